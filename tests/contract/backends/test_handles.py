"""Handles of workers, what signals do to these, and crews that leave before they are closed."""

from __future__ import annotations

import errno
import multiprocessing
import multiprocessing.connection
import multiprocessing.context
import os
import signal
import socket
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from itertools import count
from typing import Any

import pytest
from support.crew_driver import CrewDriver, echo
from support.failing_datasets import Samples, load, start
from support.platforms import DEADLINE, needs_zygote

from hybridloader import Fork, Spawn, Threads, WorkerDied

pytestmark = pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="signals of POSIX")
UNKNOWN = 255
"""Exit code of a process of which none is known, as in asyncio."""

needs_pidfd = pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="needs pidfd")


# -- what a multiprocessing.Process has --------------------------------------------------------------


@pytest.mark.parametrize("backend", ["threads", "fork"])
def test_a_handle_has_what_a_process_of_multiprocessing_has(backend: str) -> None:
    with start(load(Samples(int), backend)) as iterator:
        next(iterator)
        [worker] = iterator._workers
        public = {name for name in dir(multiprocessing.Process) if not name.startswith("_")}
        # Workers leave SIGINT to their parent, so there is no `interrupt` (Python 3.14).
        assert public - {"authkey", "close", "interrupt", "run", "start"} <= {*dir(worker)}
        assert worker.is_alive()
        assert worker.exitcode is None
        assert worker.daemon is True
        assert isinstance(worker.pid, int)
        assert (worker.ident == worker.pid) is (backend != "threads")
    worker.join(DEADLINE)
    assert worker.exitcode == 0
    if backend == "fork":
        assert multiprocessing.connection.wait([worker.sentinel], 0) == [worker.sentinel]
    else:
        assert not hasattr(worker, "sentinel")


@pytest.mark.parametrize(
    ("end", "code"), [("terminate", -signal.SIGTERM), ("kill", -signal.SIGKILL)]
)
def test_a_worker_can_be_ended_by_its_handle(end: str, code: int) -> None:
    iterator = start(load(Samples(int, 100), "fork"))
    [worker] = iterator._workers
    getattr(worker, end)()
    worker.join(DEADLINE)
    assert worker.exitcode == code
    getattr(worker, end)()  # of one that has ended
    with pytest.raises(WorkerDied, match=signal.Signals(-code).name):
        list(iterator)
    assert worker.exitcode == code


# -- signals to all processes of a job ---------------------------------------------------------------


def programs(index: int) -> int:
    """Dataset that starts a program and a fork, and tells how they take SIGTERM."""
    if index != 3:
        return 0
    told = subprocess.run(["sh", "-c", "kill -TERM $$"], check=False).returncode
    child = os.fork()
    if child == 0:
        os.kill(os.getpid(), signal.SIGTERM)
        os._exit(0)
    return -told * 100 + os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.fixture
def _requeueing() -> Iterator[None]:
    """A handler of the trainer's for a signal of Slurm's, as Lightning has one; no worker may run it."""

    def requeue(*_: object) -> None:
        raise AssertionError("the handler ran in a worker")

    before = signal.signal(signal.SIGUSR1, requeue)
    yield
    signal.signal(signal.SIGUSR1, before)


@pytest.mark.usefixtures("_requeueing")
@pytest.mark.parametrize("backend", ["fork", "spawn"])
def test_workers_leave_the_signals_of_a_job_to_the_trainer(backend: str) -> None:
    with start(load(Samples(programs, 12), backend, workers=2)) as iterator:
        found: list[Any] = []
        for _ in range(12):  # the first at once, when a worker has yet to start
            for worker in iterator._workers:
                for signum in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
                    os.kill(worker.pid or 0, signum)
            found += next(iterator)
        assert list(iterator) == []
    term = int(signal.SIGTERM)
    assert found == [0, 0, 0, 100 * term - term, *[0] * 8]


# -- children that somebody else waits for, or nobody ------------------------------------------------


@pytest.fixture
def _nobody_waits() -> Iterator[None]:
    """As after ``trap '' CHLD``: the kernel forgets children as they end."""
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    yield
    signal.signal(signal.SIGCHLD, before)


