"""However a program ends, its workers end with it: quickly, quietly, with the right exit code.

Each trial is a script of its own, without a ``__main__`` guard. Its workers make marks in a fifo when
they are at work, or when they are stuck in a sample; then the script is told to end itself, or is
ended by a signal. `test_exit_matrix` tries far more ways to end, in interpreters that were started
before; here they are started as a user does it. Most of these trials are marked `full`.
"""

from __future__ import annotations

import functools
import json
import os
import select
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pytest

BACKENDS = ("inline", "threads", "fork", "spawn", "shared-memory")
LIMIT = 2.5
"""Seconds in which everything must be gone, on a machine with a core for each runnable process."""

SPINNING = 5.0
"""Seconds where a thread of the script's process never waits: all else in it gets the GIL 5 ms late,
each time (2.0 to 2.6 s were seen, on two cores)."""

_DEADLINE = 120.0
"""Seconds for a script to get ready; never reached when all is well."""


def slower() -> float:
    """Return how many times as long as alone processes take on this machine now: those per core."""
    return max(1.0, os.getloadavg()[0] / len(os.sched_getaffinity(0)))


class Trial(NamedTuple):
    """One script: what it does with which workers, and in what state they are then."""

    backend: str
    ending: str
    state: str
    """"starting": they are not yet ready; "going": they make batches; "stuck": one sleeps, the other
    computes for ever."""

    persistent: bool = False

    def __str__(self) -> str:
        return "-".join((self.ending, self.state, self.backend))


@dataclass
class Outcome:
    """Outcome of a trial."""

    code: int | None
    stdout: str
    stderr: str
    began: float  # when it was told to end, on the clock that all processes share
    ended: float
    left: list[str] = field(default_factory=list)  # processes alive after LIMIT


SCRIPT = """
    import atexit, json, os, sys, time

    if sys.argv[2] != "loop":  # the first to register is the last to run
        atexit.register(lambda: print(time.monotonic(), flush=True))

    import psutil
    from hybridloader import DataLoader

    backend, ending, state, persistent, fifo = sys.argv[1:]

    def mark():
        line = os.open(fifo, os.O_RDWR)
        os.write(line, b"!")
        os.close(line)

    class Dataset:
        def __len__(self):
            return 1_000_000_000

        def __getitem__(self, index):
            if index == 20:
                mark()
            if index >= 4 and state == "stuck":
                mark()
                if index % 2 == 0:
                    time.sleep(1000)
                while True:
                    pass
            return index

    def begin(length=1_000_000_000):
        loader = DataLoader(
            Dataset(), sampler=range(length), num_workers=2, collate_fn=list,
            backend=backend, persistent_workers=persistent == "True",
        )
        iterator = iter(loader)
        if state == "starting" and backend == "fork":
            mark()
        for number in range(4):
            assert next(iterator) == [number]
        return loader, iterator

    def begin_and_get_stuck():
        loader, iterator = begin()
        marks = 0
        while state == "stuck" and marks < 2:
            marks += len(os.read(line, 2))
        return loader, iterator

    def exhaust():
        loader, iterator = begin(8)
        assert list(iterator) == [[number] for number in range(4, 8)]

    def break_():
        loader, iterator = begin_and_get_stuck()
        for number in range(10):
            break

    def raise_():
        loader, iterator = begin_and_get_stuck()
        raise KeyError

    def delete():
        loader, iterator = begin_and_get_stuck()
        del iterator
        del loader

    if ending == "loop":
        line = os.open(fifo, os.O_RDWR)
        for way in (exhaust, break_, raise_, delete):
            if way is exhaust and state == "stuck":
                continue
            try:
                way()
            except KeyError:
                pass
            children = [
                child for child in psutil.Process().children(recursive=True)
                if "resource_tracker" not in "".join(child.cmdline())
            ]
            left = psutil.wait_procs(children, 30)[1]
            print(json.dumps([way.__name__.strip("_"), len(left)]))
    else:
        loader, iterator = begin()
        if ending.startswith("SIG"):
            for batch in iterator:
                pass
        while state == "going" and next(iterator) != [20]:
            pass
        sys.stdin.readline()
        if ending == "raise":
            raise LookupError("the end of the script")
        sys.exit(7)
"""

SLOW_START = """
    import os, sys, time

    if any("popen_loky" in word for word in sys.orig_argv):
        line = os.open(os.environ["FIFO"], os.O_RDWR)
        os.write(line, b"!")
        os.close(line)
        time.sleep(0.5)
"""
"""The `sitecustomize` of spawned workers that shall be caught while they are starting."""

EXPECTED_CODES = {
    "loop": 0,
    "raise": 1,
    "sys.exit": 7,
    "SIGINT": -signal.SIGINT,
    "SIGTERM": -signal.SIGTERM,
    "SIGKILL": -signal.SIGKILL,
}
EXPECTED_TRACEBACKS = {"raise": "LookupError: the end of the script", "SIGINT": "KeyboardInterrupt"}


def _trials() -> list[Trial]:
    trials = [Trial(backend, ending, "going") for backend in BACKENDS for ending in EXPECTED_CODES]
    trials += [
        Trial(backend, ending, "stuck", persistent=True)
        for backend in BACKENDS
        for ending in EXPECTED_CODES
        # An inline worker is the script itself: only a signal ends it when it is stuck.
        if backend != "inline" or ending.startswith("SIG")
    ]
    trials += [Trial("fork", "SIGINT", "starting")]
    trials += [Trial("spawn", ending, "starting") for ending in ("SIGINT", "SIGTERM", "SIGKILL")]
    return trials


