"""Sharing of tasks among the workers of a crew of threads, so that a slow sample delays only one.

All workers share a long task: each fetches samples of it in turn, and the one that ends the last sample
collates. So all threads work on the oldest task first, and samples of several tasks are in flight at
once. A task that is shorter than the time to wake the threads stays with its worker. The length of the
first tasks is unknown, so each worker begins alone, until one of them has a result; or all share them
from the first on, if each sample waits for a store.

A worker whose `init_fn` has seeded generators draws from them in the order of its tasks, so no task of
such a crew is shared.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

from hybridloader.engine.messages import Task
from hybridloader.engine.meter import Measures
from hybridloader.engine.shared_items import SharedTask, UnsharedTask
from hybridloader.engine.worker import Worker


class Inbox(Protocol):
    """Queue of a worker's messages."""

    put: Callable[[Any], None]


_LEAST = 5e-3
"""Least seconds of work in a task that is shared. With 2 ms of Python, two threads lose 5 % to handing
over the GIL; with 4 ms, no loss was measurable."""

_EACH = 5e-4
"""Least seconds of work per worker. Waking a thread takes about 10 us, 2 % of that."""

NEW = 1 / 8  # part of the newest task in the mean of seconds


class TaskSharing:
    """Rule by which the tasks of one crew are shared, and their way to its workers.

    `mean`, `limit` and `whole` are there for the crew, which notes the seconds of every task by
    `mean` and calls `turn` if ``whole == (mean > limit)``. They are changed without a lock: a lost
    note is no harm.
    """

    def __init__(
        self, workers: int, samples_of: Callable[[Any], Any], *, waits: bool = False
    ) -> None:
        self._samples_of = samples_of
        self._worth = max(_LEAST, workers * _EACH)
        # All the mutable state:
        self.whole = False  # each task is done by one worker
        self.mean = 0.0  # recent seconds of a task
        self.limit = float("inf")  # for `mean`; crossing it changes `whole`
        self._workers: list[Worker] = []
        self._inboxes: list[Inbox] = []
        self._known = waits  # the duration of tasks is known
        self._held: list[SharedTask] = []  # in progress, each by one worker, until shared
        self._measures: deque[Measures] = deque()  # sent with the answer of another worker
        self._lock = threading.Lock()  # held while the duration is unknown
        if waits:
            self.mean, self.limit = self._worth, self._worth / 2

    def join(self, worker: Worker, inbox: Inbox) -> None:
        """Let a worker, which has not started, take part."""
        self._workers.append(worker)
        self._inboxes.append(inbox)

    def begin(self) -> None:
        """Note that an epoch begins: tasks of the one before are not shared any more."""
        with self._lock:
            self._held, self._measures = [], deque()

    def send(self, worker: int, task: Task, queued: list[tuple[Inbox, Any]]) -> bool:
        """Send a task, now or `queued`; False if it is to go to its worker as ever."""
        samples = self._samples_of(task.index)
        if type(samples) not in (list, tuple) or len(samples) < 2:
            return False
        shared = SharedTask(worker, task, samples, self._measures)
        if not self._known:
            with self._lock:
                if not self._known:
                    # Without failed tasks: otherwise a loader whose tasks all fail would keep them.
                    self._held = [*(task for task in self._held if task.items), shared]
                    self._inboxes[worker].put(UnsharedTask(shared))
                    return True
        if self.whole:
            return False
        shared.shared = True
        queued += [(inbox, shared) for inbox in self._inboxes]
        return True

    def turn(self, seconds: float) -> None:
        """Note that `mean` has passed `limit`, or that the first task took so many `seconds`."""
        with self._lock:
            if not self._known:
                self.mean = seconds
                self._decide(self.mean > self._worth)
                held, self._held = self._held, []
                if not self.whole:
                    for task in held:
                        task.shared = True
                        for inbox in self._inboxes:
                            inbox.put(task)
                self._known = True
            elif self.whole == (self.mean > self.limit):
                self._decide(self.whole)

    def at_work(self, worker: int) -> tuple[SharedTask, dict[int, int]] | None:
        """Return the oldest task of `worker` that any worker is fetching, and its samples in flight.

        These are the places of the samples, each with the identity of its thread.
        """
        tasks = [other.shared for other in self._workers]
        mine = [task for task in tasks if task is not None and task.worker == worker]
        if not mine:
            return None
        oldest = min(mine, key=lambda task: task.seq)
        return oldest, oldest.begun.copy()

    def _decide(self, share: bool) -> None:
        # After a failed `init_fn` all tasks of the worker are errors.
        never = any(worker.broken or worker.draws_in_turn for worker in self._workers)
        self.whole = never or not share
        self.limit = self._worth / 2 if share else self._worth
        if never:
            self.limit = float("inf")
