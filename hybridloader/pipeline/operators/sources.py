"""Sources of items: the indices of a dataset, or any iterable that one reader reads.

The reader is the thread that pulls. Samplers and iterables follow torch's conventions: `set_epoch` gets
the number of the epoch.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from hybridloader._support.states import set_epoch
from hybridloader._support.text import short
from hybridloader._support.user_objects import attribute, foreign, has, length_of
from hybridloader.pipeline.operators.parameters import (
    SEED,
    check_flags,
    check_source,
    settle,
    settle_whole,
)
from hybridloader.pipeline.operators.stateful import (
    INDICES,
    ITEMS,
    Opened,
    draws_a_seed,
    generator_state,
    with_drawn_seed,
)
from hybridloader.running.operator import Context, Length, OperatorIterator, Source


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
        return None if self._order is None else generator_state(self._order)

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
