"""Replay of a sampler: its iterator is made as it was made before, and its first items are skipped.

A sampler without a state repeats itself if its generators stand as they stood when its iterator was
made. Afterwards the loader's generator and the sampler's stay where that has brought them, since they
will be drawn from again. torch's default generator belongs to the training code; the caller restores
it. Nothing is fetched here, and nothing is drawn for a loader that loads no state.
"""

from __future__ import annotations

import itertools
import zlib
from collections import deque
from collections.abc import Iterator
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch.utils.data import BatchSampler, SequentialSampler

from hybridloader._support.attributes import attribute
from hybridloader._support.errors import StateError, described
from hybridloader._support.state_copies import Given, copied, kept
from hybridloader.loader.samplers import PeekedIndices, Samplers, SamplerState, is_ours
from hybridloader.loader.torchdata_order import is_plain

IndicesAndSeed = tuple[Iterator[Any], int | None]
"""The rest of a sampler's items, and the workers' seed if it was drawn on the way."""


def steps_of(workers: int, *, again: bool) -> tuple[str, ...]:
    """Return what torch does to the sampler and the generators at the beginning of a pass, in order.

    New worker processes take a second iterator; workers that stay (`again`) keep their seed.
    """
    if again:
        return ("iter",)
    return ("iter", "seed", "iter") if workers else ("iter", "seed")


class SamplerReplay(NamedTuple):
    """Description of how the sampler's iterator of one pass was made, from which it is made again."""

    steps: tuple[str, ...]
    """Steps that were done, in order, as `steps_of` says."""
    generators: dict[str, torch.Tensor]
    """States of the generators before these steps, by name."""
    start: Given | None
    """State of the sampler before these steps, if it has one."""
    epoch: int | None
    """Epoch of the sampler, if it has one and no state."""
    later: tuple[str, ...] | None = None
    """Steps of the later passes, if they are those of a loader that was saved; None: as torch does."""

    @staticmethod
    def of(
        samplers: Samplers, steps: tuple[str, ...], later: tuple[str, ...] | None = None
    ) -> SamplerReplay:
        """Describe a pass that begins now. Draws nothing."""
        stateful = samplers.stateful
        start = None
        if stateful is not None:
            upcoming = attribute(stateful, "upcoming_state_dict", stateful.state_dict)
            start = kept(stateful, "the sampler", asked=upcoming)
        states = {name: generator.get_state() for name, generator in samplers.generators.items()}
        epoch = None if stateful is not None else samplers.told_epoch
        return SamplerReplay(steps, states, start, epoch, later)

    def at_later_epoch(self, samplers: Samplers) -> SamplerReplay:
        """Return this for a pass from its beginning: with the sampler's epoch, if that is later."""
        told = samplers.told_epoch
        if self.epoch is None or told is None or told < self.epoch:
            return self
        return self._replace(epoch=told)

    def restore(self, samplers: Samplers) -> None:
        """Set samplers and generators to their states before the steps."""
        if self.start is not None:
            load_sampler(samplers, SamplerState(self.start, None))
        samplers.tell_epoch(self.epoch)
        samplers.set_generators(self.generators, self.epoch)

    def indices(
        self, samplers: Samplers, count: int, check: int | None, *, eager: bool
    ) -> IndicesAndSeed:
        """Make the sampler's iterator as it was made, and skip its first `count` items.

        `check` is `check_of` the last of these, if it is known. If `eager`, the sampler's draws for its
        first item are made now.
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
        rest, done = _shortcut(samplers, indices, count - 1)
        done += _skip(rest, count - 1 - done)
        try:
            last = next(rest)
        except StopIteration:
            raise StateError(
                f"_sampler_iter_yielded is {count} in the state, and {type(sampler).__name__} has "
                f"given only {done} items: it has shrunk, or the state is of another one"
            ) from None
        if check is not None and check_of(last) != check:
            raise StateError(
                f"item {count - 1} of {type(sampler).__name__} is not what it was when the state was "
                "taken: the sampler changed, or draws from a generator that is not torch's nor the "
                "loader's. Give it a `generator`, or state_dict() and load_state_dict()"
            )
        return rest, seed


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
    """Load a sampler's own state and skip `since` items more; the cost is the same at any place.

    The iterator was made in `steps`; it `begins` if nothing was drawn from it.
    """
    stateful = samplers.stateful
    try:
        if state.sampler is not None:
            if stateful is None:
                raise ValueError(f"{type(samplers.chain[-1]).__name__} has no load_state_dict()")
            stateful.load_state_dict(copied(state.sampler.kept))
        indices = iter(samplers.outer)
        if state.iterator is not None:
            indices.load_state_dict(copied(state.iterator.kept))
            own = getattr(samplers.chain[-1], "generator", None)
            if steps[-1:] == ("seed",) and own is not None and own is samplers.generator:
                samplers.draw_seed()  # was drawn after it: the next pass draws what it would have
        if begins:
            indices = _begun(samplers, indices, eager=False)
    except StateError:
        raise
    except Exception as error:  # a foreign sampler may raise anything
        name = type(stateful or samplers.chain[-1]).__name__
        raise StateError(
            f"the sampler ({name}) did not take its state: {described(error)}; load it "
            "into a loader with the sampler that it was taken from"
        ) from error
    if (skipped := _skip(indices, since)) < since:
        raise StateError(
            f"{type(samplers.outer).__name__} has given {skipped} of the {since} items that it gave "
            "between its state and that of the loader: it has shrunk, or the state is of another one"
        )
    return indices, None


def _begun(samplers: Samplers, indices: Iterator[Any], *, eager: bool) -> Iterator[Any]:
    """Begin a pass from its start.

    After an epoch the state of a sampler may be the end of that epoch, as of torchdata's distributed
    one. Then no item comes, and the sampler begins its next epoch with the next iterator.
    """
    stateful = samplers.stateful
    ends = stateful is not None and not is_ours(stateful)
    if not (eager or ends):
        return indices
    first = list(islice(indices, 1))
    if first:
        return PeekedIndices(first[0], indices)
    return iter(samplers.outer) if ends else iter(())


def _shortcut(samplers: Samplers, indices: Iterator[Any], count: int) -> tuple[Iterator[Any], int]:
    """Skip up to `count` of `indices`, if that is cheap; return the rest and the number skipped."""
    outer = samplers.outer
    inner: Any = attribute(outer, "sampler")
    if type(outer) is SequentialSampler:
        return iter(range(count, len(outer.data_source))), count
    if not is_plain(outer) or not count:
        return indices, 0
    size = outer.batch_size
    if type(inner) is SequentialSampler:
        rest: Any = iter(range(min(count * size, len(inner)), len(inner)))
        return iter(BatchSampler(rest, size, outer.drop_last)), count
    if type(outer) is not BatchSampler:  # has begun the sampler already
        return indices, 0
    samples = iter(inner)
    skipped = _skip(samples, count * size)
    return iter(BatchSampler(samples, size, outer.drop_last)), skipped // size


def _skip(items: Iterator[Any], most: int) -> int:
    """Skip up to `most` items, without a step of Python for each; return how many there were."""
    numbers = itertools.count()
    deque(zip(islice(items, most), numbers, strict=False), maxlen=0)
    return next(numbers)
