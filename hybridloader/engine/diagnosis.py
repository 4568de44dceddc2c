"""Texts of errors: stage, worker, indices, cause, and advice."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hybridloader._support.text import brief, table
from hybridloader.engine.contract import WorkerHandle
from hybridloader.engine.scheduler import Fault

_DEBUG = "To find it, run with backend='inline' under a debugger."

_ADVICE = {
    "SIGKILL": (
        "Likely the system ran out of memory, or a person or another program killed it. "
        "Try fewer workers, or backend='threads', which shares one copy of the dataset."
    ),
    "SIGSEGV": f"Native code crashed in the worker. {_DEBUG}",
    "SIGFPE": f"Native code divided by zero in the worker. {_DEBUG}",
    "SIGABRT": (
        "Native code aborted in the worker: a failed assertion, or an uncaught C++ exception. "
        f"Its message is in the worker's stderr. {_DEBUG}"
    ),
    "SIGILL": (
        "Native code used an instruction that this CPU does not have: a library was built for another "
        "CPU. Install a build of it for this one."
    ),
    "SIGBUS": (
        "The system could not provide memory that it had promised: the shared-memory mount or the "
        "memory limit is full."
    ),
    "SystemExit": "The dataset or a function it uses called sys.exit().",
}


@dataclass(frozen=True)
class WorkerReport:
    """State of one worker of a stage, a row of `workers_table`."""

    worker: int
    name: str  # kind of the worker
    pid: int | None  # None before the process exists
    state: str
    done: int  # tasks answered by all workers of this number
    restarts: int  # restarts of the worker of this number
    index: Any  # index of its oldest task; None if it has none
    seconds: float | None  # seconds since it began that task; None if it has none


def name_of(handles: Sequence[WorkerHandle], worker: int) -> str:
    """Name a worker in errors: ``"worker 1 (process, pid 4711)"``, as far as it is known."""
    if worker >= len(handles):
        return f"worker {worker}"
    handle = handles[worker]
    pid = "" if handle.known_pid is None else f", pid {handle.known_pid}"
    return f"worker {worker} ({handle.name}{pid})"


def end_of(stage: str, handles: Sequence[WorkerHandle], worker: int) -> str:
    """Return the end of a worker process in torch's words, which programs match.

    They are from ``torch/csrc/DataLoader.cpp``, with the stage's name in place of "DataLoader". The text
    is empty if the worker is no process of this machine, or has not ended.
    """
    handle = handles[worker] if worker < len(handles) else None
    if handle is None or handle.known_pid in (None, os.getpid()) or handle.exitcode is None:
        return ""
    who, code = f"{stage} worker (pid {handle.known_pid})", handle.exitcode
    if not handle.code_known:
        return f"{who} exited unexpectedly. "
    if code >= 0:
        return f"{who} exited unexpectedly with exit code {code}. "
    try:
        return f"{who} is killed by signal: {signal.strsignal(-code)}. "
    except ValueError:  # a number without a signal on this platform
        return f"{who} is killed by signal: {-code}. "


def death(
    stage: str,
    worker: str,
    fault: Fault,
    indices: Mapping[int, Any],  # indices of the tasks, by number
    refusal: str = "",  # reason why it was not restarted
) -> str:
    """Word the error for a worker that ended without being asked to."""
    event = fault.event
    held = [brief(indices.get(seq)) for seq in fault.in_flight]
    tasks = f"It was to fetch {'; '.join(held[:4])}" if held else "It had no task"
    more = f"; and {len(held) - 4} tasks more" if len(held) > 4 else ""
    advice = _advice(fault.cause)
    # The kernel's report is more exact than the guess.
    if event.memory and "SIGKILL" in fault.cause:
        advice = (
            "If it is memory: try fewer workers, or backend='threads', which shares one copy of the "
            "dataset."
        )
    elif event.memory and "SIGBUS" in fault.cause:
        advice = ""
    full = "" if event.slots is None else "Its slots took {:,} of {:,} bytes.".format(*event.slots)
    sample = "" if event.task is None else sample_at(indices.get(event.task), event.at)
    parts = [f"In stage {stage!r}, {worker} {fault.cause}.", f"{tasks}{more}.", sample]
    parts += [refusal, advice, full]
    lines = [" ".join(part for part in parts if part)]
    lines += [event.memory.strip("\n"), event.evidence.strip("\n")]
    return "\n".join(line for line in lines if line)


def _advice(cause: str) -> str:
    return next((text for word, text in _ADVICE.items() if word in cause), "")


def sample_at(index: Any, at: int | None) -> str:
    """Name sample number `at` of a task: ``"It was at sample 2 of [7, 3, 9]: 9."``.

    The text is empty if it is not known which sample it was.
    """
    if at is None or at < 0 or index is None:
        return ""
    inside = isinstance(index, (list, tuple)) and at < len(index)
    which = f": {brief(index[at])}" if inside else ""
    return f"It was at sample {at} of {brief(index)}{which}."


def overrun(
    stage: str,
    worker: str,
    index: Any,
    seconds: float,  # seconds of the task so far
    timeout: float,
    *,
    stack: str = "",  # stack of the worker, or the reason why there is none; on separate lines
    thread: bool = False,  # the worker is a thread of this process
) -> str:
    """Word the error for a task that took longer than `task_timeout`, its worker not replaced."""
    if thread:
        fate = (
            "A thread can't be killed: it finishes its sample, and the result is dropped. "
            "Workers that are processes can be killed and restarted: backend='fork', 'spawn' or "
            "'shared-memory' with on_worker_death='restart'."
        )
    else:
        fate = "It was killed; on_worker_death='restart' would restart it and continue."
    sentences = [
        f"In stage {stage!r}, {worker} has been at {brief(index)} for {_seconds(seconds)}, "
        f"longer than task_timeout={timeout:g} seconds.",
        fate,
        "If such a task may take that long, raise task_timeout.",
    ]
    text = " ".join(sentences)
    return f"{text}\n{stack.strip(chr(10))}" if stack.strip() else text


def given_up(stage: str, worker: str, deaths: int, cause: str, *, at: int | None = None) -> str:
    """Word the error in place of a sample, or of a task, that has killed workers again and again.

    `worker` is the last that died, of `cause`; `at` is None if it is not known at which sample.
    """
    workers = "1 worker" if deaths == 1 else f"{deaths} workers"
    what = "at this sample" if at is not None else "at a task that contains this sample"
    return (
        f"In stage {stage!r}, {workers} died {what}, so it was given up; "
        f"the last one, {worker}, {cause}. {_advice(cause)}".rstrip()
    )


def workers_table(rows: Sequence[WorkerReport]) -> str:
    """Return a heading and one line for each worker; empty without rows."""
    if not rows:
        return ""
    heading = ("worker", "where", "pid", "state", "done", "restarts", "for", "task")
    return "\n".join(table([heading, *map(_cells, rows)], left=(0, 1, len(heading) - 1)))


_MOST = 40  # characters of a task in the table


def _cells(row: WorkerReport) -> tuple[str, ...]:
    spent = task = "-"
    if row.seconds is not None:
        spent, task = _seconds(row.seconds), " ".join(brief(row.index).split())
        task = task if len(task) <= _MOST else f"{task[: _MOST - 3]}..."
    pid = "-" if row.pid is None else str(row.pid)
    counts = f"{row.done:,}", f"{row.restarts:,}"
    return str(row.worker), row.name, pid, row.state, *counts, spent, task


def _seconds(seconds: float) -> str:
    """Word a time: ``"0.42 s"``, ``"12.3 s"``, ``"5 min 7 s"``, ``"2 h 3 min"``."""
    if seconds < 10:
        return f"{seconds:.2f} s"
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"
