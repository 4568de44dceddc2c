"""Input of a pipeline's stage: its feed, batched into tasks, and the relay between two stages.

A feed gives several items at a time where each takes so little work that handing it to a worker
alone would cost much beside the work. It learns their number from the seconds and the bytes of the tasks
before. It never waits for items, so no slow source holds up a task.
"""

from __future__ import annotations

import math
import os
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator
from contextvars import copy_context
from typing import Any

from hybridloader._support.system import cached_property
from hybridloader._support.threads import Waits, join
from hybridloader._support.torch_env import Modes, TakenModes, modes_here
from hybridloader._support.user_objects import (
    ENDS,
    Raised,
    attribute,
    close,
    is_ours,
    no_answer,
    size_of,
)
from hybridloader.engine.contract import CLOSING, SLICE
from hybridloader.engine.messages import ByReference, Done, Payload, Result, known_bytes
from hybridloader.errors import IteratorClosed, NotReady, WorkerTimeout

# -- Relay: pulls an iterator on its thread into a bounded queue.
#
# The queue is the only object that two threads touch. Neither knows the items. An error of the iterator
# is raised in its turn, and the thread continues pulling after it, unless the error ends the iterator.
# When the consumer goes away the thread ends; when the thread ends, for whatever reason, the consumer
# wakes and never waits for it.


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
        self.ended: float | None = None  # time from which the thread adds no more items
        self._failed = False  # its end was an error
        self._sleepers = 0  # number of consumers that sleep until an item comes
        self.full = False  # the thread sleeps until an item leaves
        self._wake: Callable[[], None] | None = None  # wakes a consumer that sleeps elsewhere
        self.count = 0  # number of items that were returned, or about to be when an interrupt came

    @cached_property
    def blocks(self) -> Waits:
        """Sleeps of the thread, which are only summed unless somebody observes."""
        return Waits(math.inf)

    @cached_property
    def waits(self) -> Waits:
        """Sleeps of the consumer, by the same rule."""
        return Waits(math.inf)

    def succeed(self, before: RelayQueue) -> None:
        """Count on from a queue that had the same place; there was no thread since its own ended."""
        self.count, self.blocks, self.waits = before.count, before.blocks, before.waits
        if before.ended is not None:
            now = time.perf_counter()
            self.blocks.longer_seconds += now - before.ended
            # Only the thread itself notes one sleep at a time.
            self.blocks.ring.extend([(before.ended, now)])

    # -- for the thread ----------------------------------------------------------------------------

    def put(self, item: Any) -> bool:
        """Wait for room and add `item`; False if it is not wanted."""
        weight = 0
        if self._weigh is not None and type(item) is not Raised:
            weight = self._weigh(item)
        with self.came:
            last = self.items[-1][0] if self.items else None
            if type(last) is Raised and is_ours(last.error, WorkerTimeout):
                self.items.pop()  # it was not raised yet: now that something has come, it is over
            if not self._has_room(weight) and not self.closed:
                began = time.perf_counter()
                self.full = True
                while not self._has_room(weight) and not self.closed:
                    # With a time limit: a finalizer on this very thread may just have closed the queue.
                    self._left.wait(SLICE)
                self.full = False
                self.blocks.note(began, time.perf_counter())
            if self.closed:
                return False
            self.items.append((item, weight))
            self.weight += weight
            self._notify()
            return True

    def _has_room(self, weight: int) -> bool:
        waiting = len(self.items)
        return waiting < self.depth and (not waiting or self.weight + weight <= self._limit)

    def end(self, error: BaseException | None) -> None:
        """Give no more items after `error`, if there is one; there is always room for that."""
        with self.came:
            if error is not None and not self.closed:
                self.items.append((Raised(error), 0))
            self.ended, self._failed = time.perf_counter(), error is not None
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
            self.waits.note(began, time.perf_counter())

    def _check(self) -> None:
        if self.closed:
            raise no_answer(IteratorClosed(f"relay {self._name!r} is closed"))
        if self._failed:
            over = (
                f"relay {self._name!r} has ended with the error that it raised; make a new iterator"
            )
            raise no_answer(IteratorClosed(over))
        if self.ended is not None:
            raise StopIteration

    def when_ready(self, wake: Callable[[], None]) -> None:
        """Call `wake` once, from any thread, as soon as there is an item, an end or an error."""
        with self.came:
            if not (self.items or self.closed) and self.ended is None:
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
            del error  # its traceback has this very frame


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
    ) -> None:
        self.queue = RelayQueue(name, depth, weigh, limit)
        self.get, self.when_ready = self.queue.get, self.queue.when_ready
        self._thread = threading.Thread(
            target=copy_context().run,
            args=(_pull, self.queue, source, prepare, modes_here()),
            name=name,
            daemon=True,
        )
        self._finalizer = weakref.finalize(self, self.queue.close)
        self.start = self._thread.start

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
        if self._thread.ident is None or self._thread is threading.current_thread():
            return
        join(self._thread, CLOSING if deadline is None else max(0.0, deadline - time.monotonic()))


