"""``seeding="sample"`` as a `DataLoader` has it: which seed, which pass, and who is told.

Draws nothing: without a seed of its own it takes the one that torch has drawn for its workers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hybridloader.engine.numbering import ItemCounter
from hybridloader.seeding.global_generators import kept
from hybridloader.seeding.sample_rng import COLLATE, SampleRng
from hybridloader.seeding.sample_seeds import Origin, parse


class PassSeeds:
    """Of one iterator over a loader, which may pass over it several times.

    Parameters
    ----------
    seeding
        As the loader's keyword.
    base_seed
        That of its workers.
    epoch
        The number of the first pass.
    """

    def __init__(self, seeding: Any, base_seed: int, epoch: int) -> None:
        self._policy = parse(seeding)
        given = None if self._policy is None else self._policy.seed
        self._seed = base_seed if given is None else given
        self._counter = ItemCounter(items=False)
        self.begin(epoch)

    def begin(self, epoch: int) -> None:
        """A pass begins, which has this number."""
        self._counter.begin(epoch)

    @property
    def origin(self) -> Origin | None:
        """What workers are told; None: nothing is seeded by sample."""
        if self._policy is None:
            return None
        return Origin(self._seed, self._counter.epoch)

    @property
    def counter(self) -> ItemCounter | None:
        """Tells workers of each pass; None: as above."""
        return None if self._policy is None else self._counter

    def collating(
        self, collate_fn: Callable[[Any], Any], number: Callable[[], int]
    ) -> Callable[[Any], Any]:
        """`collate_fn` for batches that are put together here, of what was left of others.

        Each is seeded by its `number` among the batches of the pass, which a state knows, and leaves the
        caller's generators as they were.
        """
        origin = self.origin
        if origin is None:
            return collate_fn
        rng = SampleRng(origin, 0)

        def collate(samples: Any) -> Any:
            with kept():
                return rng.call(COLLATE, b"refilled/%d" % number(), collate_fn, samples)

        return collate
