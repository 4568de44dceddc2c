"""`ShuffleSampler`: all indices of a dataset in random order, in constant memory."""

from __future__ import annotations

from collections.abc import Sized

import numpy as np
import numpy.typing as npt

from hybridloader.sampling.arguments import count_of
from hybridloader.sampling.permutation import Permutation, order_of
from hybridloader.sampling.resumable import ResumableSampler


class ShuffleSampler(ResumableSampler[int]):
    """All indices in random order, without a list of them. Any position is found at once.

    torch's `RandomSampler` first makes a list of all indices, 40 bytes each, and draws the whole list
    again to resume.

    Parameters
    ----------
    data_source
        The dataset, or anything else with a length, which is read once; or the number of samples.
    seed
        From 0 to ``2**64 - 1``. Seed and epoch determine the order, on every platform.
    epoch
        First epoch. Each iteration has a different order; see `ResumableSampler`.

    Examples
    --------
    >>> sampler = ShuffleSampler(5, seed=0)
    >>> list(sampler), list(sampler)
    ([3, 4, 0, 1, 2], [0, 1, 4, 2, 3])
    >>> half = iter(sampler)
    >>> next(half), next(half)
    (4, 3)
    >>> other = ShuffleSampler(5, seed=0)
    >>> other.load_state_dict(sampler.state_dict())
    >>> list(other) == list(half)
    True
    """

    def __init__(self, data_source: int | Sized, seed: int, *, epoch: int = 0) -> None:
        super().__init__(count_of("data_source", data_source), seed, epoch)

    def order(self, epoch: int | None = None) -> Permutation:
        """Return the order of `epoch`, by default `self.epoch`: ``order[k]`` is its k-th index."""
        return order_of(self._n, self.seed, self.epoch if epoch is None else epoch)

    def at(self, k: int) -> int:
        """Return the k-th index of the epoch `self.epoch`."""
        return self.order()[k]

    def _read(self, epoch: int, start: int, stop: int) -> npt.NDArray[np.int64]:
        return self.order(epoch).read(start, stop)
