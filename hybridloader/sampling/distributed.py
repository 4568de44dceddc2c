"""The indices of one epoch, shared out among ranks; a place in it holds for any number of ranks.

The ranks take turns along one order, so after the same number of steps everywhere the epoch has come
to one position, and that is all that is saved. No rank talks to another here: that all of them were
saved after the same step, and load the same state, is up to the caller.
"""

from __future__ import annotations

from collections.abc import Sized
from typing import Any, Literal

import numpy as np

from hybridloader._support.arguments import flag, one_of, whole
from hybridloader.sampling.arguments import count_of, seed_of
from hybridloader.sampling.permutation import BLOCK, order_of
from hybridloader.sampling.resumable import Place, ResumableSampler

UNEVEN = ("pad", "drop", "exact")


def _group(num_replicas: int | None, rank: int | None) -> tuple[int, int]:
    """Number of processes, and this one's rank; None takes what torch.distributed says."""
    if num_replicas is None or rank is None:
        import torch.distributed as dist

        if not (dist.is_available() and dist.is_initialized()):
            raise ValueError(
                f"num_replicas is {num_replicas} and rank is {rank}, and torch.distributed is not "
                "initialised, which could tell: call torch.distributed.init_process_group first, or "
                "give both"
            )
        num_replicas = dist.get_world_size() if num_replicas is None else num_replicas
        rank = dist.get_rank() if rank is None else rank
    num_replicas = whole("num_replicas", num_replicas, 1)
    return num_replicas, whole("rank", rank, 0, num_replicas - 1)


class DistributedShuffleSampler(ResumableSampler[int]):
    """This rank's part of all indices in random order, at no cost in memory.

    Rank ``r`` of ``w`` takes the positions ``r``, ``r + w``, ``r + 2 w``, ... of the order that a
    `ShuffleSampler` of the same seed has.

    Parameters
    ----------
    dataset
        The dataset, or anything else with a length, which is asked for once; or the number of samples.
    seed
        From 0 to ``2**64 - 1``, the same on all ranks.
    num_replicas, rank
        Number of processes that share the indices, and which of them this is, from 0. Default: what
        `torch.distributed` says, which must have been initialised.
    uneven
        What becomes of the last indices if they are not enough for all ranks: with ``"pad"`` the
        missing ones are taken from the beginning again, as by torch's `DistributedSampler`, so some
        indices come twice; with ``"drop"`` they are left out; with ``"exact"`` some ranks get one
        index less, which is right for evaluation, and wrong where every rank must make as many steps.
    shuffle
        Whether in random order.
    epoch
        The first epoch. Every iteration has another order, as with `ShuffleSampler`; call
        `set_epoch` if some rank iterates more often than others.

    Notes
    -----
    The state of all ranks is the same if all have made as many steps; it may be loaded with another
    `num_replicas`, by all ranks, and goes on after the last index that any rank has had. With
    batches, save after the same batch everywhere. A state saved after different steps loses or
    doubles indices, and no rank can tell.

    ``len`` is that of a whole epoch, also after a state was loaded.

    Examples
    --------
    >>> import functools
    >>> exact = functools.partial(DistributedShuffleSampler, 5, seed=0, uneven="exact")
    >>> parts = [exact(num_replicas=2, rank=rank) for rank in range(2)]
    >>> [len(part) for part in parts]
    [3, 2]
    >>> sorted(index for part in parts for index in part)
    [0, 1, 2, 3, 4]
    """

    def __init__(
        self,
        dataset: int | Sized,
        seed: int,
        *,
        num_replicas: int | None = None,
        rank: int | None = None,
        uneven: Literal["pad", "drop", "exact"] = "pad",
        shuffle: bool = True,
        epoch: int = 0,
    ) -> None:
        super().__init__(epoch)
        self._n = count_of("dataset", dataset)
        self.seed = seed_of(seed)
        self.num_replicas, self.rank = _group(num_replicas, rank)
        one_of("uneven", uneven, UNEVEN)
        self.uneven = uneven
        self.shuffle = flag("shuffle", shuffle)
        if uneven == "drop" and 0 < self._n < self.num_replicas:
            raise ValueError(
                f"uneven='drop' leaves nothing of {self._n} samples for {self.num_replicas} ranks; "
                "use 'pad' or 'exact'"
            )

    def __len__(self) -> int:
        return self._steps(0)

    def _steps(self, start: int) -> int:
        """How many indices this rank gets from position `start` on."""
        left = self._n - start
        if self.uneven == "drop":
            return left // self.num_replicas
        if self.uneven == "exact":
            left = max(0, left - self.rank)
        return -(-left // self.num_replicas)

    def _agreement(self) -> dict[str, Any]:
        return {"n": self._n, "seed": self.seed, "shuffle": self.shuffle}

    def _positions(self, epoch: int) -> int:
        return self._n

    def _position(self, place: Place) -> int:
        return place.start + place.taken * self.num_replicas

    def _left(self, epoch: int, position: int) -> bool:
        return self._n - position >= (self.num_replicas if self.uneven == "drop" else 1)

    def _items(self, place: Place) -> list[int]:
        steps = min(BLOCK, self._steps(place.start) - place.taken)
        if steps <= 0:
            return []
        first = place.start + self.rank
        ks = np.arange(place.taken, place.taken + steps, dtype=np.int64)
        positions = first + self.num_replicas * ks
        if positions[-1] >= self._n:  # only where padded
            positions %= self._n
        if self.shuffle:
            positions = order_of(self._n, self.seed, place.epoch).take(positions)
        items: list[int] = positions.tolist()
        return items
