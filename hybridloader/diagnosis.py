"""The words of errors: which stage, which worker, which indices, what happened, what to try."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping, Sequence
from typing import Any

from hybridloader.contract import WorkerHandle
from hybridloader.scheduler import Fault

_short = reprlib.Repr()
_short.maxlist = _short.maxtuple = 8
_short.maxother = _short.maxstring = 120

_CAUSES = {
    "SIGKILL": (
        "Likely the system ran out of memory, or somebody killed it. "
        "Try fewer workers, or backend='threads', which shares one copy of the dataset."
    ),
    "SIGSEGV": (
        "Native code crashed in the worker. To find it, run with backend='inline' under a debugger."
    ),
    "SIGBUS": (
        "Memory that was promised could not be had: a full shared-memory mount or memory limit."
    ),
    "SystemExit": "The dataset or a function it uses called sys.exit().",
}


def name_of(handles: Sequence[WorkerHandle], worker: int) -> str:
    """``"worker 1 (process, pid 4711)"``, as far as it is known."""
    if worker >= len(handles):
        return f"worker {worker}"
    handle = handles[worker]
    return f"worker {worker} ({handle.name}, pid {handle.pid})"


def place(stage: str, worker: str, index: Any, doing: str) -> str:
    """Where an exception came from, in one line."""
    return f"In stage {stage!r}, {worker}, {doing} {_short.repr(index)}."


def death(stage: str, worker: str, fault: Fault, indices: Mapping[int, Any]) -> str:
    """What to say of a worker that ended without being asked to."""
    held = [_short.repr(indices.get(seq)) for seq in fault.in_flight]
    tasks = f"It was to fetch {'; '.join(held[:4])}" if held else "It had no task"
    more = f"; and {len(held) - 4} tasks more" if len(held) > 4 else ""
    advice = next((f" {text}" for word, text in _CAUSES.items() if word in fault.cause), "")
    return f"In stage {stage!r}, {worker} {fault.cause}. {tasks}{more}.{advice}"


def late(stage: str, workers: Sequence[str], indices: Sequence[Any], timeout: float) -> str:
    """What to say when no result came in time."""
    held = "; ".join(_short.repr(index) for index in indices[:4])
    who = ", ".join(dict.fromkeys(workers)) or "no worker"
    return (
        f"In stage {stage!r}, no result came within {timeout:g} seconds from {who}, "
        f"which was to fetch {held}. Calling next() again goes on waiting; a larger timeout= waits "
        f"longer; backend='inline' under a debugger shows where it is stuck."
    )
