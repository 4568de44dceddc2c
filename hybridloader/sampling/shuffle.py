"""Every index once, in random order, at no cost in memory: `torch.randperm` without the tensor."""

from __future__ import annotations

from collections.abc import Sized
from typing import Any

from hybridloader.sampling.arguments import count_of, seed_of
from hybridloader.sampling.permutation import BLOCK, Permutation, order_of
from hybridloader.sampling.resumable import Place, ResumableSampler


class ShuffleSampler(ResumableSampler[int]):
    """All indices in random order, whatever their number: nothing is stored, and any place is at hand.

    torch's `RandomSampler` makes a list of all indices first, which takes 40 bytes each, and can only
    be resumed by making it again.

    Parameters
    ----------
    data_source
        The dataset, or anything else with a length, which is asked for once; or the number of samples.
    seed
        From 0 to ``2**64 - 1``. With the epoch it gives the order, on every platform.
    epoch
        The first epoch. Every iteration has another order; see `ResumableSampler`.

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
        super().__init__(epoch)
        self._n = count_of("data_source", data_source)
        self.seed = seed_of(seed)

    def order(self, epoch: int | None = None) -> Permutation:
        """The order of `epoch` (None: that of `self.epoch`): ``order[k]`` is its k-th index."""
        return order_of(self._n, self.seed, self.epoch if epoch is None else epoch)

    def at(self, k: int) -> int:
        """The k-th index of the epoch `self.epoch`."""
        return self.order()[k]

    def _agreement(self) -> dict[str, Any]:
        return {"n": self._n, "seed": self.seed}

    def _positions(self, epoch: int) -> int:
        return self._n

    def _items(self, place: Place) -> list[int]:
        start = self._position(place)
        stop = min(start + BLOCK, self._n)
        items: list[int] = self.order(place.epoch).read(start, stop).tolist()
        return items
