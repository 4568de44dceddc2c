"""`ShuffleSampler`: all indices in random order. `DistributedShuffleSampler`: divided among ranks.

The ranks take turns along one order. So after equally many steps on each rank, the epoch has one
position, and the state is only this position. Ranks do not communicate: the caller saves all of them
after the same step, and loads the same state on all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Sized
from typing import Any, ClassVar, Literal

import numpy as np
import numpy.typing as npt

from hybridloader._support.text import flag, one_of, whole
from hybridloader.errors import StateError
from hybridloader.sampling.arguments import count_of
from hybridloader.sampling.permutation import Permutation, order_of
from hybridloader.sampling.resumable import (
    LONGEST,
    Leftover,
    ResumableSampler,
    SamplerPlace,
    leftover_of,
)

UNEVEN = ("pad", "drop", "exact")

Ints = npt.NDArray[np.int64]


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

    def _read(self, epoch: int, start: int, stop: int) -> Ints:
        return self.order(epoch).read(start, stop)


def _group(num_replicas: int | None, rank: int | None) -> tuple[int, int]:
    """Return the number of ranks and this rank; None takes torch.distributed's."""
    if num_replicas is None or rank is None:
        import torch.distributed as dist

        if not (dist.is_available() and dist.is_initialized()):
            raise ValueError(
                f"num_replicas is {num_replicas} and rank is {rank}, but torch.distributed is not "
                "initialized, from which a None is taken: call torch.distributed.init_process_group "
                "first, or pass both"
            )
        num_replicas = dist.get_world_size() if num_replicas is None else num_replicas
        rank = dist.get_rank() if rank is None else rank
    num_replicas = whole("num_replicas", num_replicas, 1)
    return num_replicas, whole("rank", rank, 0, num_replicas - 1)


