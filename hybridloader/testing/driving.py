"""Crew without a stage, driven by a test."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from hybridloader.engine.contract import Crew
from hybridloader.engine.messages import Done, Event, Failed, Message, Task, WorkerSpec
from hybridloader.testing.tools import DEADLINE


class Running:
    """Started crew that collects events until the wanted ones have arrived."""

    def __init__(self, crew: Crew, spec: WorkerSpec) -> None:
        self.raw, self._spec = crew, spec
        self.events: list[Any] = []
        self._unread: deque[Done | Failed] = deque()

    def __enter__(self) -> Running:
        try:
            for worker in range(self._spec.workers):
                self.raw.start(worker, self._spec)
            self.raw.settle()
        except BaseException:
            self.raw.close()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        self.raw.close()

    def send(self, worker: int, message: Message) -> None:
        self.raw.send(worker, message)

    def ask(self, indices: Iterable[Any], workers: int = 1) -> list[Done | Failed]:
        """Send a task for each index to `workers` in turn; return the results in order of arrival."""
        seq = -1
        for seq, index in enumerate(indices):
            self.raw.send(seq % workers, Task(seq, index))
        return self.collect(seq + 1)

    def collect(self, count: int) -> list[Done | Failed]:
        """Wait for the next `count` results."""
        deadline = time.monotonic() + DEADLINE
        while len(self._unread) < count:
            self._take(deadline)
        return [self._unread.popleft() for _ in range(count)]

    def collect_until(self, wanted: Callable[[Event], bool]) -> Any:
        """Wait for the first event, from now on, for which `wanted` returns True."""
        deadline = time.monotonic() + DEADLINE
        while True:
            for event in self._take(deadline):
                if wanted(event):
                    return event

    def open(self, result: Done | Failed) -> Any:
        assert isinstance(result, Done), result
        return result.payload.open()

    def _take(self, deadline: float) -> Sequence[Event]:
        left = deadline - time.monotonic()
        assert left > 0, f"nothing came; so far: {self.events}"
        events = self.raw.wait(left)
        self.events.extend(events)
        self._unread.extend(event for event in events if isinstance(event, (Done, Failed)))
        return events
