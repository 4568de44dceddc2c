"""Sources of items, and the operators whose functions run on workers.

Samplers and iterables follow torch's conventions: `set_epoch` gets the number of the epoch.
"""

from __future__ import annotations

import base64
import copy
import inspect
import sys
from collections.abc import Iterable, Iterator
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from itertools import islice
from types import GeneratorType
from typing import TYPE_CHECKING, Any, ClassVar

from hybridloader._support.states import Cadence, copied, is_stateful, load_into, set_epoch
from hybridloader._support.system import cached_property
from hybridloader._support.text import beginning, short, warn_once
from hybridloader._support.user_objects import (
    attribute,
    foreign,
    has,
    is_container,
    length_of,
    no_answer,
    text_of,
)
from hybridloader.devices import pinning
from hybridloader.engine.dataset_state import undo_load
from hybridloader.errors import StateError
from hybridloader.fetching.on_error import rest_is_lost
from hybridloader.fetching.readers import MapFetch, Step, is_async
from hybridloader.fetching.shards import readers_share_of
from hybridloader.running.operator import (
    SEED,
    Context,
    GeneratorIterator,
    Length,
    Mark,
    OneForOne,
    Operator,
    OperatorIterator,
    Placement,
    RelayOptions,
    Source,
    Where,
    check_flags,
    settle_whole,
)
from hybridloader.seeding.sample_rng import SampleSeeding

if TYPE_CHECKING:
    from typing_extensions import Self


def check_source(name: str, source: Any, hint: str = "") -> None:
    """Refuse an object that is no iterable, nor a function that returns one. Raises `TypeError`."""
    if isinstance(source, (str, bytes)):
        raise TypeError(
            f"{name}: a {type(source).__qualname__} would be read one character at a time: "
            f"{short(source)}; give an iterable of items, such as an open file or a list of paths"
        )
    if not hasattr(type(source), "__iter__") and not callable(source):
        raise TypeError(
            f"{name}: source must be an iterable, or a function that gives one, not {short(source)}"
            f"{hint}"
        )


