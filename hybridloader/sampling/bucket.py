"""Batches of samples of similar length, of a fixed number of samples each."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from hybridloader._support.arguments import flag, whole
from hybridloader.sampling.arguments import fingerprint, lengths_of, seed_of
from hybridloader.sampling.batching import Cuts, Ints, PlannedBatchSampler, cut_each, narrow


class BucketBatchSampler(PlannedBatchSampler):
    """Batches of samples of similar length: each from one bucket, in random order of all batches.

    Say either `buckets` or `width`.

    Parameters
    ----------
    lengths
        One of each sample: a list, an array or a tensor of whole numbers.
    batch_size
        Samples in a batch. The last of each bucket has fewer.
    buckets
        How many buckets, of about as many samples each; or the lengths at which a new one begins, so
        ``[50, 100]`` makes three: below 50, from 50 to 99, from 100 on. Samples of one length are in
        one bucket.
    width
        Lengths in a bucket: ``10`` makes 0 to 9, 10 to 19, and so on.
    seed
        From 0 to ``2**64 - 1``. With the epoch it gives the batches, on every platform.
    drop_last
        Leave out the batches that are not full; `left_out` says how many samples that are. Which
        they are differs by epoch.
    shuffle
        Whether in random order, of the samples within a bucket and of the batches. If not: bucket by
        bucket, and in the order of their indices within.
    epoch
        The first epoch. Every iteration has other batches; see `ResumableSampler`.

    Attributes
    ----------
    left_out : int
        Samples that are in no batch of an epoch.

    Notes
    -----
    The number of batches is the same in every epoch. With the first item of an epoch its samples are
    put in order, which takes 8 bytes and some 200 ns for each, and is kept until the next.

    Examples
    --------
    >>> sampler = BucketBatchSampler([5, 90, 6, 91, 7], 2, buckets=[50], seed=0)
    >>> sorted(len(batch) for batch in sampler)
    [1, 2, 2]
    >>> list(BucketBatchSampler([5, 90, 6, 91, 7], 2, width=50, seed=0, shuffle=False))
    [[0, 2], [4], [1, 3]]
    """

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
        super().__init__(seed_of(seed), epoch, flag("shuffle", shuffle))
        given = lengths_of(lengths)
        self.batch_size = whole("batch_size", batch_size, 1)
        self.drop_last = flag("drop_last", drop_last)
        if (buckets is None) == (width is None):
            raise ValueError(
                "give either buckets= (a number, or the lengths at which they begin) or width=, got "
                f"buckets={buckets!r} and width={width!r}"
            )
        self._fingerprint = fingerprint(given)
        self._made_by: dict[str, Any] = {"buckets": None, "width": None}
        if width is not None:
            self._made_by["width"] = width = whole("width", width, 1)
            classes: Any = given // width
            if given.size and int(classes.max()) > max(len(given), 2**16):
                classes = np.unique(classes, return_inverse=True)[1]
        else:
            bounds = self._bounds(given, buckets)
            classes = np.searchsorted(bounds, given, side="right")
        self._classes = narrow(classes)
        counts = np.bincount(self._classes).astype(np.int64)
        sizes = np.full(len(counts), self.batch_size, np.int64)
        self._cuts = cut_each(counts, sizes, whole_only=self.drop_last)
        self.left_out = len(given) - int((self._cuts.ends - self._cuts.starts).sum())

    def _bounds(self, lengths: Ints, buckets: Any) -> Ints:
        """The lengths at which a bucket begins, but for the first."""
        if isinstance(buckets, (int, np.integer)):
            self._made_by["buckets"] = number = whole("buckets", buckets, 1)
            if not lengths.size:
                return lengths
            number = min(number, len(lengths))
            at = [len(lengths) * i // number for i in range(1, number)]
            return np.unique(np.sort(lengths)[at])
        if not isinstance(buckets, Iterable):
            raise TypeError(
                f"buckets must be a number, or the lengths at which they begin, got {buckets!r}"
            )
        bounds = np.asarray([whole("a length in buckets", bound, 0) for bound in buckets], np.int64)
        if (bounds[1:] <= bounds[:-1]).any():
            raise ValueError(f"buckets must ascend, got {bounds.tolist()}")
        self._made_by["buckets"] = bounds.tolist()
        return bounds

    def __len__(self) -> int:
        return len(self._cuts.starts)

    def _positions(self, epoch: int) -> int:
        return len(self._cuts.starts)

    def _cut(self, samples: Ints) -> Cuts:
        return self._cuts

    def _agreement(self) -> dict[str, Any]:
        return {
            "n": len(self._classes),
            "seed": self.seed,
            "batch_size": self.batch_size,
            **self._made_by,
            "drop_last": self.drop_last,
            "shuffle": self.shuffle,
            "lengths_crc32": self._fingerprint,
        }
