"""Tools that replace waiting: a clock and a gate that a test controls, and scripted workers; a crew
without a stage; and work for the workers of a test.

The work is sent to workers of every kind, and imports torch and numpy where it runs.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from hybridloader.engine.contract import Backend, Crew
from hybridloader.engine.messages import (
    Done,
    EndOfShard,
    Event,
    Failed,
    Fetch,
    Fetcher,
    FunctionFetcher,
    Message,
    Task,
    TaskContext,
    WorkerSpec,
)
from hybridloader.engine.worker import get_worker_info
from hybridloader.fetching.collate import WithoutTorch

DEADLINE = 60.0
"""Seconds after which a test that waits for a worker gives up; a correct test never waits that long."""


class FakeClock:
    """Clock that a test sets: ``clock()`` returns `now`, in seconds."""

    def __init__(self, now: float = 0.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


class Gate:
    """Barrier: workers wait until the test opens it, and the test waits until workers have arrived.

    It is a folder, so it works across threads, processes and start methods, and it can be pickled.

    Parameters
    ----------
    folder
        An empty folder. None makes a temporary one, which is removed with this object; workers that
        still wait then pass.
    """

    def __init__(self, folder: str | os.PathLike[str] | None = None) -> None:
        self.folder = Path(folder or tempfile.mkdtemp(prefix="hybridloader-gate-"))
        if folder is None:
            weakref.finalize(self, _remove, self.folder, os.getpid())

    def open(self) -> None:
        (self.folder / "open").touch()

    def arrive(self) -> None:
        """Report the arrival of a worker, and wait until the gate is open. Called by workers."""
        descriptor, _ = tempfile.mkstemp(prefix="arrived-", dir=self.folder)
        os.close(descriptor)
        opened = self.folder / "open"
        self._until(
            lambda: opened.exists() or not self.folder.exists(), "the gate was never opened"
        )

    def await_arrivals(self, count: int = 1) -> None:
        """Wait until `count` workers have arrived. Called by the test."""
        self._until(
            lambda: len(list(self.folder.glob("arrived-*"))) >= count, "no worker came to the gate"
        )

    @staticmethod
    def _until(condition: Callable[[], bool], complaint: str) -> None:
        deadline = time.monotonic() + DEADLINE
        while not condition():
            if time.monotonic() > deadline:
                raise TimeoutError(complaint)
            time.sleep(0.002)  # the only place that polls, so that tests need not


def _remove(folder: Path, owner: int) -> None:
    if os.getpid() == owner:  # a fork has a copy of the gate
        shutil.rmtree(folder, ignore_errors=True)


@dataclass
class ScriptedBackend(Backend):
    """Backend whose workers follow a script.

    Parameters
    ----------
    script
        Events that successive calls of `wait` return. An item may be a function of the crew, which may
        look at `crew.sent`, and move a `FakeClock`.
    """

    script: Iterable[Sequence[Event] | Callable[[ScriptedCrew], Sequence[Event]]] = ()
    crews: list[ScriptedCrew] = field(default_factory=list)
    name: ClassVar[str] = "scripted"
    in_process: ClassVar[bool] = True

    def open(self) -> Crew:
        crew = ScriptedCrew(iter(self.script))
        self.crews.append(crew)
        return crew


class ScriptedCrew(Crew):
    """Crew that records its calls in `started`, `sent`, `killed`, `woken` and `closed`."""

    def __init__(
        self, script: Iterator[Sequence[Event] | Callable[[ScriptedCrew], Sequence[Event]]]
    ) -> None:
        self._script = script
        self.started: list[int] = []
        self.sent: list[tuple[int, Message]] = []
        self.killed: list[int] = []
        self.woken = self.closed = 0

    def start(self, worker: int, spec: WorkerSpec) -> None:
        self.started.append(worker)

    def send(self, worker: int, message: Message) -> None:
        self.sent.append((worker, message))

    def wait(self, timeout: float | None) -> Sequence[Event]:
        for step in self._script:
            return step(self) if callable(step) else step
        raise AssertionError(f"the script has ended, but wait was called again; sent: {self.sent}")

    def wake(self) -> None:
        self.woken += 1

    def kill(self, worker: int) -> None:
        self.killed.append(worker)

    def close(self) -> None:
        self.closed += 1


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


# -- work: a function, or a shard; and the functions of the contract suite


@dataclass(frozen=True)
class Call(Fetch):
    """A `Fetch` that calls a function: the simplest work for a worker."""

    function: Callable[[Any], Any]
    dataset: Any = None
    private: bool = False

    def open(self, shared_seed: int | None, context: TaskContext) -> Fetcher:
        return FunctionFetcher(self.function)


@dataclass(frozen=True)
class Count(Fetch):
    """A `Fetch` whose shard has `length` items in each epoch."""

    length: int
    dataset: Any = None
    private: bool = True

    def open(self, shared_seed: int | None, context: TaskContext) -> Fetcher:
        items = iter(range(self.length))

        def fetch(index: Any) -> int:
            for item in items:
                return item
            raise EndOfShard

        return FunctionFetcher(fetch)


def echo(index: Any) -> Any:
    return index


def filled(index: int) -> Any:
    import numpy as np

    return np.full(1 << 20, index, dtype=np.int16)


def collated(index: int) -> Any:
    """Return a batch from the default collation that works without torch."""
    import numpy as np

    return WithoutTorch("default_collate")([np.full(1 << 19, index, dtype=np.uint8)])


def fail_on_odd(index: int) -> int:
    if index % 2:
        raise ArithmeticError("odd", index)
    return index


def leave(index: Any) -> None:
    raise SystemExit(3)


def unpicklable(index: int) -> Any:
    return "fine" if index else (x for x in "abc")


def broken_init(worker: int) -> None:
    raise LookupError(f"no luck in worker {worker}")


def who(index: Any) -> tuple[int, int, int]:
    from torch.utils.data import get_worker_info as torchs

    ours, theirs = get_worker_info(), torchs()
    assert ours is theirs
    assert ours is not None
    return ours.id, ours.num_workers, ours.seed


def at_gate(gate: Gate) -> Callable[[bytes], int]:
    def wait_then_measure(data: bytes) -> int:
        gate.arrive()
        return len(data)

    return wait_then_measure


def init_into(folder: Path) -> Callable[[int], None]:
    def init(worker: int) -> None:
        import torch

        descriptor, name = tempfile.mkstemp(prefix="init-", dir=folder)
        os.close(descriptor)
        Path(name).write_text(f"{worker} {torch.initial_seed()}")
        torch.manual_seed(0)

    return init