@dataclass(frozen=True)
class Indices(Source):
    """The indices of a map-style dataset, in the order in which it is to be read.

    See `Pipeline.from_dataset`. The dataset is asked for its length when an epoch begins, and for
    nothing else. Without a sampler and without `shuffle` the indices are those of
    ``range(len(dataset))``.
    """

    dataset: Any = field(repr=False)
    sampler: Iterable[Any] | None = None
    batch_sampler: Iterable[Any] | None = None
    shuffle: bool = False
    seed: int | None = None

    cheap = True

    @property
    def name(self) -> str:
        return "from_dataset"

    def __post_init__(self) -> None:
        check_flags(self, "shuffle")
        settle_whole(self, "seed", 0, SEED, optional=True)
        if self.sampler is not None and self.batch_sampler is not None:
            raise ValueError(
                f"{self.name}: sampler and batch_sampler both select the samples; pass one of them"
            )
        given = "sampler" if self.batch_sampler is None else "batch_sampler"
        order = self._order
        if order is not None:
            if self.shuffle:
                raise ValueError(
                    f"{self.name}: shuffle=True and a {given} both set the order of the "
                    "dataset; pass one of them"
                )
            if not hasattr(type(order), "__iter__"):
                raise TypeError(f"{self.name}: {given} must be an iterable, not {short(order)}")
            if hasattr(type(order), "__next__"):
                raise TypeError(
                    f"{self.name}: {given} must be an iterable that can be read in every pass, not "
                    f"an iterator, which is over after one: {short(order)}; give list({given})"
                )
        if self.seed is not None and not self.shuffle:
            raise ValueError(
                f"{self.name}: seed={self.seed} is of no use without shuffle=True; give that too, or "
                "leave the seed out"
            )
        kind, torch = type(self.dataset), sys.modules.get("torch")
        # Torch's iterable ones inherit a `__getitem__` that always raises.
        iterable = torch is not None and isinstance(self.dataset, torch.utils.data.IterableDataset)
        if iterable or not hasattr(kind, "__getitem__"):
            raise TypeError(
                f"{self.name}: a {kind.__qualname__} can't be read by index; a dataset has "
                "__getitem__ and __len__. An iterable is read with from_iterable"
            )
        if order is None and not hasattr(kind, "__len__"):
            raise TypeError(
                f"{self.name}: the dataset, a {kind.__qualname__}, has no __len__, so its indices are "
                "not known; give it one, or give a sampler"
            )

    @property
    def _order(self) -> Iterable[Any] | None:
        return self.sampler if self.batch_sampler is None else self.batch_sampler

    def start(self, context: Context) -> Iterator[Any]:
        order = self._order
        if order is not None:
            set_epoch(order, context.epoch)
            seeded = with_drawn_seed(order, context)
            return opened(seeded, context, self.name, INDICES, drawn=seeded is not order)
        count = len(self.dataset)
        if not count:
            kind = type(self.dataset).__qualname__
            warn_once(f"{self.name}: the dataset, a {kind}, has no samples", "empty-dataset")
        start = min(context.start, count)
        rest: Iterator[int] = iter(range(start, count))
        if self.shuffle and count:  # torch refuses to shuffle nothing
            from torch import Generator
            from torch.utils.data import RandomSampler

            seed = context.seed if self.seed is None else self.seed
            # As torch draws it where no generator is given, and for a later pass another.
            seed = context.draw() if seed is None else seed + context.epoch
            sampler = RandomSampler(range(count), generator=Generator().manual_seed(seed))
            rest = islice(iter(sampler), start, None)  # 10 times as fast as one by one
        return context.drop(OperatorIterator(rest), start)

    def seek(self, n: int) -> int:
        return n

    def upcoming(self) -> str | None:
        generator = _generator_of(self._order)
        return None if generator is None else _generator_state(generator)

    def draws(self, seeded: bool) -> bool:
        if self._order is None:
            return self.shuffle and self.seed is None and not seeded
        return draws_a_seed(self._order)

    def describe(self, longest: int | None = 40) -> str:
        return _described(super().describe(longest), self.dataset)

    @property
    def share(self) -> tuple[int, int] | None:
        # Known for samplers of hybridloader and torch, also in a `BatchSampler`.
        for sampler in (self._order, attribute(self._order, "sampler")):
            ranks, rank = attribute(sampler, "num_replicas"), attribute(sampler, "rank")
            if type(ranks) is int:
                return ranks, rank if type(rank) is int else 0
        return None

    def identity(self) -> str | None:
        # Only of samplers with a place that all ranks share may the number of ranks change.
        if self.share is None or has(self._order, "state_after"):
            return super().identity()
        return f"{super().identity()} for {self.share[0]} ranks"

    def length(self, upstream: Length) -> Length:
        order = self._order
        return length_of(self.dataset if order is None else order)


@dataclass(frozen=True)
class Items(Source):
    """Items of an iterable, read by one reader; see `Pipeline.from_iterable`."""

    source: Any = field(repr=False)
    # Not a part of the description: an entry once the one pass over an iterator has begun.
    _begun: list[bool] = field(default_factory=list, init=False, repr=False, compare=False)

    @property
    def name(self) -> str:
        return "from_iterable"

    def __post_init__(self) -> None:
        source = self.source
        more = ""
        if hasattr(type(source), "__getitem__"):
            more = "; what has __getitem__ and __len__ is read by index, with from_dataset"
        check_source(self.name, source, more)

    @property
    def read_once(self) -> bool:  # type: ignore[override]
        return hasattr(type(self.source), "__next__")

    def __reduce__(self) -> Any:
        return Items, (self.source,)

    def start(self, context: Context) -> Iterator[Any]:
        source = self.source
        if self.read_once:
            if self._begun:
                raise ValueError(
                    f"{self.name}: {short(source)} is an iterator, which can be read once, and a pass "
                    "over it has begun already; give a list, or a function that makes the iterator, "
                    "to read it in every pass"
                )
        elif not hasattr(type(source), "__iter__"):
            try:
                source = source()
            except StopIteration as error:
                raise foreign(error, f"{self.name}: the function {short(self.source)}") from error
            if not hasattr(type(source), "__iter__"):
                raise TypeError(
                    f"{self.name}: the function {short(self.source)} must give an iterable, not "
                    f"{short(source)}"
                )
        set_epoch(source, context.epoch)
        if context.start and type(source) in (list, tuple, range):
            start = min(context.start, len(source))
            rest = map(source.__getitem__, range(start, len(source)))
            return context.drop(OperatorIterator(rest), start)
        if self.read_once:
            self._begun.append(True)
        return opened(source, context, self.name, ITEMS, own=not self.read_once)

    def seek(self, n: int) -> int:
        return n

    def describe(self, longest: int | None = 40) -> str:
        return _described(super().describe(longest), self.source)

    def length(self, upstream: Length) -> Length:
        return length_of(self.source) if hasattr(type(self.source), "__iter__") else None


