"""`BlockReader`: blocks of a remote source, each fetched once, ahead of its samples.

A `BlockShuffleSampler` announces the order of an epoch when its iteration begins. From the first sample
on, threads fetch the blocks in the order in which their first samples come, as long as there is room,
and each block is dropped after its last sample was read. A thread of this module lives only while it
fetches.

Nothing depends on the reader but speed: a sample whose block is not held is read alone. So a retry, a
second iteration of the same source or a copy of it is slower, and never wrong.
"""

from __future__ import annotations

import os
import threading
from array import array
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from hybridloader._support.caller import warn_once

Ints = npt.NDArray[np.int64]
Fetch = Callable[[int, int, int], Any]
"""``fetch(shard, first, last)``: the bytes of these samples of a shard."""

AT_ONCE = 16
"""Blocks that are fetched at the same time."""

AHEAD = 512 << 20
"""Bytes of blocks that a process holds, fetched or being fetched."""

_MANY = 512
"""Samples that are read alone from a remote source until a warning names the sampler."""

_QUEUED = 64
"""Blocks that are known ahead, at most, where there is no room for another one."""

_JOIN = 5.0
"""Seconds that closing waits for fetches that have begun."""


class Fetched(NamedTuple):
    """Bytes of several samples of one shard, as `Shards.fetch` returned them."""

    data: Any
    """Buffer of bytes."""
    first: int
    """Number in the shard of the first of these samples."""
    last: int
    """Number after that of the last one."""


class _Block:
    """A block of a plan. Its fields change under the lock of the reader; `data` is set once."""

    __slots__ = ("chunk", "data", "error", "fetched", "left", "place", "size", "started", "uses")

    def __init__(self, place: tuple[int, int, int], size: int) -> None:
        self.place = place  # shard, and its samples from the first to before the last
        self.left = place[2] - place[1]  # samples not read yet
        self.size = size  # bytes, also if they are only reserved; -1: unknown
        self.uses = self.chunk = 0  # samples planned and not read; part of the order with the last
        self.started = False  # a thread fetches it, or has
        self.fetched = threading.Event()  # also if that has failed
        self.data: Any = None
        self.error: Exception | None = None


class _Plan:
    """What one iteration of a sampler reads, in its order, and what is held of it."""

    def __init__(
        self,
        starts: array[int],
        shard_ends: array[int],
        order: Iterator[Ints],
        size_of: Callable[[int, int, int], int],
    ) -> None:
        self.starts, self.process = starts, os.getpid()
        self._shard_ends, self._size_of = shard_ends, size_of
        # All the mutable state:
        self.order: Iterator[Ints] | None = order  # samples that were not looked at yet
        self.blocks: dict[int, _Block] = {}  # in the order of their first samples
        self.queue: deque[_Block] = deque()  # those that no thread has begun
        self.held = 0  # bytes
        self.begun = False  # a sample was read
        self._seen: set[int] = set()  # all blocks so far
        self._chunk = 0  # parts of the order that were looked at

    def look_ahead(self, blocks: int) -> None:
        """Have `blocks` blocks in the queue, if as many are left."""
        while self.order is not None and len(self.queue) < blocks:
            samples = next(self.order, None)
            self._chunk += 1
            if samples is None:
                self.order = None
                return
            found = np.searchsorted(self.starts, samples, "right") - 1
            numbers, firsts, counts = np.unique(found, return_index=True, return_counts=True)
            for at in firsts.argsort().tolist():
                self._note(int(numbers[at]), int(counts[at]))

    def _note(self, number: int, uses: int) -> None:
        if number not in self._seen:
            self._seen.add(number)
            start, stop = self.starts[number : number + 2]
            shard = bisect_right(self._shard_ends, start)
            before = self._shard_ends[shard - 1] if shard else 0
            place = shard, start - before, stop - before
            made = self.blocks[number] = _Block(place, self._size_of(*place))
            self.queue.append(made)
        block = self.blocks.get(number)
        if block is not None:
            block.uses += uses
            block.chunk = self._chunk

    def start(self, block: _Block, size: int) -> None:
        block.started, block.size = True, size
        self.held += size

    def drop(self, number: int) -> None:
        self.held -= self.blocks.pop(number).size

    def make_room(self, size: int, limit: int) -> bool:
        """Drop blocks of which some samples never come: a run was resumed, or ranks share a block."""
        if len(self.queue) < _QUEUED:
            self.look_ahead(len(self.queue) + 1)
        for number, block in [*self.blocks.items()]:
            over = block.chunk < self._chunk or self.order is None
            if over and block.uses <= 0 and block.fetched.is_set():
                self.drop(number)
                if self.held + size <= limit:
                    return True
        return False


