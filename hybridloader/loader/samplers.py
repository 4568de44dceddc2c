"""Samplers of a loader, their generators, and the replay of their draws.

Nothing is drawn for a loader that loads no state. A sampler without a state repeats its order if its
generators have the same states as when its iterator was made. So a replay restores these states, makes
the iterator again, and skips its first items. The generators of the loader and of the sampler then keep
their new states for later draws. torch's default generator belongs to the training code; the caller
restores it.
"""

from __future__ import annotations

import itertools
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sized
from inspect import GEN_CREATED, getgeneratorstate, isgenerator
from itertools import chain, islice
from typing import Any, NamedTuple

import torch
from torch.utils.data import (
    BatchSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
from torch.utils.data.distributed import DistributedSampler

from hybridloader._support.states import (
    Cadence,
    Given,
    Kept,
    copied,
    is_stateful,
    kept,
    load_into,
)
from hybridloader._support.user_objects import attribute, described
from hybridloader.errors import StateError

# -- Order of torchdata's loaders: the samplers of a `StatefulDataLoader`.
#
# They draw the same permutations at the same times as torchdata's samplers, number by number. Their
# states have the same keys. This module does not need torchdata.


class RandomOrder(RandomSampler):
    """Random permutations, drawn from the sampler's generator.

    Parameters
    ----------
    data_source
        The dataset; only its length is used.
    generator
        Generator to draw from. None makes one, and draws its seed from torch's default generator now.
    """

    generator: torch.Generator

    def __init__(self, data_source: Sized, generator: torch.Generator | None = None) -> None:
        if generator is None:
            drawn = torch.empty((), dtype=torch.int64, device="cpu").random_()
            generator = torch.Generator().manual_seed(int(drawn.item()))
        super().__init__(data_source, generator=generator)

    def __iter__(self) -> Iterator[int]:
        return _Permutation(self.generator, len(self.data_source))


class _Permutation(Iterator[int]):
    """One permutation, drawn at once. Its state is a count, and the generator's before the draw."""

    def __init__(self, generator: torch.Generator, length: int) -> None:
        self._generator, self._length = generator, length
        self._draw()

    def _draw(self) -> None:
        self._given = 0
        self._before = self._generator.get_state()
        self._order: list[int] = torch.randperm(
            self._length, generator=self._generator, device="cpu"
        ).tolist()

    def __next__(self) -> int:
        if self._given == self._length:
            raise StopIteration
        self._given += 1
        return self._order[self._given - 1]

    def state_dict(self) -> dict[str, Any]:
        return {"yielded": self._given, "generator": self._before}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        given = state["yielded"]
        if not 0 <= given <= self._length:
            raise StateError(
                f"yielded is {given} in the state, and the sampler has {self._length} indices"
            )
        self._generator.set_state(state["generator"])
        self._draw()
        self._given = given


class BatchOrder(BatchSampler):
    """Batches of a sampler. If the sampler's iterator has a state, so has the iterator over batches."""

    def __iter__(self) -> Iterator[list[int]]:
        samples = iter(self.sampler)  # here, not with the first batch
        if is_stateful(samples):
            return _Batches(samples, self.batch_size, drop_last=self.drop_last)
        return iter(BatchSampler(samples, self.batch_size, self.drop_last))


class _Batches(Iterator[list[int]]):
    def __init__(self, samples: Any, size: int, *, drop_last: bool) -> None:
        self._samples, self._size, self._drop_last = samples, size, drop_last
        self._given = 0

    def __next__(self) -> list[int]:
        batch: list[int] = list(islice(self._samples, self._size))
        self._given += len(batch)
        if not batch or (self._drop_last and len(batch) < self._size):
            raise StopIteration
        return batch

    def state_dict(self) -> dict[str, Any]:
        return {"samples_yielded": self._given, "sampler_iter_state": self._samples.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._given = state["samples_yielded"]
        self._samples.load_state_dict(state["sampler_iter_state"])


PLAIN = BatchSampler, BatchOrder  # batch samplers that draw nothing ahead of their batches

_LAST = SequentialSampler, RandomSampler  # samplers without a state or another sampler

_TORCHS = BatchSampler, *_LAST  # samplers without an epoch


DEFAULT = "default"  # name of torch's default generator in a state

SAMPLERS = "sampler"  # name of the sampler's generator in a state


_DRAWN_AT_ONCE = (
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
    DistributedSampler,
    RandomOrder,
)
"""Samplers that draw nothing after their first index, from any generator."""


_LONGEST_CHAIN = 16  # largest number of nested samplers to look at; real chains have two to four


class SamplerState(NamedTuple):
    """States of a sampler and of the iterator over it; None for one without a state."""

    sampler: Given | None
    iterator: Given | None


class Samplers(NamedTuple):
    """Samplers that the indices of a loader are drawn from."""

    outer: Any  # sampler whose items are the tasks: the sampler of batches, if there is one
    generator: Any  # generator of the loader

    chain: list[Any]
    """The outer sampler, and those that it draws from, down to the sampler of samples."""

    stateful: Any  # sampler with a state that follows its draws; None if there is none

    @classmethod
    def of(cls, loader: Any) -> Samplers:
        outer = loader._index_sampler
        # Batch samplers of other classes may have drawn ahead of their batches.
        drawn = outer.sampler if type(outer) in PLAIN else outer
        stateful = type(drawn) not in _LAST and is_stateful(drawn)
        return cls(outer, loader.generator, _chain(outer), drawn if stateful else None)

    @property
    def names(self) -> list[str]:
        """Class names of the chain; torch's name for batch samplers that draw as torch's does."""
        return ["BatchSampler" if type(s) in PLAIN else type(s).__name__ for s in self.chain]

    @property
    def share(self) -> list[int] | None:
        """Rank and number of ranks, if a sampler without a state has them (torch's, accelerate's)."""
        if self.stateful is not None:
            return None
        for sampler in self.chain:
            for names in (("rank", "num_replicas"), ("process_index", "num_processes")):
                share: list[Any] = [attribute(sampler, name) for name in names]
                if all(type(number) is int for number in share):
                    return share
        return None

    @property
    def generators(self) -> dict[str, Any]:
        """Known generators that the loader and its samplers draw from, by name."""
        found: dict[str, Any] = {}
        if self.generator is not None:
            found["loader"] = self.generator
        samplers = self.chain
        inner = samplers[-1]
        own = attribute(inner, "generator")
        if isinstance(own, torch.Generator):
            if own is not self.generator:
                found[SAMPLERS] = own
            return found
        known = type(samplers[0]) in PLAIN or len(samplers) == 1
        fixed = type(inner) is SequentialSampler or self.stateful is not None
        iterable = type(inner).__name__ == "_InfiniteConstantSampler" and self.generator is not None
        if not (known and fixed) and not iterable:
            found[DEFAULT] = torch.default_generator
        return found

    def set_generators(self, states: Mapping[str, torch.Tensor], epoch: int | None) -> None:
        """Set the generators to `states`, by name, taken when `announced_epoch` was `epoch`."""
        own = self.generators
        for name, state in states.items():
            if name not in own:
                if epoch is not None and name in (DEFAULT, SAMPLERS):
                    continue  # a sampler that makes and seeds its generator at its first draw
                raise StateError(
                    f"the state has a generator {name!r}, and this loader draws from "
                    f"{', '.join(own) or 'none'}; pass the sampler and generator that the loader had "
                    "when the state was taken"
                )
            try:
                own[name].set_state(state)
            except (RuntimeError, TypeError) as error:
                raise StateError(
                    f"the state of the generator {name!r} can't be loaded: {error}"
                ) from error

    @property
    def unobserved(self) -> bool:
        """True if the times at which indices after the first are drawn can't be observed.

        This is only known for exact types: a user's class may do anything. A `RandomSampler` without a
        generator makes a private one; with a generator, it draws from it after its last index.
        """
        batches, inner = self.chain[0], self.chain[-1]
        if len(self.chain) > 2 or (batches is not inner and type(batches) not in PLAIN):
            return False
        if type(inner) is RandomSampler:
            return inner.generator is None
        return type(inner) in _DRAWN_AT_ONCE

    @property
    def _seeded(self) -> Any:
        """Sampler with a `set_epoch()`, whose order depends on the epoch."""
        for sampler in self.chain:
            if type(sampler) not in _TORCHS and callable(attribute(sampler, "set_epoch")):
                return sampler
        return None

    @property
    def announced_epoch(self) -> int | None:
        """Last epoch passed to a sampler with a `set_epoch()`; None if there is no such sampler."""
        epoch = getattr(self._seeded, "epoch", None)
        return epoch if type(epoch) is int else None

    def announce_epoch(self, epoch: int | None) -> None:
        """Set the epoch of such a sampler, unless it has that epoch.

        A sampler of hybridloader may be within that epoch; without the call it would begin the next one.
        """
        if epoch is not None and (self.announced_epoch != epoch or is_ours(self._seeded)):
            self._seeded.set_epoch(epoch)

    def drawn_in_batches(self, batches: Iterator[Any], arrays: Callable[[], bool]) -> Iterator[Any]:
        """Return the items of `batches`, drawn a batch at a time if the sampler of samples supports it.

        Drawn one by one, indices cost the calling thread 3 times as much. As `arrays`, 4,096 indices
        cost it 80 us less than as a list.
        """
        inner = self.chain[-1]
        if len(self.chain) != 2 or type(self.outer) is not BatchSampler or not is_ours(inner):
            return batches
        of_one = getattr(inner, "batches", None)
        if of_one is None or not isgenerator(batches) or getgeneratorstate(batches) != GEN_CREATED:
            return batches
        return iter(of_one(self.outer.batch_size, self.outer.drop_last, arrays=arrays()))

    def draw_seed(self) -> int:
        """Draw the seed of the workers, as torch does."""
        return int(torch.empty((), dtype=torch.int64).random_(generator=self.generator).item())

    def state_access(
        self, indices: Iterator[Any]
    ) -> tuple[Callable[[], SamplerState], Cadence | None] | None:
        """Return a function that returns the state after the last item of `indices`, and its cadence.

        None if there is no state. A cadence of None takes it after every item.
        """
        stateful = self.stateful
        iterator: Any = indices.rest if isinstance(indices, PeekedIndices) else indices
        if isgenerator(iterator) or not is_stateful(iterator):
            iterator = None
        if stateful is None and iterator is None:
            return None
        if iterator is None and is_ours(stateful):
            # It makes a new dict of two numbers each time.
            return lambda: SamplerState(Kept(stateful.state_dict()), None), None
        samples = iterator._samples if type(iterator) is _Batches else iterator
        if stateful is None and type(samples) is _Permutation:  # so does this one
            return lambda: SamplerState(None, Kept(iterator.state_dict())), None

        def take() -> SamplerState:
            return SamplerState(
                None if stateful is None else kept(stateful, "the sampler"),
                None if iterator is None else kept(iterator, "the iterator over the sampler"),
            )

        return take, Cadence()


class PeekedIndices(Iterator[Any]):
    """Iterator whose first item was already drawn, to see if there is one."""

    def __init__(self, first: Any, rest: Iterator[Any]) -> None:
        self.rest = rest
        self._items = chain([first], rest)

    def __next__(self) -> Any:
        return next(self._items)


def _chain(outer: Any) -> list[Any]:
    """Return `outer` and the samplers that it draws from.

    accelerate wraps one sampler of batches in another, as its `batch_sampler`. A mock has every
    attribute, so the chain would never end.
    """
    found = [outer]
    while len(found) < _LONGEST_CHAIN:
        last = found[-1]
        if type(last) in _LAST:
            break
        if type(last) in PLAIN:
            inner = last.sampler
        elif (inner := attribute(last, "batch_sampler")) is None:
            inner = attribute(last, "sampler")
        if inner is None or id(inner) in map(id, found):
            break
        found.append(inner)
    return found


def is_ours(sampler: Any) -> bool:
    return type(sampler).__module__.startswith("hybridloader.")


IndicesAndSeed = tuple[Iterator[Any], int | None]
"""Rest of a sampler's items, and the workers' seed if it was drawn meanwhile."""


def steps_of(workers: int, *, again: bool) -> tuple[str, ...]:
    """Return torch's steps on the sampler and the generators at the beginning of an epoch, in order.

    With new worker processes it makes a second iterator; persistent workers (`again`) keep their seed.
    """
    if again:
        return ("iter",)
    return ("iter", "seed", "iter") if workers else ("iter", "seed")


class SamplerReplay(NamedTuple):
    """Record of how the sampler's iterator of one epoch was made, from which it can be made again."""

    steps: tuple[str, ...]  # steps that were done, in order, as of `steps_of`
    generators: dict[str, torch.Tensor]  # states of the generators before these steps, by name
    start: Given | None  # state of the sampler before these steps, if it has one
    epoch: int | None  # epoch of the sampler, if it has one and no state
    later: tuple[str, ...] | None = None
    """Steps of the later epochs, if they are those of a saved loader; None for torch's."""

    @staticmethod
    def of(
        samplers: Samplers, steps: tuple[str, ...], later: tuple[str, ...] | None = None
    ) -> SamplerReplay:
        """Return the replay of an epoch that begins now. Draws nothing."""
        stateful = samplers.stateful
        start = None
        if stateful is not None:
            upcoming = getattr(stateful, "upcoming_state_dict", stateful.state_dict)
            start = kept(stateful, "the sampler", asked=upcoming)
        states = {name: generator.get_state() for name, generator in samplers.generators.items()}
        epoch = None if stateful is not None else samplers.announced_epoch
        return SamplerReplay(steps, states, start, epoch, later)

    def at_later_epoch(self, samplers: Samplers) -> SamplerReplay:
        """Return this for an epoch from its beginning: with the sampler's epoch, if that is later."""
        announced = samplers.announced_epoch
        if self.epoch is None or announced is None or announced < self.epoch:
            return self
        return self._replace(epoch=announced)

    def restore(self, samplers: Samplers) -> None:
        """Set samplers and generators to their states before the steps."""
        if self.start is not None:
            load_sampler(samplers, SamplerState(self.start, None))
        samplers.announce_epoch(self.epoch)
        samplers.set_generators(self.generators, self.epoch)

    def indices(
        self, samplers: Samplers, count: int, check: int | None, *, eager: bool
    ) -> IndicesAndSeed:
        """Make the sampler's iterator in the recorded way, and skip its first `count` items.

        `check` is `check_of` the last of these, if known. With `eager`, the sampler draws for its first
        item now.
        """
        sampler = samplers.outer
        self.restore(samplers)
        seed = None
        indices: Iterator[Any] = iter(())
        for step in self.steps:
            if step == "iter":
                indices = iter(sampler)
            else:
                seed = samplers.draw_seed()
        if not count:
            return _begun(samplers, indices, eager=eager), seed
        done = _skip(indices, count - 1)
        try:
            last = next(indices)
        except StopIteration:
            raise StateError(
                f"_sampler_iter_yielded is {count} in the state, and {type(sampler).__name__} has "
                f"only {done} items: it has become shorter, or the state is of another sampler"
            ) from None
        if check is not None and check_of(last) != check:
            raise StateError(
                f"item {count - 1} of {type(sampler).__name__} differs from the one when the state was "
                "taken: the sampler changed, or draws from a generator that is neither torch's nor the "
                "loader's. Pass it a `generator`, or define state_dict() and load_state_dict()"
            )
        return indices, seed


def check_of(index: Any) -> int:
    """Return a checksum of one item of a sampler."""
    if isinstance(index, (list, tuple)):
        index = (len(index), list(index[:8]), list(index[-8:]))
    return zlib.crc32(repr(index).encode())


def load_sampler(
    samplers: Samplers,
    state: SamplerState,
    since: int = 0,
    steps: tuple[str, ...] = (),
    *,
    begins: bool = False,
) -> IndicesAndSeed:
    """Load the state of a sampler and skip `since` more items; the cost is the same at any position.

    The iterator was made in `steps`; it `begins` if nothing was drawn from it.
    """
    stateful = samplers.stateful
    try:
        if state.sampler is not None:
            if stateful is None:
                raise ValueError(f"{type(samplers.chain[-1]).__name__} has no load_state_dict()")
            load_into(stateful, copied(state.sampler.kept), "the sampler")
        indices = iter(samplers.outer)
        if state.iterator is not None:
            indices.load_state_dict(copied(state.iterator.kept))
            own = getattr(samplers.chain[-1], "generator", None)
            if steps[-1:] == ("seed",) and own is not None and own is samplers.generator:
                samplers.draw_seed()  # after it, so that the next epoch draws the same numbers
        if begins:
            indices = _begun(samplers, indices, eager=False)
    except StateError:
        raise
    except Exception as error:  # a foreign sampler may raise anything
        name = type(stateful or samplers.chain[-1]).__name__
        raise StateError(
            f"the sampler ({name}) could not load its state: {described(error)}; load the state into "
            "a loader with the sampler that it was taken from"
        ) from error
    if (skipped := _skip(indices, since)) < since:
        raise StateError(
            f"{type(samplers.outer).__name__} returned {skipped} of the {since} items between its state "
            "and that of the loader: it has become shorter, or the state is of another sampler"
        )
    return indices, None


def _begun(samplers: Samplers, indices: Iterator[Any], *, eager: bool) -> Iterator[Any]:
    """Begin an epoch from its start.

    After an epoch, a sampler's state may be the end of that epoch, as for torchdata's distributed
    sampler. Then no item comes, and the sampler begins its next epoch with the next iterator.
    """
    stateful = samplers.stateful
    ends = stateful is not None and not is_ours(stateful)
    if not (eager or ends):
        return indices
    first = list(islice(indices, 1))
    if first:
        return PeekedIndices(first[0], indices)
    if not ends:
        return iter(())
    return iter(samplers.outer)


def _skip(items: Iterator[Any], most: int) -> int:
    """Skip up to `most` items, without Python code for each; return the number of skipped items."""
    numbers = itertools.count()
    deque(zip(islice(items, most), numbers, strict=False), maxlen=0)
    return next(numbers)