def _described(without: str, data: Any) -> str:
    """Put in the type of `data` and its length: the repr of a dataset may be as long as the dataset."""
    text = attribute(data, "__qualname__") or type(data).__qualname__
    if (length := length_of(data)) is not None:
        text += f" of {length}"
    name, _, rest = without.partition("(")
    return f"{name}({text})" if rest == ")" else f"{name}({text}, {rest}"


# -- sources with a state: samplers and iterables that know their position
#
# They have torchdata's protocol, `state_dict` and `load_state_dict`, on the object or on its iterator.
# Their state is taken now and then, before it is known whether anybody will want it: a pipeline reads
# ahead, so when its state is asked for, the source is far beyond. Nothing is read here for its state.

INDICES = 1024  # indices from one mark of a sampler to the next: an index takes 0.1 us, a state 10

ITEMS = 64
"""Items from one mark of an iterable to the next: up to as many are read again for nothing."""


def opened(
    iterable: Any, context: Context, name: str, every: int, *, drawn: bool = False, own: bool = True
) -> Iterator[Any]:
    """Return the items of an iterable from the position of a state on, marked `every` so many of them.

    The iterable has got the number of the epoch; a `drawn` one has a generator made for it. The items
    close it if they are to `own` it.
    """
    mark, at = context.saved, 0
    undo_load(iterable)
    generator = None if drawn else _generator_of(iterable)
    if generator is not None and mark is not None and isinstance(mark.value, str):
        _set_state(generator, mark.value, name)
        mark = None
    iterator: Iterator[Any] = iter(iterable)
    stateful: Any = None
    computes = False  # its state after any number of items, at any time
    if is_stateful(iterator):  # as in torchdata, this comes first
        stateful = iterator
        if mark is not None:
            at = _load(stateful, mark, name)
    elif is_stateful(iterable):
        stateful, computes = iterable, has(iterable, "state_after")
        if mark is not None and mark.value is None:  # after the last item
            at, iterator, stateful = mark.at, iter(()), None
        elif mark is not None:
            at = _load(stateful, mark, name)
            iterator = iter(iterable)
            if computes and iterable.epoch != mark.value["epoch"]:
                iterator = iter(())  # it was the end, for this number of ranks
    items = OperatorIterator(iterator)
    if stateful is None:
        if generator is not None:  # all of the order follows from how it is now
            context.mark(0, _generator_state(generator))
        if isinstance(iterator, GeneratorType):
            items = GeneratorIterator(iterator, partial(rest_is_lost, "an item of a source"))
    elif computes:
        begun = copied(stateful.state_dict())
        context.log((context.start,), lambda n: stateful.state_after(begun, n - at))
    else:
        loaded = context.saved is not None and not at
        items = MarkedIterator(iterator, at, stateful, context, every, loaded)
    items.owns = own
    return context.drop(items, at)


def _load(stateful: Any, mark: Mark, name: str) -> int:
    """Load the state of a mark; return the number of items before it."""
    try:
        load_into(stateful, copied(mark.value), name)
    except Exception as error:
        raise no_answer(
            StateError(
                f"{name}: {type(stateful).__qualname__}.load_state_dict() refused the state that was "
                f"saved after item {mark.at}: {text_of(error)}"
            )
        ) from error
    return mark.at


def _set_state(generator: Any, value: Any, name: str) -> None:
    import torch

    try:
        state = torch.frombuffer(bytearray(base64.b64decode(value)), dtype=torch.uint8)
        generator.set_state(state)
    except Exception as error:
        raise no_answer(
            StateError(f"{name}: the state of the generator is damaged: {error}")
        ) from error


def _generator_state(generator: Any) -> str:
    return base64.b64encode(generator.get_state().numpy().tobytes()).decode()


