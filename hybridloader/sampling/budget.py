"""`TokenBudgetBatchSampler`: batches within a budget of tokens, frames, bytes, ..."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np

from hybridloader._support.arguments import flag, one_of, whole
from hybridloader.sampling.arguments import LARGEST, lengths_of
from hybridloader.sampling.batching import Cuts, Ints, PlannedBatchSampler

OVERSIZE = ("raise", "skip", "alone")

_BANDS = 4
"""Bits below the highest bit of a length that determine its band: a band is at most 1/16 wide."""


def _bands(lengths: Ints) -> Ints:
    """Return the band of each length. It rises by one where the length rises by 1/32 to 1/16."""
    exponent = np.maximum(np.frexp(lengths.astype(np.float64))[1] - 1 - _BANDS, 0).astype(np.int64)
    bands: Ints = (exponent << _BANDS) + (lengths >> exponent)
    return bands


def _distinct(lengths: Ints) -> tuple[Ints, Any]:
    """Return the distinct lengths, ascending, and for each sample the index of its length."""
    most = int(lengths.max()) if lengths.size else 0
    if most >= max(4 * len(lengths), 2**16):
        return np.unique(lengths, return_inverse=True)
    there = np.flatnonzero(np.bincount(lengths))
    place = np.zeros(most + 1, np.int64)
    place[there] = np.arange(len(there))
    return there, place[lengths]


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


class TokenBudgetBatchSampler(PlannedBatchSampler):
    """Batches of as many samples as fit into a budget.

    Parameters
    ----------
    lengths
        The length of each sample: a list, an array or a tensor of whole numbers. 0 counts as 1.
    max_cost
        The most that a batch may cost.
    padded
        The cost of a batch. True: its longest length times its samples, for padded sequences; batches
        are of samples of similar length. False: the sum of its lengths, for packed sequences; batches
        are of any samples.
    max_size
        Maximum number of samples in a batch. None: no limit.
    seed
        From 0 to ``2**64 - 1``. Seed and epoch determine the batches, on every platform.
    oversize
        Treatment of a sample that alone costs more than `max_cost`. ``"raise"`` raises a `ValueError`
        that names the sample; ``"skip"`` leaves it out, in every epoch; ``"alone"`` makes a batch of
        this sample only. `oversized` is the number of such samples. `Pipeline.batch_by` has the same
        option.
    shuffle
        Shuffle the samples and the batches. If False, padded batches ascend in length, and packed ones
        are in the order of the indices.
    epoch
        First epoch. Each iteration has different batches; see `ResumableSampler`.

    Attributes
    ----------
    oversized : int
        Samples that alone cost more than the budget.

    Raises
    ------
    ValueError
        A sample costs more than the budget, among others; the message names the first.

    Notes
    -----
    Samples form a class if equally many of them fit into the budget and their lengths are within 1/16 of
    each other. A padded batch is a random choice from a class; the last batch of a class is filled up
    from the next class. So each epoch has the same number of padded batches. Packed batches are filled
    in random order, and ``len`` is that of the epoch `self.epoch`.

    The first batch of an epoch sorts the samples, which takes 8 bytes and about 200 ns per sample; the
    result is kept until the next epoch.

    Examples
    --------
    >>> sampler = TokenBudgetBatchSampler([3, 3, 3, 9, 10], max_cost=10, seed=0)
    >>> sorted(sorted(batch) for batch in sampler)
    [[0, 1, 2], [3], [4]]
    """

    _STATED = ("seed", "max_cost", "padded", "max_size", "oversize", "shuffle")

    def __init__(
        self,
        lengths: Any,
        max_cost: int,
        *,
        padded: bool = True,
        max_size: int | None = None,
        seed: int,
        oversize: Literal["raise", "skip", "alone"] = "raise",
        shuffle: bool = True,
        epoch: int = 0,
    ) -> None:
        given = lengths_of(lengths)
        super().__init__(given, seed, epoch, shuffle)
        self.max_cost = whole("max_cost", max_cost, 1)
        self.padded = flag("padded", padded)
        self.max_size = None if max_size is None else whole("max_size", max_size, 1)
        one_of("oversize", oversize, OVERSIZE)
        self.oversize = oversize
        above = given > self.max_cost
        self.oversized = int(np.count_nonzero(above))
        if self.oversized and oversize == "raise":
            at = int(above.argmax())
            raise ValueError(
                f"sample {at} has length {given[at]}, above max_cost={self.max_cost} ({self.oversized} "
                "such in all); raise max_cost, or choose oversize='skip' or oversize='alone'"
            )
        self._kept = len(given) - (self.oversized if oversize == "skip" else 0)
        costs = np.maximum(given, 1)
        self._costs: Any = None
        if self.padded:
            self._cuts = self._cut_padded(costs)
            return
        self._classify(above.astype(np.int64) * (oversize == "skip"))  # skipped samples are last
        most = int(costs.max()) if costs.size else 0
        if most * len(costs) > LARGEST - self.max_cost:
            raise ValueError(f"lengths of up to {most} are too long to add up; use a coarser unit")
        self._costs = costs.astype(np.min_scalar_type(-most - 1))

    def _cut_padded(self, costs: Ints) -> Cuts:
        """Give each sample its class, ascending in length, and cut the classes into batches."""
        distinct, which = _distinct(costs)
        sizes = np.maximum(self.max_cost // distinct, 1)
        if self.max_size is not None:
            sizes = np.minimum(sizes, self.max_size)
        # All of these are monotonic, so a class ends where one of them changes. Samples above the budget
        # are separate classes, the last ones, so that they can be left out.
        marks = sizes, _bands(distinct), distinct > self.max_cost
        new = np.any([np.diff(mark) != 0 for mark in marks], axis=0)
        begins = np.append(True, new)[: len(distinct)]
        counts = self._classify((np.cumsum(begins) - 1)[which])
        first = np.flatnonzero(begins)
        if self.oversize == "skip":
            first = first[distinct[first] <= self.max_cost]
        return _cut_filling(counts[: len(first)], sizes[first])

    def _cut(self, samples: Ints) -> Cuts:
        costs = self._costs[samples[: self._kept]]
        sums = np.cumsum(costs, dtype=np.int64)
        ends = np.searchsorted(sums, sums - costs + self.max_cost, side="right")
        at = np.arange(len(sums))
        np.maximum(ends, at + 1, out=ends)  # a sample above the budget is alone
        if self.max_size is not None:
            np.minimum(ends, at + self.max_size, out=ends)
        starts, at_start, jumps = [], 0, memoryview(ends)
        while at_start < len(sums):
            starts.append(at_start)
            at_start = jumps[at_start]
        cut = np.array(starts, np.int64)
        return Cuts(cut, ends[cut])
