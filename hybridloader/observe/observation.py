"""Observation of one loader or pipeline, which feeds statistics, traces, watches and reports.

An iterator makes one only if `observe` asks for it or a trace or a watch runs at that time. Without one
no clock is read, no worker has a meter, and no stage has an observer.
"""

from __future__ import annotations

import functools
import weakref
from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterable, Mapping
from typing import Any, NamedTuple

from hybridloader._support.gil import turn_at_gil
from hybridloader._support.store_use import (
    StoreUse,
    start_counting,
    together,
    uses,
    uses_since,
)
from hybridloader.engine.contract import Backend
from hybridloader.engine.fetcher import Fetch
from hybridloader.engine.relay import RelayQueue, RelaySleeps
from hybridloader.fetching.on_error.error_budget import ErrorBudget
from hybridloader.observe.recording import Recording, StageRecord
from hybridloader.observe.reporting import Follower, Observe, Reporter
from hybridloader.observe.stage_measures import StageMeasures
from hybridloader.observe.stats import Stats, stats_of
from hybridloader.observe.thread_times import LoopWaits
from hybridloader.observe.tracing import LOOP, StageTrace, Trace, skipped_in, traced
from hybridloader.observe.watching import Watch, WatchedEpochs


class Asked(NamedTuple):
    """Consumers of an observation: a trace, a watch, reports."""

    policy: Observe | None
    trace: Trace | None
    watch: Watch | None


def asked(observe: bool | Observe) -> Asked | None:
    """Return the consumers for an iterator that is made now; None if there are none."""
    trace, watch = Trace.running(), Watch.running()
    if trace is None and watch is None and not observe:
        return None
    return Asked(observe if isinstance(observe, Observe) else None, trace, watch)


class Observation(ABC):
    """Observation of one iterator, or of one pipeline's epochs. `stats` is for any thread.

    A watch shows it as `name` and recognises it by `key`. It refers to no iterator and no worker.
    """

    def __init__(self, asked: Asked, name: str, key: Hashable) -> None:
        self.trace = asked.trace
        self._followers: list[Follower] = []
        if asked.watch is not None:
            self._followers.append(WatchedEpochs(asked.watch, name, key))
        if asked.policy is not None:
            self._followers.append(Reporter(asked.policy))
        # All the mutable state:
        self._stores = uses()  # as they were before
        self.loop = self._new_loop()
        weakref.finalize(self, start_counting()).atexit = False

    @abstractmethod
    def stats(self) -> Stats:
        """Return the statistics until now."""

    def _stats_of(
        self,
        stages: tuple[StageRecord, ...],
        batch_size: int | None = None,
        reported: Iterable[StoreUse] = (),
    ) -> Stats:
        """Return the statistics of `stages`, and of stores, with the use `reported` by workers."""
        processes = [
            stage.cpu for stage in stages if not stage.in_process and stage.cpu is not None
        ]
        loop, cores = self.loop.record(), self.loop.cores.use(sum(processes))
        stores = together((*uses_since(self._stores), *reported))
        return stats_of(Recording(stages, loop, cores, turn_at_gil(), batch_size, stores))

    # -- what is observed ----------------------------------------------------------------------------

    def _new_loop(self) -> LoopWaits:
        loop = LoopWaits()
        first, then = LOOP
        traced(self.trace, then, loop, first)
        return loop

    def measures(
        self,
        name: str,
        key: Hashable,  # distinguishes stages of one name in a trace
        backend: Backend,
        fetch: Fetch,
        workers: int,
        window: int,
        options: Mapping[str, Any] | None = None,
        *,
        each: bool = False,
    ) -> StageMeasures:
        """Return the observer of a stage; the arguments are those of `StageMeasures`."""
        of_the_stage = backend, fetch, workers, window, options
        if self.trace is None:
            return StageMeasures(*of_the_stage, each=each)
        return StageTrace(self.trace, name, key, *of_the_stage, each=each)

    def relay(self, queue: RelayQueue) -> None:
        """Record the sleeps at a relay's queue; to be called before the relay's thread starts."""
        sleeps = queue.sleeps = RelaySleeps(queue.items)
        traced(self.trace, "wait for room", sleeps.blocks)
        traced(self.trace, "wait", sleeps.waits)

    def budget(self, budget: ErrorBudget) -> None:
        """Add skipped and replaced items to the trace, if one runs."""
        if self.trace is not None:
            budget.on_record = functools.partial(skipped_in, self.trace)

    # -- begin and end of an epoch, on the thread of the loop ----------------------------------------

    def begin(self) -> None:
        """Begin an epoch of `loop`; the followers may ask for `stats` from now on."""
        for follower in self._followers:
            follower.begin(self.loop, self.stats)

    def due(self) -> None:
        """Have the followers act: `loop.due` has come."""
        for follower in self._followers:
            follower.due()

    def ended(self, *, finished: bool) -> None:
        """Note that the epoch has returned all its items (`finished`), or returns no more."""
        for follower in self._followers:
            follower.end(finished=finished)

    def end(self) -> None:
        """Stop counting."""
        self.loop.end()