def _generator_of(order: Any) -> Any:
    """Return torch's generator in one of its samplers, also in its `BatchSampler`."""
    for sampler in (order, attribute(order, "sampler")):
        generator = attribute(sampler, "generator")
        if has(generator, "get_state") and has(generator, "initial_seed"):
            return generator
    return None


def draws_a_seed(order: Any) -> bool:
    """Return True if it is torch's `RandomSampler` without a generator, maybe in torch's `BatchSampler`.

    Others that use torch's default generator can't be distinguished from those that use none.
    """
    if "torch" not in sys.modules:
        return False
    from torch.utils.data import BatchSampler, RandomSampler

    sampler = order.sampler if type(order) is BatchSampler else order
    return type(sampler) is RandomSampler and sampler.generator is None


def with_drawn_seed(order: Any, context: Context) -> Any:
    """Return `order`, or a copy of it that has the seed that it would draw."""
    if not draws_a_seed(order):
        return order
    from torch import Generator

    order = copy.copy(order)
    if has(order, "sampler"):
        order.sampler = copy.copy(order.sampler)
    sampler = attribute(order, "sampler", order)
    sampler.generator = Generator().manual_seed(context.draw())
    return order


class MarkedIterator(OperatorIterator):
    """Iterator that takes a state of `stateful` every `every` items, or less often if that takes long.

    A state after the last item is never used: it may mean the beginning of the next epoch. If no first
    item comes, and the iterable may begin `again`, the state was the end of the epoch before.
    """

    def __init__(
        self,
        items: Iterator[Any],
        at: int,
        stateful: Any,
        context: Context,
        every: int,
        again: bool,
    ) -> None:
        super().__init__(items)
        self._stateful, self._mark, self._every = stateful, context.mark, every
        self._cadence = Cadence()
        # All the other mutable state:
        self._again = again
        self._given = at  # items, also those that raised
        self._cadence.due()
        self._mark(at, self._state())
        self._due = at + every

    def __next__(self) -> Any:
        due, at, state = self._given >= self._due and self._cadence.due(), self._given, None
        if due:
            self._due, state = at + self._every, self._state()
        try:
            item = self._pull()
        except StopIteration:
            again, self._again = self._again, False
            if not again or self._given:
                self._end()
                raise
            undo_load(self._stateful)
            self._items = iter(self._stateful)
            self._pull = self._items.__next__
            return next(self)
        except Exception:
            self._given += 1
            raise
        self._given += 1
        if due:
            self._mark(at, state)
        return item

    def _state(self) -> Any:
        """Return the state, or the error: it is raised only if a state is asked for."""
        try:
            return copied(self._stateful.state_dict())
        except Exception as error:
            BaseException.__setattr__(error, "__traceback__", None)
            return error
        finally:
            self._cadence.taken()


# -- the operators whose functions run on workers


_AT_ONCE = (list, tuple, range, str, bytes)
"""Types of datasets that take no time to speak of for a sample."""


class Placed(Operator):
    """Base of the steps that the engine runs, each with its placement."""

    placement: Placement
    label: str | None
    """Name in errors and tables; None: the operator and the function."""

    def __post_init__(self) -> None:
        if self.label is not None and not isinstance(self.label, str):
            raise TypeError(f"the name of a stage is a text, not {self.label!r}")

    def open(self, items: Iterator[Any], context: Context) -> Iterator[Any]:
        raise TypeError(f"{self.name} is opened by the engine, on its backend")

    def describe(self, longest: int | None = None) -> str:
        return self.name

    def identity(self) -> str:
        policy = self.placement.on_error
        return beginning(self.name + ("" if policy is None else f" with on_error={policy!r}"))


