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
from collections.abc import Callable, Iterator
from itertools import chain, islice
from typing import TYPE_CHECKING, Any, NamedTuple

from hybridloader.errors import StateError
from hybridloader.foreign import attribute
from hybridloader.states.cadence import Cadence
from hybridloader.states.carried import is_stateful
from hybridloader.states.copies import Given, Kept, copied, kept

if TYPE_CHECKING:
    import torch

DEFAULT = "default"
"""The name of torch's default generator."""

SAMPLERS = "sampler"
"""That of the generator which the sampler has of its own."""

FIRST_WITHOUT_WORKERS = ("iter", "seed")
FIRST = ("iter", "seed", "iter")
AGAIN = ("iter",)
"""What is done to the sampler and the generators for a pass, in torch's order: where the caller does the
work; for new workers, where the first iterator is thrown away; and for workers who stay."""


class Snapshot(NamedTuple):
    """The state of a sampler, and that of the iterator over it; None for what has none."""

    sampler: Given | None
    iterator: Given | None


class Making(NamedTuple):
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
    start: Snapshot | None
    epoch: int | None

    @staticmethod
    def of(loader: Any, steps: tuple[str, ...]) -> Making:
        """What is so now. Draws nothing."""
        stateful = stateful_of(loader)
        start = None
        if stateful is not None:
            upcoming = attribute(stateful, "upcoming_state_dict", stateful.state_dict)
            start = Snapshot(kept(stateful, "the sampler", upcoming), None)
        states = {name: generator.get_state() for name, generator in generators_of(loader).items()}
        return Making(steps, states, start, None if stateful is not None else told_epoch(loader))

    def as_told(self, loader: Any) -> Making:
        """The same for a pass from its beginning: if the sampler was told a later epoch, that one."""
        told = told_epoch(loader)
        if self.epoch is None or told is None or told < self.epoch:
            return self
        return self._replace(epoch=told)


def samplers_of(loader: Any) -> list[Any]:
    """The sampler of batches, if there is one, and what it draws from, down to that of samples.

    accelerate puts one sampler of batches around another, as its `batch_sampler`.
    """
    found = [loader._index_sampler]
    while True:
        last = found[-1]
        inner = attribute(last, "batch_sampler")
        if inner is None:
            inner = attribute(last, "sampler")
        if inner is None or any(inner is one for one in found):
            return found
        found.append(inner)


def share_of(loader: Any) -> list[int] | None:
    """Which rank of how many a sampler without a state draws for, if it tells: torch's, accelerate's."""
    if stateful_of(loader) is not None:
        return None
    for sampler in samplers_of(loader):
        for names in (("rank", "num_replicas"), ("process_index", "num_processes")):
            share: list[Any] = [attribute(sampler, name) for name in names]
            if all(type(number) is int for number in share):
                return share
    return None


def stateful_of(loader: Any) -> Any:
    """The sampler that has a state which follows what is drawn, if there is one."""
    from hybridloader.sampling.torchdata_order import is_plain

    outer = loader._index_sampler
    if is_stateful(outer):
        return outer
    # What another class has drawn ahead of its batches, nobody knows.
    inner = outer.sampler if is_plain(outer) else None
    return inner if is_stateful(inner) else None


def generators_of(loader: Any) -> dict[str, Any]:
    """The generators that the loader and its samplers draw from, as far as one can tell."""
    import torch
    from torch.utils.data import SequentialSampler

    from hybridloader.sampling.torchdata_order import is_plain

    found: dict[str, Any] = {}
    if loader.generator is not None:
        found["loader"] = loader.generator
    samplers = samplers_of(loader)
    inner = samplers[-1]
    own = attribute(inner, "generator")
    if isinstance(own, torch.Generator):
        if own is not loader.generator:
            found[SAMPLERS] = own
        return found
    known = is_plain(samplers[0]) or len(samplers) == 1
    fixed = type(inner) is SequentialSampler or stateful_of(loader) is not None
    iterable = type(inner).__name__ == "_InfiniteConstantSampler" and loader.generator is not None
    if not (known and fixed) and not iterable:
        found[DEFAULT] = torch.default_generator
    return found


def _seeded(loader: Any) -> Any:
    """The sampler whose order follows from an epoch that it is told."""
    for sampler in samplers_of(loader):
        if callable(attribute(sampler, "set_epoch")):
            return sampler
    return None


def told_epoch(loader: Any) -> int | None:
    """The epoch that such a sampler was told last."""
    epoch = attribute(_seeded(loader), "epoch", None)
    return epoch if type(epoch) is int else None


def tell_epoch(loader: Any, epoch: int | None) -> None:
    """Tell it another, if that is not the one it was told last."""
    if epoch is not None and told_epoch(loader) != epoch:
        _seeded(loader).set_epoch(epoch)


def _is_ours(sampler: Any) -> bool:
    return type(sampler).__module__.startswith("hybridloader.")


class Snapshots(NamedTuple):
    """Access to the sampler's state after the item that was drawn last.

    Attributes
    ----------
    take
        Function that returns the state.
    cadence
        When the state is taken; None: after every item.
    """

    take: Callable[[], Snapshot]
    cadence: Cadence | None


