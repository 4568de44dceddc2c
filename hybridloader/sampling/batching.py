"""Base of the batch samplers: shuffle the samples of a class, cut them into batches, shuffle these.

The classes depend on the lengths only and are computed once. An epoch adds two orders, one of the
samples and one of the batches. Both depend on seed and epoch only, so a position is a number of batches.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from hybridloader._support.arguments import flag
from hybridloader.sampling.arguments import fingerprint
from hybridloader.sampling.permutation import Permutation
from hybridloader.sampling.resumable import ResumableSampler

Ints = npt.NDArray[np.int64]


class Cuts(NamedTuple):
    """Start and end of each batch in an order of the samples."""

    starts: Ints
    ends: Ints


class EpochPlan(NamedTuple):
    """The batches of one epoch."""

    epoch: int
    samples: Ints  # class by class
    cuts: Cuts
    batches: Permutation  # the order of the batches


class PlannedBatchSampler(ResumableSampler[list[int]]):
    """Sampler of batches, each with samples of one class or of neighbouring classes.

    A subclass sets `_classes`, a number for each sample, and `_cuts`, or it overrides `_cut`. `shuffle`
    shuffles the samples within a class, and the batches. The lengths have been checked.
    """

    _BLOCK = 256

    def __init__(self, lengths: Ints, seed: int, epoch: int, shuffle: bool) -> None:
        super().__init__(len(lengths), seed, epoch)
        self.shuffle = flag("shuffle", shuffle)
        self._fingerprint = fingerprint(lengths)
        self._classes: npt.NDArray[np.unsignedinteger[Any]]
        self._cuts: Cuts | None = None  # if they are the same in every epoch
        self._plan: EpochPlan | None = None

    def _cut(self, samples: Ints) -> Cuts:
        """Cut `samples`, in their order of one epoch, into batches."""
        raise NotImplementedError

    def _classify(self, classes: npt.NDArray[np.integer[Any]]) -> Ints:
        """Set the class of each sample. Return the number of samples of each class."""
        # In 16 bits if possible: numpy sorts these by radix, several times as fast as others.
        most = int(classes.max()) if classes.size else 0
        self._classes = classes.astype(np.uint16 if most < 2**16 else np.uint32)
        return np.bincount(self._classes).astype(np.int64)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_plan": None}

    def _agreement(self) -> dict[str, Any]:
        return {**super()._agreement(), "lengths_crc32": self._fingerprint}

    def _positions(self, epoch: int) -> int:
        return len((self._cuts or self._planned(epoch).cuts).starts)

    def _read(self, epoch: int, start: int, stop: int) -> list[list[int]]:
        _, samples, (starts, ends), batches = self._planned(epoch)
        which = np.arange(start, stop)
        if self.shuffle:
            which = batches.take(which)
        spans = zip(starts[which].tolist(), ends[which].tolist(), strict=True)
        return [samples[first:end].tolist() for first, end in spans]

    def _planned(self, epoch: int) -> EpochPlan:
        if self._plan is None or self._plan.epoch != epoch:
            self._plan = None  # frees the memory of the previous plan
            samples = self._arranged(epoch)
            cuts = self._cuts or self._cut(samples)
            batches = Permutation(len(cuts.starts), self.seed, epoch, purpose="batches")
            self._plan = EpochPlan(epoch, samples, cuts, batches)
        return self._plan

    def _arranged(self, epoch: int) -> Ints:
        """Return the samples class by class, each class in random order."""
        if not self.shuffle:
            return np.argsort(self._classes, kind="stable")
        samples = Permutation(self._n, self.seed, epoch, purpose="samples").read(0, self._n)
        return samples[np.argsort(self._classes[samples], kind="stable")]