TASK_SECONDS = 12e-3
"""Target seconds of a task of several items. To send an item of 77 kB to a process and back costs 0.2 to
0.3 ms of CPU, to a thread 0.1 ms: about 2 % of this (docs/decisions.md)."""

MOST = 64  # items in one task at most

MOST_BYTES = 1 << 22
"""Most bytes of the items of a task of several, and of its results: 4 MiB. To copy as much takes longer
than to send a task, so larger tasks would only hold more memory."""

LOOKED_AT = 8
"""Elements of each container that count for these bytes: to look at all of a list of 8,192 numbers takes
some milliseconds."""

_MEMORY = 0.9  # decay of the running mean of task sizes and seconds, per task

_GATHERING = 1e-3
"""Most seconds spent on gathering the items of one task, if they are computed meanwhile."""


class Feed(ABC):
    """Source of indices whose `draw` never waits. It may return further indices after an error."""

    @abstractmethod
    def draw(self, most: int | None) -> Any:
        """Return the next index, of at most `most` items. Raises `NotReady` if there is none yet."""

    def ended_by(self, error: Exception) -> bool:
        """Return True if nothing more will come after `error`, which `draw` has raised."""
        return is_ours(error, ENDS)

    def when_ready(self, wake: Callable[[], None]) -> None:
        """Call `wake` once, from any thread, when `draw` may have something: by default, now."""
        wake()

    def take_apart(self, index: Any) -> bool:
        """Give each item of `index`, which could not be sent, again alone. False if it is only one."""
        return False


def is_forwarded(item: Any) -> bool:
    """True if `item` is an unopened payload of several items from another process."""
    return isinstance(item, Payload) and item.forwardable


def items_in(index: Any) -> int:
    if type(index) is int:  # a reader's task is a number of items
        return index
    return len(index) if isinstance(index, list) else (index.count or 1)


