"""Crews that are told to leave before they are closed, and what may be asked of one that is closed."""

from __future__ import annotations

import os
import pickle
import socket
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import bare_platform
from support.crew_driver import CrewDriver, echo
from support.forking import in_a_fork
from support.platforms import DEADLINE

from hybridloader import Fork, Spawn, Threads
from hybridloader.backends.process import child, frames, starters
from hybridloader.backends.process import crew as processes
from hybridloader.backends.process.frames import Frame
from hybridloader.engine import WorkerSpec, contract
from hybridloader.testing import Call, FakeClock, Gate

BACKENDS = [
    pytest.param(Fork(), id="fork"),
    pytest.param(Spawn(), id="spawn"),
    pytest.param(Threads(), id="threads"),
]


@pytest.mark.parametrize("backend", BACKENDS)
def test_workers_that_are_told_to_leave_are_gone_without_a_close(backend: Any) -> None:
    with CrewDriver(backend, echo, workers=2) as crew:
        assert crew.call(1) == 1
        crew.raw.leave()
        for handle in crew.raw.handles():
            handle.join(DEADLINE)
            assert not handle.is_alive()
        crew.raw.leave()
        crew.send(2)  # to nobody
        crew.raw.wake()


def test_without_sockets_workers_leave_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    bare_platform.without_sockets(monkeypatch)
    with CrewDriver(Spawn(), echo) as crew:
        assert crew.call(1) == 1
        crew.raw.leave()
        crew.raw.handles()[0].join(DEADLINE)
        assert not crew.raw.handles()[0].is_alive()


@pytest.mark.parametrize("backend", BACKENDS[::2])
def test_the_patience_of_close_counts_from_the_moment_of_leaving(
    backend: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    gate, asked = Gate(tmp_path), []
    clock = FakeClock(100.0)

    class Time:
        monotonic = clock
        sleep = time.sleep

    class Handle:
        def __init__(self, handle: Any) -> None:
            self.handle = handle

        def __getattr__(self, name: str) -> Any:
            return getattr(self.handle, name)

        def join(self, timeout: float) -> None:
            asked.append(timeout)
            gate.open()
            self.handle.join(DEADLINE)

    for module in (starters, processes) if backend.name == "fork" else (contract,):
        monkeypatch.setattr(module, "time", Time)
    with CrewDriver(backend, lambda index: gate.arrive()) as crew:
        crew.send(0)
        crew.raw.flush()
        gate.await_arrivals()
        listed = crew.raw.handles()
        listed[:] = [Handle(handle) for handle in listed]
        crew.raw.leave()
        clock.now += 0.6
        crew.raw.leave()  # the first one counts
        crew.raw.close()
    assert asked[0] == pytest.approx(contract.GRACE - 0.6)


def test_waking_a_closed_crew_writes_to_nobody() -> None:
    with CrewDriver(Fork(), echo) as crew:
        ours = crew.raw.transport._alarm_r, crew.raw.transport._alarm_w
    pipes: list[tuple[int, int]] = []
    try:
        while not {fd for pipe in pipes for fd in pipe} >= set(ours):
            pipes.append(os.pipe())  # takes the descriptors that the crew had
            assert len(pipes) < 50
        crew.raw.wake()
        for read, _ in pipes:
            os.set_blocking(read, False)
            with pytest.raises(BlockingIOError):
                os.read(read, 1)
    finally:
        for pipe in pipes:
            for fd in pipe:
                os.close(fd)


def test_a_worker_that_reads_a_task_after_the_hang_up_leaves_no_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The watch notices the hang-up first: then nothing that the worker reads is the end."""
    names = f"hl-{os.getpid()}-left-"

    class Watch(child.ParentWatch):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            Endpoint.watch = self

    class Endpoint:
        watch: Watch

        def __init__(self, pipe: Any) -> None:
            self.line, self.parents_end = pipe
            self.fileno = self.line.fileno
            self.taken = 0

        def get(self) -> Frame:
            if not self.taken:
                self.taken = 1
                return Frame([memoryview(b"")], [])  # the work is there already
            if self.taken > 1:
                assert os.path.exists(f"/dev/shm/{names}0")
                self.parents_end.close()
                while not self.watch.context.cancelled:
                    os.sched_yield()
            self.taken += 1
            return Frame([memoryview(frames.encode_fields(frames.TASK, 0, pickle.dumps(7)))], [])

        def send(self, parts: Any, fds: Any = ()) -> None:
            assert not fds

        def close(self) -> None:
            self.line.close()

    def be_a_worker() -> None:
        spec = WorkerSpec("stage", 1, Call(lambda index: np.full(10**5, index)))
        first, slots = child.FirstFrame(False, spec), (10**8, names)
        child.main(0, Endpoint, socket.socketpair(), first, os.getppid(), slots, [], fresh=False)

    monkeypatch.setattr(child, "ParentWatch", Watch)
    assert in_a_fork(be_a_worker) == 0
    assert not os.path.exists(f"/dev/shm/{names}0")


def test_at_exit_one_that_can_not_be_closed_keeps_no_other_from_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Runner:
        def __init__(self, error: Exception | None = None) -> None:
            self.error, self.closed = error, 0

        def close(self) -> None:
            self.closed += 1
            if self.error is not None:
                raise self.error

    class Busy(dict[Any, int]):
        """To which another thread adds, the first time that somebody looks."""

        looks = 0

        def __iter__(self) -> Any:
            self.looks += 1
            if self.looks == 1:
                raise RuntimeError("Set changed size during iteration")
            return super().__iter__()

    errors = LookupError("mine"), LookupError("not the first"), None
    runners = Busy({Runner(error): 0 for error in errors})
    owned = Busy({Runner(): os.getpid(), Runner(): -1})
    monkeypatch.setattr(contract, "exiting", False)
    monkeypatch.setattr(contract, "_runners", runners)
    monkeypatch.setattr(contract, "_crews", owned)
    with pytest.raises(LookupError, match="mine"):
        contract._close_all()
    assert [runner.closed for runner in runners] == [1, 1, 1]
    assert [crew.closed for crew in owned] == [1, 0]
