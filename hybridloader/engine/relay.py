"""A relay: pulls an iterator on a thread of its own into a bounded queue.

The only object that two threads touch. It knows nothing of what flows through it. What the iterator
raises comes out in its turn, and the thread goes on pulling behind it, unless the error is one that
ends the iterator. When the consumer goes away the thread ends; when the thread ends, for whatever
reason, the consumer is told and never waits for it.
"""

from __future__ import annotations

import os
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from hybridloader._support.attributes import close
from hybridloader._support.errors import IteratorClosed, NotReady, Raised, WorkerDied

_PATIENCE = 2.0
"""Seconds that `close` waits for the thread."""

_SLICE = 0.2 if sys.platform == "win32" else None
"""Seconds of one sleep. On Windows a wait for a lock can't be interrupted by Ctrl-C."""

FINAL = (IteratorClosed, WorkerDied)
"""Errors of an iterator that would be raised again and again."""


class _Belt:
    """What the thread and the consumer share; the thread holds this and never the relay."""

    def __init__(self, depth: int, weigh: Callable[[Any], int] | None, limit: int) -> None:
        self.depth = depth
        self.weigh, self.limit = weigh, limit
        self.owner = os.getpid()
        # One lock, which a finalizer on the same thread may take again.
        lock = threading.RLock()
        self.came = threading.Condition(lock)
        self.left = threading.Condition(lock)
        # All the mutable state, under that lock:
        self.items: deque[Any] = deque()
        self.weights: deque[int] = deque()  # of the items, if there is a `weigh`
        self.weight = 0  # of all of them
        self.closed = self.ended = False
        self.broken = False  # it ended with an error, and not because all had come
        self.waiting = 0  # consumers that sleep until something comes
        self.full = False  # the thread sleeps until something leaves
        self.wake: Callable[[], None] | None = None  # a consumer that does not sleep here
        self.count = 0  # items that have come out
        self.blocked = 0.0  # seconds that the thread slept
        self.waited = 0.0  # seconds that the consumer slept

    def put(self, item: Any) -> bool:
        weight = 0
        if self.weigh is not None and type(item) is not Raised:
            weight = self.weigh(item)
        with self.came:
            if not self._has_room(weight) and not self.closed:
                began = time.monotonic()
                self.full = True
                while not self._has_room(weight) and not self.closed:
                    self.left.wait()
                self.full = False
                self.blocked += time.monotonic() - began
            if self.closed:
                return False
            self.items.append(item)
            if self.weigh is not None:
                self.weights.append(weight)
                self.weight += weight
            self._tell()
            return True

    def _has_room(self, weight: int) -> bool:
        waiting = len(self.items)
        return waiting < self.depth and (not waiting or self.weight + weight <= self.limit)

    def get(self) -> Any:
        """The first item, under the lock."""
        item = self.items.popleft()
        if self.weigh is not None:
            self.weight -= self.weights.popleft()
        self.count += 1
        if self.full:
            self.left.notify()
        return item

    def end(self, error: BaseException | None) -> None:
        """Nothing more will come, after `error` if there is one; there is always room for that."""
        with self.came:
            if error is not None and not self.closed:
                self.items.append(Raised(error))
                self.weights.append(0)
            self.ended, self.broken = True, error is not None
            self._tell()

    def close(self) -> None:
        if os.getpid() != self.owner:
            return  # a fork has copied the lock, perhaps locked, and not the thread
        with self.came:
            self.closed = True
            self.items.clear()
            self.weights.clear()
            self.weight = 0
            self.left.notify_all()
            self._tell()

    def _tell(self) -> None:
        if self.waiting:
            self.came.notify_all()
        if self.wake is not None:
            wake, self.wake = self.wake, None
            wake()


def _pull(belt: _Belt, source: Iterator[Any], prepare: Callable[[], None] | None) -> None:
    error: BaseException | None = None
    try:
        if prepare is not None:
            prepare()
        while True:
            try:
                item = next(source)
            except StopIteration:
                break
            except FINAL:
                raise
            except Exception as caught:
                item = Raised(caught)
            wanted = belt.put(item)
            del item  # an error in it has this very frame in its traceback
            if not wanted:
                break
    except BaseException as caught:  # whatever it is, it is the consumer's to hear of
        error = caught
    finally:
        try:
            close(source)
        finally:
            belt.end(error)


