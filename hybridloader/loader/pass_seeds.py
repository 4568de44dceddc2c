"""``seeding="sample"`` in a `DataLoader`: the seed and the number of each pass, for its workers.

Nothing is drawn here: without a seed of its own, the policy takes the one that torch has drawn for the
workers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hybridloader.engine.numbering import ItemCounter
from hybridloader.seeding.global_generators import kept
from hybridloader.seeding.sample_rng import COLLATE, SampleRng
from hybridloader.seeding.sample_seeds import Origin, parse_seeding


class PassSeeds:
    """Seeds of one loader iterator, whose workers have `base_seed` and whose first pass is `epoch`."""

    def __init__(self, seeding: Any, base_seed: int, epoch: int) -> None:
        policy = parse_seeding(seeding)
        given = None if policy is None else policy.seed
        self.seed = base_seed if given is None else given
        self.counter = None if policy is None else ItemCounter(items=False)
        """Counter that tells workers the number of each pass; None if samples are not seeded."""
        self.begin(epoch)

    def begin(self, epoch: int) -> None:
        """Begin pass number `epoch`."""
        if self.counter is not None:
            self.counter.begin(epoch)

    @property
    def origin(self) -> Origin | None:
        """Seed and epoch, for workers; None if samples are not seeded."""
        return None if self.counter is None else Origin(self.seed, self.counter.epoch)

    def collating(
        self, collate_fn: Callable[[Any], Any], number: Callable[[], int]
    ) -> Callable[[Any], Any]:
        """Return `collate_fn` for batches that are made on this side, of samples left over from others.

        Each is seeded by its `number` in the pass, which a state knows too, and leaves the caller's
        generators as they were.
        """
        origin = self.origin
        if origin is None:
            return collate_fn
        rng = SampleRng(origin, 0)

        def collate(samples: Any) -> Any:
            with kept():
                return rng.call(COLLATE, b"refilled/%d" % number(), collate_fn, samples)

        return collate