def snapshots(loader: Any, indices: Iterator[Any]) -> Snapshots | None:
    """Return the snapshots of what `indices` are drawn from; None if that has no state."""
    from hybridloader.sampling.torchdata_order import tells_anew

    stateful = stateful_of(loader)
    iterator: Any = indices if is_stateful(indices) else None
    if stateful is None and iterator is None:
        return None
    if iterator is None and _is_ours(stateful):
        # Makes a new dict each time, of two numbers; and is drawn from otherwise by other ranks.
        return Snapshots(lambda: Snapshot(Kept(stateful.state_dict()), None), None)
    if stateful is None and tells_anew(iterator):
        return Snapshots(lambda: Snapshot(None, Kept(iterator.state_dict())), None)

    def take() -> Snapshot:
        own = within = None
        if stateful is not None:
            own = kept(stateful, "the sampler", stateful.state_dict)
        if iterator is not None:
            within = kept(iterator, "the iterator over the sampler", iterator.state_dict)
        return Snapshot(own, within)

    return Snapshots(take, Cadence())


def check_of(index: Any) -> int:
    """A number by which one item of a sampler is known again."""
    if isinstance(index, (list, tuple)):
        index = (len(index), list(index[:8]), list(index[-8:]))
    return zlib.crc32(repr(index).encode())


def set_generators(loader: Any, making: Making) -> None:
    """Set the generators as they were."""
    own = generators_of(loader)
    for name, state in making.generators.items():
        if name not in own:
            if making.epoch is not None and name in (DEFAULT, SAMPLERS):
                continue  # a sampler that makes its generator when it is first asked, and seeds it then
            raise StateError(
                f"the state holds that of the generator {name!r}, and this loader draws from "
                f"{', '.join(own) or 'none'}; give it the same sampler and generator as when the state "
                "was taken"
            )
        try:
            own[name].set_state(state)
        except (RuntimeError, TypeError) as error:
            raise StateError(
                f"the state of the generator {name!r} can't be loaded: {error}"
            ) from error


class Replayed(NamedTuple):
    """An iterator over the rest of what a sampler gives; the seed that was drawn on the way, if any."""

    indices: Iterator[Any]
    seed: int | None


def load_sampler(
    loader: Any,
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
    stateful = stateful_of(loader)
    try:
        if snapshot.sampler is not None:
            if stateful is None:
                raise ValueError(
                    f"{type(samplers_of(loader)[-1]).__name__} has no load_state_dict()"
                )
            stateful.load_state_dict(copied(snapshot.sampler.kept))
        indices = iter(loader._index_sampler)
        if snapshot.iterator is not None:
            indices.load_state_dict(copied(snapshot.iterator.kept))
            own = getattr(samplers_of(loader)[-1], "generator", None)
            if steps[-1:] == ("seed",) and own is not None and own is loader.generator:
                draw_seed(
                    loader
                )  # as was done behind it, so that the next pass draws what it would have
        if begins:
            indices = _begun(loader, indices, eager=False)
    except StateError:
        raise
    except Exception as error:  # whatever a foreign sampler raises
        raise StateError(f"the sampler did not take its state: {error}") from error
    if (gone := _drop(indices, since)) < since:
        raise StateError(
            f"{type(loader._index_sampler).__name__} has given {gone} of the {since} items that it gave "
            "between its state and that of the loader: it has shrunk, or the state is of another one"
        )
    return Replayed(indices, None)


def replay(
    loader: Any,
    making: Making,
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
    sampler = loader._index_sampler
    if making.start is not None and making.start.sampler is not None:
        load_sampler(loader, making.start)
    tell_epoch(loader, making.epoch)
    set_generators(loader, making)
    seed = None
    indices: Iterator[Any] = iter(())
    for step in making.steps:
        if step == "iter":
            indices = iter(sampler)
        else:
            seed = draw_seed(loader)
    if not count:
        return Replayed(_begun(loader, indices, eager=eager), seed)
    short, done = _shortcut(loader, indices, count - 1)
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
    return Replayed(short, seed)


def _begun(loader: Any, indices: Iterator[Any], *, eager: bool) -> Iterator[Any]:
    """Begin a pass from its start.

    After an epoch a sampler may tell the end of that epoch, as torchdata's distributed one does.
    Then no item comes, and the sampler begins its next epoch with the next iterator.
    """
    stateful = stateful_of(loader)
    ends = stateful is not None and not _is_ours(stateful)
    if not (eager or ends):
        return indices
    first = list(islice(indices, 1))
    if ends and not first:
        return iter(loader._index_sampler)
    return chain(first, indices)


def draw_seed(loader: Any) -> int:
    """The seed of the workers, as torch draws it."""
    import torch

    return int(torch.empty((), dtype=torch.int64).random_(generator=loader.generator).item())


def _shortcut(loader: Any, indices: Iterator[Any], count: int) -> tuple[Iterator[Any], int]:
    """`indices` without its first `count` items, if that can be had cheaply: how many were left out."""
    from torch.utils.data import BatchSampler, SequentialSampler

    from hybridloader.sampling.torchdata_order import is_plain

    outer = loader._index_sampler
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
