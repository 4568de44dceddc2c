"""`BlockShuffleSampler`: blocks in random order, and samples shuffled among a few blocks at a time.

For data that are read best a block at a time: a shard, a row group. The order is computed from one
entry for each block; nothing is kept for each sample.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar, Literal, Protocol

import numpy as np
import numpy.typing as npt

from hybridloader._support.text import whole
from hybridloader._support.user_objects import attribute
from hybridloader.sampling.arguments import fingerprint, lengths_of
from hybridloader.sampling.distributed import DistributedShuffleSampler
from hybridloader.sampling.permutation import Permutation
from hybridloader.sampling.resumable import SamplerPlace

Ints = npt.NDArray[np.int64]


_PLANNED = 4096
"""Positions that are announced to a source at a time."""


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
        if num_replicas is None and rank is None and not _in_group():
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
            length = self._n // self.num_canonical_ranks
            span, within = (
                positions % self.num_canonical_ranks,
                positions // self.num_canonical_ranks,
            )
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


def _in_group() -> bool:
    import torch.distributed as dist

    return bool(dist.is_available() and dist.is_initialized())
