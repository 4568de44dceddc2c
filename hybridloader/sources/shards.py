"""`Shards`: samples in shards, of which each knows how many it has. The contract of all sources.

A source is a map-style dataset, so order, ranks, workers, state and resuming are those of the samplers
and of the loader: nothing here counts samples.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt

from hybridloader._support.store_use import count, counting
from hybridloader._support.text import whole
from hybridloader.sources.block_reader import AHEAD, BlockCache, BlockReader, Fetched
from hybridloader.sources.store import Store

T_co = TypeVar("T_co", covariant=True)
Ints = npt.NDArray[np.int64]


class Shards(ABC, Generic[T_co]):
    """A dataset whose samples lie in shards, one after the other; a base class.

    A subclass calls ``super().__init__`` and defines `read`, which workers call: a handle that `read`
    needs is a `PerWorker`.

    Parameters
    ----------
    shard_names
        Name of each shard, for errors: a path or URL.
    shard_sizes
        Number of samples of each shard; 0 is allowed.

    Examples
    --------
    >>> class Lines(Shards[str]):
    ...     def __init__(self, texts):
    ...         self.lines = [text.splitlines() for text in texts]
    ...         names = [f"text {i}" for i in range(len(texts))]
    ...         super().__init__(names, [len(lines) for lines in self.lines])
    ...
    ...     def read(self, shard, number):
    ...         return self.lines[shard][number]
    >>> lines = Lines(["a b", "c\\nd\\ne"])
    >>> len(lines), lines[-1], lines.locate(2)
    (4, 'e', (1, 1))
    >>> lines.block_sizes.tolist()
    [1, 3]
    """

    def __init__(self, shard_names: Sequence[str], shard_sizes: Sequence[int] | Ints) -> None:
        self.shard_names = shard_names
        self.shard_sizes: Ints = np.asarray(shard_sizes, np.int64)
        if self.shard_sizes.shape != (len(shard_names),):
            raise ValueError(
                f"there are {len(shard_names)} shards, and shard_sizes of the shape "
                f"{self.shard_sizes.shape}; pass one size for each shard"
            )
        if (self.shard_sizes < 0).any():
            at = int(self.shard_sizes.argmin())
            raise ValueError(
                f"{shard_names[at]} has {self.shard_sizes[at]} samples; pass 0 or more"
            )
        # Not a list: of a million shards, forked workers would copy the pages of all its ints.
        self._ends: array[int] = array("q", np.cumsum(self.shard_sizes, dtype=np.int64).tobytes())
        self._shard_stores: Sequence[Store] = ()  # closed with this source
        self._reader: BlockReader | None = None
        if type(self).fetch is not Shards.fetch:
            self._read_blocks(AHEAD)

    @property
    def _is_remote(self) -> bool:
        return any(not store.is_local for store in self._shard_stores)

    def _read_blocks(
        self,
        ahead_bytes: int,
        cache_dir: str | None = None,
        cache_bytes: int | None = None,
        *,
        remote: bool = True,
        warns: bool = True,
    ) -> None:
        """Hold up to so many bytes of blocks. 0, or not `remote`: read each sample alone."""
        self._reader = None
        if whole("ahead_bytes", ahead_bytes, 0) and remote:
            cache = None
            if cache_dir is not None:
                cache = BlockCache(os.path.abspath(cache_dir), whole("cache_bytes", cache_bytes, 1))
            self._reader = BlockReader(self._ends, ahead_bytes, cache, warns=warns)

    @abstractmethod
    def read(self, shard: int, number: int) -> T_co:
        """Return a sample.

        Parameters
        ----------
        shard
            Number of the shard, from 0.
        number
            Number of the sample in the shard, from 0.

        Raises
        ------
        SourceError
            The data are bad, so a retry can't help.
        StoreError, OSError
            The store did not serve.
        """

    def fetch(self, shard: int, first: int, last: int) -> Any:
        """Return the bytes of the samples from `first` to before `last` of a shard.

        Your source, if it lies in a remote store, may define it. Under a `BlockShuffleSampler` it is
        then called once for each block, ahead of the samples, from several threads, and `read` finds the
        bytes by `fetched`. Without it each sample is read by itself.

        Parameters
        ----------
        shard
            Number of the shard, from 0.
        first, last
            Numbers of samples in the shard.

        Returns
        -------
        bytes or memoryview
            Whatever `read` needs to find each of these samples in it.
        """
        raise NotImplementedError(
            f"{type(self).__name__} has no fetch(); define it, or read samples one by one"
        )

    def fetch_size(self, shard: int, first: int, last: int) -> int:
        """Return the number of bytes that `fetch` returns for these arguments; -1 if it is unknown."""
        return -1

    def fetch_key(self, shard: int, first: int, last: int) -> str:
        """Return a name of the bytes that `fetch` returns for these arguments, for a cache.

        It must be another one where the bytes are others: in another file, or if the file has changed.
        """
        return f"{type(self).__qualname__} {self.shard_names[shard]} {first} {last}"

    def fetched(self, shard: int, number: int) -> Fetched | None:
        """Return the block that has a sample, for `read`, which calls this once for each sample.

        Parameters
        ----------
        shard, number
            Those of `read`.

        Returns
        -------
        Fetched or None
            The `data` that `fetch` returned for the samples from `first` to before `last` of this
            shard. None: read the sample alone.

        Raises
        ------
        FileNotFoundError
            `fetch` did not find the shard.
        """
        if self._reader is None:
            return None
        found = self._reader.find(self, number + (self._ends[shard - 1] if shard else 0))
        if found is None and counting():
            count(self.shard_names[shard], alone=1)
        return found

    def read_ahead(
        self, sizes: Ints, order: Iterator[Ints] | None, blocks: int
    ) -> Callable[[int], None] | None:
        """Fetch blocks ahead of their samples from now on; `BlockShuffleSampler` calls it.

        Parameters
        ----------
        sizes
            Number of samples of each block.
        order
            Arrays of indices of the samples that come, in their order. None: nothing comes yet, and
            workers may be about to start.
        blocks
            Number of blocks from which samples come in turn.

        Returns
        -------
        callable or None
            To be called with the number of samples that were given out, each time. None: nothing is
            read ahead.
        """
        reader = self._reader
        if reader is None:
            return None
        if order is None:
            reader.divide(sizes, blocks)
        else:
            reader.begin(self, sizes, order, blocks)
        return partial(reader.advance, self)

    @property
    def waits(self) -> bool:
        """True if each sample waits for a request, so that threads share even the first batch.

        Default: False. Your source, if it is read sample by sample, may define it.
        """
        return False

    @property
    def block_sizes(self) -> Ints:
        """Number of samples of each block of consecutive samples that are read best together.

        `BlockShuffleSampler` asks for it. Here each shard is a block.
        """
        return self.shard_sizes

    def close(self) -> None:
        """Close the handles of this process. They are opened again when they are needed."""
        if self._reader is not None:
            self._reader.close()
        for store in self._shard_stores:
            store.close()

    def locate(self, index: int) -> tuple[int, int]:
        """Return the number of the shard that has the sample `index`, and its number there."""
        count = len(self)
        at = whole("an index", index)
        at += count if at < 0 else 0
        if not 0 <= at < count:
            raise IndexError(f"no sample {index} in a {type(self).__name__} of {count}")
        shard = bisect_right(self._ends, at)
        return shard, at - (self._ends[shard - 1] if shard else 0)

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __getitem__(self, index: int) -> T_co:
        return self.read(*self.locate(index))

    def __iter__(self) -> Any:  # otherwise Python requests indices until one is out of range
        return map(self.__getitem__, range(len(self)))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self):,} samples in {len(self.shard_names):,} shards)"
