"""Relay: pulls an iterator on its thread into a bounded queue.

The queue is the only object that two threads touch. Neither knows the items. An error of the iterator is
raised in its turn, and the thread continues pulling after it, unless the error ends the iterator. When
the consumer goes away the thread ends; when the thread ends, for whatever reason, the consumer wakes and
never waits for it.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sized
from contextvars import copy_context
from typing import Any

from hybridloader._support.threads import Waits, join
from hybridloader._support.torch_env import Modes, TakenModes, modes_here
from hybridloader._support.user_objects import ENDS, Raised, close, is_ours, no_answer
from hybridloader.engine.contract import CLOSING, SLICE
from hybridloader.errors import IteratorClosed, NotReady, WorkerTimeout


class RelaySleeps:
    """Sleeps at the queues of one place: of relays that follow one another there. Made only if asked."""

    def __init__(self, items: Sized) -> None:
        # All the mutable state:
        self.items = items  # of the current queue
        self.blocks, self.waits = Waits(), Waits()  # sleeps of the thread, and of the consumer
        self.ended: float | None = None  # time at which the thread ended

    def begin_again(self, items: Sized) -> None:
        """Begin with another relay: there was no thread since the one before ended."""
        self.items = items
        if self.ended is not None:
            now = time.perf_counter()
            self.blocks.longer_seconds += now - self.ended
            # Only the thread itself notes one sleep at a time.
            self.blocks.ring.extend([(self.ended, now)])
            self.ended = None


class RelayQueue:
    """Bounded queue between the thread of a relay and its consumer; the thread never holds the relay."""

    def __init__(
        self, name: str, depth: int, weigh: Callable[[Any], int] | None, limit: int
    ) -> None:
        self._name = name
        self.depth = depth  # number of items that may wait; settable at any time
        self._weigh, self._limit = weigh, limit
        self._owner = os.getpid()
        # A single reentrant lock: a finalizer on the same thread may take it again.
        lock = threading.RLock()
        self.came = threading.Condition(lock)
        self._left = threading.Condition(lock)
        # All the mutable state, under that lock:
        self.items: deque[tuple[Any, int]] = deque()  # each with its weight
        self.weight = 0  # of all items
        self.closed = False  # no consumer waits for items any more
        self.ended = False  # the thread adds no more items
        self._failed = False  # its end was an error
        self._sleepers = 0  # number of consumers that sleep until an item comes
        self.full = False  # the thread sleeps until an item leaves
        self._wake: Callable[[], None] | None = None  # wakes a consumer that sleeps elsewhere
        self.count = 0  # number of items that were returned, or about to be when an interrupt came
        # Set before the thread starts, if the run is observed.
        self.sleeps: RelaySleeps | None = None

    # -- for the thread ----------------------------------------------------------------------------

    def put(self, item: Any) -> bool:
        """Wait for room and add `item`; False if it is not wanted."""
        weight = 0
        if self._weigh is not None and type(item) is not Raised:
            weight = self._weigh(item)
        with self.came:
            if self.items and type(self.items[-1][0]) is Raised:
                self._forget_timeout()
            if not self._has_room(weight) and not self.closed:
                began = time.perf_counter()
                self.full = True
                while not self._has_room(weight) and not self.closed:
                    # With a time limit: a finalizer on this very thread may just have closed the queue.
                    self._left.wait(SLICE)
                self.full = False
                if self.sleeps is not None:
                    self.sleeps.blocks.note(began, time.perf_counter())
            if self.closed:
                return False
            self.items.append((item, weight))
            self.weight += weight
            self._notify()
            return True

    def _forget_timeout(self) -> None:
        """Drop a timeout that was not raised yet: now that something has come, it is over."""
        if is_ours(self.items[-1][0].error, WorkerTimeout):
            self.items.pop()

    def _has_room(self, weight: int) -> bool:
        waiting = len(self.items)
        return waiting < self.depth and (not waiting or self.weight + weight <= self._limit)

    def end(self, error: BaseException | None) -> None:
        """Give no more items after `error`, if there is one; there is always room for that."""
        with self.came:
            if error is not None and not self.closed:
                self.items.append((Raised(error), 0))
            self.ended, self._failed = True, error is not None
            if self.sleeps is not None:
                self.sleeps.ended = time.perf_counter()
            self._notify()

    def _notify(self) -> None:
        if self._sleepers:
            self.came.notify_all()
        if self._wake is not None:
            wake, self._wake = self._wake, None
            wake()

    # -- for the consumer --------------------------------------------------------------------------

    def get(self, timeout: float | None = None) -> Any:
        """Return the next item, or raise the error in its place; wait `timeout` seconds for it.

        Raises `NotReady` if none comes within that time; None sets no limit.
        """
        with self.came:
            if not self.items:
                self._sleep(timeout)
            self.count += 1  # first, so that an interrupt after it finds the item counted
            try:
                item, weight = self.items.popleft()
            except IndexError:  # a signal handler has closed the queue meanwhile
                self._check()
                raise
            self.weight -= weight
            if self.full:
                self._left.notify()
            if type(item) is Raised:
                item.throw()
            return item

    def _sleep(self, timeout: float | None) -> None:
        self._check()
        if timeout == 0:
            raise no_answer(NotReady(f"nothing has come through {self._name!r} yet"))
        began = time.perf_counter()
        self._sleepers += 1
        try:
            while not self.items:
                self._check()
                left = None if timeout is None else began + timeout - time.perf_counter()
                if left is not None and left <= 0:
                    late = f"nothing has come through {self._name!r} in {timeout:g} seconds"
                    raise no_answer(NotReady(late))
                self.came.wait(SLICE if left is None else min(left, SLICE))
        finally:
            self._sleepers -= 1
            if self.sleeps is not None:
                self.sleeps.waits.note(began, time.perf_counter())

    def _check(self) -> None:
        if self.closed:
            raise no_answer(IteratorClosed(f"relay {self._name!r} is closed"))
        if self._failed:
            raise no_answer(
                IteratorClosed(
                    f"relay {self._name!r} has ended with the error that it raised; make a new iterator"
                )
            )
        if self.ended:
            raise StopIteration

    def when_ready(self, wake: Callable[[], None]) -> None:
        """Call `wake` once, from any thread, as soon as there is an item, an end or an error."""
        with self.came:
            if not (self.items or self.ended or self.closed):
                self._wake = wake
                return
        wake()

    def close(self) -> None:
        if os.getpid() != self._owner:
            return  # a fork has copied the lock, perhaps locked, and not the thread
        with self.came:
            self.closed = True
            self.items.clear()
            self.weight = 0
            self._left.notify_all()
            self._notify()


def _pull(
    queue: RelayQueue,
    source: Iterator[Any],
    prepare: Callable[[], None] | None,
    modes: Modes | None,
) -> None:
    error: BaseException | None = None
    taken = TakenModes()
    try:
        taken.take(modes)
        if prepare is not None:
            prepare()
        while True:
            try:
                item = next(source)
            except StopIteration:
                break
            except Exception as caught:
                if is_ours(caught, ENDS):
                    raise
                item = Raised(caught)
            wanted = queue.put(item)
            del item  # an error in it has this very frame in its traceback
            if not wanted:
                break
    except BaseException as caught:  # the consumer raises it, of any class
        error = caught
    finally:
        try:
            close(source)
            taken.close()
        finally:
            queue.end(error)


class Relay(Iterator[Any]):
    """Iterator over `source`, which is pulled on a named thread."""

    def __init__(
        self,
        source: Iterator[Any],  # used and closed by the thread alone from now on
        name: str,  # name of the thread
        *,
        depth: int = 2,  # number of items that may wait, at least 1
        weigh: Callable[[Any], int] | None = None,  # weight of an item, for example its bytes
        limit: int = 0,  # most weight of all waiting items; a single one may weigh more
        # Called first on the thread, for example to choose a device.
        prepare: Callable[[], None] | None = None,
        start: bool = True,  # False: `start` starts the thread
    ) -> None:
        if depth < 1:
            raise ValueError(f"depth must be at least 1, got {depth}")
        self.queue = RelayQueue(name, depth, weigh, limit)
        self.get, self.when_ready = self.queue.get, self.queue.when_ready
        self._thread = threading.Thread(
            target=copy_context().run,
            args=(_pull, self.queue, source, prepare, modes_here()),
            name=name,
            daemon=True,
        )
        self._finalizer = weakref.finalize(self, self.queue.close)
        if start:
            self.start()

    def start(self) -> None:
        self._thread.start()

    def __next__(self) -> Any:
        return self.queue.get()

    def next_nowait(self) -> Any:
        """Return the next item if there is one. Raises `NotReady` if not."""
        return self.queue.get(0)

    def shut(self) -> None:
        """Let the thread end, without waiting for it."""
        self.queue.close()
        self._finalizer.detach()

    def close(self, deadline: float | None = None) -> None:
        """End the thread; wait for it at most 2 seconds, or until `deadline` (`time.monotonic`)."""
        self.shut()
        if self._thread.ident is None or self.here:
            return
        join(self._thread, CLOSING if deadline is None else max(0.0, deadline - time.monotonic()))

    @property
    def here(self) -> bool:
        """True on the relay's thread."""
        return self._thread is threading.current_thread()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()
