"""Crews that a test sends tasks to itself, alone or one after the other, without a pipeline.

Nothing here imports torch, so fresh workers that are sent the functions below start at once.
"""

from __future__ import annotations

import hashlib
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np

from hybridloader.engine import Backend, Done, Exited, Failed, Ready, Task, WorkerSpec
from hybridloader.testing import Call
from support.platforms import DEADLINE

OWN = 256 * 1024
"""Bytes from which on a buffer has a slot of its own."""

LARGE = 2 * OWN


class CrewDriver:
    """A crew whose workers call one function; a context manager that closes it.

    `raw` is the crew, `events` all that it has told.
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

    def wait_for(self, wanted: Callable[[Any], bool]) -> Any:
        """The first event, of old ones too, for which `wanted` holds."""
        deadline, looked_at = time.monotonic() + DEADLINE, 0
        while True:
            for event in self.events[looked_at:]:
                if wanted(event):
                    return event
            looked_at = len(self.events)
            assert time.monotonic() < deadline, f"nothing came; so far: {self.events}"
            self.events += self.raw.wait(deadline - time.monotonic())

    def result(self, seq: int) -> Done | Failed:
        """Wait for the end of task `seq`, once."""
        found = self.wait_for(lambda e: isinstance(e, (Done, Failed)) and e.seq == seq)
        self.events.remove(found)
        return found  # type: ignore[no-any-return]

    def payload(self, seq: int) -> Any:
        """Wait for the result of task `seq`, unopened."""
        done = self.result(seq)
        if isinstance(done, Failed):
            raise done.failure.to_exception("a task failed")
        return done.payload

    def call(self, index: Any, worker: int | None = None) -> Any:
        """Send `index`, and give the value of its result."""
        return self.payload(self.send(index, worker)).open()

    def all_ready(self) -> None:
        for worker in range(self.workers):
            self.wait_for(lambda e, w=worker: isinstance(e, Ready) and e.worker == w)

    def end_of(self, worker: int) -> Exited:
        return self.wait_for(lambda e: isinstance(e, Exited) and e.worker == worker)  # type: ignore[no-any-return]


# -- work for them ---------------------------------------------------------------------------------


def echo(index: Any) -> Any:
    return index


def total(index: Any) -> int:
    return int(index.sum())


def make(number: int) -> list[Any]:
    """Return the items of one task: one with a slot of its own, some that share one, some without."""
    rng = np.random.default_rng(number)
    return [
        rng.integers(0, 255, LARGE + 4096 * (number % 3), np.uint8),
        *(rng.random(6000) for _ in range(3)),
        np.full(50, number),
        f"text {number}",
    ]


def digest(items: list[Any]) -> str:
    found = hashlib.sha1()
    for item in items:
        found.update(item.encode() if isinstance(item, str) else np.asarray(item).tobytes())
    return found.hexdigest()


def full(number: int) -> np.ndarray:
    return np.full(LARGE, number, np.uint8)


def one_value(array: np.ndarray) -> tuple[int, int]:
    return int(array.min()), int(array.max())


# -- from one to the other -------------------------------------------------------------------------


def waiting(reader: Any) -> list[int]:
    """The slots that were returned in this process, and of which the writer does not know yet."""
    return list(dict.fromkeys([*reader._free, *(number for number, _ in reader._returned)]))


def slots_in_use(crew: CrewDriver) -> int:
    """Slots of A's workers that the parent has not given back, or not told of yet."""
    results = [channel.results for channel in crew.raw.channels]
    return sum(len(reader.segments) - len(waiting(reader)) for reader in results)


def given_back(crew: CrewDriver, worker: int = 0) -> list[int]:
    """The slots of a worker that the parent is about to give back."""
    return sorted(waiting(crew.raw.channels[worker].results))


def through(
    a: CrewDriver,
    b: CrewDriver,
    numbers: range,
    ahead: int = 4,
    send: Callable[..., int] | None = None,
) -> list[Any]:
    """Have A make items of `numbers`, and B values of these, with `ahead` tasks of each under way."""
    found: list[Any] = []
    at_a: deque[int] = deque()
    at_b: deque[int] = deque()
    todo = deque(numbers)
    while todo or at_a or at_b:
        while todo and len(at_a) < ahead:
            at_a.append(a.send(todo.popleft()))
        while at_a and len(at_b) < ahead:
            at_b.append((send or b.send)(a.payload(at_a.popleft())))
        found.append(b.payload(at_b.popleft()).open())
    return found
