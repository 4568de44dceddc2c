"""`TokenBudgetBatchSampler`: batches of samples of similar length.

It shuffles the samples of a class, cuts them into batches, and shuffles these. Classes depend on the
lengths only and are computed once. An epoch adds two orders, one of the samples and one of the batches.
Both depend on seed and epoch only, so a position is a number of batches.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from hybridloader._support.text import flag, whole
from hybridloader.sampling.permutation import Permutation
from hybridloader.sampling.resumable import ResumableSampler, fingerprint, lengths_of

Ints = npt.NDArray[np.int64]


class Cuts(NamedTuple):
    """Start and end of each batch in an order of the samples."""

    starts: Ints
    ends: Ints


class EpochPlan(NamedTuple):
    """The batches of one epoch."""

    epoch: int
    samples: Ints  # class by class
    batches: Permutation  # the order of the batches


_BANDS = 4
"""Bits below the highest bit of a length that determine its band: a band is at most 1/16 wide."""


def _bands(lengths: Ints) -> Ints:
    """Return the band of each length. It rises by one where the length rises by 1/32 to 1/16."""
    exponent = np.maximum(np.frexp(lengths.astype(np.float64))[1] - 1 - _BANDS, 0).astype(np.int64)
    bands: Ints = (exponent << _BANDS) + (lengths >> exponent)
    return bands


def _cut_filling(counts: Ints, sizes: Ints) -> Cuts:
    """Cut the samples into batches; a batch may continue into the next classes.

    Batch sizes do not grow from class to class, so a batch that fits its last class fits them all.
    """
    starts: list[int] = []
    at = opened = 0  # start of the class; start of the batch that is not cut yet
    for count, size in zip(counts.tolist(), sizes.tolist(), strict=True):
        if at - opened > size:
            starts.append(opened)
            opened = at
        at += count
        full = range(opened, at - size + 1, size)
        starts += full
        opened += size * len(full)
    if at > opened:
        starts.append(opened)
    cut = np.array(starts, np.int64)
    return Cuts(cut, np.append(cut[1:], at)[: len(cut)])


class TokenBudgetBatchSampler(ResumableSampler[list[int]]):
    """Batches of as many samples of similar length as fit into a budget, for padded sequences.

    A batch costs its longest length times its samples. For packed sequences, which cost the sum of their
    lengths, use `Pipeline.batch_by` or `Pipeline.pack`.

    Parameters
    ----------
    lengths
        The length of each sample: a list, an array or a tensor of whole numbers. 0 counts as 1.
    max_cost
        The most that a batch may cost.
    max_size
        Maximum number of samples in a batch. None: no limit. With a large `max_cost`, nearly all
        batches have this size.
    seed
        From 0 to ``2**64 - 1``. Seed and epoch determine the batches, on every platform.
    shuffle
        Shuffle the samples and the batches. If False, batches ascend in length.
    epoch
        First epoch. Each iteration has different batches; see `ResumableSampler`.

    Raises
    ------
    ValueError
        A sample alone costs more than `max_cost`, among others; the message names the first. Lengths of
        at most `max_cost`, as by ``numpy.minimum``, make a batch of each such sample; a `Subset` of the
        dataset leaves them out.

    Notes
    -----
    Samples form a class if equally many of them fit into the budget and their lengths are within 1/16 of
    each other. A batch is a random choice from a class; the last batch of a class is filled up from the
    next class. So each epoch has the same number of batches.

    The first batch of an epoch sorts the samples, which takes 8 bytes and about 200 ns per sample; the
    result is kept until the next epoch.

    Examples
    --------
    >>> sampler = TokenBudgetBatchSampler([3, 3, 3, 9, 10], max_cost=10, seed=0)
    >>> sorted(sorted(batch) for batch in sampler)
    [[0, 1, 2], [3], [4]]
    """

    _STATED = ("seed", "max_cost", "max_size", "shuffle")

    _BLOCK = 256

    def __init__(
        self,
        lengths: Any,
        max_cost: int,
        *,
        max_size: int | None = None,
        seed: int,
        shuffle: bool = True,
        epoch: int = 0,
    ) -> None:
        given = lengths_of(lengths)
        super().__init__(len(given), seed, epoch)
        self.shuffle = flag("shuffle", shuffle)
        self.max_cost = whole("max_cost", max_cost, 1)
        self.max_size = None if max_size is None else whole("max_size", max_size, 1)
        above = given > self.max_cost
        if above.any():
            at = int(above.argmax())
            raise ValueError(
                f"sample {at} has length {given[at]}, above max_cost={self.max_cost} "
                f"({np.count_nonzero(above)} such in all); raise max_cost, or clip the lengths to it, "
                "which makes a batch of each such sample"
            )
        self._fingerprint = fingerprint(given)
        self._classes, self._cuts = self._classified(np.maximum(given, 1))
        self._plan: EpochPlan | None = None  # all the mutable state beside that of the base

    def _classified(self, costs: Ints) -> tuple[npt.NDArray[np.unsignedinteger[Any]], Cuts]:
        """Return the class of each sample, ascending in length, and the batches of the classes."""
        distinct, which = np.unique(costs, return_inverse=True)
        sizes = self.max_cost // distinct
        if self.max_size is not None:
            sizes = np.minimum(sizes, self.max_size)
        marks = sizes, _bands(distinct)  # both are monotonic, so a class ends where one changes
        new = np.any([np.diff(mark) != 0 for mark in marks], axis=0)
        begins = np.append(True, new)[: len(distinct)]
        # In 16 bits if possible: numpy sorts these by radix, several times as fast as others.
        kind = np.uint16 if np.count_nonzero(begins) <= 2**16 else np.uint32
        classes = (np.cumsum(begins) - 1)[which].astype(kind)
        cuts = _cut_filling(np.bincount(classes).astype(np.int64), sizes[np.flatnonzero(begins)])
        return classes, cuts

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_plan": None}

    def _agreement(self) -> dict[str, Any]:
        return {**super()._agreement(), "lengths_crc32": self._fingerprint}

    def _positions(self, epoch: int) -> int:
        return len(self._cuts.starts)

    def _read(self, epoch: int, start: int, stop: int) -> list[list[int]]:
        _, samples, batches = self._planned(epoch)
        starts, ends = self._cuts
        which = np.arange(start, stop)
        if self.shuffle:
            which = batches.take(which)
        spans = zip(starts[which].tolist(), ends[which].tolist(), strict=True)
        return [samples[first:end].tolist() for first, end in spans]

    def _planned(self, epoch: int) -> EpochPlan:
        if self._plan is None or self._plan.epoch != epoch:
            self._plan = None  # frees the memory of the previous plan
            if self.shuffle:  # class by class, each class in random order
                order = Permutation(self._n, self.seed, epoch, purpose="samples").read(0, self._n)
                samples = order[np.argsort(self._classes[order], kind="stable")]
            else:
                samples = np.argsort(self._classes, kind="stable")
            batches = Permutation(len(self._cuts.starts), self.seed, epoch, purpose="batches")
            self._plan = EpochPlan(epoch, samples, batches)
        return self._plan
