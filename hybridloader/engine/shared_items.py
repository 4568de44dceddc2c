"""Items that several threads work at together: samples of a task, or of one call.

There is no lock: items are handed out by `deque.popleft` and counted by `list.pop`, which are atomic on
every build of CPython. That takes 0.3 us for each item; a queue entry and a future each, as
`concurrent.futures` has them, 10.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from threading import get_ident
from time import perf_counter
from typing import Any, NamedTuple

from hybridloader.engine.fetcher import TaskContext
from hybridloader.engine.messages import Task


class SharedItems:
    """Items, begun in their order, each by one thread, and their results.

    After an error no other item is begun, and running ones still end. So all items before the failed
    one have ended when all have, and the error of the lowest place is the one that a loop would raise.
    """

    def __init__(self, items: Iterable[Any]) -> None:
        self.items = items if isinstance(items, (list, tuple, range)) else list(items)
        count = len(self.items)
        # All the mutable state:
        self.todo = deque(enumerate(self.items))
        self.begun: dict[int, int] = {}  # places in progress, and the identity of the thread
        self.results: list[Any] = [None] * count
        self.errors: dict[int, BaseException] = {}
        self.seconds: list[float] = []  # seconds of each item
        self.shared = False  # several threads may process them
        # One entry fewer than items: the last to end finds it empty.
        self._unfinished = [None] * (count - 1)

    def work(
        self,
        function: Callable[[Any], Any],
        context: TaskContext | None,  # checked after every item
        catch: type[BaseException] = Exception,  # errors of items; others are raised immediately
        *,
        alone: bool = False,  # until the items are `shared`
    ) -> bool:
        """Process items until all have begun; return True if this call has finished the last one."""
        todo, begun, results, me = self.todo, self.begun, self.results, get_ident()
        since = perf_counter()
        while True:
            try:
                place, item = todo.popleft()
            except IndexError:
                return False
            begun[place] = me
            try:
                results[place] = function(item)
            except catch as error:
                self.errors[place] = error
                self.stop()
            del item
            now = perf_counter()
            self.seconds.append(now - since)
            since = now
            del begun[place]
            if self._finish():
                return True
            if context is not None and context.cancelled:
                return self.stop()
            if alone and self.shared:
                return False

    def stop(self) -> bool:
        """Begin no more items; return True if none is in flight."""
        last = False
        try:
            while True:
                self.todo.popleft()
                last = self._finish()
        except IndexError:
            return last

    def _finish(self) -> bool:
        """Count an item that has ended or will not be begun; True for the last one."""
        try:
            self._unfinished.pop()
        except IndexError:
            return True
        return False

    def failed(self) -> int | None:
        """Return the first place that has failed; None if there is none."""
        return min(self.errors) if self.errors else None

    def forget(self) -> None:
        """Drop all objects of the user: a thread that comes late still finds this."""
        self.todo.clear()
        self.items = self.results = []
        self.errors = {}


class SharedTask(SharedItems):
    """Task of one worker, whose samples several workers fetch. A message to each of them."""

    def __init__(
        self,
        worker: int,
        task: Task,
        samples: Any,  # indices of the samples
        measures: deque[Any],
    ) -> None:
        super().__init__(samples)
        self.worker, self.seq, self.task = worker, task.seq, task
        self.measures = measures
        """Measures of workers that fetched samples of this epoch's tasks and have answered none of
        them."""

    def forget(self) -> None:
        super().forget()
        self.task = self.task._replace(index=None)


class UnsharedTask(NamedTuple):
    """Message: the worker fetches the samples of its task alone, until they are shared."""

    task: SharedTask
