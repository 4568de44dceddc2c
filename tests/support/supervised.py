"""Stages with scripted workers that die or run over, for the tests of supervision."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from hybridloader import RestartPolicy
from hybridloader.engine import ByReference, Done, Event, Exited, Ready, Task, WorkerSpec
from hybridloader.engine.scheduler import BYTES, PAGES, TASKS, ReorderLimit, least_busy
from hybridloader.engine.stage import QUICK, START, Stage
from hybridloader.fetching.readers import MapFetch
from support.scripted import FakeClock, ScriptedBackend, ScriptedCrew

__all__ = ["BYTES", "PAGES", "QUICK", "START", "TASKS", "ReorderLimit", "Stage"]
__all__ += ["least_busy"]

KILLED = "was killed by signal SIGKILL (9)"


class Processes(ScriptedBackend):
    """Scripted workers that can be killed, as processes can."""

    in_process = False


def stage(
    script: Sequence[Any],
    *,
    workers: int = 1,
    lookahead: int = 4,
    policy: RestartPolicy | None = RestartPolicy(),  # noqa: B008  # it is frozen
    in_turn: bool = False,
    **more: Any,
) -> tuple[Stage, ScriptedBackend]:
    chosen = Processes(script)
    fetch: Any = (InTurn if in_turn else MapFetch)([], list, batched=True)
    spec = WorkerSpec("scripted", workers, fetch)
    made = Stage(chosen, spec, lookahead=lookahead, on_worker_death=policy, **more)
    return made, chosen


class InTurn(MapFetch):
    in_turn = True


def dead(worker: int = 0, **known: Any) -> Exited:
    return Exited(worker, KILLED, **known)


def answer(*seqs: int, worker: int = 0, position: int = 0) -> list[Event]:
    return [Done(worker, seq, ByReference(f"value {seq}"), 0.0, position) for seq in seqs]


def ready(*workers: int) -> list[Event]:
    return [Ready(worker) for worker in workers or (0,)]


def tasks(backend: ScriptedBackend) -> list[tuple[int, int]]:
    crew = backend.crews[0]
    return [(worker, sent.seq) for worker, sent in crew.sent if isinstance(sent, Task)]


def passing(clock: FakeClock, seconds: float, *events: Event) -> Callable[[Any], Sequence[Event]]:
    def step(_: ScriptedCrew) -> Sequence[Event]:
        clock.now += seconds
        return events

    return step
