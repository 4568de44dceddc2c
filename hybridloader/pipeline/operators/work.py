"""The operators whose functions run on workers."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import KW_ONLY, dataclass, field
from functools import cached_property
from types import FunctionType
from typing import TYPE_CHECKING, Any, ClassVar

from hybridloader._support.text import beginning, short
from hybridloader._support.user_objects import attribute, is_container
from hybridloader.devices.accelerator import current, find
from hybridloader.devices.pinning import AHEAD, BUFFER_BYTES, Pinner, Transfer, check, pinner_for
from hybridloader.fetching.item_steps import Step, is_async
from hybridloader.fetching.readers import MapFetch
from hybridloader.fetching.shards import readers_share_of
from hybridloader.pipeline.operators.sources import check_source
from hybridloader.running.operator import (
    Context,
    OneForOne,
    Operator,
    Placement,
    RelayOptions,
    Source,
    Where,
    settle_whole,
)
from hybridloader.seeding.sample_rng import SampleSeeding

if TYPE_CHECKING:
    from typing_extensions import Self


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

    keeps_count = True

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

    @property
    def keeps_count(self) -> bool:  # type: ignore[override]
        return not (self.function.batched and self.leaves_out)  # of a batch, one sample fails


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

    keeps_count = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_source(self.name, self.source)
        if hasattr(type(self.source), "__next__"):
            raise TypeError(
                f"{self.name} got {self.source!r}, which can be read only once and by one reader; "
                "give a function that makes it, as in "
                "from_iterable(lambda: read(shard), backend='threads', num_workers=4)"
            )
        if self.placement.auto:
            raise ValueError(
                f"{self.name} got 'auto', but the order of its items depends on the number of readers; "
                "give a number"
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


def _takes_one(function: Any) -> bool:
    """Return True if a function of Python's can be called with one argument: a signature takes 30 us.

    If False, its signature is needed.
    """
    own = 0
    if type(function) is not FunctionType:
        function, own = attribute(type(function), "__call__"), 1  # which takes `self` first
        if type(function) is not FunctionType:
            return False
    if vars(function):  # a wrapper, maybe with another signature
        return False
    code, least = (
        function.__code__,
        function.__code__.co_argcount - len(function.__defaults__ or ()),
    )
    return least <= 1 + own <= code.co_argcount and not code.co_kwonlyargcount


def check_function(stage: str, function: Any) -> None:
    """Raise `TypeError` unless `function` can be called with one item."""
    if not callable(function):
        raise TypeError(f"stage {stage!r} needs a function of one item, not {function!r}")
    if isinstance(function, type) and callable(attribute(function, "setup")):
        raise TypeError(
            f"stage {stage!r} got the class {function.__name__}, which has a setup(); give an object "
            f"of it, as in map({function.__name__}()): every worker gets its own"
        )
    if _takes_one(function):
        return
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
    batches_ahead: int = AHEAD
    buffer_bytes: int = BUFFER_BYTES

    begins_anew = True
    moves: ClassVar[bool] = False
    """True if items come on the device."""

    def __post_init__(self) -> None:
        try:
            Transfer(self.device, self.batches_ahead, self.buffer_bytes)
        except (TypeError, ValueError) as error:
            raise type(error)(f"{self.name}: {error}") from None

    @property
    def relay(self) -> RelayOptions:
        return RelayOptions(self.batches_ahead, self.pinner, self.moves)

    def check_run(self) -> None:
        check(self.device)

    def pinner(self) -> Pinner | None:
        """Return the pinner of one run, for the device that is current on this thread."""
        accelerator = current() if self.device is None else find(self.device)
        if accelerator is None or not accelerator.pins:
            return None
        return Pinner(accelerator, self.batches_ahead, self.buffer_bytes)

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

    def pinner(self) -> Pinner | None:
        transfer = Transfer(self.device, self.batches_ahead, self.buffer_bytes)
        return pinner_for(transfer, pin_memory=False)