@dataclass(frozen=True)
class Work(Placed):
    """A function for each item; the kinds differ in their use of its result."""

    function: Any
    placement: Placement = field(default_factory=Placement)
    label: str | None = None

    kind = "map"
    begins_anew = True

    @classmethod
    def of(cls, function: Any, label: str | None, where: Where) -> Self:
        """Make one with the placement that the user has given by keywords."""
        name = cls(function, label=label).name
        placement = Placement.of(name, where)
        cls._check_coroutines(name, function, placement, asked="concurrency" in where)
        return cls(function, placement, label)

    @classmethod
    def _check_coroutines(
        cls, name: str, function: Any, placement: Placement, *, asked: bool
    ) -> None:
        """Raise if the kind of function and the options for coroutines don't fit."""
        if not is_async(function):
            if asked:
                raise ValueError(
                    f"stage {name!r}: concurrency is for an async def function; for others, "
                    "threads_per_worker processes several items at a time"
                )
            return
        if cls.kind != "map":
            raise TypeError(
                f"stage {name!r} got an async def function; await it in a map() before this one"
            )
        if placement.threads_per_worker > 1:
            raise ValueError(
                f"stage {name!r}: threads_per_worker and an async def function; give concurrency= "
                "alone"
            )
        if isinstance(placement.seeding, SampleSeeding):
            raise ValueError(
                f"stage {name!r}: seeding='sample' and an async def function, whose coroutines take "
                "turns: draw random numbers in a separate map()"
            )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_function(self.name, self.function)

    @property
    def name(self) -> str:
        return self.label or f"{self.kind}({name_of_function(self.function)})"

    @cached_property
    def _step(self) -> Step:
        coroutines = self.placement.concurrency if is_async(self.function) else 0
        return Step(self.kind, self.function, coroutines, self.name)

    def step(self) -> Step:
        return self._step  # opening a run asks for it ten times, and `is_async` takes 4 us


@dataclass(frozen=True)
class Map(Work, OneForOne):
    """One result for each item."""

    def seek(self, n: int) -> int | None:
        return n if self.placement.on_error is None else None


@dataclass(frozen=True)
class FlatMap(Work):
    """An iterable of results for each item, one after the other."""

    kind = "flat_map"
    makes_several = True


@dataclass(frozen=True)
class Filter(Work):
    """The items for which the function is true."""

    kind = "filter"


@dataclass(frozen=True)
class Lookup(Map):
    """The samples of a map-style dataset by index, or its batches by lists of indices."""

    function: MapFetch

    def __post_init__(self) -> None:
        Placed.__post_init__(self)

    @property
    def name(self) -> str:
        return self.label or f"{type(self.function.dataset).__name__}[...]"

    @property
    def cheap(self) -> bool:  # type: ignore[override]
        return isinstance(self.function.dataset, _AT_ONCE) and not self.function.batched


@dataclass(frozen=True)
class Readers(Placed, Source):
    """Several readers of an iterable source, each a worker with its own iterator.

    They are read in turn: the first item of each, the second of each, and so on.
    """

    source: Any
    """An iterable, of which every worker gets a copy, or a function that returns one.
    `get_worker_info()` returns the number of its part."""
    placement: Placement = field(default_factory=Placement)
    label: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_source(self.name, self.source)
        if hasattr(type(self.source), "__next__"):
            raise TypeError(
                f"{self.name} got {self.source!r}, which can be read only once and by one reader; "
                "give a function that makes it, as in "
                "from_iterable(lambda: read(shard), backend='threads', num_workers=4)"
            )
        for name in ("threads_per_worker", "concurrency"):
            if getattr(self.placement, name) > 1:
                raise ValueError(
                    f"{self.name} got {name}, but a reader reads its part item by item; take more "
                    f"readers (num_workers), or give {name} to the step after it"
                )
        readers = self.placement.num_workers
        if readers > 1 and is_container(self.source):
            raise ValueError(
                f"{self.name}: each of the {readers} readers would give all items of "
                f"{short(self.source)}; leave out num_workers and give it to a later step, such as "
                "map, or read by index, with from_dataset"
            )

    @property
    def name(self) -> str:
        return self.label or f"read({name_of_function(self.source)})"

    def step(self) -> Step:
        return Step("read", self.source, name=self.name)

    def identity(self) -> str:
        if self.share is not None:  # its shards may be divided again
            return super().identity()
        return beginning(f"{self.placement.num_workers} x {super().identity()}")

    @property
    def share(self) -> tuple[int, int] | None:
        found = readers_share_of(self.source)
        return found and (found[1], found[0])

    def start(self, context: Context) -> Iterator[Any]:
        raise TypeError(f"{self.name} is opened by the engine, on its backend")