EVERYDAY = {
    ("fork", "loop", "stuck"),
    ("fork", "sys.exit", "going"),
    ("fork", "SIGINT", "starting"),
    ("spawn", "SIGINT", "starting"),
    ("threads", "SIGINT", "stuck"),
}
"""Backend, ending and state of the trials that every run makes: one of each state and each kind of
worker, those first that the matrix has not: workers that are starting, and that compute for ever."""


def _parameters(*, loop: bool) -> list[Any]:
    """The trials of one of the two tests."""
    return [
        pytest.param(trial, marks=() if trial[:3] in EVERYDAY else pytest.mark.full, id=str(trial))
        for trial in _trials()
        if (trial.ending == "loop") == loop
    ]


def _run(trial: Trial, folder: Path) -> Outcome:
    folder.mkdir()
    script, fifo, errors = folder / "script.py", folder / "fifo", folder / "stderr"
    script.write_text(textwrap.dedent(SCRIPT))
    os.mkfifo(fifo)
    environment = dict(os.environ, FIFO=str(fifo))
    if trial.state == "starting":
        (folder / "sitecustomize.py").write_text(textwrap.dedent(SLOW_START))
        environment["PYTHONPATH"] = str(folder)
    words = [trial.backend, trial.ending, trial.state, str(trial.persistent), str(fifo)]
    line = os.open(fifo, os.O_RDWR)
    with (
        errors.open("wb") as stderr,
        subprocess.Popen(
            [sys.executable, script, *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            start_new_session=True,
            env=environment,
        ) as process,
    ):
        try:
            watched = {}
            if trial.ending != "loop":
                _await_marks(line, trial, process)
                watched = _watch(psutil.Process(process.pid))
            began = time.monotonic()
            if trial.ending == "SIGINT":  # as from a terminal: to the whole group
                os.killpg(process.pid, signal.SIGINT)
            elif trial.ending.startswith("SIG"):
                process.send_signal(signal.Signals[trial.ending])
            stdout, _ = process.communicate(b"end\n", timeout=_DEADLINE)
            ended = time.monotonic()
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise
        finally:
            os.close(line)
    left = _alive_after(watched, LIMIT * slower())
    return Outcome(process.returncode, stdout.decode(), errors.read_text(), began, ended, left)


def _await_marks(line: int, trial: Trial, process: subprocess.Popen[bytes]) -> None:
    """Wait until the workers are where the trial wants them."""
    both = {"starting": trial.backend == "spawn", "stuck": trial.backend != "inline"}
    missing = 2 if both.get(trial.state) else 1
    ended = os.pidfd_open(process.pid)
    try:
        while missing > 0:
            ready = select.select([line, ended], [], [], _DEADLINE)[0]
            assert ready == [line], f"{trial} did not get ready"
            missing -= len(os.read(line, missing))
    finally:
        os.close(ended)


def _watch(family: psutil.Process) -> dict[int, str]:
    """A descriptor for each child of the script, which becomes readable when the child has ended.

    Unlike psutil's `wait_procs` it does not take a child that nobody reaps for alive: orphans in a
    container may stay zombies.
    """
    watched: dict[int, str] = {}
    for child in family.children(recursive=True):
        try:
            watched[os.pidfd_open(child.pid)] = repr(child)
        except ProcessLookupError:
            continue
    return watched


def _alive_after(watched: dict[int, str], limit: float) -> list[str]:
    deadline = time.monotonic() + limit
    left = dict(watched)
    while left:
        ready = select.select(list(left), [], [], max(0.0, deadline - time.monotonic()))[0]
        if not ready:
            break
        for descriptor in ready:
            del left[descriptor]
    for descriptor in watched:
        os.close(descriptor)
    return list(left.values())


@pytest.fixture(scope="session")
def outcome_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Trial], Outcome]:
    """Makes a trial; once, if two tests ask for it."""
    folder = tmp_path_factory.mktemp("exits")
    return functools.cache(lambda trial: _run(trial, folder / str(trial)))


def _check(trial: Trial, outcome: Outcome) -> None:
    """Claims that hold for every end of every script."""
    assert outcome.code == EXPECTED_CODES[trial.ending], outcome.stderr
    traceback = EXPECTED_TRACEBACKS.get(trial.ending)
    if traceback is None:
        assert outcome.stderr == ""
    else:
        assert outcome.stderr.count("Traceback (most recent call last)") == 1, outcome.stderr
        assert outcome.stderr.rstrip().splitlines()[-1].startswith(traceback), outcome.stderr
        for noise in ("Exception ignored", "resource_tracker", "leaked", "Fatal", "terminate"):
            assert noise not in outcome.stderr, outcome.stderr
    assert not outcome.left


pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="watches processes by pidfd"),
]


@pytest.mark.parametrize("trial", _parameters(loop=True))
def test_a_loop_that_ends_leaves_no_worker(
    trial: Trial, outcome_of: Callable[[Trial], Outcome]
) -> None:
    outcome = outcome_of(trial)
    _check(trial, outcome)
    ways = ["exhaust", "break", "raise", "delete"][trial.state == "stuck" :]
    told = [json.loads(line) for line in outcome.stdout.splitlines()]
    assert told == [[way, 0] for way in ways]


@pytest.mark.parametrize("trial", _parameters(loop=False))
def test_a_program_that_ends_leaves_no_process(
    trial: Trial, outcome_of: Callable[[Trial], Outcome]
) -> None:
    outcome = outcome_of(trial)
    _check(trial, outcome)
    told = outcome.stdout.split()
    assert len(told) == (trial.ending not in ("SIGTERM", "SIGKILL"))
    # Interpreters take their time to end, most of all on a busy machine; that is not ours to bound.
    limit = SPINNING if (trial.backend, trial.state) == ("threads", "stuck") else LIMIT
    limit *= slower()
    assert (float(told[0]) if told else outcome.ended) - outcome.began < limit
    assert outcome.ended - outcome.began < 2 * limit
