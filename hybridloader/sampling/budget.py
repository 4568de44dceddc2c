"""Batches of as many samples as a budget of tokens (frames, bytes, ...) allows."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np

from hybridloader._support.arguments import flag, one_of, whole
from hybridloader.sampling.arguments import LARGEST, fingerprint, lengths_of, seed_of
from hybridloader.sampling.batching import Cuts, Ints, PlannedBatchSampler, narrow

OVERSIZE = ("raise", "skip", "alone")

_BANDS = 4
"""Bits of a length that its band has below the highest one: a band is at most 1/16 wide."""


def _bands(lengths: Ints) -> Ints:
    """A number for each length that grows with it, by one for each 1/32 to 1/16 of it."""
    exponent = np.maximum(np.frexp(lengths.astype(np.float64))[1] - 1 - _BANDS, 0).astype(np.int64)
    bands: Ints = (exponent << _BANDS) + (lengths >> exponent)
    return bands


def _distinct(lengths: Ints) -> tuple[Ints, Any]:
    """The lengths that occur, ascending, and which of them each sample has."""
    most = int(lengths.max()) if lengths.size else 0
    if most >= max(4 * len(lengths), 2**16):
        return np.unique(lengths, return_inverse=True)
    there = np.flatnonzero(np.bincount(lengths))
    place = np.zeros(most + 1, np.int64)
    place[there] = np.arange(len(there))
    return there, place[lengths]


def _cut_filling(counts: Ints, sizes: Ints) -> Cuts:
    """Cut the samples into batches, of which one may go on into the next classes.

    Parameters
    ----------
    counts, sizes
        Of each class, how many samples there are and how many make a batch; sizes do not grow, so
        a batch that is not above the size of its last class is not above any.
    """
    starts: list[Ints] = []
    at = opened = 0
    for count, size in zip(counts.tolist(), sizes.tolist(), strict=True):
        end = at + count
        if at - opened > size:
            starts.append(np.array([opened], np.int64))
            opened = at
        full = np.arange(opened, end - size + 1, size, dtype=np.int64)
        if len(full):
            starts.append(full)
            opened = int(full[-1]) + size
        at = end
    if at > opened:
        starts.append(np.array([opened], np.int64))
    all_starts = np.concatenate(starts) if starts else np.empty(0, np.int64)
    return Cuts(all_starts, np.append(all_starts[1:], at)[: len(all_starts)])


class TokenBudgetBatchSampler(PlannedBatchSampler):
    """Batches of as many samples as stay within a budget.

    Parameters
    ----------
    lengths
        One of each sample: a list, an array or a tensor of whole numbers.
    budget
        The most that a batch may cost.
    padded
        What a batch costs: its longest length times its samples, or, if False, the sum of its lengths,
        for packed sequences. Padded batches are of samples of similar length; packed ones of any.
    max_size
        The most samples in a batch. Default: no limit but the budget.
    seed
        From 0 to ``2**64 - 1``. With the epoch it gives the batches, on every platform.
    oversize
        Treatment of a sample that alone costs more than `budget`: ``"raise"`` a `ValueError` that names
        it; ``"skip"`` it, in every epoch; or give it ``"alone"``, in a batch of its own. `oversized`
        says how many there are. `Pipeline.batch_by` has the same words.
    shuffle
        Whether in random order, of the samples and of the batches. If not: padded ones ascend in
        length, packed ones are in the order of the indices.
    epoch
        The first epoch. Every iteration has other batches; see `ResumableSampler`.

    Attributes
    ----------
    oversized : int
        Samples that alone are above the budget.

    Raises
    ------
    ValueError
        Among others, a sample is above the budget; the message names the first.

    Notes
    -----
    Samples that fit as many times into the budget, and are within 1/16 of each other in length, make a
    class, and a batch is a random choice from one; what does not fill a batch is filled up from the
    next class. So padded batches have the same number in every epoch; packed ones
    are filled in random order, and ``len`` is that of the epoch `self.epoch`. Lengths of 0 count as 1.

    With the first item of an epoch its samples are put in order, which takes 8 bytes and some 200 ns
    for each, and is kept until the next.

    Examples
    --------
    >>> sampler = TokenBudgetBatchSampler([3, 3, 3, 9, 10], budget=10, seed=0)
    >>> sorted(sorted(batch) for batch in sampler)
    [[0, 1, 2], [3], [4]]
    """

    def __init__(
        self,
        lengths: Any,
        budget: int,
        *,
        padded: bool = True,
        max_size: int | None = None,
        seed: int,
        oversize: Literal["raise", "skip", "alone"] = "raise",
        shuffle: bool = True,
        epoch: int = 0,
    ) -> None:
        super().__init__(seed_of(seed), epoch, flag("shuffle", shuffle))
        given = lengths_of(lengths)
        self.budget = whole("budget", budget, 1)
        self.padded = flag("padded", padded)
        self.max_size = None if max_size is None else whole("max_size", max_size, 1)
        one_of("oversize", oversize, OVERSIZE)
        self.oversize = oversize
        above = given > self.budget
        self.oversized = int(np.count_nonzero(above))
        if self.oversized and oversize == "raise":
            at = int(above.argmax())
            raise ValueError(
                f"sample {at} has length {given[at]}, above budget={self.budget} ({self.oversized} "
                "such in all); raise the budget, or choose oversize='skip' or oversize='alone'"
            )
        self._fingerprint = fingerprint(given)
        self._kept = len(given) - (self.oversized if oversize == "skip" else 0)
        costs = np.maximum(given, 1)
        self._cuts: Cuts | None = None
        self._costs: Any = None
        if self.padded:
            self._classify(costs)
        else:
            self._classes = narrow(above.astype(np.int64) * (oversize == "skip"))
            most = int(costs.max()) if costs.size else 0
            if most * len(costs) > LARGEST - self.budget:
                raise ValueError(
                    f"lengths of up to {most} are too long to add up; use a coarser unit"
                )
            self._costs = costs.astype(np.min_scalar_type(-most - 1))

    def _classify(self, costs: Ints) -> None:
        """Give each sample its class, ascending in length, and cut the classes into batches."""
        distinct, which = _distinct(costs)
        sizes = np.maximum(self.budget // distinct, 1)
        if self.max_size is not None:
            sizes = np.minimum(sizes, self.max_size)
        bands = _bands(distinct)
        # Neither ever goes back as lengths grow, so a class ends where one of them changes. What is
        # above the budget is apart, to be last if it is left out.
        above = distinct > self.budget
        new = (np.diff(sizes) != 0) | (np.diff(bands) != 0) | (np.diff(above) != 0)
        class_of = np.concatenate((np.zeros(min(1, len(distinct)), np.int64), np.cumsum(new)))
        self._classes = narrow(class_of[which])
        counts = np.bincount(self._classes).astype(np.int64)
        class_sizes = sizes[np.flatnonzero(np.append(True, new))] if len(distinct) else sizes
        if self.oversize == "skip":
            counts = counts[: len(counts) - len(np.unique(class_of[above]))]
        self._cuts = _cut_filling(counts, class_sizes[: len(counts)])

    def __len__(self) -> int:
        return self._positions(self.epoch)

    def _positions(self, epoch: int) -> int:
        return len(self._cuts.starts) if self._cuts else super()._positions(epoch)

    def _cut(self, samples: Ints) -> Cuts:
        if self._cuts is not None:
            return self._cuts
        costs = self._costs[samples[: self._kept]]
        sums = np.cumsum(costs, dtype=np.int64)
        ends = np.searchsorted(sums, sums - costs + self.budget, side="right")
        at = np.arange(len(sums))
        np.maximum(ends, at + 1, out=ends)  # one above the budget is alone
        if self.max_size is not None:
            np.minimum(ends, at + self.max_size, out=ends)
        starts, at_start, jumps = [], 0, memoryview(ends)
        while at_start < len(sums):
            starts.append(at_start)
            at_start = jumps[at_start]
        cut = np.array(starts, np.int64)
        return Cuts(cut, ends[cut])

    def _agreement(self) -> dict[str, Any]:
        return {
            "n": len(self._classes),
            "seed": self.seed,
            "budget": self.budget,
            "padded": self.padded,
            "max_size": self.max_size,
            "oversize": self.oversize,
            "shuffle": self.shuffle,
            "lengths_crc32": self._fingerprint,
        }
