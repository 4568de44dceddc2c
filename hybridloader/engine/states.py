"""States of a stage's run and of its workers, and the moves between them.

Each of the two state machines is a table: (state, event) -> state. A pair that is not in its table is
illegal: it raises `IllegalTransition` and changes nothing.
"""

from __future__ import annotations

from enum import Enum

from hybridloader.errors import IllegalTransition


class _State(Enum):
    __hash__ = object.__hash__  # `Enum.__hash__` is a Python function, called for each look-up


class RunState(_State):
    NEW = "NEW"
    RUNNING = "RUNNING"
    DRAINING = "DRAINING"
    IDLE = "IDLE"
    CLOSING = "CLOSING"
    CLOSED = "CLOSED"


class WorkerState(_State):
    STARTING = "STARTING"
    READY = "READY"
    EXHAUSTED = "EXHAUSTED"
    ABSENT = "ABSENT"
    STOPPING = "STOPPING"
    GONE = "GONE"


# fmt: off
RUN_TABLE: dict[tuple[RunState, str], RunState] = {
    (RunState.NEW,      "begin"):   RunState.RUNNING,
    (RunState.NEW,      "fault"):   RunState.CLOSING,
    (RunState.NEW,      "close"):   RunState.CLOSING,
    (RunState.RUNNING,  "begin"):   RunState.RUNNING,
    (RunState.RUNNING,  "ended"):   RunState.DRAINING,
    (RunState.RUNNING,  "fault"):   RunState.CLOSING,
    (RunState.RUNNING,  "close"):   RunState.CLOSING,
    (RunState.DRAINING, "begin"):   RunState.RUNNING,
    (RunState.DRAINING, "drained"): RunState.IDLE,
    (RunState.DRAINING, "fault"):   RunState.CLOSING,
    (RunState.DRAINING, "close"):   RunState.CLOSING,
    (RunState.IDLE,     "begin"):   RunState.RUNNING,
    (RunState.IDLE,     "fault"):   RunState.CLOSING,
    (RunState.IDLE,     "close"):   RunState.CLOSING,
    (RunState.CLOSING,  "fault"):   RunState.CLOSING,
    (RunState.CLOSING,  "close"):   RunState.CLOSING,
    (RunState.CLOSING,  "gone"):    RunState.CLOSED,
    (RunState.CLOSED,   "close"):   RunState.CLOSED,
}

WORK_TABLE: dict[tuple[WorkerState, str], WorkerState] = {
    (WorkerState.STARTING,  "ready"):     WorkerState.READY,
    (WorkerState.STARTING,  "begin"):     WorkerState.STARTING,
    (WorkerState.STARTING,  "replaced"):  WorkerState.STARTING,
    (WorkerState.STARTING,  "stop"):      WorkerState.STOPPING,
    (WorkerState.STARTING,  "exited"):    WorkerState.GONE,
    (WorkerState.READY,     "exhausted"): WorkerState.EXHAUSTED,
    (WorkerState.READY,     "begin"):     WorkerState.READY,
    (WorkerState.READY,     "replaced"):  WorkerState.STARTING,
    (WorkerState.READY,     "stop"):      WorkerState.STOPPING,
    (WorkerState.READY,     "exited"):    WorkerState.GONE,
    (WorkerState.EXHAUSTED, "exhausted"): WorkerState.EXHAUSTED,
    (WorkerState.EXHAUSTED, "begin"):     WorkerState.READY,
    (WorkerState.EXHAUSTED, "replaced"):  WorkerState.ABSENT,  # restarted only with the next epoch
    (WorkerState.EXHAUSTED, "stop"):      WorkerState.STOPPING,
    (WorkerState.EXHAUSTED, "exited"):    WorkerState.GONE,
    (WorkerState.ABSENT,    "begin"):     WorkerState.STARTING,
    (WorkerState.ABSENT,    "stop"):      WorkerState.GONE,
    (WorkerState.STOPPING,  "ready"):     WorkerState.STOPPING,
    (WorkerState.STOPPING,  "exhausted"): WorkerState.STOPPING,
    (WorkerState.STOPPING,  "stop"):      WorkerState.STOPPING,
    (WorkerState.STOPPING,  "exited"):    WorkerState.GONE,
    (WorkerState.GONE,      "stop"):      WorkerState.GONE,
}
# fmt: on

ACTIVE = (WorkerState.READY, WorkerState.STARTING)  # states of workers that get tasks


def run_after(state: RunState, event: str) -> RunState:
    """Return the state of a run after `event`."""
    try:
        return RUN_TABLE[state, event]
    except KeyError:
        raise IllegalTransition(f"run is {state.value}: {event!r} is illegal") from None


def worker_after(worker: int, state: WorkerState, event: str) -> WorkerState:
    """Return the state of `worker`, which is in `state`, after `event`."""
    try:
        return WORK_TABLE[state, event]
    except KeyError:
        raise IllegalTransition(f"worker {worker} is {state.value}: {event!r} is illegal") from None
