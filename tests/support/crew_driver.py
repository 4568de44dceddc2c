"""Crews that a test sends tasks to itself, alone or one after the other, without a pipeline.

Nothing here imports torch, so fresh workers that are sent the functions below start at once.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np

from hybridloader.engine import Backend, Done, Failed, Task, WorkerSpec
from hybridloader.testing import Call
from support.platforms import DEADLINE

OWN = 256 * 1024
"""Bytes from which on a buffer has a slot of its own."""

LARGE = 2 * OWN


class CrewDriver:
    """A crew whose workers call one function; a context manager that closes it.

    `raw` is the crew, `events` all that it has reported.
    """

    def __init__(
        self, backend: Backend, function: Callable[[Any], Any], workers: int = 1, **more: Any
    ) -> None:
        backend.check()
        self.raw: Any = backend.open()
        self.events: list[Any] = []
        self.workers = workers
        self.seq = 0
        try:
            for worker in range(workers):
                self.raw.start(worker, WorkerSpec("driven", workers, Call(function), **more))
        except BaseException:
            self.raw.close()
            raise

    def __enter__(self) -> CrewDriver:
        return self

    def __exit__(self, *exc: object) -> None:
        self.raw.close()

    def send(self, index: Any, worker: int | None = None) -> int:
        """Send a task, to the workers in turn; gives its number."""
        seq = self.seq
        self.seq += 1
        self.raw.send(seq % self.workers if worker is None else worker, Task(seq, index))
        return seq

    def result(self, seq: int) -> Done | Failed:
        """Wait for the end of task `seq`, once."""
        deadline = time.monotonic() + DEADLINE
        while True:
            for event in self.events:
                if isinstance(event, (Done, Failed)) and event.seq == seq:
                    self.events.remove(event)
                    return event
            assert time.monotonic() < deadline, f"nothing came; so far: {self.events}"
            self.events += self.raw.wait(deadline - time.monotonic())

    def payload(self, seq: int) -> Any:
        """Wait for the result of task `seq`, unopened."""
        done = self.result(seq)
        if isinstance(done, Failed):
            raise done.failure.to_exception("a task failed")
        return done.payload

    def call(self, index: Any, worker: int | None = None) -> Any:
        """Send `index`, and give the value of its result."""
        return self.payload(self.send(index, worker)).open()


# -- work for them ---------------------------------------------------------------------------------


def echo(index: Any) -> Any:
    return index


def full(number: int) -> np.ndarray:
    return np.full(LARGE, number, np.uint8)
