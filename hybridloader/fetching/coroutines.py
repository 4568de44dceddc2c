"""Coroutines of an ``async def`` function: several at a time, on one event loop of the worker.

The loop runs on the worker's own thread, and only while somebody waits, for a result or for a message.
It lives as long as the worker, so connections that belong to it serve all epochs.
"""

from __future__ import annotations

import asyncio
import threading
from asyncio import events, tasks
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from math import inf
from time import perf_counter
from typing import Any

from hybridloader.engine.messages import Abandoned, GivenUp, TaskContext

_SLICE = 0.05  # seconds between two checks of the context while a loop runs

_PATIENCE = 1.5
"""Seconds for cancelled coroutines to end: shorter than a crew waits for its workers."""


_HELD = 4
"""Items held for each coroutine that may run: begun items whose results wait for a slow one first."""


class Loop:
    """An event loop, run by one thread at a time: the one that waits."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._context: TaskContext | None = None  # of the current wait
        self.in_use = threading.Lock()  # held by the thread that runs or ends the loop
        self._wakeable = False
        # All loops of asyncio wait in this method. Loops of other libraries may not.
        selector = getattr(self._loop, "_selector", None)
        self._timed = selector is not None
        if selector is not None:
            selector.select = partial(self._select, selector.select)
        self._loop.call_soon(self._look)
        self._runs = self._running()

    @property
    def closed(self) -> bool:
        return self._loop.is_closed()

    def begin(self, coroutine: Any) -> asyncio.Task[Any]:
        return self._loop.create_task(coroutine)

    def wait(self, task: asyncio.Task[Any], context: TaskContext) -> None:
        """Run until `task` is done. Raises `Abandoned` if the context is cancelled before."""
        if not task.done():
            task.add_done_callback(self._stop)
            try:
                self._run(context)
            finally:
                task.remove_done_callback(self._stop)
        if context.cancelled:
            raise Abandoned

    def run(self, context: TaskContext) -> None:
        """Run until `stop`, or `wake`, or the context is cancelled; at most `_SLICE`."""
        self._wakeable = True
        try:
            self._run(context)
        finally:
            self._wakeable = False

    def _run(self, context: TaskContext) -> None:
        self._context, parts = context, context.parts if self._timed else None
        try:
            with self.in_use, _beside_the_callers():
                if parts is not None:
                    parts.turn()
                next(self._runs)
        except BaseException:
            self._runs = self._running()  # the error has ended the generator
            raise
        finally:
            self._context = None
            if parts is not None:
                parts.turned()

    def _running(self) -> Iterator[None]:
        """Run the loop once for each item.

        On Python 3.12 and 3.13, the frames of a coroutine's error refer to their callers (`f_back`), and
        these to the iterator. While the error waits in a queue of the iterator, neither would be
        collected. A suspended generator has no caller.
        """
        while True:
            self._loop.run_forever()
            yield

    def _select(self, select: Callable[[Any], Any], timeout: Any = None) -> Any:
        parts = None if self._context is None else self._context.parts
        return select(timeout) if parts is None else parts.select(select, timeout)

    def wake(self) -> None:
        """End `run` from another thread; coroutines that it runs continue at the next `run`."""
        with suppress(RuntimeError):  # the loop may be closed
            self._loop.call_soon_threadsafe(self.stop)

    def stop(self) -> None:
        """End `run`, on its thread."""
        if self._wakeable:
            self._loop.stop()

    def cancel(self, tasks: Iterable[asyncio.Task[Any]]) -> None:
        """Cancel tasks, and let them end, for as long as `_PATIENCE`."""
        left = {task for task in tasks if not task.done()}
        for task in left:
            task.cancel()
        if left and not self._loop.is_closed():
            self._finish(asyncio.wait(left, timeout=_PATIENCE))
        for task in tasks:
            if task.done() and not task.cancelled():
                task.exception()  # otherwise asyncio logs an exception that was never retrieved

    def complete(self, coroutine: Any) -> None:
        """Run a coroutine to its end, or cancel it after `_PATIENCE`. Raises its error."""
        task = self.begin(coroutine)
        self._finish(asyncio.wait({task}, timeout=_PATIENCE))
        if task.done():
            task.result()
        else:
            self.cancel([task])

    def close(self) -> None:
        """End the tasks that still run on the loop, and close it. Idempotent."""
        if self.closed:
            return
        self.cancel(asyncio.all_tasks(self._loop))
        self._finish(self._loop.shutdown_asyncgens())
        self._finish(self._loop.shutdown_default_executor())
        self._loop.close()

    def _finish(self, coroutine: Any) -> None:
        """Run until `coroutine` has ended, also after an interrupt has ended a run."""
        with _beside_the_callers():
            self._loop.stop()
            self._loop.run_forever()  # once: the task that raised has a call of `_stop` left
            self._loop.run_until_complete(coroutine)

    def _stop(self, _: asyncio.Task[Any]) -> None:
        self._loop.stop()

    def _look(self) -> None:
        if self._wakeable or (self._context is not None and self._context.cancelled):
            self._loop.stop()
        self._loop.call_later(_SLICE, self._look)


@contextmanager
def _beside_the_callers() -> Iterator[None]:
    """Allow a loop to run on a thread that has one running, as in a notebook.

    The running task is put aside, too: since Python 3.14 it belongs to the thread, and another could not
    be entered beside it.
    """
    before, task = events._get_running_loop(), None
    swap = getattr(tasks, "_swap_current_task", None)  # since Python 3.12
    # 3.12.1 raises KeyError for a loop without a task.
    if before is not None and swap is not None and tasks.current_task(before) is not None:
        task = swap(before, None)
    events._set_running_loop(None)
    try:
        yield
    finally:
        events._set_running_loop(before)
        if task is not None and swap is not None:
            swap(before, task)


class Coroutines:
    """An ``async def`` function as a step calls it: `through` items, then once for each of them.

    `limit` coroutines run at a time. They are begun in the order of their items. `aclose` is awaited at
    the end, on the same loop, if any was begun.

    The first step of a worker runs on the worker's loop. A function without workers has its own loop: it
    may pull the items of another, from within a callback of its loop.
    """

    def __init__(
        self,
        function: Callable[[Any], Any],
        limit: int,
        context: TaskContext,
        aclose: Callable[[], Any] | None = None,
        *,
        of_worker: bool = True,
    ) -> None:
        self._function, self._limit, self._context = function, limit, context
        self._aclose, self._is_workers = aclose, of_worker
        # All the mutable state:
        self.is_open = True
        self._loop: Loop | None = None  # made in the first thread that needs it
        self._running: set[asyncio.Task[Any]] = set()
        self.sources: deque[StartedItems] = deque()  # those with items left to begin
        self._done: asyncio.Task[Any] | None = None  # of the current item of a loop over items

    def through(self, items: Iterable[Any]) -> StartedItems:
        """Return an iterator of the items, each when its coroutine has ended."""
        started = StartedItems(self, items, most=_HELD * self._limit)
        self.sources.append(started)
        return started

    def begin(self, items: Sequence[Any]) -> StartedItems:
        """Begin the items of a task after those of the tasks before it, as soon as there is room."""
        started = StartedItems(self, items, left=len(items))
        self.sources.append(started)
        self._fill()
        return started

    def __call__(self, item: Any) -> Any:
        """Return the result of the item that was given last; of any other, run its coroutine."""
        task, self._done = self._done, None
        if task is None:  # a retry
            task = self._begin(item)
            assert self._loop is not None
            self._loop.wait(task, self._context)
        try:
            return task.result()
        except asyncio.CancelledError as error:
            raise RuntimeError(
                "code outside this pipeline cancelled the coroutine of this item; look for a call of "
                "cancel() in the function or in a library that it uses"
            ) from error

    def next(self, started: StartedItems) -> Any:
        """Return the next of the items whose coroutine has ended, in order."""
        self._fill()
        if not started.begun:
            raise StopIteration
        item, task = started.begun[0]
        if isinstance(task, Exception):
            started.begun.popleft()
            if not isinstance(task, StopIteration):
                self.sources.append(started)  # there may be more items
            elif not self._is_workers:
                self.close()
            raise task
        if task is not None:
            assert self._loop is not None
            try:
                self._loop.wait(task, self._context)
            except Abandoned:
                self.close()
                raise
        started.begun.popleft()
        self._done = task
        return item

    def _fill(self) -> None:
        """Begin items in their order, up to one that can't be had."""
        sources, parts = self.sources, self._context.parts
        while sources and len(self._running) < self._limit:
            started = sources[0]
            if len(started.begun) >= started.most:
                return
            try:
                item = next(started.items) if parts is None else parts.pull(started.items)
            except Exception as error:  # it is raised where its item would have been returned
                sources.popleft()
                started.begun.append((None, error))
            else:
                task = None if type(item) is GivenUp else self._begin(item, started)
                started.begun.append((item, task))

    def _begin(self, item: Any, started: StartedItems | None = None) -> asyncio.Task[Any]:
        if self._loop is None:
            self._loop = self._context.loop if self._is_workers else None
            if self._loop is None:
                self._loop = Loop()
                if self._is_workers:
                    self._context.loop = self._loop
        if self._context.parts is not None:
            self._context.parts.coroutines += 1
        task = self._loop.begin(self._function(item))
        self._running.add(task)
        task.add_done_callback(partial(self._end, started, perf_counter()))
        return task

    def _end(self, started: StartedItems | None, began: float, task: asyncio.Task[Any]) -> None:
        self._running.discard(task)
        if not task.cancelled():
            task.exception()  # as in `Loop.cancel`: the caller may not read all of them
        if self._loop is None:  # `close` is cancelling the tasks
            return
        self._fill()
        if started is not None and started.left:
            started.seconds.append(perf_counter() - began)
            started.left -= 1
            if not started.left:
                started.ended = True
                self._loop.stop()

    def run(self) -> None:
        """Run the loop until there may be a message, or a task has ended."""
        assert self._loop is not None
        self._loop.run(self._context)

    def wake(self) -> None:
        """Have `run` return, from any thread."""
        loop = self._loop
        if loop is not None:
            loop.wake()

    def close(self) -> None:
        """Cancel the running coroutines; close the loop unless it is the worker's. Idempotent.

        From any thread. Where another one waits for a result, that one does it, once it has seen that
        the context is cancelled.
        """
        self.is_open = False
        loop = self._loop
        if loop is None or not loop.in_use.acquire(blocking=False):
            return
        try:
            self._loop = None
            loop.cancel([*self._running])
            self.sources.clear()
            try:
                if self._aclose is not None:
                    loop.complete(self._aclose())
            finally:
                if not self._is_workers:
                    loop.close()
        finally:
            loop.in_use.release()


class StartedItems(Iterator[Any]):
    """Items whose coroutines are begun in order, each returned when its coroutine has ended.

    An error is raised in the place of its item, and more items may follow. Those of a task that was
    started early are a `StartedTask`, for the worker's thread alone.
    """

    def __init__(
        self,
        coroutines: Coroutines,
        items: Iterable[Any],
        *,
        most: float = inf,  # items that may wait, begun and not returned
        left: int = 0,
    ) -> None:
        self._coroutines = coroutines
        self.items, self.most = iter(items), most
        # All the mutable state: items that were begun and not returned, with an error in place of one
        # that could not be had, ...
        self.begun: deque[tuple[Any, asyncio.Task[Any] | Exception | None]] = deque()
        # ... and for a task that was started early:
        self.left = left  # items whose coroutines have not ended
        self.seconds: list[float] = []
        self.ended = False

    def __next__(self) -> Any:
        return self._coroutines.next(self)

    def result(self) -> Iterator[Any]:
        return self

    def wait_here(self) -> bool:
        self._coroutines.run()
        return True

    def stop(self) -> bool:
        return True  # `Coroutines.close` follows at once: it begins none, and cancels the others

    def leave(self) -> bool:
        return True
