"""Scripted recordings of runs whose bottleneck is known, and the parts of figures and verdicts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from hybridloader._support.store_use import StoreUse
from hybridloader.observe.figures import (
    CoreUse,
    CoroutineUse,
    Figures,
    LoopRecord,
    Recording,
    Span,
    StageRecord,
    Wait,
    between,
    length,
    percentile,
    stall_by_stage,
    within,
)
from hybridloader.observe.measures import CoreUsage, StageMeasures
from hybridloader.observe.observation import SHOWN, Tables
from hybridloader.observe.stats import LOOP, stats_of
from hybridloader.observe.tracing import Event, chrome_events
from hybridloader.observe.verdict import advice_on, for_start, judge

__all__ = ["LOOP", "CoreUsage", "CoroutineUse", "Figures", "StoreUse", "advice_on", "between"]
__all__ += ["for_start", "judge", "length", "percentile", "stall_by_stage", "stats_of"]
__all__ += ["SHOWN", "Event", "Tables", "chrome_events"]
__all__ += ["within"]

IDLE = CoreUse(8.0, 1.0, 0.9)
"""A machine with cores to spare."""


def stage(name: str = "map(f)", workers: int = 2, load: float = 1.0, **others: Any) -> StageRecord:
    """A stage that ran from second 0 to second 10, always with the same load."""
    busy = 10.0 * workers * load
    idle = 10.0 * workers - busy
    known: dict[str, Any] = {
        "backend": "threads",
        "items": 100,
        "busy": busy,
        "blocked": idle,
        "cpu": busy,
        "wait_for_core": 0.0,
        "spans": tuple(Span(0.0, 10.0, load / workers) for _ in range(workers)),
        "first": 0.0,
        "full": 0.5,
        "options": {"backend": "threads", "num_workers": workers, "persistent_workers": False},
    }
    return StageRecord(name, num_workers=workers, **{**known, **others})


def loop(step: float = 0.05, wait: float = 0.05, **others: Any) -> LoopRecord:
    """A loop of 10 seconds that waits `wait` seconds before each step."""
    waits, at = [], 0.0
    while at < 10.0:
        waits.append(Wait(at, min(10.0, at + wait)))
        at += wait + step
    known: dict[str, Any] = {
        "items": len(waits),
        "waited": sum(one.ended - one.began for one in waits),
        "waits": tuple(waits),
    }
    if wait <= 0:
        known |= {"waits": (), "brief": len(waits), "waited": 0.0}
    return LoopRecord(0.0, 10.0, **{**known, **others})


def recording(*stages: StageRecord, cores: CoreUse | None = IDLE, **of_loop: Any) -> Recording:
    return Recording(stages, loop(**of_loop), cores)


def slept(record: StageRecord) -> StageRecord:
    """The same stage, whose work took hardly any CPU time."""
    return replace(record, cpu=0.01 * record.busy)


def free_cores_are_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Record of real runs that cores were free: no verdict is then on what else this machine does."""
    record: Callable[..., StageRecord] = StageMeasures.record

    def free(*arguments: Any, **keywords: Any) -> StageRecord:
        return replace(record(*arguments, **keywords), wait_for_core=0.0)

    monkeypatch.setattr(CoreUsage, "use", lambda *_: CoreUse(8.0, 1.0, 1.0))
    monkeypatch.setattr(StageMeasures, "record", free)
