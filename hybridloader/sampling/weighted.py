"""`WeightedSampler`: draws by weight from any number of indices; `torch.multinomial` ends at 2^24.

Draw k of an epoch depends only on seed, epoch and k, by a counter-based generator (Philox). So it is
computed without the draws before it. Weights are summed in float64, in short runs and then over the
runs, so that small weights are not lost in a large sum.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from hybridloader._support.text import whole
from hybridloader.sampling.permutation import key_words
from hybridloader.sampling.resumable import ResumableSampler, fingerprint, weights_of

Floats = npt.NDArray[np.float64]

RUN = 256
"""Weights in a run: 2 KB of sums. The sums over the runs take 1.6 MB for 5e7 weights, which fits into a
cache. A draw takes 0.4 us; `numpy.searchsorted` in all sums takes 1.9 us."""

_BUILT_AT_ONCE = 4096 * RUN


def uniform_draws(seed: int, epoch: int, start: int, stop: int) -> npt.NDArray[np.uint64]:
    """Return random numbers `start` to before `stop` of `epoch`: whole, and below ``2**53``.

    They are made of the raw words of Philox, which numpy guarantees to keep (NEP 19), unlike the methods
    of its `Generator`.
    """
    first = start // 4  # one value of the counter makes four words
    counter = np.array([first, 0, 0, 0], np.uint64)
    generator = np.random.Philox(key=key_words("draws", seed, epoch)[:2], counter=counter)
    words = np.asarray(generator.random_raw(stop - 4 * first), np.uint64)
    words >>= np.uint64(11)
    return words[start - 4 * first :]


class Sums:
    """Cumulative sums of the weights, in which `find` looks up categories.

    They have two levels: the sums over runs of `RUN` weights, and the sums within each run. No weight is
    negative, and not all are 0.
    """

    def __init__(self, weights: Floats) -> None:
        # Scales the largest to about 1, which is exact, and does not overflow.
        exponent = -int(np.frexp(weights.max())[1])
        runs = -(-len(weights) // RUN)
        self._within = np.zeros(runs * RUN)
        for start in range(0, len(weights), _BUILT_AT_ONCE):
            part = weights[start : start + _BUILT_AT_ONCE]
            np.ldexp(part, exponent, out=self._within[start : start + len(part)])
        table = self._within.reshape(runs, RUN)
        for start in range(0, runs, 4096):
            np.cumsum(table[start : start + 4096], axis=1, out=table[start : start + 4096])
        # The remainder of a number in a run may be rounded up to the sum of the run, which is beyond
        # its last weight.
        self._ends = np.nextafter(table[:, -1], 0)
        self._over = np.concatenate(([0.0], np.cumsum(table[:, -1])))

    def find(self, draws: npt.NDArray[np.uint64]) -> npt.NDArray[np.int64]:
        """Return the category of each of `draws`, which are whole numbers below ``2**53``."""
        # Below the total, even when rounded: (1 - 2**-53) of it is nearer to the next number below.
        sought = draws * (self._over[-1] * 2.0**-53)
        run = np.searchsorted(self._over, sought, side="right") - 1
        sought -= self._over[run]
        np.minimum(sought, self._ends[run], out=sought)
        found = run * RUN
        step = RUN // 2
        while step:  # a binary search in all runs at once: how many sums are not above `sought`
            found += step * (self._within[found + (step - 1)] <= sought)
            step //= 2
        categories: npt.NDArray[np.int64] = found.astype(np.int64, copy=False)
        return categories


class WeightedSampler(ResumableSampler[int]):
    """Indices drawn in proportion to their weights, for any number of weights.

    An index may be drawn again. torch's `WeightedRandomSampler` draws a whole epoch at once, from at
    most 2^24 weights, and also without replacement.

    Parameters
    ----------
    weights
        Weight of each index: a sequence, an array or a tensor. The sum need not be 1; an index of
        weight 0 is never drawn.
    num_samples
        Number of draws in an epoch.
    seed
        From 0 to ``2**64 - 1``. Seed and epoch determine the draws, on every platform.
    epoch
        First epoch. Each iteration has different draws; see `ResumableSampler`.

    Notes
    -----
    A weight takes 8 bytes. Weights below 1e-16 of their sum may count as 0.

    Examples
    --------
    >>> list(WeightedSampler([0.0, 3.0, 1.0], 8, seed=0))
    [1, 1, 1, 2, 1, 1, 1, 1]
    """

    _STATED = ("seed", "num_samples")

    def __init__(self, weights: Any, num_samples: int, *, seed: int, epoch: int = 0) -> None:
        given = weights_of(weights)
        super().__init__(len(given), seed, epoch)
        self.num_samples = whole("num_samples", num_samples, 1)
        self._fingerprint = fingerprint(given)
        self._sums = Sums(given)

    def at(self, k: int) -> int:
        """Return the k-th draw of the epoch `self.epoch`."""
        k = whole("k", k, 0, self.num_samples - 1)
        return int(self._read(self.epoch, k, k + 1)[0])

    def _agreement(self) -> dict[str, Any]:
        return {**super()._agreement(), "weights_crc32": self._fingerprint}

    def _positions(self, epoch: int) -> int:
        return self.num_samples

    def _read(self, epoch: int, start: int, stop: int) -> npt.NDArray[np.int64]:
        return self._sums.find(uniform_draws(self.seed, epoch, start, stop))