@dataclass(frozen=True)
class Prefetch(OneForOne):
    """Prefetch `count` items on a thread.

    Parameters
    ----------
    count
        At least 1.
    """

    count: int

    begins_anew = True

    def __post_init__(self) -> None:
        settle_whole(self, "count", 1, "give how many items may wait")

    @property
    def relay(self) -> RelayOptions:
        return RelayOptions(self.count)

    def open(self, items: Iterator[Any], context: Context) -> Iterator[Any]:
        raise TypeError("prefetch is opened by the engine, as a relay")


def name_of_function(function: Any) -> str:
    """Return a short name for tables: ``decode``, ``Decoder``, ``lambda``."""
    name = attribute(function, "__qualname__") or type(function).__qualname__
    return str(name).rpartition(".")[2].strip("<>")


def check_function(stage: str, function: Any) -> None:
    """Raise `TypeError` unless `function` can be called with one item."""
    if not callable(function):
        raise TypeError(f"stage {stage!r} needs a function of one item, not {function!r}")
    if isinstance(function, type) and callable(attribute(function, "setup")):
        raise TypeError(
            f"stage {stage!r} got the class {function.__name__}, which has a setup(); give an object "
            f"of it, as in map({function.__name__}()): every worker gets its own"
        )
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # some built-ins have no signature
        return
    try:
        signature.bind(None)
    except TypeError as error:
        raise TypeError(
            f"stage {stage!r} calls its function with one item, but {name_of_function(function)}"
            f"{signature} can't be: {error}"
        ) from None


# -- batches in page-locked memory, or on a device: made ready by a thread
#
# See `hybridloader.devices.pinning` for the rules of pinning and copying.


@dataclass(frozen=True)
class PinMemory(OneForOne):
    """Pin tensors, in containers too, and objects with a `pin_memory()`, as torch's DataLoader does.

    A thread pins them, for the device that was current where the run was started. Without an
    accelerator, items are passed on unchanged, with a warning.

    Parameters
    ----------
    device
        The accelerator for which memory is locked; None: the current one.
    batches_ahead
        Items that may wait, at least 1.
    buffer_bytes
        Bytes that these may have together. An item that is larger than that waits alone.
    """

    device: Any = None
    _: KW_ONLY
    batches_ahead: int = pinning.AHEAD
    buffer_bytes: int = pinning.BUFFER_BYTES

    begins_anew = True
    moves: ClassVar[bool] = False
    """True if items come on the device."""

    def __post_init__(self) -> None:
        try:
            pinning.Transfer(self.device, self.batches_ahead, self.buffer_bytes)
        except (TypeError, ValueError) as error:
            raise type(error)(f"{self.name}: {error}") from None

    @property
    def relay(self) -> RelayOptions:
        return RelayOptions(self.batches_ahead, self.pinner, self.moves)

    def check_run(self) -> None:
        pinning.check(self.device)

    def pinner(self) -> pinning.Pinner | None:
        """Return the pinner of one run, for the device that is current on this thread."""
        accelerator = pinning.current() if self.device is None else pinning.find(self.device)
        if accelerator is None or not accelerator.pins:
            return None
        return pinning.Pinner(accelerator, self.batches_ahead, self.buffer_bytes)

    def open(self, items: Iterator[Any], context: Context) -> Iterator[Any]:
        raise TypeError(f"{self.name} is opened by the engine, as a relay")


@dataclass(frozen=True)
class ToDevice(PinMemory):
    """Copies the tensors that `PinMemory` would pin to a device, ahead of the loop.

    A thread queues the copies on a stream beside the others. The current stream of the thread that takes
    an item waits for them. So it comes last, or before steps that your loop itself runs.

    Parameters
    ----------
    device
        A str such as ``"cuda"``, a `torch.device` or an `Accelerator`. Without an index, the device that
        is current where the pipeline is started.
    batches_ahead, buffer_bytes
        See `PinMemory`; the items wait on the device, and one more is being copied meanwhile.
    """

    moves: ClassVar[bool] = True

    @property
    def name(self) -> str:
        return "to"

    def check_run(self) -> None:
        if self.device is None:
            raise TypeError("to: give a device, such as 'cuda'")
        super().check_run()

    def pinner(self) -> pinning.Pinner | None:
        transfer = pinning.Transfer(self.device, self.batches_ahead, self.buffer_bytes)
        return pinning.pinner_for(transfer, pin_memory=False)
