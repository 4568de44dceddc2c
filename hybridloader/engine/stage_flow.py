"""Metrics of a running stage: items and bytes under way, and where the time went.

They hold the stage back when more is under way than its `prefetch` or `buffer_bytes` allow. The
thread that pulls the stage writes them, under its lock; `stats()` reads them from any thread.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any

from hybridloader._support.sizes import size_of
from hybridloader.engine.feed import items_in
from hybridloader.engine.messages import Done, Result
from hybridloader.engine.payload import ByReference, Payload
from hybridloader.engine.relay import REMEMBERED, RelayQueue


class StageFlow:
    """Metrics of one stage, and its `FlowControl`; for `prefetch` and `buffer_bytes` see `Placement`.

    Each item under way counts as many bytes as the largest result until then; until there is one, only
    one item for each worker is let in. One task is always let in. `learn` is called with the number of
    items of a task and the seconds that it took.
    """

    def __init__(
        self,
        workers: int,
        *,
        prefetch: int | None = None,
        buffer_bytes: int | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.workers = workers
        self._prefetch, self._limit = prefetch, buffer_bytes
        self.limited = prefetch is not None or buffer_bytes is not None
        self.learn: Callable[[int, float], None] | None = None  # set by `StageItems`
        self._clock = clock
        self.behind: RelayQueue | None = None  # where results wait once they were handed out
        # All the mutable state:
        self.items_out = 0
        self.busy = 0.0  # seconds that workers worked, together
        self.waited = 0.0  # seconds that whoever pulls the stage waited for it
        self.waits: deque[tuple[float, float]] = deque(maxlen=REMEMBERED)  # begin and end of each
        self.starved = 0.0  # seconds that workers had nothing to do because nothing came, together
        self.blocked_seen = 0.0  # seconds that they had nothing to do because nothing went out
        self.began: float | None = None
        self._away = 0.0  # seconds that nobody pulled the stage
        self._away_since: float | None = None
        self.ended: float | None = None
        self.queued = 0  # items under way, or waiting to be handed out
        self.queued_bytes = 0  # of results that wait
        self._largest = 0  # bytes of one item, as far as is known
        self._items: dict[int, int] = {}  # of each task under way or waiting
        self._bytes: dict[int, int] = {}  # of each result that waits
        self._idle = 0
        self._starved = False
        self._since = 0.0

    # -- flow control, called by the stage -----------------------------------------------------------

    def room(self) -> int | None:
        queued = self.queued
        room = None
        if self._prefetch is not None:
            waiting = 0 if self.behind is None else len(self.behind.items)
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
        if self.began is None:
            self.began = self._clock()
        count = items_in(index)
        self.queued += count
        self._items[seq] = count

    def came(self, event: Result) -> None:
        if not isinstance(event, Done):
            return
        self.busy += event.seconds
        if self.learn is not None:
            self.learn(self._items.get(event.seq, 1), event.seconds)
        if self._limit is not None:
            size, largest = _sizes_of(event.payload, self._items.get(event.seq, 1))
            self.queued_bytes += size
            self._bytes[event.seq] = size
            self._largest = max(self._largest, largest, 1)

    def left(self, seq: int) -> None:
        self.queued -= self._items.pop(seq, 0)
        if self._bytes:
            self.queued_bytes -= self._bytes.pop(seq, 0)

    def idle(self, workers: int, *, starved: bool) -> None:
        if not (workers or self._idle) and self.began is not None:
            return  # all were at work and are: no look at the clock, in most batches
        now = self._clock()
        if self._idle:
            passed = self._idle * (now - self._since)
            if self._starved:
                self.starved += passed
            else:
                self.blocked_seen += passed
        self._idle, self._starved, self._since = workers, starved, now
        if self.began is None:
            self.began = now

    def listening(self, began: float, ended: float) -> None:
        self.waited += ended - began
        self.waits.append((began, ended))

    def pulled(self) -> None:
        """Note that somebody asks for results."""
        if self._away_since is not None:
            self._away += self._clock() - self._away_since
            self._away_since = None

    def turned_away(self) -> None:
        """Note that nobody asks for results any more."""
        self._away_since = self._clock()

    # -- statistics ------------------------------------------------------------------------------------

    def close(self) -> None:
        """Note that the stage has ended."""
        if self.ended is None:
            self.idle(0, starved=False)
            self.ended = self._clock()

    @property
    def elapsed(self) -> float:
        """Seconds since the first task, until the end."""
        if self.began is None:
            return 0.0
        return (self._clock() if self.ended is None else self.ended) - self.began

    @property
    def blocked(self) -> float:
        """Seconds that workers had nothing to do because nobody took results, together.

        While nobody pulls the stage, nobody sees when its workers have done what they have; what they
        did not work of that time is counted.
        """
        return min(self._rest, max(self.blocked_seen, self.workers * self._away))

    @property
    def other(self) -> float:
        """Seconds that workers started, were handed tasks, or waited for a CPU, together."""
        return self._rest - self.blocked

    @property
    def _rest(self) -> float:
        return max(0.0, self.workers * self.elapsed - self.busy - self.starved)


def _sizes_of(payload: Any, count: int) -> tuple[int, int]:
    """Return the bytes of a result, and of the largest item in it as far as that can be seen."""
    if isinstance(payload, ByReference):
        value = payload.peek()
        whole = size_of(value)
        items = map(size_of, value) if isinstance(value, list) else ()
        return whole, max(-(-whole // max(1, count)), max(items, default=0))
    whole = payload.nbytes if isinstance(payload, Payload) else 0
    return whole, -(-whole // max(1, count))
