"""The iterator over a loader's sampler, made as it was made before, and its first items left out.

A sampler without a state repeats itself if the generators that it draws from stand as they stood when
its iterator was made. The loader's own generator, and the sampler's, are then left where they get by
that, since they will be drawn from again; torch's default generator is the training code's, and whoever
calls puts it back. Nothing is fetched here, and nothing is drawn for a loader that loads no state.
"""

from __future__ import annotations

import itertools
import zlib
from collections import deque
from collections.abc import Iterator
from itertools import chain, islice
from typing import TYPE_CHECKING, Any, NamedTuple

from hybridloader._support.attributes import attribute
from hybridloader._support.errors import StateError
from hybridloader._support.state_copies import Given, copied, kept
from hybridloader.loader.samplers import Samplers, Snapshot, is_ours, is_plain

if TYPE_CHECKING:
    import torch

FIRST_WITHOUT_WORKERS = ("iter", "seed")
FIRST = ("iter", "seed", "iter")
AGAIN = ("iter",)
"""What is done to the sampler and the generators for a pass, in torch's order: where the caller does the
work; for new workers, where the first iterator is thrown away; and for workers who stay."""


class SamplerReplay(NamedTuple):
    """How the sampler's iterator of one pass was made.

    Attributes
    ----------
    steps
        What was done, in order.
    generators
        The states of the generators before that, by name.
    start
        The sampler's state before that, if it has one.
    epoch
        The sampler's own epoch, where it has one and no state.
    """

    steps: tuple[str, ...]
    generators: dict[str, torch.Tensor]
    start: Given | None
    epoch: int | None

    @staticmethod
    def of(samplers: Samplers, steps: tuple[str, ...]) -> SamplerReplay:
        """What is so now. Draws nothing."""
        stateful = samplers.stateful
        start = None
        if stateful is not None:
            upcoming = attribute(stateful, "upcoming_state_dict", stateful.state_dict)
            start = kept(stateful, "the sampler", asked=upcoming)
        states = {name: generator.get_state() for name, generator in samplers.generators.items()}
        return SamplerReplay(
            steps, states, start, None if stateful is not None else samplers.told_epoch
        )

    def as_told(self, samplers: Samplers) -> SamplerReplay:
        """The same for a pass from its beginning: if the sampler was told a later epoch, that one."""
        told = samplers.told_epoch
        if self.epoch is None or told is None or told < self.epoch:
            return self
        return self._replace(epoch=told)

    def restore(self, samplers: Samplers) -> None:
        """Have the samplers and the generators as they were."""
        if self.start is not None:
            load_sampler(samplers, Snapshot(self.start, None))
        samplers.tell_epoch(self.epoch)
        samplers.set_generators(self.generators, self.epoch)


def check_of(index: Any) -> int:
    """A number by which one item of a sampler is known again."""
    if isinstance(index, (list, tuple)):
        index = (len(index), list(index[:8]), list(index[-8:]))
    return zlib.crc32(repr(index).encode())


Replayed = tuple[Iterator[Any], int | None]
"""An iterator over the rest of what a sampler gives; the seed that was drawn on the way, if any."""


def load_sampler(
    samplers: Samplers,
    snapshot: Snapshot,
    since: int = 0,
    steps: tuple[str, ...] = (),
    *,
    begins: bool = False,
) -> Replayed:
    """Load a sampler's own state and skip `since` items more; the cost is the same at any place.

    Parameters
    ----------
    steps
        The way in which the iterator was made.
    begins
        Whether nothing was drawn from the iterator.
    """
    stateful = samplers.stateful
    try:
        if snapshot.sampler is not None:
            if stateful is None:
                raise ValueError(f"{type(samplers.chain[-1]).__name__} has no load_state_dict()")
            stateful.load_state_dict(copied(snapshot.sampler.kept))
        indices = iter(samplers.outer)
        if snapshot.iterator is not None:
            indices.load_state_dict(copied(snapshot.iterator.kept))
            own = getattr(samplers.chain[-1], "generator", None)
            if steps[-1:] == ("seed",) and own is not None and own is samplers.generator:
                samplers.draw_seed()  # as was done behind it: the next pass draws what it would have
        if begins:
            indices = _begun(samplers, indices, eager=False)
    except StateError:
        raise
    except Exception as error:  # whatever a foreign sampler raises
        raise StateError(f"the sampler did not take its state: {error}") from error
    if (gone := _drop(indices, since)) < since:
        raise StateError(
            f"{type(samplers.outer).__name__} has given {gone} of the {since} items that it gave "
            "between its state and that of the loader: it has shrunk, or the state is of another one"
        )
    return indices, None


def replay(
    samplers: Samplers,
    making: SamplerReplay,
    count: int,
    check: int | None,
    *,
    eager: bool,
) -> Replayed:
    """Make the sampler's iterator as it was made, and leave out its first `count` items.

    Parameters
    ----------
    check
        What `check_of` said of the last of them; None: not known.
    eager
        Whether what the sampler draws when it is first asked is drawn now.
    """
    sampler = samplers.outer
    making.restore(samplers)
    seed = None
    indices: Iterator[Any] = iter(())
    for step in making.steps:
        if step == "iter":
            indices = iter(sampler)
        else:
            seed = samplers.draw_seed()
    if not count:
        return _begun(samplers, indices, eager=eager), seed
    short, done = _shortcut(samplers, indices, count - 1)
    done += _drop(short, count - 1 - done)
    try:
        last = next(short)
    except StopIteration:
        raise _too_few(sampler, done, count) from None
    if check is not None and check_of(last) != check:
        raise StateError(
            f"item {count - 1} of {type(sampler).__name__} is not what it was when the state was taken: "
            "the sampler changed, or draws from a generator that is not torch's nor the loader's. Give "
            "it a `generator`, or state_dict() and load_state_dict()"
        )
    return short, seed


def _begun(samplers: Samplers, indices: Iterator[Any], *, eager: bool) -> Iterator[Any]:
    """Begin a pass from its start.

    After an epoch a sampler may tell the end of that epoch, as torchdata's distributed one does.
    Then no item comes, and the sampler begins its next epoch with the next iterator.
    """
    stateful = samplers.stateful
    ends = stateful is not None and not is_ours(stateful)
    if not (eager or ends):
        return indices
    first = list(islice(indices, 1))
    if ends and not first:
        return iter(samplers.outer)
    return chain(first, indices)


def _shortcut(samplers: Samplers, indices: Iterator[Any], count: int) -> tuple[Iterator[Any], int]:
    """`indices` without its first `count` items, if that can be had cheaply: how many were left out."""
    from torch.utils.data import BatchSampler, SequentialSampler

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
    gone = _drop(samples, count * size)
    return iter(BatchSampler(samples, size, outer.drop_last)), gone // size


def _drop(items: Iterator[Any], most: int) -> int:
    """Leave out up to `most` items, without a step of Python for each: how many there were."""
    numbers = itertools.count()
    deque(zip(islice(items, most), numbers, strict=False), maxlen=0)
    return next(numbers)


def _too_few(sampler: Any, there: int, count: int) -> StateError:
    return StateError(
        f"_sampler_iter_yielded is {count} in the state, and {type(sampler).__name__} has given only "
        f"{there} items: it has shrunk, or the state is of another one"
    )