class BlockReader:
    """Blocks of one source in one process. Threads share them; a fork or a copy begins without any.

    Parameters
    ----------
    shard_ends
        Number of samples up to the end of each shard.
    limit
        Bytes of blocks that are held or being fetched. A block that a sample waits for is fetched
        even if there is no room.
    """

    def __init__(self, shard_ends: array[int], limit: int = AHEAD) -> None:
        self._shard_ends, self._limit = shard_ends, limit
        self._lock = threading.Lock()
        # All the mutable state:
        self._plan: _Plan | None = None
        self._largest = 0  # bytes of a block
        self._threads: set[threading.Thread] = set()
        self._alone = 0  # samples that were read without a plan

    def __reduce__(self) -> Any:
        return _received, (self._shard_ends, self._limit)

    def begin(
        self,
        size_of: Callable[[int, int, int], int],
        sizes: Ints,
        order: Iterator[Ints],
        blocks: int,
    ) -> None:
        """Read ahead in `order` from the next sample on. What an earlier plan holds is dropped.

        Parameters
        ----------
        size_of
            Bytes that a fetch will return, for the arguments of `Fetch`; -1: unknown.
        sizes
            Number of samples of each block; none lies in two shards.
        order
            Arrays of the samples that come, in their order. It is read from several threads, one at a
            time.
        blocks
            Number of blocks that are in use at the same time.
        """
        starts = np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes)])
        if not np.isin(np.asarray(self._shard_ends, np.int64), starts).all():
            return
        plan = _Plan(array("q", starts.tobytes()), self._shard_ends, order, size_of)
        plan.look_ahead(blocks)
        window = sum(block.size for block in islice(plan.queue, blocks))
        if window > self._limit:
            warn_once(
                f"the {min(blocks, len(plan.queue))} blocks of a window have {window / 2**20:.0f} MiB, "
                f"more than ahead_bytes={self._limit}: samples are read one by one, which takes a "
                "request each; give BlockShuffleSampler a smaller block= or window=, or raise "
                "ahead_bytes="
            )
            plan.order = iter(())
            plan.blocks.clear()
            plan.queue.clear()
        self._plan = plan

    def find(self, fetch: Fetch, index: int) -> Fetched | None:
        """Return the block of a sample; None if the sample is to be read alone.

        `fetch` may be called from several threads. Raises `FileNotFoundError` if its shard is not there.
        """
        plan = self._plan
        if plan is None:
            self._count_alone()
            return None
        number = bisect_right(plan.starts, index) - 1
        block = plan.blocks.get(number)
        if block is None or plan.process != os.getpid():
            return None
        if not block.fetched.is_set():
            if not plan.begun:  # not by `begin`: an order may be asked for without its samples
                plan.begun = True
                self._fill(fetch)
            with self._lock:
                mine = not block.started
                if mine:
                    plan.start(block, self._size(block))
            if mine:
                self._fetch(fetch, plan, block)
            block.fetched.wait()
        if block.error is not None:
            if isinstance(block.error, FileNotFoundError):
                raise FileNotFoundError(*block.error.args) from block.error
            return None  # then its own error is raised, or none
        data = block.data
        with self._lock:
            block.left -= 1
            block.uses -= 1
            done = not block.left
            if done and number in plan.blocks:
                plan.drop(number)
        if done:
            self._fill(fetch)
        return Fetched(data, *block.place[1:])

    def close(self) -> None:
        """Drop all blocks, and wait a few seconds for fetches that have begun."""
        plan, self._plan = self._plan, None
        if plan is None or plan.process != os.getpid():
            return
        with self._lock:
            threads = [*self._threads]
        for thread in threads:
            thread.join(_JOIN)

    def _count_alone(self) -> None:
        self._alone += 1
        if self._alone == _MANY:
            warn_once(
                "samples of a remote source are read one by one, which takes a request each: give the "
                "loader sampler=BlockShuffleSampler(source, seed), which reads whole blocks"
            )

    def _size(self, block: _Block) -> int:
        return block.size if block.size >= 0 else self._largest

    def _next(self) -> tuple[_Plan, _Block] | None:
        """Take the block that is to be fetched next, if there is room for it."""
        with self._lock:
            plan = self._plan
            if plan is None or plan.process != os.getpid():
                return None
            while True:
                plan.look_ahead(1)
                if not plan.queue:
                    return None
                block = plan.queue[0]
                if not block.started:
                    size = self._size(block)
                    if plan.held + size > self._limit and not plan.make_room(size, self._limit):
                        return None
                    plan.start(block, size)
                    return plan, plan.queue.popleft()
                plan.queue.popleft()  # the thread that needs it has begun

    def _fill(self, fetch: Fetch) -> None:
        """Start threads while there are blocks to fetch, and room for them."""
        while len(self._threads) < AT_ONCE and (found := self._next()) is not None:
            thread = threading.Thread(
                target=self._run, args=(fetch, *found), name="hybridloader-blocks", daemon=True
            )
            with self._lock:
                self._threads.add(thread)
            thread.start()

    def _run(self, fetch: Fetch, plan: _Plan, block: _Block) -> None:
        found: tuple[_Plan, _Block] | None = (plan, block)
        try:
            while found is not None:
                self._fetch(fetch, *found)
                found = self._next()
        finally:
            with self._lock:
                self._threads.discard(threading.current_thread())

    def _fetch(self, fetch: Fetch, plan: _Plan, block: _Block) -> None:
        """Fetch a block that this thread has started. An error is kept for those who read it."""
        size = 0
        try:
            block.data = fetch(*block.place)
            size = len(block.data)
        except Exception as error:
            block.error = error
        with self._lock:
            plan.held += size - block.size
            block.size = size
            self._largest = max(self._largest, size)
        block.fetched.set()


def _received(shard_ends: array[int], limit: int) -> BlockReader:
    """Return a reader in another process, where no sampler announces anything, so none is missed."""
    reader = BlockReader(shard_ends, limit)
    reader._alone = _MANY
    return reader