class DistributedShuffleSampler(ResumableSampler[int]):
    """This rank's part of all indices in random order, in constant memory.

    Rank ``r`` of ``w`` takes the positions ``r``, ``r + w``, ``r + 2 w``, ... of the order of a
    `ShuffleSampler` with the same seed.

    Parameters
    ----------
    dataset
        The dataset, or anything else with a length, which is read once; or the number of samples.
    seed
        From 0 to ``2**64 - 1``, the same on all ranks.
    num_replicas, rank
        The number of processes that share the indices, and this one's number, from 0. Default: those
        of `torch.distributed`, which must have been initialized.
    uneven
        Treatment of the last indices if they are too few for all ranks. ``"pad"`` adds indices from
        the beginning, as torch's `DistributedSampler` does, so some come twice. ``"drop"`` leaves
        them out. ``"exact"`` gives some ranks one index less: right for evaluation, wrong if all ranks
        must make equally many steps.
    shuffle
        True (default) for random order, False for ascending order.
    epoch
        First epoch. Each iteration has a different order, as with `ShuffleSampler`; call `set_epoch` if
        some rank iterates more often than others.

    Notes
    -----
    After equally many steps on each rank, the state is the same on all ranks. It may be loaded with
    another `num_replicas`, on all ranks, and continues after the last index that any rank had. With
    batches, save after the same batch on all ranks: states saved after different steps lose or repeat
    indices, and no rank can detect that. `merge_states` makes one state from such states.

    ``len`` is the length of a whole epoch, also after a state was loaded.

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

    _STATED: ClassVar[tuple[str, ...]] = ("seed", "shuffle")
    _OPTIONAL: ClassVar[str] = "left?"

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
        super().__init__(count_of("dataset", dataset), seed, epoch)
        self.num_replicas, self.rank = _group(num_replicas, rank)
        self._step = self.num_replicas
        one_of("uneven", uneven, UNEVEN)
        self.uneven = uneven
        self.shuffle = flag("shuffle", shuffle)
        if uneven == "drop" and 0 < self._n < self.num_replicas:
            raise ValueError(
                f"uneven='drop' leaves nothing of {self._n} samples for {self.num_replicas} ranks; "
                "use 'pad' or 'exact'"
            )

    def __len__(self) -> int:
        return self._steps(SamplerPlace(0))

    def _shared(self, place: SamplerPlace) -> int:
        """Return the number of indices that all ranks together get from `place` on."""
        return (self._n if place.left is None else place.left.size) - place.position

    def _steps(self, place: SamplerPlace) -> int:
        """Return the number of indices that this rank gets from `place` on."""
        return self._steps_of(place, self.num_replicas, self.rank)

    def _steps_of(self, place: SamplerPlace, ranks: int, rank: int) -> int:
        left = self._shared(place)
        if self.uneven == "drop":
            return left // ranks
        if self.uneven == "exact":
            left = max(0, left - rank)
        return -(-left // ranks)

    def _goes_on(self, place: SamplerPlace) -> bool:
        return self._shared(place) >= (self.num_replicas if self.uneven == "drop" else 1)

    def _place_in(self, state: Mapping[str, Any]) -> SamplerPlace:
        left = leftover_of(self._n, state.get("left"))
        return SamplerPlace(state["epoch"], state["position"], left)

    def _items(self, place: SamplerPlace, most: int) -> Ints:
        steps = min(most, self._steps(place))
        if steps <= 0:
            return np.empty(0, np.int64)
        first = place.position + self.rank
        positions = first + self.num_replicas * np.arange(steps, dtype=np.int64)
        size = self._n if place.left is None else place.left.size
        if positions[-1] >= size:  # only where padded
            positions %= size
        if place.left is not None:
            positions = place.left.take(positions)
        return self._indices(place.epoch, positions)

    def _indices(self, epoch: int, positions: Ints) -> Ints:
        """Return the indices at `positions` of the order of `epoch`, which all ranks share."""
        return order_of(self._n, self.seed, epoch).take(positions) if self.shuffle else positions

    def steps_after(self, state: Mapping[str, Any], ranks: int, rank: int) -> int:
        """Return the number of indices that `rank` of `ranks` gets in the epoch of its `state`."""
        return self._steps_of(self._place_in(state), ranks, rank)

    def merge_states(
        self,
        states: Sequence[Mapping[str, Any] | None],
        wanted: Sequence[tuple[Sequence[int], int]] = (),
    ) -> dict[str, Any] | None:
        """Merge the states of all ranks into one, from which any number of ranks get the rest.

        Parameters
        ----------
        states
            States of one epoch, by rank. The ranks may have made different numbers of steps. None stands
            for a rank that has had all of its indices.
        wanted
            Indices after each rank's state that are left: some numbers, counted from the state, and a
            number from which on all indices are left. Default: all. The single numbers come first.

        Returns
        -------
        dict or None
            None if no index is left. The order of the rest is a new one, unless all ranks have made
            equally many steps.

        Raises
        ------
        StateError
            The states are of different epochs or runs, or the merged state takes more than 7 kB.
        """
        kept = [state for state in states if state is not None]
        if not kept:
            return None
        for other in kept:
            for name in ("epoch", "left"):
                if other.get(name) != kept[0].get(name):
                    raise StateError(
                        f"{name} is {kept[0].get(name)!r:.80} in the state of one rank and "
                        f"{other.get(name)!r:.80} in that of another; pass states of one run"
                    )
        ranks = len(states)
        place = self._place_in(kept[0])
        size = self._shared(place) + place.position
        turns, first = [], list[int]()
        for rank, state in enumerate(states):
            early, rest = wanted[rank] if wanted else ((), 0)
            if state is None:
                # The end: far enough after another rank's turn.
                turns.append(place.position + ranks * -(-(size - place.position) // ranks))
                continue
            at = state["position"]
            steps = self.steps_after(state, ranks, rank)
            positions = (at + rank + ranks * number for number in early if number < steps)
            first += (position % size for position in positions)  # above, where padded
            turns.append(at + ranks * rest)
        if not first and len(set(turns)) == 1:
            return {**kept[0], "position": turns[0]} if turns[0] < size else None
        merged = Leftover(size, turns, first, place.left)
        left = merged.saved()
        if sum(len(text) for level in left for text in level[1:]) > LONGEST:
            raise StateError(
                f"left: the indices that {ranks} ranks have left take more than {LONGEST:,} characters; "
                "save when fewer batches wait in buffers, or at the end of an epoch"
            )
        return {**kept[0], "position": 0, "left": left} if merged.size else None
