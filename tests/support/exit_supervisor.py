"""Supervisor of the trials of `test_exit_matrix`: forks them, follows their processes, ends what hangs.

The server imports everything once, has no thread, and forks for each trial a supervisor, which forks the
trial. The supervisor adopts whatever the trial leaves behind (as a subreaper, prctl(2), which only
Linux has) and so knows when the last process is gone. It looks at the clock to tell how long that
took, and to kill what hangs; never to wait for something.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import os
import select
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any, NamedTuple

KILL_AFTER = 60.0
"""Seconds after its cause in which a trial and all its processes must be gone; 2 are promised."""

GET_READY = 120.0
"""Seconds for a trial to come to its cause; never reached when all is well."""

AT_ONCE = 4
"""Trials that run at the same time; some of them only wait."""

SET_CHILD_SUBREAPER = 36  # from linux/prctl.h
LOADERS = ("loader", "persistent", "pinned")
SIGNALS = ("SIGINT", "SIGTERM", "SIGKILL")


class Trial(NamedTuple):
    """One program."""

    cause: str
    """Name of the function in `exit_trial` that ends it."""

    backend: str
    """Argument of `backend=`."""

    mode: str
    """``loader``, ``persistent`` (a loader with persistent workers), ``pinned`` (one with a pinning
    thread), ``run`` or ``epochs``."""

    stuck: str = ""
    """Behavior of workers in their first sample: ``wait`` for ever, ``deaf`` (and ignore SIGTERM too),
    ``stopped`` (by SIGSTOP). Else they work."""

    def __str__(self) -> str:
        return "-".join(filter(None, self))


class Late(Exception):
    """A trial hangs."""


def serve(todo: list[tuple[int, Trial]], root: Path) -> tuple[Trial, Path] | None:
    """Fork a supervisor for each trial, some at a time. Returns in each trial; None at the end."""
    running = 0
    for number, given in todo:
        if running == AT_ONCE:
            os.wait()
            running -= 1
        where = root / str(number)
        where.mkdir()
        if os.fork() == 0:
            if supervise(given, where):
                return given, where
            os._exit(0)
        running += 1
    for _ in range(running):
        os.wait()
    return None


def supervise(given: Trial, where: Path) -> bool:
    """Start the trial, give it its signal, and write down how all its processes ended.

    True in the trial itself.
    """
    ctypes.CDLL(None).prctl(SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    for name in ("cause", "mark"):
        os.mkfifo(where / name)
    line = os.open(where / "cause", os.O_RDWR)
    marks = os.open(where / "mark", os.O_RDWR)
    script = os.fork()
    if script == 0:
        os.close(line)
        os.close(marks)
        os.setpgid(0, 0)  # as a shell does: a terminal's Ctrl-C goes to the whole group
        for number, mode in enumerate((os.O_RDONLY, os.O_WRONLY, os.O_WRONLY)):
            path = os.devnull if number == 0 else where / f"{number}"
            opened = os.open(path, mode | os.O_CREAT)
            os.dup2(opened, number)
            os.close(opened)
        return True
    outcome = follow(given, script, line)
    (where / "outcome.json").write_text(json.dumps(outcome))
    return False


def follow(given: Trial, script: int, line: int) -> dict[str, Any]:
    """Wait for the trial and all processes that it made; return how each ended."""

    def late(*_: Any) -> None:
        raise Late

    signal.signal(signal.SIGALRM, late)
    reached, code = False, None
    began = ended = gone = 0.0
    left: list[str] = []
    pids = {script}
    try:
        signal.setitimer(signal.ITIMER_REAL, GET_READY)
        reached = line in select.select([line, os.pidfd_open(script)], [], [])[0]
        signal.setitimer(signal.ITIMER_REAL, KILL_AFTER)
        began = time.monotonic()
        if given.cause in ("SIGINT", "SIGTERM"):  # as from a terminal, and as from Slurm
            os.killpg(script, signal.Signals[given.cause])
        elif given.cause in SIGNALS:
            os.kill(script, signal.Signals[given.cause])
        while True:
            pid, status = os.waitpid(-1, 0)
            gone = time.monotonic() - began
            pids.add(pid)
            if pid == script:
                code, ended = os.waitstatus_to_exitcode(status), gone
    except ChildProcessError:
        pass
    except Late:
        left = kill_all()
    signal.setitimer(signal.ITIMER_REAL, 0)
    left += [name for pid in pids for name in segments_of(pid)]
    return {"reached": reached, "code": code, "ended": ended, "gone": gone, "left": left}


def segments_of(pid: int) -> list[str]:
    """Names of shared memory that a process has made: whoever used them has gone."""
    return [name for name in os.listdir("/dev/shm") if name.startswith(f"hl-{pid}-")]


def kill_all() -> list[str]:
    """Kill all that a hanging trial has left; gives what it was."""
    import psutil

    found = psutil.Process().children(recursive=True)
    shown = [f"{child!r} {child.status()}" for child in found]
    for child in found:
        try:
            child.kill()
        except psutil.NoSuchProcess:
            continue
    return shown


def warm_up(*, torch: bool) -> None:
    """Import what trials need, once for all; nothing here starts a thread."""
    needed = ["loky.backend", "psutil", "hybridloader.running.run"]
    needed.append("hybridloader.backends.process.backend")
    if torch:
        needed += [
            "torch.utils.data",
            "hybridloader.loader.dataloader",
            "hybridloader.backends.threads",
        ]
    for name in needed:
        importlib.import_module(name)
    assert threading.active_count() == 1
    assert torch or "torch" not in sys.modules
    gc.collect()
    gc.freeze()  # else every trial spends half a second on collecting what was imported


def needs_torch(given: Trial) -> bool:
    """Taking torch apart costs a trial most of its time; a pipeline on processes does without."""
    return given.mode in LOADERS or given.backend in ("inline", "threads")


def next_trial(root: Path) -> tuple[Trial, Path] | None:
    """The trial that this process, a fork, has to be; None in the server when all are done."""
    todo = [Trial(*fields) for fields in json.loads((root / "trials.json").read_text())]
    for heavy in (False, True):
        chosen = [(n, given) for n, given in enumerate(todo) if needs_torch(given) == heavy]
        if chosen:
            warm_up(torch=heavy)
            found = serve(chosen, root)
            if found is not None:
                return found
    return None
