"""Shuffled orders of all indices: of one process, divided among ranks, and by blocks.

Ranks take turns along one order. So after equally many steps on each rank, the epoch has one position,
and the state is only this position. Ranks do not communicate: the caller saves all of them after the
same step, and loads the same state on all.

Blocks are for data that are read best a block at a time: a shard, a row group. Their order is computed
from one entry for each block; nothing is kept for each sample.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from typing import Any, ClassVar, Literal, Protocol

import numpy as np
import numpy.typing as npt

from hybridloader._support.text import flag, one_of, whole
from hybridloader._support.user_objects import attribute
from hybridloader.errors import StateError
from hybridloader.fetching.shards import group_of_ranks
from hybridloader.sampling.permutation import Permutation, order_of
from hybridloader.sampling.resumable import (
    LONGEST,
    Leftover,
    ResumableSampler,
    SamplerPlace,
    count_of,
    fingerprint,
    leftover_of,
    lengths_of,
)

Ints = npt.NDArray[np.int64]

UNEVEN = ("pad", "drop", "exact")


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

    def _read(self, epoch: int, start: int, stop: int) -> Ints:
        return self.order(epoch).read(start, stop)


def _group(num_replicas: int | None, rank: int | None) -> tuple[int, int]:
    """Return the number of ranks and this rank; None takes torch.distributed's."""
    if num_replicas is None or rank is None:
        group = group_of_ranks()
        if group is None:
            raise ValueError(
                f"num_replicas is {num_replicas} and rank is {rank}, but torch.distributed is not "
                "initialized, from which a None is taken: call torch.distributed.init_process_group "
                "first, or pass both"
            )
        num_replicas = group[1] if num_replicas is None else num_replicas
        rank = group[0] if rank is None else rank
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


_PLANNED = 4096  # positions that are announced to a source at a time


class HasBlocks(Protocol):
    """A dataset that knows its blocks: the sources of `hybridloader.sources` do."""

    @property
    def block_sizes(self) -> Ints:
        """Number of samples of each block; the blocks follow each other."""


class BlockShuffleSampler(DistributedShuffleSampler):
    """Blocks in random order, and samples in random order within a window of several blocks.

    At any time only the blocks of one window are read (on each rank). So a shard is read in large
    parts, a decoded row group is used up while it is cached, and yet a batch has samples of several
    shards.

    Parameters
    ----------
    data_source
        A source of `hybridloader.sources`, or anything else with `block_sizes`; or these sizes: the
        number of samples of each block. Blocks follow each other, so ``[len(dataset)]`` with a
        `block_size` serves any dataset.
    seed
        From 0 to ``2**64 - 1``, the same on all ranks.
    block_size
        Largest number of samples of a block; larger ones are cut. Default: none is cut.
    window_blocks
        Number of blocks among which samples are shuffled. 1 shuffles within each block; as many as
        there are shuffle everything.
    num_replicas, rank
        The number of processes that share the samples, and this one's number, from 0. Default: those
        of `torch.distributed` if it was initialized, otherwise one process.
    uneven
        ``"pad"``, ``"drop"`` or ``"exact"``; see `DistributedShuffleSampler`.
    num_canonical_ranks
        Number of parts of the order that are read at the same time, in turn. Ranks whose number
        divides it read no block twice, but where two parts meet. Default: `num_replicas`. To resume
        with another number of ranks, give the number that there was at first.
    shuffle
        Shuffle blocks and samples (default), or take the samples of each span in their own order.
    epoch
        The first epoch. Each iteration has another order.

    Notes
    -----
    Made in a few ms for a million blocks, once an epoch. The state is an epoch and a position, as
    with the other samplers, and may be loaded with another `num_replicas`.

    Examples
    --------
    >>> sampler = BlockShuffleSampler([4, 4, 4, 4], seed=0, window_blocks=2)
    >>> order = list(sampler)
    >>> order
    [14, 2, 3, 12, 13, 1, 0, 15, 8, 10, 6, 4, 5, 11, 7, 9]
    >>> sorted(order) == list(range(16))
    True
    """

    _STATED: ClassVar[tuple[str, ...]] = ("seed", "shuffle", "window_blocks", "num_canonical_ranks")

    def __init__(
        self,
        data_source: HasBlocks | Sequence[int] | Ints,
        seed: int,
        *,
        block_size: int | None = None,
        window_blocks: int = 8,
        num_replicas: int | None = None,
        rank: int | None = None,
        uneven: Literal["pad", "drop", "exact"] = "pad",
        num_canonical_ranks: int | None = None,
        shuffle: bool = True,
        epoch: int = 0,
    ) -> None:
        sizes = lengths_of(_sizes_of(data_source))
        if block_size is not None:
            sizes = _cut(sizes, whole("block_size", block_size, 1))
        if num_replicas is None and rank is None and group_of_ranks() is None:
            num_replicas, rank = 1, 0
        super().__init__(
            int(sizes.sum()),
            seed,
            num_replicas=num_replicas,
            rank=rank,
            uneven=uneven,
            shuffle=shuffle,
            epoch=epoch,
        )
        self.window_blocks = whole("window_blocks", window_blocks, 1)
        spans = self.num_replicas if num_canonical_ranks is None else num_canonical_ranks
        self.num_canonical_ranks = whole("num_canonical_ranks", spans, 1)
        self._sizes, self._fingerprint = sizes, fingerprint(sizes)
        # All the mutable state beside that of the base:
        self._read_ahead = attribute(data_source, "read_ahead")
        self._given: Callable[[int], None] | None = None  # to be called with each item's samples
        if self._read_ahead is not None and self._read_ahead(sizes, None, self._in_use) is None:
            self._read_ahead = None
        self._last: tuple[int, BlockOrder] | None = None  # order of the epoch that was read last

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_last": None, "_read_ahead": None, "_given": None}

    def _agreement(self) -> dict[str, Any]:
        return {**super()._agreement(), "blocks_crc32": self._fingerprint}

    def order(self, epoch: int | None = None) -> BlockOrder:
        """The order of `epoch` (None: that of `self.epoch`) before it is cut into spans."""
        epoch = self.epoch if epoch is None else epoch
        last = self._last  # the source looks ahead on other threads, maybe still in another epoch
        if last is None or last[0] != epoch:
            last = self._last = epoch, BlockOrder(self._sizes, self.window_blocks, self.seed, epoch)
        return last[1]

    @property
    def _in_use(self) -> int:
        """Blocks from which this rank takes samples in turn."""
        return self.window_blocks * (
            self.num_canonical_ranks // math.gcd(self.num_canonical_ranks, self.num_replicas)
        )

    def _blocks(self, most: int) -> Iterator[tuple[SamplerPlace, Any]]:
        if self._read_ahead is not None:
            order = self._planned(SamplerPlace(self._next.epoch, self._next.position))
            self._given = self._read_ahead(self._sizes, order, self._in_use)
        yield from super()._blocks(most)

    def __iter__(self) -> Iterator[int]:
        items = super().__iter__()
        return items if self._read_ahead is None else self._reporting(items)

    def batches(
        self, batch_size: int, drop_last: bool, *, arrays: bool = False
    ) -> Iterator[Sequence[int]]:
        items = super().batches(batch_size, drop_last, arrays=arrays)
        return items if self._read_ahead is None else self._reporting(items)

    def _reporting(self, items: Iterator[Any]) -> Iterator[Any]:
        """Yield items, and report each to the source."""
        for item in items:
            if self._given is not None:
                self._given(1 if isinstance(item, int) else len(item))
            yield item

    def _planned(self, place: SamplerPlace) -> Iterator[Ints]:
        """The indices from `place` to the end of the epoch, several at a time."""
        while len(items := self._items(place, _PLANNED)):
            yield items
            place.position += self._step * len(items)

    def _indices(self, epoch: int, positions: Ints) -> Ints:
        if self.num_canonical_ranks > 1:
            ranks = self.num_canonical_ranks
            length, span, within = self._n // ranks, positions % ranks, positions // ranks
            # The last ones are too few for a turn of all spans, and come as they are.
            positions = np.where(within < length, span * length + within, positions)
        return self.order(epoch).take(positions) if self.shuffle else positions


