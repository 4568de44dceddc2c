"""The samplers of a loader, and the generators that they draw from. Draws nothing by itself."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from hybridloader._support.attributes import attribute
from hybridloader._support.cadence import Cadence
from hybridloader._support.errors import StateError
from hybridloader._support.state_copies import Given, Kept, is_stateful, kept

if TYPE_CHECKING:
    import torch

DEFAULT = "default"
"""The name of torch's default generator."""

SAMPLERS = "sampler"
"""That of the generator which the sampler has of its own."""


class Snapshot(NamedTuple):
    """The state of a sampler, and that of the iterator over it; None for what has none."""

    sampler: Given | None
    iterator: Given | None


class Samplers(NamedTuple):
    """Samplers that the indices of a loader are drawn from.

    Attributes
    ----------
    outer
        The sampler whose items are the tasks: of batches, if there is one.
    generator
        The loader's own.
    """

    outer: Any
    generator: Any

    @classmethod
    def of(cls, loader: Any) -> Samplers:
        return cls(loader._index_sampler, loader.generator)

    @property
    def chain(self) -> list[Any]:
        """The outer one, and what it draws from, down to the sampler of samples.

        accelerate puts one sampler of batches around another, as its `batch_sampler`.
        """
        found = [self.outer]
        while True:
            last = found[-1]
            inner = attribute(last, "batch_sampler")
            if inner is None:
                inner = attribute(last, "sampler")
            if inner is None or any(inner is one for one in found):
                return found
            found.append(inner)

    @property
    def names(self) -> list[str]:
        """Names of their classes; for batch samplers that draw as torch's does, torch's name."""
        return ["BatchSampler" if is_plain(s) else type(s).__name__ for s in self.chain]

    @property
    def share(self) -> list[int] | None:
        """Rank and number of ranks of a sampler without a state, if it tells: torch's, accelerate's."""
        if self.stateful is not None:
            return None
        for sampler in self.chain:
            for names in (("rank", "num_replicas"), ("process_index", "num_processes")):
                share: list[Any] = [attribute(sampler, name) for name in names]
                if all(type(number) is int for number in share):
                    return share
        return None

    @property
    def stateful(self) -> Any:
        """The sampler that has a state which follows what is drawn; None if there is none."""
        if is_stateful(self.outer):
            return self.outer
        # What another class has drawn ahead of its batches, nobody knows.
        inner = self.outer.sampler if is_plain(self.outer) else None
        return inner if is_stateful(inner) else None

    @property
    def generators(self) -> dict[str, Any]:
        """The generators that the loader and its samplers draw from, as far as one can tell."""
        import torch
        from torch.utils.data import SequentialSampler

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
        """Set the generators to `states`, by name; `epoch` is what `told_epoch` was then."""
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
    def _seeded(self) -> Any:
        """The sampler whose order follows from an epoch that it is told."""
        told = (s for s in self.chain if callable(attribute(s, "set_epoch")))
        return next(told, None)

    @property
    def told_epoch(self) -> int | None:
        """The epoch that such a sampler was told last."""
        epoch = attribute(self._seeded, "epoch", None)
        return epoch if type(epoch) is int else None

    def tell_epoch(self, epoch: int | None) -> None:
        """Tell it another, if that is not the one it was told last."""
        if epoch is not None and self.told_epoch != epoch:
            self._seeded.set_epoch(epoch)

    def draw_seed(self) -> int:
        """Draw the seed of the workers, as torch does."""
        import torch

        return int(torch.empty((), dtype=torch.int64).random_(generator=self.generator).item())

    def snapshots(
        self, indices: Iterator[Any]
    ) -> tuple[Callable[[], Snapshot], Cadence | None] | None:
        """Return access to the state behind the last of `indices`; None if there is none.

        Returns
        -------
        tuple
            A function that takes the state, and when to take it; None: after every item.
        """
        stateful = self.stateful
        iterator: Any = indices if is_stateful(indices) else None
        if stateful is None and iterator is None:
            return None
        if iterator is None and is_ours(stateful):
            # Makes a new dict each time, of two numbers; and is drawn from otherwise by other ranks.
            return lambda: Snapshot(Kept(stateful.state_dict()), None), None
        if stateful is None and _torchdata_order().tells_anew(iterator):
            return lambda: Snapshot(None, Kept(iterator.state_dict())), None

        def take() -> Snapshot:
            own = within = None
            if stateful is not None:
                own = kept(stateful, "the sampler")
            if iterator is not None:
                within = kept(iterator, "the iterator over the sampler")
            return Snapshot(own, within)

        return take, Cadence()


@functools.cache
def _torchdata_order() -> Any:
    from hybridloader.loader import torchdata_order  # imports torch, and needs this package

    return torchdata_order


def is_plain(batches: Any) -> bool:
    return bool(_torchdata_order().is_plain(batches))


def is_ours(sampler: Any) -> bool:
    return type(sampler).__module__.startswith("hybridloader.")
