"""Observation of one loader or pipeline, which feeds statistics, traces, tables and reports.

An iterator makes one only if `observe` asks for it or a trace or `Tables` run at that time. Without one
no clock is read, no worker has a meter, and no stage has an observer.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable
from typing import Any, TextIO

from hybridloader._support.store_use import StoreUse, start_counting, together, uses, uses_since
from hybridloader._support.threads import turn_at_gil
from hybridloader.engine.feed import RelayQueue
from hybridloader.fetching.on_error import ErrorBudget
from hybridloader.observe.figures import Recording, StageRecord
from hybridloader.observe.measures import LoopWaits, StageMeasures
from hybridloader.observe.stats import Stats, stats_of
from hybridloader.observe.tracing import (
    LOOP,
    ProgramBlock,
    StageTrace,
    Trace,
    skipped_in,
    traced,
)


def is_observed(observe: bool) -> bool:
    """Return True if an iterator that is made now is observed: by its user, a trace or tables."""
    return observe or Trace.running is not None or Tables.running is not None


SHOWN = 12  # maximum number of loaders in the tables of a program, the latest ones


class Tables(ProgramBlock):
    """Tables of all loaders and pipelines whose iterators are made while it runs; for one use.

    Its end writes them to `stream`, by default standard error.
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        super().__init__()
        self._stream = sys.stderr if stream is None else stream
        # All the mutable state, under the lock: statistics by name, as a function and as they were last.
        self._seen: dict[str, tuple[Callable[[], Stats], Stats | None]] = {}

    def see(self, name: str, stats: Callable[[], Stats]) -> None:
        """Have a table of the result of `stats`, in place of an earlier one of this name."""
        with self._lock:
            self._seen.pop(name, None)
            self._seen[name] = stats, None  # at the end: the latest
            if len(self._seen) > SHOWN:
                del self._seen[next(iter(self._seen))]

    def look(self, name: str) -> None:
        """Remember the statistics of this name as of now."""
        # The run of a pipeline is gone, or another thread begins an epoch.
        with contextlib.suppress(Exception):
            stats, _ = self._seen[name]
            latest = stats()
            with self._lock:
                if name in self._seen:
                    self._seen[name] = stats, latest

    def _end(self, error: BaseException | None) -> None:
        for name in self._seen.copy():
            self.look(name)
        tables = (
            f"hybridloader: {name}:\n{latest}\n"
            for name, (_, latest) in self._seen.copy().items()
            if latest is not None
        )
        try:
            self._stream.write("".join(tables))
            self._stream.flush()
        except (OSError, ValueError):  # the terminal is gone
            if error is None:
                raise


class Observation(ABC):
    """Observation of one iterator, or of one pipeline's epochs. `stats` is for any thread.

    `key` distinguishes those of one name in tables. It refers to no iterator and no worker.
    """

    def __init__(self, name: str, key: Hashable) -> None:
        self.trace, self._tables = Trace.running, Tables.running
        if self._tables is not None:
            self._name = self._tables.name_of(name, key)
        # All the mutable state:
        self._stores = uses()  # as they were before
        self.loop = self._new_loop()
        weakref.finalize(self, start_counting()).atexit = False

    @abstractmethod
    def stats(self) -> Stats:
        """Return the statistics until now."""

    def _stats_of(
        self, stages: tuple[StageRecord, ...], reported: Iterable[StoreUse] = ()
    ) -> Stats:
        """Return the statistics of `stages`, and of stores, with the use `reported` by workers."""
        processes = sum(stage.cpu or 0.0 for stage in stages if not stage.in_process)
        loop, cores = self.loop.record(), self.loop.cores.use(processes)
        stores = together((*uses_since(self._stores), *reported))
        return stats_of(Recording(stages, loop, cores, turn_at_gil(), stores))

    # -- what is observed ----------------------------------------------------------------------------

    def _new_loop(self) -> LoopWaits:
        loop = LoopWaits()
        first, then = LOOP
        traced(self.trace, then, loop, first)
        return loop

    def measures(
        self, name: str, key: Hashable, *of_the_stage: Any, each: bool = False
    ) -> StageMeasures:
        """Return the observer of a stage; `key` distinguishes stages of one name in a trace.

        The other arguments are those of `StageMeasures`.
        """
        if self.trace is None:
            return StageMeasures(*of_the_stage, each=each)
        return StageTrace(self.trace, name, key, *of_the_stage, each=each)

    def relay(self, queue: RelayQueue) -> None:
        """Note each sleep at a relay's queue; to be called before the relay's thread starts."""
        queue.blocks.brief = queue.waits.brief = 0.0
        traced(self.trace, "wait for room", queue.blocks)
        traced(self.trace, "wait", queue.waits)

    def budget(self, budget: ErrorBudget) -> None:
        """Add skipped and replaced items to the trace, if one runs."""
        if self.trace is not None:
            budget.on_record = functools.partial(skipped_in, self.trace)

    # -- begin and end of an epoch, on the thread of the loop ----------------------------------------

    def begin(self) -> None:
        """Begin an epoch of `loop`; `stats` may be asked for from now on."""
        if self._tables is not None:
            self._tables.see(self._name, self.stats)

    def ended(self) -> None:
        """Note that the epoch has returned all its items, or is left; any thread may call it."""
        if self._tables is not None:
            self._tables.look(self._name)

    def end(self) -> None:
        """Stop counting."""
        self.loop.end()
