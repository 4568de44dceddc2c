"""`BucketBatchSampler`: batches of similar length, each of the same number of samples."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from hybridloader._support.arguments import flag, whole
from hybridloader.sampling.arguments import lengths_of
from hybridloader.sampling.batching import Cuts, Ints, PlannedBatchSampler


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

    Give either `buckets` or `width`.

    Parameters
    ----------
    lengths
        Length of each sample: a list, an array or a tensor of whole numbers.
    batch_size
        Samples in a batch. The last batch of each bucket may have fewer.
    buckets
        Number of buckets, which then have about as many samples each; or the lengths at which new
        buckets begin: ``[50, 100]`` makes three, below 50, from 50 to 99, and from 100 on. Samples of
        the same length are in the same bucket.
    width
        Number of lengths in a bucket: ``10`` makes 0 to 9, 10 to 19, and so on.
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
    >>> list(BucketBatchSampler([5, 90, 6, 91, 7], 2, width=50, seed=0, shuffle=False))
    [[0, 2], [4], [1, 3]]
    """

    _STATED = ("seed", "batch_size", "buckets", "width", "drop_last", "shuffle")

    def __init__(
        self,
        lengths: Any,
        batch_size: int,
        *,
        buckets: int | Sequence[int] | None = None,
        width: int | None = None,
        seed: int,
        drop_last: bool = False,
        shuffle: bool = True,
        epoch: int = 0,
    ) -> None:
        given = lengths_of(lengths)
        super().__init__(given, seed, epoch, shuffle)
        self.batch_size = whole("batch_size", batch_size, 1)
        self.drop_last = flag("drop_last", drop_last)
        if (buckets is None) == (width is None):
            raise ValueError(
                "give either buckets= (a number, or the lengths at which they begin) or width=, got "
                f"buckets={buckets!r} and width={width!r}"
            )
        self.width = None if width is None else whole("width", width, 1)
        self.buckets = None if buckets is None else _buckets(buckets)
        if self.width is not None:
            classes: Any = given // self.width
            if given.size and int(classes.max()) > max(len(given), 2**16):
                classes = np.unique(classes, return_inverse=True)[1]
        else:
            classes = np.searchsorted(_bounds(given, self.buckets), given, side="right")
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


def _bounds(lengths: Ints, buckets: int | list[int] | None) -> Any:
    """Return the lengths at which new buckets begin, without the first bucket."""
    if not isinstance(buckets, int):
        return buckets or []
    number = min(buckets, len(lengths))
    at = [len(lengths) * i // number for i in range(1, number)]
    return np.unique(np.sort(lengths)[at])
