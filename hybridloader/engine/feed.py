"""Input of a pipeline's stage: its feed, batched into tasks.

A feed gives several items at a time where each takes so little work that handing it to a worker
alone would cost much beside the work. It learns their number from the seconds and the bytes of the tasks
before. It never waits for items, so no slow source holds up a task.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from hybridloader._support.attributes import attribute
from hybridloader._support.error_handling import ENDS, counts_as_item, is_ours
from hybridloader._support.sizes import size_of
from hybridloader.engine.payload import Payload
from hybridloader.errors import NotReady

TASK_SECONDS = 12e-3
"""Target seconds of a task of several items. To send an item of 77 kB to a process and back costs 0.2 to
0.3 ms of CPU, to a thread 0.1 ms: about 2 % of this (decision 43)."""

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
        self._others: list[TaskBatching] = []
        # All the mutable state:
        self.size = min(least, self._most)
        self._items = self._seconds = 0.0  # of earlier tasks, with decaying weight
        self._put_back: deque[Any] = deque()  # to be drawn before any other item
        self._error: Exception | None = None  # error that followed items
        self.drawn: deque[int] | None = None
        """Number of items of each task, in order. A reader sets a deque and empties it; None: no
        reader."""

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

    def no_larger_than(self, other: TaskBatching) -> None:
        """Give no more at a time than `other` would, from now on."""
        self._others.append(other)

    def draw(self, most: int | None) -> Any:
        if self.drawn is None:
            return self._draw(most)
        try:
            found = self._draw(most)
        except Exception as error:
            if counts_as_item(error) and not isinstance(error, StopIteration):
                self.drawn.append(1)
            raise
        self.drawn.append(items_in(found))
        return found

    def _draw(self, most: int | None) -> Any:
        if self._put_back:
            return self._put_back.popleft()
        if self._error is not None:
            error, self._error = self._error, None
            raise error
        item = self._next()
        if self._forwarded and is_forwarded(item):
            return item
        found = [item]
        size = min([self.size, *(other.size for other in self._others)])
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
        if self.drawn is not None:
            self.drawn[-1] = 0
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