class Relay(Iterator[Any]):
    """An iterator over `source` that is pulled on a named thread.

    Parameters
    ----------
    source
        What to pull; from now on it belongs to the thread, which also closes it if it can be.
    name
        The thread's name.
    depth
        How many items may wait, at least 1.
    weigh
        The weight of an item, such as its bytes.
    limit
        How much the items that wait may weigh together; one alone may weigh more.
    prepare
        Called first on the thread, for instance to choose a device.
    start
        Whether the thread starts at once; else `start` does it.
    """

    def __init__(
        self,
        source: Iterator[Any],
        name: str,
        *,
        depth: int = 2,
        weigh: Callable[[Any], int] | None = None,
        limit: int = 0,
        prepare: Callable[[], None] | None = None,
        start: bool = True,
    ) -> None:
        if depth < 1:
            raise ValueError(f"depth must be at least 1, got {depth}")
        self._belt = _Belt(depth, weigh, limit)
        self._thread = threading.Thread(
            target=_pull, args=(self._belt, source, prepare), name=name, daemon=True
        )
        self._finalizer = weakref.finalize(self, self._belt.close)
        if start:
            self.start()

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def __next__(self) -> Any:
        return self.get()

    def get(self, timeout: float | None = None) -> Any:
        """The next item, waited for.

        Parameters
        ----------
        timeout
            Seconds to wait at most; None: for ever.

        Raises
        ------
        NotReady
            None came in that time.
        """
        belt = self._belt
        with belt.came:
            if not belt.items:
                self._sleep(timeout)
            return self._get()

    def next_nowait(self) -> Any:
        """The next item if there is one. Raises `NotReady` if not."""
        belt = self._belt
        with belt.came:
            if not belt.items:
                self._check()
                raise NotReady(f"nothing has come through {self._thread.name!r} yet")
            return self._get()

    def when_ready(self, wake: Callable[[], None]) -> None:
        """Call `wake` once, from any thread, as soon as there is something to get, an end or an error.

        At once, if there is something already.
        """
        belt = self._belt
        with belt.came:
            if not (belt.items or belt.ended or belt.closed):
                belt.wake = wake
                return
        wake()

    def shut(self) -> None:
        """Let the thread end, without waiting for it."""
        self._finalizer()

    def close(self, deadline: float | None = None) -> None:
        """End the thread; wait for it at most 2 seconds, or until `deadline`. Idempotent.

        Parameters
        ----------
        deadline
            By `time.monotonic`, in seconds.
        """
        self.shut()
        if self._thread.ident is None or self._thread is threading.current_thread():
            return
        self._thread.join(_PATIENCE if deadline is None else max(0.0, deadline - time.monotonic()))

    @property
    def name(self) -> str:
        return self._thread.name

    @property
    def here(self) -> bool:
        """True if this is its thread."""
        return self._thread is threading.current_thread()

    @property
    def alive(self) -> bool:
        """True if the thread runs."""
        return self._thread.is_alive()

    @property
    def depth(self) -> int:
        """How many items may wait. May be set at any time."""
        return self._belt.depth

    @depth.setter
    def depth(self, depth: int) -> None:
        self._belt.depth = depth

    @property
    def waiting(self) -> int:
        """How many items wait now."""
        return len(self._belt.items)

    @property
    def count(self) -> int:
        """How many items have come out."""
        return self._belt.count

    @property
    def blocked(self) -> float:
        """Seconds that the thread has waited for the consumer."""
        return self._belt.blocked

    @property
    def waited(self) -> float:
        """Seconds that the consumer has waited for the thread."""
        return self._belt.waited

    def _sleep(self, timeout: float | None) -> None:
        belt, began = self._belt, time.monotonic()
        belt.waiting += 1
        try:
            while not belt.items:
                self._check()
                left = None if timeout is None else began + timeout - time.monotonic()
                if left is not None and left <= 0:
                    raise NotReady(
                        f"nothing has come through {self._thread.name!r} in {timeout:g} s"
                    )
                belt.came.wait(min(filter(None, (left, _SLICE)), default=None))
        finally:
            belt.waiting -= 1
            belt.waited += time.monotonic() - began

    def _check(self) -> None:
        """Say why nothing will come any more, if that is so."""
        if self._belt.closed:
            raise IteratorClosed(f"relay {self._thread.name!r} is closed")
        if self._belt.broken:
            raise IteratorClosed(f"relay {self._thread.name!r} was ended by the error before")
        if self._belt.ended:
            raise StopIteration

    def _get(self) -> Any:
        item = self._belt.get()
        if type(item) is Raised:
            item.throw()
        return item
