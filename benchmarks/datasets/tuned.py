"""Datasets for the case `tune`: work of each kind that a tuner must tell apart."""

from __future__ import annotations

import fcntl
import tempfile
import time
import zlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import Dataset, IterableDataset, get_worker_info

_PACKED = zlib.compress(bytes(1 << 22), 1)  # some 2 ms to unpack, without the GIL


class Work(Dataset[Any]):
    """Samples that wait, unpack without the GIL, and loop in Python.

    Parameters
    ----------
    waiting_ms
        Milliseconds of waiting.
    unpacked
        Times that 4 MB are unpacked, which releases the GIL.
    loops
        Turns of a loop in Python, which holds the GIL.
    locked_ms
        Milliseconds under one lock of all threads and processes.
    size
        Bytes of a sample.
    """

    def __init__(
        self,
        waiting_ms: float = 0,
        unpacked: int = 0,
        loops: int = 0,
        locked_ms: float = 0,
        size: int = 64,
        length: int = 100_000,
    ) -> None:
        self._waiting, self._unpacked, self._loops = waiting_ms / 1e3, unpacked, loops
        self._locked, self._size, self._length = locked_ms / 1e3, size, length
        self._path = tempfile.gettempdir() + "/hybridloader-tune.lock"

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Any:
        if self._waiting:
            time.sleep(self._waiting)
        for _ in range(self._unpacked):
            zlib.decompress(_PACKED)
        total = index
        for turn in range(self._loops):
            total += turn & 7
        if self._locked:
            with open(self._path, "w") as file:
                fcntl.flock(file, fcntl.LOCK_EX)
                time.sleep(self._locked)
        return torch.full((self._size,), total & 7, dtype=torch.uint8)


class Shards(IterableDataset[Any]):
    """Shards of which the first has half of all samples; each sample unpacks 4 MB."""

    def __init__(self, shards: int = 8, length: int = 4000) -> None:
        self.sizes = [length // 2] + [length // 2 // (shards - 1)] * (shards - 1)

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        worker, workers = (info.id, info.num_workers) if info else (0, 1)
        for shard in range(len(self.sizes))[worker::workers]:
            yield from self.shard(shard)

    def shard(self, shard: int) -> Iterator[Any]:
        """Samples of one shard."""
        for number in range(self.sizes[shard]):
            zlib.decompress(_PACKED)
            yield number
