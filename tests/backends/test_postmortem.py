"""Postmortem records: the sample a worker was at, and its stack when it crashed, also in a crew."""

from __future__ import annotations

import ctypes
import faulthandler
import os
import signal
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from support.postmortem import PATIENCE, Child, child, crash_in_native_code

from hybridloader._support import system
from hybridloader.backends.process import postmortem
from hybridloader.backends.process.backend import Fork, Spawn
from hybridloader.backends.process.postmortem import (
    PostmortemContext,
    PostmortemRecord,
    PostmortemWriter,
    ours,
)
from hybridloader.engine.contract import Backend, Crew
from hybridloader.engine.messages import (
    Done,
    Event,
    Exited,
    Fetcher,
    FunctionFetcher,
    Ready,
    Task,
    TaskContext,
    WorkerSpec,
)
from hybridloader.fetching.readers import MapFetch

# -- numbers -----------------------------------------------------------------------------------------


def test_a_new_record_knows_nothing(record: PostmortemRecord) -> None:
    assert (record.at, record.task, record.crash()) == (None, None, "")


def test_what_the_worker_was_at_outlives_it(record: PostmortemRecord) -> None:
    def body(me: Child) -> None:
        me.side.begin(7)
        flag = me.side.context()
        flag.at = 2
        flag.at = 3
        os.kill(os.getpid(), signal.SIGKILL)

    assert Child(record, body).end() == -signal.SIGKILL
    assert (record.task, record.at) == (7, 3)


def test_a_task_begins_without_a_sample_and_ends_without_either(record: PostmortemRecord) -> None:
    seen: list[tuple[int | None, int | None]] = []

    def body(me: Child) -> None:
        flag = me.side.context()
        steps: tuple[Callable[[], None], ...] = (
            lambda: me.side.begin(0),
            lambda: setattr(flag, "at", 5),
            me.side.end,
            lambda: me.side.begin(1),
        )
        for step in steps:
            step()
            me.stuck()

    with child(record, body) as one:
        for _ in range(4):
            one.hear()
            seen.append((record.task, record.at))
            one.let_go()
    assert seen == [(0, None), (0, 5), (None, 5), (1, None)]


def test_the_flag_is_one_that_fetchers_know_and_starts_at_no_sample() -> None:
    cell = ctypes.c_int64(5)
    flag = PostmortemContext(cell)
    assert isinstance(flag, TaskContext)
    assert (flag.cancelled, flag.tracked, TaskContext().tracked) == (False, True, False)
    assert (flag.at, cell.value) == (-1, -1)
    flag.at = 4
    assert (flag.at, cell.value) == (4, 4)


def test_closing_twice_is_closing_once_and_nothing_is_known_after(record: PostmortemRecord) -> None:
    fd = record.fd
    assert fd in ours
    record.close()
    other = os.dup(0)  # has the number now, most likely; a second close would take it away
    record.close()
    os.fstat(other)
    os.close(other)
    assert fd not in ours
    assert (record.at, record.task, record.crash(), record.stack(os.getpid())) == (
        None,
        None,
        "",
        "",
    )
    assert record.why_none


def test_there_is_no_record_where_no_file_can_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> int:
        raise OSError(24, "Too many open files")

    for name in ("nameless_file", "open_record"):
        monkeypatch.setattr(postmortem, name, refuse)
    assert PostmortemRecord.make() is None


def test_a_descriptor_that_is_no_record_leaves_the_worker_without(record: PostmortemRecord) -> None:
    assert PostmortemWriter.open(10_000_000) is None
    read, write = os.pipe()
    was = faulthandler.is_enabled()
    assert PostmortemWriter.open(read) is None  # can't be mapped
    assert faulthandler.is_enabled() == was
    with pytest.raises(OSError):  # and was closed
        os.fstat(read)
    os.close(write)


