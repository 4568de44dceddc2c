"""The indices of one epoch, shared out among ranks; a place in it holds for any number of ranks.

The ranks take turns along one order, so after the same number of steps everywhere the epoch has come
to one position, and that is all that is saved. No rank talks to another here: that all of them were
saved after the same step, and load the same state, is up to the caller.
"""

from __future__ import annotations

from collections.abc import Sized
from typing import Any, Literal

import numpy as np

from hybridloader.arguments import flag, one_of, whole
from hybridloader.sampling.arguments import count_of, seed_of
from hybridloader.sampling.permutation import BLOCK, order_of
from hybridloader.sampling.resumable import Place, ResumableSampler

UNEVEN = ("pad", "drop", "exact")


def _group(rank: int | None, world: int | None) -> tuple[int, int]:
    """This process's rank, and how many there are."""
    if rank is None or world is None:
        import torch.distributed as dist

        if not (dist.is_available() and dist.is_initialized()):
            raise ValueError(
                f"rank is {rank} and world is {world}, and torch.distributed is not initialised, "
                "which could tell: call torch.distributed.init_process_group first, or give both"
            )
        rank = dist.get_rank() if rank is None else rank
        world = dist.get_world_size() if world is None else world
    world = whole("world", world, 1)
    return whole("rank", rank, 0, world - 1), world


class DistributedShuffleSampler(ResumableSampler[int]):
    """This rank's part of all indices in random order, at no cost in memory.

    Rank ``r`` of ``w`` takes the positions ``r``, ``r + w``, ``r + 2 w``, ... of the order that a
    `ShuffleSampler` of the same seed has.

    Parameters
    ----------
    n_or_data_source
        How many samples there are, or something with a length, which is asked for once.
    seed
        From 0 to ``2**64 - 1``, the same on all ranks.
    rank, world
        Which process this is, and of how many. Default: what `torch.distributed` says, which must
        have been initialised.
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
    `world`, by all ranks, and goes on after the last index that any rank has had. With batches, save
    after the same batch everywhere. What was saved after different steps loses or doubles indices,
    and no rank can tell.

    ``len`` is that of a whole epoch, also after a state was loaded.

    Examples
    --------
    >>> parts = [DistributedShuffleSampler(5, 0, rank=r, world=2, uneven="exact") for r in (0, 1)]
    >>> [len(part) for part in parts]
    [3, 2]
    >>> sorted(index for part in parts for index in part)
    [0, 1, 2, 3, 4]
    """

    def __init__(
        self,
        n_or_data_source: int | Sized,
        seed: int,
        *,
        rank: int | None = None,
        world: int | None = None,
        uneven: Literal["pad", "drop", "exact"] = "pad",
        shuffle: bool = True,
        epoch: int = 0,
    ) -> None:
        super().__init__(epoch)
        self._n = count_of(n_or_data_source)
        self.seed = seed_of(seed)
        self.rank, self.world = _group(rank, world)
        one_of("uneven", uneven, UNEVEN)
        self.uneven = uneven
        self.shuffle = flag("shuffle", shuffle)
        if uneven == "drop" and 0 < self._n < self.world:
            raise ValueError(
                f"uneven='drop' leaves nothing of {self._n} samples for {self.world} ranks; "
                "use 'pad' or 'exact'"
            )

    def __len__(self) -> int:
        return self._steps(0)

    def _steps(self, start: int) -> int:
        """How many indices this rank gets from position `start` on."""
        left = self._n - start
        if self.uneven == "drop":
            return left // self.world
        if self.uneven == "exact":
            left = max(0, left - self.rank)
        return -(-left // self.world)

    def _agreement(self) -> dict[str, Any]:
        return {"n": self._n, "seed": self.seed, "shuffle": self.shuffle}

    def _positions(self, epoch: int) -> int:
        return self._n

    def _position(self, place: Place) -> int:
        return place.start + place.taken * self.world

    def _left(self, epoch: int, position: int) -> bool:
        return self._n - position >= (self.world if self.uneven == "drop" else 1)

    def _items(self, place: Place) -> list[int]:
        steps = min(BLOCK, self._steps(place.start) - place.taken)
        if steps <= 0:
            return []
        first = place.start + self.rank
        ks = np.arange(place.taken, place.taken + steps, dtype=np.int64)
        positions = first + self.world * ks
        if positions[-1] >= self._n:  # only where padded
            positions %= self._n
        if self.shuffle:
            positions = order_of(self._n, self.seed, place.epoch).take(positions)
        items: list[int] = positions.tolist()
        return items