class TaskBatching(Feed):
    """Feed of lists of several items from an iterator; forwarded payloads as they come.

    If `items` has `next_nowait` and `when_ready`, as a relay has, it is not waited for. Else pulling it
    must be quick.
    """

    def __init__(
        self,
        items: Iterator[Any],
        *,
        forwarded: bool = False,  # some of `items` are payloads of several items
        # Least items of a task if available, for workers that process several at once.
        least: int = 1,
        most: int | None = None,  # most items of a task; None: `MOST`, or `least`
    ) -> None:
        self._next: Callable[[], Any] = attribute(items, "next_nowait", items.__next__)
        self._when_ready = attribute(items, "when_ready")
        self._forwarded, self._least = forwarded, least
        self._most = max(MOST, least) if most is None else min(max(MOST, least), most)
        self.later: TaskBatching | None = None  # of the stage that gets the results undivided
        # All the mutable state:
        self.size = min(least, self._most)
        self._items = self._seconds = 0.0  # of earlier tasks, with decaying weight
        self._put_back: deque[Any] = deque()  # to be drawn before any other item
        self._error: Exception | None = None  # error that followed items

    def learn(self, items: int, seconds: float, nbytes: int = 0) -> None:
        """Learn from a task of `items` items that took `seconds` and gave `nbytes`, as far as known."""
        # A mean over many tasks: a single one may have waited for the GIL, or found its file in the
        # cache.
        self._items = _MEMORY * self._items + items
        self._seconds = _MEMORY * self._seconds + seconds
        fitting = MOST if self._seconds <= 0 else int(TASK_SECONDS * self._items / self._seconds)
        if nbytes * fitting > MOST_BYTES * items:
            fitting = MOST_BYTES * items // nbytes
        self.size = min(self._most, max(self._least, min(fitting, 2 * self.size)))

    def draw(self, most: int | None) -> Any:
        if self._put_back:
            return self._put_back.popleft()
        if self._error is not None:
            error, self._error = self._error, None
            raise error
        item = self._next()
        if self._forwarded and is_forwarded(item):
            return item
        found = [item]
        size = self.size if self.later is None else min(self.size, self.later.size)
        if most is not None:
            size = min(size, most)
        if size > 1:
            size = max(self._least, min(size, MOST_BYTES // max(1, size_of(item, LOOKED_AT))))
            self._gather(found, size)
        return found

    def when_ready(self, wake: Callable[[], None]) -> None:
        if self._error is not None or self._put_back or self._when_ready is None:
            wake()
        else:
            self._when_ready(wake)

    def take_apart(self, index: Any) -> bool:
        if type(index) is not list or len(index) < 2:
            return False
        self._put_back.extendleft([item] for item in reversed(index))
        return True

    def _gather(self, found: list[Any], size: int) -> None:
        pull, until = self._next, time.monotonic() + _GATHERING
        try:
            while len(found) < size:
                item = pull()
                if self._forwarded and is_forwarded(item):
                    self._put_back.append(item)
                    return
                found.append(item)
                if time.monotonic() > until:
                    return
        except StopIteration:
            return  # the next call raises it again
        except Exception as error:
            if not is_ours(error, NotReady):  # `NotReady` is raised again by the next call
                self._error = error


# -- flow control of a pipeline's stage: the number of items in flight
#
# It limits the items in flight to the stage's `prefetch`, and passes the seconds of each task to its
# feed, which sizes the next tasks. Only the consumer's thread writes to it.


class StageFlow:
    """Items in flight in one stage; for `prefetch` see `Placement`. One task is always allowed."""

    def __init__(self, prefetch: int | None = None) -> None:
        self.prefetch = prefetch
        self.learn: Callable[[int, float, int], None] | None = None
        """Function that is called with the items of a task, its seconds, and the bytes of its results
        as far as they are known."""
        self.relay: RelayQueue | None = None  # queue of results that the stage has returned
        # All the mutable state:
        self.items_out = 0  # counted by the thread that unpacks results
        self.queued = 0  # items in flight, or waiting to be returned
        self._items: dict[int, int] = {}  # items of each task in flight or waiting

    def room(self) -> int:
        """Return the number of further items that may be in flight, if there is a limit."""
        assert self.prefetch is not None
        waiting = 0 if self.relay is None else len(self.relay.items)
        return max(0 if self.queued else 1, self.prefetch - self.queued - waiting)

    def sent(self, seq: int, index: Any) -> None:
        """Record that task `seq` was sent."""
        count = items_in(index)
        self.queued += count
        self._items[seq] = count

    def came(self, event: Result) -> None:
        """Record that a task was done, or has failed."""
        if isinstance(event, Done) and self.learn is not None:
            items, payload = self._items.get(event.seq, 1), event.payload
            self.learn(items, event.seconds, _roughly_bytes(payload, items))

    def left(self, seq: int) -> int:
        """Record that the result of task `seq` was returned, or will never be; return its item count.

        0 for an error of the feed, which has no task.
        """
        items = self._items.pop(seq, 0)
        self.queued -= items
        return items


def _roughly_bytes(payload: Any, count: int) -> int:
    """Return the bytes of a result of `count` items, taken from its first if it is in this process."""
    if not isinstance(payload, ByReference):
        return known_bytes(payload)
    value = payload.peek()
    return count * size_of(value[0], LOOKED_AT) if type(value) is list and value else 0
