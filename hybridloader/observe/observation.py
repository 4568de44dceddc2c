"""Observation of one loader or pipeline, which feeds statistics, traces, tables and reports.

An iterator makes one only if `observe` asks for it or a trace or `Tables` run at that time. Without one
no clock is read, no worker has a meter, and no stage has an observer.
"""

from __future__ import annotations

import contextlib
import functools
import math
import sys
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from time import perf_counter
from typing import Any, TextIO

from hybridloader._support.store_use import StoreUse, start_counting, together, uses, uses_since
from hybridloader._support.text import flag, function, seconds, warn
from hybridloader._support.threads import turn_at_gil
from hybridloader._support.user_objects import described
from hybridloader.engine.feed import RelayQueue, RelaySleeps
from hybridloader.fetching.on_error import ErrorBudget
from hybridloader.observe.figures import Recording, StageRecord
from hybridloader.observe.measures import LoopWaits, StageMeasures
from hybridloader.observe.stats import Stats, stats_of
from hybridloader.observe.tracing import (
    LOOP,
    ProgramBlock,
    StageTrace,
    Trace,
    numbered,
    skipped_in,
    traced,
)


@dataclass(frozen=True)
class Observe:
    """Policy of `observe`: a function that receives the statistics while your loop runs.

    The thread of your loop calls it between two batches and at the end of each epoch, so its time adds
    to the loop's. If it raises, one warning reports the first error and the loop continues.

    Parameters
    ----------
    on_stats
        Function of one `Stats`.
    every
        Minimum number of seconds between two calls.

    Raises
    ------
    TypeError, ValueError
        `on_stats` is not callable, or `every` is not above 0.

    Examples
    --------
    >>> from hybridloader import DataLoader, Observe
    >>> seen = []
    >>> loader = DataLoader(range(6), 2, observe=Observe(seen.append, every=10.0))
    >>> for batch in loader:
    ...     pass
    >>> seen[-1].items
    3
    """

    on_stats: Callable[[Stats], object]
    every: float = 10.0

    def __post_init__(self) -> None:
        function("on_stats", self.on_stats, "a function that takes one Stats")
        seconds("every", self.every, above=True)


def check_observe(value: bool | Observe) -> None:
    """Check the `observe` of a loader or a pipeline. Raises `TypeError`."""
    if not isinstance(value, Observe):
        flag("observe", value)


def is_observed(observe: bool | Observe) -> bool:
    """Return True if an iterator that is made now is observed: by its user, a trace or tables."""
    return bool(observe) or Trace.running() is not None or Tables.running() is not None


SHOWN = 12  # maximum number of loaders in the tables of a program, the latest ones


class _Seen:
    """Loader or pipeline with a table, and the statistics of its latest epoch."""

    def __init__(self, name: str, stats: Callable[[], Stats]) -> None:
        self.name, self.stats = name, stats
        self.latest: Stats | None = None

    def look(self) -> None:
        """Remember the statistics as of now."""
        # The run of a pipeline is gone, or another thread begins an epoch.
        with contextlib.suppress(Exception):
            self.latest = self.stats()


class Tables(ProgramBlock):
    """Tables of all loaders and pipelines whose iterators are made while it runs; for one use.

    Its end writes them to `stream`, by default standard error.
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        super().__init__()
        self._stream = sys.stderr if stream is None else stream
        self._lock = threading.RLock()
        # All the mutable state, under that lock:
        self._seen: dict[Hashable, _Seen] = {}
        self._numbers: dict[str, int] = {}

    def see(self, name: str, key: Hashable, stats: Callable[[], Stats]) -> None:
        """Have a table of the result of `stats`, in place of an earlier one with this `key`."""
        with self._lock:
            before = self._seen.pop(key, None)
            if before is None:
                number = self._numbers[name] = self._numbers.get(name, 0) + 1
            name = numbered(name, number) if before is None else before.name
            self._seen[key] = _Seen(name, stats)  # at the end: the latest
            if len(self._seen) > SHOWN:
                del self._seen[next(iter(self._seen))]

    def look(self, key: Hashable) -> None:
        """Remember the statistics of `key` before it is closed."""
        with self._lock:
            seen = self._seen.get(key)
            if seen is not None:
                seen.look()

    def _end(self, error: BaseException | None) -> None:
        with self._lock:
            seen = [*self._seen.values()]
        for one in seen:
            one.look()
        tables = (f"hybridloader: {one.name}:\n{one.latest}\n" for one in seen if one.latest)
        try:
            self._stream.write("".join(tables))
            self._stream.flush()
        except (OSError, ValueError):  # the terminal is gone
            if error is None:
                raise


class Observation(ABC):
    """Observation of one iterator, or of one pipeline's epochs. `stats` is for any thread.

    Tables show it as `name` and recognize it by `key`. It refers to no iterator and no worker.
    """

    def __init__(self, observe: bool | Observe, name: str, key: Hashable) -> None:
        self._policy = observe if isinstance(observe, Observe) else None
        self.trace, self._tables = Trace.running(), Tables.running()
        self._name, self._key = name, key
        # All the mutable state:
        self._warned = False
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
        """Begin an epoch of `loop`; `stats` may be asked for from now on."""
        if self._tables is not None:
            self._tables.see(self._name, self._key, self.stats)
        if self._policy is not None:
            self.loop.due = perf_counter() + self._policy.every

    def due(self) -> None:
        """Report between two items: the time `loop.due` has come."""
        policy = self._policy
        if policy is None:
            return
        try:
            policy.on_stats(self.stats())
        except Exception as error:
            if not self._warned:
                self._warned = True
                warn(
                    f"on_stats raised {described(error)}. The loop continues and still calls it "
                    f"every {policy.every:g} s; later errors are not reported",
                    "on-stats",
                )
        finally:
            self.loop.due = perf_counter() + policy.every

    def ended(self, *, finished: bool) -> None:
        """Note that the epoch has returned all its items (`finished`), or returns no more.

        Any thread may call it for an epoch that is left. A finished epoch is reported once more.
        """
        if self._tables is not None:
            self._tables.look(self._key)
        if finished and self.loop.due < math.inf:
            try:
                self.due()
            finally:
                self.loop.due = math.inf

    def end(self) -> None:
        """Stop counting."""
        self.loop.end()
