"""Batches of samples that belong together: classes of samples, shuffled, cut, and shuffled as batches.

What follows from the lengths alone is worked out once, by the kinds of sampler that are built on this;
an epoch adds an order of the samples, and one of the batches. All of it follows from seed and epoch,
so a place in an epoch is a number of batches.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from hybridloader.sampling.permutation import Permutation
from hybridloader.sampling.resumable import Place, ResumableSampler

Ints = npt.NDArray[np.int64]
Classes = npt.NDArray[np.unsignedinteger[Any]]

_BATCHES = 256
"""Batches that are looked up at a time."""


class Cuts(NamedTuple):
    """Where in an order of the samples each batch starts and ends."""

    starts: Ints
    ends: Ints


class Plan(NamedTuple):
    """The batches of one epoch."""

    epoch: int
    samples: Ints
    """The samples, class by class."""
    cuts: Cuts
    batches: Permutation
    """The order of the batches."""


def narrow(classes: npt.NDArray[np.integer[Any]]) -> Classes:
    """Classes in 16 bits if these do: numpy sorts those by radix, several times as fast as others."""
    most = int(classes.max()) if classes.size else 0
    return classes.astype(np.uint16 if most < 2**16 else np.uint32)


def cut_each(counts: Ints, sizes: Ints, *, whole_only: bool) -> Cuts:
    """Cut class after class into batches, none of which has samples of two.

    Parameters
    ----------
    counts, sizes
        Of each class, how many samples there are and how many make a batch.
    whole_only
        Leave out what does not fill a batch.
    """
    batches = counts // sizes if whole_only else -(-counts // sizes)
    of = np.repeat(np.arange(len(counts)), batches)
    offsets = np.cumsum(counts) - counts
    number = np.arange(len(of)) - (np.cumsum(batches) - batches)[of]
    starts = offsets[of] + number * sizes[of]
    return Cuts(starts, np.minimum(starts + sizes[of], (offsets + counts)[of]))


class PlannedBatchSampler(ResumableSampler[list[int]]):
    """A sampler of batches, each of samples of one class or of neighbouring ones.

    Parameters
    ----------
    seed, epoch, shuffle
        As checked by the kind of sampler.
    """

    def __init__(self, seed: int, epoch: int, shuffle: bool) -> None:
        super().__init__(epoch)
        self.seed = seed
        self.shuffle = shuffle
        self._classes: Classes
        self._plan: Plan | None = None

    def _cut(self, samples: Ints) -> Cuts:
        """Cut `samples`, in their order of one epoch, into batches."""
        raise NotImplementedError

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_plan": None}

    def _positions(self, epoch: int) -> int:
        return len(self._planned(epoch).cuts.starts)

    def _items(self, place: Place) -> list[list[int]]:
        plan = self._planned(place.epoch)
        starts, ends = plan.cuts
        first = self._position(place)
        which = np.arange(first, min(first + _BATCHES, len(starts)))
        if self.shuffle:
            which = plan.batches.take(which)
        spans = zip(starts[which].tolist(), ends[which].tolist(), strict=True)
        return [plan.samples[start:end].tolist() for start, end in spans]

    def _planned(self, epoch: int) -> Plan:
        if self._plan is None or self._plan.epoch != epoch:
            self._plan = None  # the one before need not stay while this one is made
            samples = self._arranged(epoch)
            cuts = self._cut(samples)
            batches = Permutation(len(cuts.starts), self.seed, epoch, purpose="batches")
            self._plan = Plan(epoch, samples, cuts, batches)
        return self._plan

    def _arranged(self, epoch: int) -> Ints:
        """The samples, class by class, each class in random order."""
        n = len(self._classes)
        if not self.shuffle:
            return np.argsort(self._classes, kind="stable")
        samples = Permutation(n, self.seed, epoch, purpose="samples").read(0, n)
        return samples[np.argsort(self._classes[samples], kind="stable")]
