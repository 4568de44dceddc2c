"""``seeding="sample"`` in a `DataLoader`: the seed and the number of each pass, for its workers.

Nothing is drawn here: without a seed of its own, the policy takes the one that torch has drawn for the
workers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from hybridloader.engine.numbering import ItemCounter
from hybridloader.seeding.global_generators import kept
from hybridloader.seeding.sample_rng import COLLATE, SampleRng
from hybridloader.seeding.sample_seeds import Kind, Origin, origin_of


class PassSeeds:
    """Seeds of one loader iterator, whose workers have `base_seed` and whose first pass is `epoch`."""

    def __init__(
        self,
        seeding: Any,
        base_seed: int,
        epoch: int,
        *,
        threads: bool,
        several: bool,
        stays: bool,  # the seed is that of several passes, because the workers stay
    ) -> None:
        self._origin = origin = origin_of(seeding, base_seed, threads=threads, several=several)
        asked = origin is not None and origin.kind is Kind.SAMPLE
        self.seed = base_seed if origin is None else origin.seed
        # As torch's workers, which know no epoch: a script that resumes by restoring the generator, and
        # begins to count again, draws the same numbers.
        self._counts = asked or stays
        self.counter = None if self._origin is None else ItemCounter(items=False)
        """Counter that tells workers the number of each pass; None if samples are not seeded."""
        self.begin(epoch)

    def begin(self, epoch: int) -> None:
        """Begin pass number `epoch`."""
        if self.counter is not None:
            self.counter.begin(epoch if self._counts else 0)

    @property
    def origin(self) -> Origin | None:
        """Seed and epoch, for workers; None if samples are not seeded."""
        if self._origin is None or self.counter is None:
            return None
        return replace(self._origin, epoch=self.counter.epoch)

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
