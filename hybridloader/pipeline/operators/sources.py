"""Sources of items: the indices of a dataset, or any iterable that one reader reads.

The reader is the thread that pulls. Samplers and iterables follow torch's conventions: `set_epoch` gets
the number of the epoch.
"""

from __future__ import annotations

import base64
import copy
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from types import GeneratorType
from typing import Any

from hybridloader._support.states import Cadence, copied, is_stateful, set_epoch
from hybridloader._support.text import short
from hybridloader._support.user_objects import (
    attribute,
    foreign,
    has,
    length_of,
    no_answer,
    text_of,
)
from hybridloader.engine.dataset_state import load_for_epoch, undo_load
from hybridloader.errors import ShardLost, StateError
from hybridloader.fetching.on_error import rest_is_lost
from hybridloader.running.operator import (
    SEED,
    Context,
    Length,
    Mark,
    OperatorIterator,
    Source,
    check_flags,
    settle,
    settle_whole,
)


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
        kind = type(self.dataset)
        if not hasattr(kind, "__getitem__") or _is_iterable_dataset(self.dataset):
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
            opened = Opened(seeded, context, self.name, drawn=seeded is not order)
            return context.drop(opened.items(context, INDICES), opened.at)
        count = len(self.dataset)
        start = min(context.start, count)
        if self.shuffle and count:  # torch refuses to shuffle nothing
            from torch import Generator
            from torch.utils.data import RandomSampler

            seed = context.seed if self.seed is None else self.seed
            # As torch draws it where no generator is given, and for a later pass another.
            seed = context.draw() if seed is None else seed + context.epoch
            sampler = RandomSampler(range(count), generator=Generator().manual_seed(seed))
            rest = islice(iter(sampler), start, None)  # 10 times as fast as one by one
            return context.drop(OperatorIterator(rest), start)
        return context.drop(OperatorIterator(iter(range(start, count))), start)

    def seek(self, n: int) -> int:
        return n

    @property
    def counted(self) -> bool:  # type: ignore[override]
        return self._order is None

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


def _is_iterable_dataset(dataset: Any) -> bool:
    """Return True if it is torch's, which inherits a ``__getitem__`` that always raises."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(dataset, torch.utils.data.IterableDataset)


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

    def __getstate__(self) -> dict[str, Any]:
        return {"source": self.source}

    def __setstate__(self, state: dict[str, Any]) -> None:
        settle(self, **state, _begun=[])

    def start(self, context: Context) -> Iterator[Any]:
        source = self.source
        if self.read_once:
            if self._begun:
                raise ValueError(
                    f"{self.name}: {short(source)} is an iterator, which can be read once, and a pass "
                    "over it has begun already; give a list, or a function that makes the iterator, "
                    "to read it in every pass"
                )
            set_epoch(source, context.epoch)
            self._begun.append(True)
            items, at = self._read(source, context)
            items.owns = False
            return context.drop(items, at)
        if not hasattr(type(source), "__iter__"):
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
        return context.drop(*self._read(source, context))

    def _read(self, source: Any, context: Context) -> tuple[OperatorIterator, int]:
        opened = Opened(source, context, self.name)
        return opened.items(context, ITEMS), opened.at

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

INDICES = 1024
"""Indices from one mark of a sampler to the next: an index takes 0.1 us, a state 10."""

ITEMS = 64
"""Items from one mark of an iterable to the next: up to as many are read again for nothing."""


class Opened:
    """Iteration over an iterable, begun after the `at` items before the position of a state.

    The iterable has got the number of the epoch; a `drawn` one has a generator made for it.
    """

    def __init__(self, iterable: Any, context: Context, name: str, *, drawn: bool = False) -> None:
        mark = context.saved
        undo_load(iterable)
        self._generator = None if drawn else _generator_of(iterable)
        self.at = 0
        if self._generator is not None and mark is not None and isinstance(mark.value, str):
            self._set(self._generator, mark.value, name)
            mark = None
        self.iterator: Iterator[Any] = iter(iterable)
        self._stateful: Any = None
        self._computes = False  # its state after any number of items, at any time
        if is_stateful(self.iterator):  # as in torchdata, this comes first
            self._stateful = self.iterator
            if mark is not None:
                self._load(mark, name)
        elif is_stateful(iterable):
            self._stateful = iterable
            if mark is not None and mark.value is None:  # after the last item
                self.at, self.iterator, self._stateful = mark.at, iter(()), None
            elif mark is not None:
                self._load(mark, name)
                self.iterator = iter(iterable)
                if has(iterable, "state_after") and iterable.epoch != mark.value["epoch"]:
                    self.iterator = iter(())  # it was the end, for this number of ranks
            self._computes = has(self._stateful, "state_after")

    def _load(self, mark: Mark, name: str) -> None:
        try:
            load_for_epoch(self._stateful, copied(mark.value), name)
        except Exception as error:
            raise no_answer(
                StateError(
                    f"{name}: {type(self._stateful).__qualname__}.load_state_dict() refused the "
                    f"state that was saved after item {mark.at}: {text_of(error)}"
                )
            ) from error
        self.at = mark.at

    @staticmethod
    def _set(generator: Any, value: Any, name: str) -> None:
        import torch

        try:
            state = torch.frombuffer(bytearray(base64.b64decode(value)), dtype=torch.uint8)
            generator.set_state(state)
        except Exception as error:
            raise no_answer(
                StateError(f"{name}: the state of the generator is damaged: {error}")
            ) from error

    def items(self, context: Context, every: int) -> OperatorIterator:
        """Return the rest of the epoch, marked every so many items."""
        if self._computes:
            stateful, at, begun = self._stateful, self.at, copied(self._stateful.state_dict())
            context.mark_all(lambda n: stateful.state_after(begun, n - at))
            return OperatorIterator(self.iterator)
        if self._stateful is not None:
            loaded = context.saved is not None and not self.at
            again = self._begun_again if loaded else None
            return MarkedIterator(self.iterator, self.at, self._stateful, context, every, again)
        if self._generator is not None:  # all of the order follows from how it is now
            context.mark(0, _generator_state(self._generator))
        if isinstance(self.iterator, GeneratorType):
            return GeneratorIterator(self.iterator)
        return OperatorIterator(self.iterator)

    def _begun_again(self) -> Iterator[Any]:
        """Return the iterator of the epoch, if the state before it was the end of the one before."""
        undo_load(self._stateful, ended=True)
        return iter(self._stateful)


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


class GeneratorIterator(OperatorIterator):
    """Iterator over a generator. An error ends it, which must not look like the end of the source."""

    def __init__(self, items: Iterator[Any]) -> None:
        super().__init__(items)
        # All the mutable state:
        self._lost: ShardLost | None = None

    def __next__(self) -> Any:
        if self._lost is not None:
            lost, self._lost = self._lost, None
            raise lost
        try:
            return self._pull()
        except Exception as error:
            self._failed(error)
            if not isinstance(error, StopIteration):
                self._lost = rest_is_lost("an item of a source", error)
            raise


class MarkedIterator(OperatorIterator):
    """Iterator that takes a state of `stateful` every `every` items, or less often if that takes long.

    A state after the last item is never used: it may mean the beginning of the next epoch. If no first
    item comes, `again` makes another iterator.
    """

    def __init__(
        self,
        items: Iterator[Any],
        at: int,
        stateful: Any,
        context: Context,
        every: int,
        again: Callable[[], Iterator[Any]] | None = None,
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
            again, self._again = self._again, None
            if again is None or self._given:
                self._end()
                raise
            self._items = again()
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
