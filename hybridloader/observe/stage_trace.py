"""Trace of one stage: the slices that its workers report, and those of the results' consumer."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace
from typing import Any

from hybridloader._support.user_objects import described, repr_of
from hybridloader.engine.messages import Done, Result
from hybridloader.engine.meter import MEASURES
from hybridloader.engine.slices import LONG, SEEN, TASK, TASKS, SliceReport, Slices
from hybridloader.fetching.on_error import Skipped
from hybridloader.observe.stage_measures import StageMeasures
from hybridloader.observe.thread_times import BRIEF, LoopWaits
from hybridloader.observe.trace_files import Track
from hybridloader.observe.tracing import SLICES, Trace, traced


class StageTrace(StageMeasures):
    """Measures of one stage that also go into a trace. `key` distinguishes stages of one name."""

    def __init__(
        self, trace: Trace, name: str, key: Hashable, *of_the_stage: Any, each: bool
    ) -> None:
        self._trace, self._name = trace, trace.name_of(name, key)
        # All the other mutable state:
        self._loop: LoopWaits | None = None  # the loop that takes the results
        self._long = True  # each task has separate slices
        super().__init__(*of_the_stage, each=each)
        self.metering = replace(self.metering, slices=SLICES)

    def begin_again(self) -> None:
        super().begin_again()
        traced(self._trace, "wait", self.waits)

    def of_loop(self, loop: LoopWaits) -> None:
        self._loop = loop

    def came(self, event: Result, since: float) -> None:
        measures = None if event.extras is None else event.extras.get(MEASURES)
        super().came(event, since)
        if measures is None or not isinstance(event, Done):
            return
        for each in (measures, *measures.others):
            if each.slices is None:
                continue
            track = self._take_in(each.slices)
            if each.retried:
                self._trace.instant("retried", track, stage=self._name, calls=each.retried)
        self._long = self.opens_slowly = event.seconds >= LONG
        if self._loop is not None:  # if tasks are long, it notes each of its waits
            self._loop.brief = 0.0 if self._long else BRIEF

    def opened(self, seq: int, began: float, ended: float) -> None:
        super().opened(seq, began, ended)
        self.opens_slowly |= self._long
        if not self.backend.in_caller:
            self._trace.slice("open", began, ended, task=seq)

    def replaced(self, worker: int, cause: str | None) -> None:
        super().replaced(worker, cause)
        self._trace.instant("worker restarted", stage=self._name, worker=worker, cause=cause)

    def raised(self, worker: int, seq: int, error: BaseException) -> None:
        self._trace.instant(
            "error", stage=self._name, worker=worker, task=seq, message=described(error)
        )

    def _take_in(self, report: SliceReport) -> Track:
        """Add the slices that a worker reported; return its track."""
        trace, name = self._trace, self._name
        worker = f"{name} worker {report.worker}"
        own = (
            trace.here()
            if self.backend.in_caller
            else (report.process, f"{worker}/{report.thread}")
        )
        trace.name_track(own, worker, f"{worker} ({self.backend.name})")
        trace.drop(report.dropped)
        for kind, began, ended, thread, number in report.slices:
            track = own
            if thread != report.thread:
                track = report.process, f"{worker}/{thread}"
                trace.name_track(track, f"{worker}, more threads", worker)
            if kind == TASK:
                trace.slice(kind, began, ended, track, task=number)
            elif kind == TASKS:
                trace.slice(kind, began, ended, track, tasks=number)
            else:
                trace.slice(kind, began, ended, track)
        return own


class LocalSlices(Slices):
    """Slices of functions that a thread of this process calls, added to the trace directly."""

    def __init__(self, trace: Trace) -> None:
        super().__init__(1)
        self._trace = trace

    def add(self, name: str, began: float, ended: float, number: int = -1) -> None:
        if ended - began >= SEEN:
            self._trace.slice(name, began, ended)


def skipped_in(trace: Trace, record: Skipped) -> None:
    """Note in the trace that a sample was skipped or replaced."""
    place = {"stage": record.stage, "worker": record.worker, "index": record.index}
    trace.instant(
        "replaced" if record.replaced else "skipped", **place, error=repr_of(record.error)
    )
