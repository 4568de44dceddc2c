"""`BucketBatchSampler` and `TokenBudgetBatchSampler`: batches of samples of similar length.

Their base shuffles the samples of a class, cuts them into batches, and shuffles these. Classes depend
on the lengths only and are computed once. An epoch adds two orders, one of the samples and one of the
batches. Both depend on seed and epoch only, so a position is a number of batches.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
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


class PlannedBatchSampler(ResumableSampler[list[int]]):
    """Sampler of batches, each with samples of one class or of neighboring classes.

    A subclass sets `_classes`, a number for each sample, and `_cuts`. `shuffle` shuffles the samples
    within a class, and the batches. The lengths have been checked.
    """

    _BLOCK = 256

    def __init__(self, lengths: Ints, seed: int, epoch: int, shuffle: bool) -> None:
        super().__init__(len(lengths), seed, epoch)
        self.shuffle = flag("shuffle", shuffle)
        self._fingerprint = fingerprint(lengths)
        self._classes: npt.NDArray[np.unsignedinteger[Any]]
        self._cuts: Cuts  # the same in every epoch
        self._plan: EpochPlan | None = None

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


def _cut_each(counts: Ints, size: int, *, drop_last: bool) -> Cuts:
    """Cut each class into batches of `size` samples, where `counts` are the sizes of the classes."""
    batches = counts // size if drop_last else -(-counts // size)
    of = np.repeat(np.arange(len(counts)), batches)  # class of each batch
    offsets = np.cumsum(counts) - counts
    number = np.arange(len(of)) - (np.cumsum(batches) - batches)[of]
    starts = offsets[of] + number * size
    return Cuts(starts, np.minimum(starts + size, (offsets + counts)[of]))


class BucketBatchSampler(PlannedBatchSampler):
    """Batches of samples of similar length, in random order. Each batch is from one bucket.

    Parameters
    ----------
    lengths
        Length of each sample: a list, an array or a tensor of whole numbers.
    batch_size
        Samples in a batch. The last batch of each bucket may have fewer.
    buckets
        Number of buckets, which then have about as many samples each; or the lengths at which new
        buckets begin: ``[50, 100]`` makes three, below 50, from 50 to 99, and from 100 on, and
        ``range(10, 500, 10)`` one for each ten lengths. Samples of the same length are in the same
        bucket.
    seed
        From 0 to ``2**64 - 1``. Seed and epoch determine the batches, on every platform.
    drop_last
        Leave out the batches that are not full. `left_out` is the number of samples in these; each
        epoch leaves out different ones.
    shuffle
        Shuffle the samples within a bucket, and the batches. If False, batches come bucket by bucket,
        and samples in the order of their indices.
    epoch
        First epoch. Each iteration has different batches; see `ResumableSampler`.

    Attributes
    ----------
    left_out : int
        Number of samples that are in no batch of an epoch.

    Notes
    -----
    Each epoch has the same number of batches. The first batch of an epoch sorts the samples, which takes
    8 bytes and about 200 ns per sample; the result is kept until the next epoch.

    Examples
    --------
    >>> sampler = BucketBatchSampler([5, 90, 6, 91, 7], 2, buckets=[50], seed=0)
    >>> sorted(len(batch) for batch in sampler)
    [1, 2, 2]
    >>> list(BucketBatchSampler([5, 90, 6, 91, 7], 2, buckets=[50], seed=0, shuffle=False))
    [[0, 2], [4], [1, 3]]
    """

    _STATED = ("seed", "batch_size", "buckets", "drop_last", "shuffle")

    def __init__(
        self,
        lengths: Any,
        batch_size: int,
        *,
        buckets: int | Sequence[int],
        seed: int,
        drop_last: bool = False,
        shuffle: bool = True,
        epoch: int = 0,
    ) -> None:
        given = lengths_of(lengths)
        super().__init__(given, seed, epoch, shuffle)
        self.batch_size = whole("batch_size", batch_size, 1)
        self.drop_last = flag("drop_last", drop_last)
        self.buckets = _buckets(buckets)
        bounds = _bounds(given, self.buckets)
        classes: Any = np.searchsorted(bounds, given, side="right")
        counts = self._classify(classes)
        self._cuts = _cut_each(counts, self.batch_size, drop_last=self.drop_last)
        self.left_out = len(given) - int((self._cuts.ends - self._cuts.starts).sum())


def _buckets(buckets: Any) -> int | list[int]:
    """Return `buckets` as a number, or as the lengths at which new buckets begin."""
    if isinstance(buckets, (int, np.integer)):
        return whole("buckets", buckets, 1)
    if not isinstance(buckets, Iterable):
        raise TypeError(
            f"buckets must be a number, or the lengths at which they begin, got {buckets!r}"
        )
    bounds = [whole("a length in buckets", bound, 0) for bound in buckets]
    if sorted({*bounds}) != bounds:
        raise ValueError(f"buckets must ascend, got {bounds}")
    return bounds


def _bounds(lengths: Ints, buckets: int | list[int]) -> Any:
    """Return the lengths at which new buckets begin, without the first bucket."""
    if not isinstance(buckets, int):
        return buckets
    number = min(buckets, len(lengths))
    at = [len(lengths) * i // number for i in range(1, number)]
    return np.unique(np.sort(lengths)[at])


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
        Maximum number of samples in a batch. None: no limit.
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
        super().__init__(given, seed, epoch, shuffle)
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
        self._cuts = self._classified(np.maximum(given, 1))

    def _classified(self, costs: Ints) -> Cuts:
        """Give each sample its class, ascending in length, and cut the classes into batches."""
        distinct, which = _distinct(costs)
        sizes = self.max_cost // distinct
        if self.max_size is not None:
            sizes = np.minimum(sizes, self.max_size)
        marks = sizes, _bands(distinct)  # both are monotonic, so a class ends where one changes
        new = np.any([np.diff(mark) != 0 for mark in marks], axis=0)
        begins = np.append(True, new)[: len(distinct)]
        counts = self._classify((np.cumsum(begins) - 1)[which])
        first = np.flatnonzero(begins)
        return _cut_filling(counts, sizes[first])