def test_where_there_is_no_memfd_a_file_without_a_name_serves(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(system, "MEMFD", False)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    made = PostmortemRecord.make()
    assert made is not None
    assert not list(tmp_path.iterdir())

    def body(me: Child) -> None:
        me.side.begin(3)
        ctypes.string_at(0)

    assert Child(made, body).end() == -signal.SIGSEGV
    assert made.task == 3
    assert "in body" in made.crash()
    made.close()


# -- a crash -----------------------------------------------------------------------------------------


def _raise_signal(signum: int) -> Callable[[], None]:
    return lambda: os.kill(os.getpid(), signum)


@pytest.mark.parametrize(
    ("die", "signum"),
    [
        (crash_in_native_code, signal.SIGSEGV),
        (os.abort, signal.SIGABRT),
        (_raise_signal(signal.SIGBUS), signal.SIGBUS),
        (_raise_signal(signal.SIGFPE), signal.SIGFPE),
        (_raise_signal(signal.SIGILL), signal.SIGILL),
    ],
)
def test_a_crash_leaves_its_python_stack_and_its_signal(
    record: PostmortemRecord, die: Callable[[], None], signum: int
) -> None:
    def the_users_sample(me: Child) -> None:
        die()

    assert Child(record, lambda me: the_users_sample(me)).end() == -signum
    text = record.crash()
    assert text.startswith("Fatal Python error: ")
    assert "The thread that crashed" in text
    assert "in the_users_sample" in text
    assert "Extension modules" not in text


def test_a_death_without_a_crash_leaves_no_stack(record: PostmortemRecord) -> None:
    assert Child(record, lambda me: os.kill(os.getpid(), signal.SIGKILL)).end() == -signal.SIGKILL
    assert record.crash() == ""


def test_a_stack_that_was_asked_for_is_no_crash_and_a_crash_after_it_is_told(
    record: PostmortemRecord,
) -> None:
    def body(me: Child) -> None:
        me.stuck()
        crash_in_native_code()

    one = Child(record, body)
    one.hear()
    assert "in stuck" in record.stack(one.pid, PATIENCE)
    assert record.crash() == ""
    one.let_go()
    assert one.end() == -signal.SIGSEGV
    assert "in crash_in_native_code" in record.crash()
    assert "in stuck" not in record.crash()


def test_a_fork_of_the_worker_that_crashed_is_not_taken_for_the_worker(
    record: PostmortemRecord,
) -> None:
    def grandchild() -> None:
        os.abort()

    def body(me: Child) -> None:
        pid = os.fork()
        if pid == 0:
            grandchild()
        os.waitpid(pid, 0)
        crash_in_native_code()

    assert Child(record, body).end() == -signal.SIGSEGV
    assert "in crash_in_native_code" in record.crash()
    assert "in grandchild" not in record.crash()


def test_the_users_own_faulthandler_wins(record: PostmortemRecord, tmp_path: Path) -> None:
    own = tmp_path / "own"

    def body(me: Child) -> None:
        faulthandler.enable(own.open("w"))
        crash_in_native_code()

    assert Child(record, body).end() == -signal.SIGSEGV
    assert record.crash() == ""
    assert "in crash_in_native_code" in own.read_text()


# -- in a crew ---------------------------------------------------------------------------------------


class Trouble:
    """Samples some of which crash or hang."""

    def __init__(self, fifo: str) -> None:
        self.fifo = fifo

    def __getitem__(self, index: int) -> int:
        if index == 1:
            with open(os.devnull, "w") as null:
                os.dup2(null.fileno(), 2)
            ctypes.string_at(0)
        if index == 2:
            self.hang()
        return index

    def hang(self) -> None:
        with open(self.fifo, "wb", buffering=0) as line:
            line.write(b"!")
        with open(self.fifo, "rb") as line:  # blocks: nobody writes
            line.read()


@dataclass(frozen=True)
class Noting(MapFetch):
    """One that says which sample it is at, as fetchers do that are watched."""

    def open(self, shared_seed: int | None, context: TaskContext) -> Fetcher:
        def fetch(indices: list[int]) -> list[int]:
            samples = []
            for number, index in enumerate(indices):
                context.at = number
                samples.append(self.dataset[index])
            return samples

        return FunctionFetcher(fetch)


@contextmanager
def crew_of(backend: Backend, fifo: str, *, tracked: bool = True) -> Iterator[Crew]:
    crew = backend.open()
    try:
        fetch = Noting(Trouble(fifo), list, batched=True)
        crew.start(0, WorkerSpec("stage", 1, fetch, tracked=tracked))
        while not any(isinstance(event, Ready) for event in crew.wait(PATIENCE)):
            pass
        yield crew
    finally:
        crew.close()


def events_until(crew: Crew, kind: type) -> list[Event]:
    found: list[Event] = []
    while not any(isinstance(event, kind) for event in found):
        found += crew.wait(PATIENCE)
    return found


@pytest.mark.parametrize("backend", [Fork(), Spawn()], ids=lambda backend: backend.name)
def test_a_crew_tells_at_which_sample_its_worker_crashed_and_where(
    backend: Backend, tmp_path: Path
) -> None:
    with crew_of(backend, "") as crew:
        crew.send(0, Task(6, [0, 0]))
        (done,) = (e for e in events_until(crew, Done) if isinstance(e, Done))
        done.payload.discard()
        crew.send(0, Task(7, [0, 0, 1, 0]))
        (death,) = (e for e in events_until(crew, Exited) if isinstance(e, Exited))
    assert "SIGSEGV" in (death.cause or "")
    assert (death.task, death.at) == (7, 2)
    assert "in __getitem__" in death.evidence
    assert "in main" not in death.evidence


def test_a_worker_that_dies_between_two_tasks_was_at_none() -> None:
    with crew_of(Fork(), "") as crew:
        crew.send(0, Task(6, [0, 0]))
        (done,) = (e for e in events_until(crew, Done) if isinstance(e, Done))
        done.payload.discard()
        while "in get" not in crew.stack(0):  # it has yet to come back for the next
            pass
        crew.kill(0)
        (death,) = (e for e in events_until(crew, Exited) if isinstance(e, Exited))
    assert (death.task, death.at) == (None, -1)


@pytest.mark.parametrize("backend", [Fork(), Spawn()], ids=lambda backend: backend.name)
def test_a_crew_tells_where_its_worker_hangs(backend: Backend, tmp_path: Path) -> None:
    fifo = str(tmp_path / "fifo")
    os.mkfifo(fifo)
    with crew_of(backend, fifo, tracked=False) as crew:
        crew.send(0, Task(3, [2]))
        crew.flush()
        with open(fifo, "rb", buffering=0) as line:
            assert line.read(1) == b"!"
        text = crew.stack(0)
        assert "in hang" in text
        assert text.splitlines()[1].endswith("in fetch")  # and nothing of ours around it
        crew.kill(0)
        (death,) = (e for e in events_until(crew, Exited) if isinstance(e, Exited))
    assert (death.task, death.at) == (3, None)
