"""`WeightedSampler`: draws by weight from any number of indices; `torch.multinomial` ends at 2^24.

Draw k of an epoch depends only on seed, epoch and k, by a counter-based generator (Philox). So it is
computed without the draws before it. Weights are summed in float64.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from hybridloader._support.text import whole
from hybridloader.sampling.permutation import key_words
from hybridloader.sampling.resumable import ResumableSampler, fingerprint, weights_of

Floats = npt.NDArray[np.float64]


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
        # Scaled, which is exact, so that the largest is about 1 and the sum does not overflow.
        self._sums: Floats = np.cumsum(np.ldexp(given, -int(np.frexp(given.max())[1])))

    def _agreement(self) -> dict[str, Any]:
        return {**super()._agreement(), "weights_crc32": self._fingerprint}

    def _positions(self, epoch: int) -> int:
        return self.num_samples

    def _read(self, epoch: int, start: int, stop: int) -> npt.NDArray[np.int64]:
        # Below the total, even when rounded: (1 - 2**-53) of it is nearer to the next number below.
        sought = uniform_draws(self.seed, epoch, start, stop) * (self._sums[-1] * 2.0**-53)
        order = sought.argsort()  # a search in ascending order reads nearby sums: half of the time
        found = np.empty(len(sought), np.int64)
        found[order] = np.searchsorted(self._sums, sought[order], side="right")
        return found