def end_at_five(index: int) -> int:
    if index == 5:
        os._exit(3)
    return index


SILENT_CHILDREN = [
    (
        "fork",
        None,
        r"worker \(pid \d+\) exited unexpectedly\. .*code is not known, because SIGCHLD",
    ),
    pytest.param(
        *("spawn", 0, r"exited unexpectedly with exit code 3\. .*exited with code 3\."),
        marks=needs_zygote,
    ),
]
"""Backends, with the exit code that is known of a worker at its end, and the words for another."""


@pytest.mark.usefixtures("_nobody_waits")
@pytest.mark.parametrize(("backend", "code", "words"), SILENT_CHILDREN)
def test_children_that_nobody_waits_for_are_children_like_others(
    backend: str, code: int | None, words: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with start(load(Samples(int, 4), backend)) as iterator:
        assert list(iterator) == [[0], [1], [2], [3]]
    assert [worker.exitcode for worker in iterator._workers] == [UNKNOWN if code is None else code]
    iterator = start(load(Samples(end_at_five), backend))
    with pytest.raises(WorkerDied, match=words):
        list(iterator)
    assert capfd.readouterr().err == ""


@needs_pidfd
def test_no_signal_goes_to_the_number_of_a_worker_that_somebody_else_has_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    iterator = start(load(Samples(int, 100), "fork", workers=2))
    next(iterator)
    worker, other = iterator._workers
    os.kill(worker.pid or 0, signal.SIGKILL)
    assert os.waitpid(worker.pid or 0, 0)[0] == worker.pid
    sent: list[int] = []
    monkeypatch.setattr("os.kill", lambda pid, signum: sent.append(pid))
    worker.kill()
    worker.terminate()
    worker.join()
    assert not worker.is_alive()
    assert worker.exitcode == UNKNOWN
    other.kill()
    with pytest.raises(WorkerDied):
        list(iterator)
    assert worker.pid not in sent
    assert other.pid not in sent


def test_what_was_made_for_a_process_that_can_not_be_started_is_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: Any) -> Any:
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    monkeypatch.setattr(multiprocessing.context.ForkProcess, "_Popen", staticmethod(refuse))
    before = set(os.listdir("/proc/self/fd"))
    with pytest.raises(BlockingIOError):
        start(load(Samples(int), "fork"))
    assert set(os.listdir("/proc/self/fd")) == before


@needs_zygote
@pytest.mark.parametrize("backend", ["fork", "spawn", Spawn(preload=False)])
def test_whichever_descriptor_of_a_start_can_not_be_had_the_others_are_closed(
    backend: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As at `ulimit -n`, but for pipes, of which multiprocessing leaves some open."""
    left, parent = 0, os.getpid()

    def refuse(make: Any, *args: Any) -> Any:
        nonlocal left
        left -= os.getpid() == parent
        if left == -1:
            raise OSError(errno.EMFILE, "Too many open files")
        return make(*args)

    def samples() -> Any:
        with suppress(OSError), start(load(Samples(int), backend)) as iterator:
            return list(iterator)

    expected = samples()
    for owner, name in ((os, "dup"), (os, "memfd_create"), (socket, "socketpair")):
        monkeypatch.setattr(owner, name, partial(refuse, getattr(owner, name)))
    before = set(os.listdir("/proc/self/fd"))
    for number in count():
        left = number
        assert samples() in (None, expected)
        assert set(os.listdir("/proc/self/fd")) == before, f"call {number}"
        if left >= 0:
            break
    assert number > 1


# -- crews that leave ----------------------------------------------------------------------------------


LEAVING = [
    pytest.param(Fork(), id="fork"),
    pytest.param(Spawn(), id="spawn", marks=pytest.mark.full),
    pytest.param(Threads(), id="threads"),
]


@pytest.mark.parametrize("backend", LEAVING)
def test_workers_that_are_told_to_leave_are_gone_without_a_close(backend: Any) -> None:
    with CrewDriver(backend, echo, workers=2) as crew:
        assert crew.call(1) == 1
        crew.raw.leave()
        for handle in crew.raw.handles:
            handle.join(DEADLINE)
            assert not handle.is_alive()
        crew.raw.leave()
        crew.send(2)  # to nobody
        crew.raw.wake()
