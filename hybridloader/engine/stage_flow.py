"""Flow control of a pipeline's stage: the number of items and bytes in flight.

It limits the items and bytes in flight to the stage's `prefetch` and `buffer_bytes`, and passes the
seconds of each task to its feed, which sizes the next tasks. Only the consumer's thread writes to it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hybridloader._support.user_objects import size_of
from hybridloader.engine.feed import LOOKED_AT, items_in
from hybridloader.engine.messages import Done, Result
from hybridloader.engine.payload import ByReference, known_bytes
from hybridloader.engine.relay import RelayQueue


class StageFlow:
    """Items and bytes in flight in one stage; for `prefetch` and `buffer_bytes` see `Placement`.

    Each item in flight counts as many bytes as the largest result so far. Before the first result, each
    worker may have one item. One task is always allowed.
    """

    def __init__(
        self, workers: int, *, prefetch: int | None = None, buffer_bytes: int | None = None
    ) -> None:
        self.workers = workers
        self._prefetch, self._limit = prefetch, buffer_bytes
        self.limited = prefetch is not None or buffer_bytes is not None
        """True if tasks may be delayed, so that `room` is to be called."""
        self.learn: Callable[[int, float, int], None] | None = None
        """Function that is called with the items of a task, its seconds, and the bytes of its results
        as far as they are known."""
        self.relay: RelayQueue | None = None  # queue of results that the stage has returned
        # All the mutable state:
        self.items_out = 0  # counted by the thread that unpacks results
        self.queued = 0  # items in flight, or waiting to be returned
        self.queued_bytes = 0  # bytes of waiting results
        self._largest = 0  # most bytes of one item so far
        self._items: dict[int, int] = {}  # items of each task in flight or waiting
        self._bytes: dict[int, int] = {}  # bytes of each waiting result

    def room(self) -> int | None:
        """Return the number of further items that may be in flight; None: any number."""
        queued = self.queued
        room = None
        if self._prefetch is not None:
            waiting = 0 if self.relay is None else len(self.relay.items)
            room = max(0 if queued else 1, self._prefetch - queued - waiting)
        if self._limit is not None and room != 0:
            if not self._largest:
                free = self.workers - queued
            else:
                coming = queued - sum(self._items[seq] for seq in self._bytes)
                left = self._limit - self.queued_bytes - coming * self._largest
                free = left // self._largest
            free = max(free, 0 if queued else 1)
            room = free if room is None else min(room, free)
        return room

    def sent(self, seq: int, index: Any) -> None:
        """Record that task `seq` was sent."""
        count = items_in(index)
        self.queued += count
        self._items[seq] = count

    def came(self, event: Result) -> None:
        """Record that a task was done, or has failed."""
        if not isinstance(event, Done):
            return
        if self.learn is not None:
            items, payload = self._items.get(event.seq, 1), event.payload
            self.learn(items, event.seconds, _roughly_bytes(payload, items))
        if self._limit is not None:
            size, largest = _sizes_of(event.payload, self._items.get(event.seq, 1))
            self.queued_bytes += size
            self._bytes[event.seq] = size
            self._largest = max(self._largest, largest, 1)

    def left(self, seq: int) -> None:
        """Record that the result of task `seq` was returned, or will never be."""
        self.queued -= self._items.pop(seq, 0)
        if self._bytes:
            self.queued_bytes -= self._bytes.pop(seq, 0)


def _roughly_bytes(payload: Any, count: int) -> int:
    """Return the bytes of a result of `count` items, taken from its first if it is in this process."""
    if not isinstance(payload, ByReference):
        return known_bytes(payload)
    value = payload.peek()
    return count * size_of(value[0], LOOKED_AT) if type(value) is list and value else 0


def _sizes_of(payload: Any, count: int) -> tuple[int, int]:
    """Return the bytes of a result, and of the largest item in it as far as that can be seen."""
    if isinstance(payload, ByReference):
        value = payload.peek()
        whole = size_of(value)
        items = map(size_of, value) if isinstance(value, list) else ()
        return whole, max(-(-whole // max(1, count)), max(items, default=0))
    whole = known_bytes(payload)
    return whole, -(-whole // max(1, count))
