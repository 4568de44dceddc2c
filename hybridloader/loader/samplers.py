"""Samplers of a loader, and the generators that they draw from. Nothing is drawn unasked."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from inspect import GEN_CREATED, getgeneratorstate, isgenerator
from itertools import chain
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

from hybridloader._support.attributes import attribute
from hybridloader._support.cadence import Cadence
from hybridloader._support.errors import StateError
from hybridloader._support.state_copies import Given, Kept, is_stateful, kept
from hybridloader.loader.torchdata_order import RandomOrder, is_plain, tells_anew

DEFAULT = "default"
"""Name of torch's default generator in a state."""

SAMPLERS = "sampler"
"""Name of the sampler's own generator in a state."""


_DRAWN_AT_ONCE = (
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
    DistributedSampler,
    RandomOrder,
)
"""Samplers that draw nothing after their first index, from any generator."""


_LONGEST_CHAIN = 16
"""Samplers around one another that are looked at; real ones are two to four."""


class SamplerState(NamedTuple):
    """State of a sampler, and of the iterator over it; None for what has no state."""

    sampler: Given | None
    iterator: Given | None


class Samplers(NamedTuple):
    """Samplers that the indices of a loader are drawn from."""

    outer: Any
    """Sampler whose items are the tasks: the sampler of batches, if there is one."""
    generator: Any
    """The loader's own generator."""

    chain: list[Any]
    """The outer sampler, and those that it draws from, down to the sampler of samples."""

    stateful: Any
    """Sampler whose state follows what is drawn; None if there is none."""

    @classmethod
    def of(cls, loader: Any) -> Samplers:
        outer = loader._index_sampler
        return cls(outer, loader.generator, _chain(outer), _stateful(outer))

    @property
    def names(self) -> list[str]:
        """Class names of the chain; torch's name for batch samplers that draw as torch's does."""
        return ["BatchSampler" if is_plain(s) else type(s).__name__ for s in self.chain]

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
        """Generators that the loader and its samplers draw from, by name, as far as is known."""
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
        known = is_plain(samplers[0]) or len(samplers) == 1
        fixed = type(inner) is SequentialSampler or self.stateful is not None
        iterable = type(inner).__name__ == "_InfiniteConstantSampler" and self.generator is not None
        if not (known and fixed) and not iterable:
            found[DEFAULT] = torch.default_generator
        return found

    def set_generators(self, states: Mapping[str, torch.Tensor], epoch: int | None) -> None:
        """Set the generators to `states`, by name, taken when `told_epoch` was `epoch`."""
        own = self.generators
        for name, state in states.items():
            if name not in own:
                if epoch is not None and name in (DEFAULT, SAMPLERS):
                    continue  # a sampler that makes its generator when first asked, and seeds it then
                raise StateError(
                    f"the state holds that of the generator {name!r}, and this loader draws from "
                    f"{', '.join(own) or 'none'}; give it the same sampler and generator as when the "
                    "state was taken"
                )
            try:
                own[name].set_state(state)
            except (RuntimeError, TypeError) as error:
                raise StateError(
                    f"the state of the generator {name!r} can't be loaded: {error}"
                ) from error

    @property
    def unobserved(self) -> bool:
        """True if nobody can tell when an index is asked for, once the first was.

        That is known of exact types alone: a class of the user's may do anything. A `RandomSampler`
        without a generator makes one of its own; with one, it draws from it after its last index.
        """
        batches, inner = self.chain[0], self.chain[-1]
        if len(self.chain) > 2 or (batches is not inner and not is_plain(batches)):
            return False
        if type(inner) is RandomSampler:
            return inner.generator is None
        return type(inner) in _DRAWN_AT_ONCE

    @property
    def _seeded(self) -> Any:
        """Sampler with a `set_epoch()`, whose order follows from the epoch."""
        for sampler in self.chain:
            if callable(attribute(sampler, "set_epoch")):
                return sampler
        return None

    @property
    def told_epoch(self) -> int | None:
        """Epoch that was given last to a sampler with a `set_epoch()`; None if there is none."""
        epoch = attribute(self._seeded, "epoch", None)
        return epoch if type(epoch) is int else None

    def tell_epoch(self, epoch: int | None) -> None:
        """Give such a sampler another epoch, if it has a different one.

        One of ours may be within that epoch, and begin the next one if it is not told.
        """
        if epoch is not None and (self.told_epoch != epoch or is_ours(self._seeded)):
            self._seeded.set_epoch(epoch)

    def drawn_in_batches(self, batches: Iterator[Any], *, arrays: bool) -> Iterator[Any]:
        """Return what `batches` are, drawn a batch at a time where the sampler of samples can do that.

        One by one, its indices cost the calling thread 3 times as much. As `arrays`, 4,096 of them cost
        it 80 us less than as a list.
        """
        inner = self.chain[-1]
        of_one = attribute(inner, "batches") if len(self.chain) == 2 and is_ours(inner) else None
        if of_one is None or type(self.outer) is not BatchSampler:
            return batches
        if not isgenerator(batches) or getgeneratorstate(batches) != GEN_CREATED:
            return batches
        return iter(of_one(self.outer.batch_size, self.outer.drop_last, arrays=arrays))

    def draw_seed(self) -> int:
        """Draw the seed of the workers, as torch does."""
        return int(torch.empty((), dtype=torch.int64).random_(generator=self.generator).item())

    def state_access(
        self, indices: Iterator[Any]
    ) -> tuple[Callable[[], SamplerState], Cadence | None] | None:
        """Return a function that takes the state after the last item of `indices`, and its cadence.

        None if there is no state. A cadence of None takes it after every item.
        """
        stateful = self.stateful
        iterator: Any = indices.rest if isinstance(indices, PeekedIndices) else indices
        if not is_stateful(iterator):
            iterator = None
        if stateful is None and iterator is None:
            return None
        if iterator is None and is_ours(stateful):
            # It makes a new dict of two numbers each time.
            return lambda: SamplerState(Kept(stateful.state_dict()), None), None
        if stateful is None and tells_anew(iterator):
            return lambda: SamplerState(None, Kept(iterator.state_dict())), None

        def take() -> SamplerState:
            return SamplerState(
                None if stateful is None else kept(stateful, "the sampler"),
                None if iterator is None else kept(iterator, "the iterator over the sampler"),
            )

        return take, Cadence()


class PeekedIndices(Iterator[Any]):
    """Iterator of which the first item was drawn, to see whether there is one."""

    def __init__(self, first: Any, rest: Iterator[Any]) -> None:
        self.rest = rest
        self._items = chain([first], rest)

    def __next__(self) -> Any:
        return next(self._items)


def _chain(outer: Any) -> list[Any]:
    """Return `outer` and the samplers that it draws from.

    accelerate puts one sampler of batches around another, as its `batch_sampler`. A mock has another one
    behind every name, for ever.
    """
    found = [outer]
    while len(found) < _LONGEST_CHAIN:
        last = found[-1]
        inner = attribute(last, "batch_sampler")
        if inner is None:
            inner = attribute(last, "sampler")
        if inner is None or any(inner is one for one in found):
            break
        found.append(inner)
    return found


def _stateful(outer: Any) -> Any:
    if is_stateful(outer):
        return outer
    # Batch samplers of other classes may have drawn ahead of their batches.
    inner = outer.sampler if is_plain(outer) else None
    return inner if is_stateful(inner) else None


def is_ours(sampler: Any) -> bool:
    return type(sampler).__module__.startswith("hybridloader.")