def _sizes_of(data_source: Any) -> Any:
    """Return the sizes of blocks. A dataset without them is not read for them: it may be large."""
    sizes = attribute(data_source, "block_sizes", data_source)
    numbers = isinstance(sizes, (list, tuple, range)) or hasattr(sizes, "__array__")
    if sizes is data_source and not numbers:
        raise TypeError(
            f"{type(data_source).__name__} has no block_sizes; give the number of samples of each "
            "block, or [len(dataset)] with block_size="
        )
    return sizes


class BlockOrder:
    """Order of the samples of one epoch: ``take(positions)`` are their indices."""

    def __init__(
        self,
        sizes: Ints,  # number of samples of each block; some may be 0
        window: int,  # number of blocks among which samples are shuffled
        seed: int,
        epoch: int,
    ) -> None:
        self._key, self._window = (seed, epoch), window
        order = Permutation(len(sizes), seed, epoch, purpose="blocks").read(0, len(sizes))
        ends = np.cumsum(sizes[order])
        # First index of a block, less its first place in this order.
        self._shift = (np.cumsum(sizes) - sizes)[order] - (ends - sizes[order])
        self._ends = ends
        last = ends[-1:]  # once more, if the last window is full: it is then a window of none
        self._bounds = np.concatenate([np.zeros(1, np.int64), ends[window - 1 :: window], last])

    def take(self, positions: Ints) -> Ints:
        """The indices at `positions`, which must be from 0 to below the number of samples."""
        windows = np.searchsorted(self._bounds, positions, "right") - 1
        indices = np.empty(len(positions), np.int64)
        changes = np.flatnonzero(windows[1:] != windows[:-1]) + 1  # few: positions mostly ascend
        for window in sorted({*windows[:1].tolist(), *windows[changes].tolist()}):
            part = np.flatnonzero(windows == window)
            start, stop = self._bounds[window : window + 2].tolist()
            shuffled = _window_order(stop - start, *self._key, window)
            places = start + shuffled.take(positions[part] - start)
            first = window * self._window  # among its own blocks, one is found sooner
            ends = self._ends[first : first + self._window]
            block = first + np.searchsorted(ends, places, "right")
            indices[part] = places + self._shift[block]
        return indices


@functools.lru_cache(maxsize=64)
def _window_order(size: int, seed: int, epoch: int, window: int) -> Permutation:
    return Permutation(size, seed, epoch, purpose=f"window {window}")


def _cut(sizes: Ints, block: int) -> Ints:
    """Sizes of the blocks that are left if each is cut into blocks of at most `block`."""
    pieces = np.maximum(1, -(-sizes // block))
    cut = np.full(int(pieces.sum()), block, np.int64)
    cut[np.cumsum(pieces) - 1] = sizes - (pieces - 1) * block
    return cut
