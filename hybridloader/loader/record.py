"""Records of loaders: data about a loader outside its attributes, as long as the loader lives.

A record is found by the loader's identity. It is not an attribute, because frameworks watch, copy and
pickle the attributes of a loader. It is not in a `weakref.WeakKeyDictionary`, because a user's subclass
may define ``__eq__``: without ``__hash__`` it would be refused, and equal loaders would share a record.
"""

from __future__ import annotations

import itertools
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from hybridloader._support.store_use import uses
from hybridloader._support.threads import Waits
from hybridloader._support.user_objects import attribute
from hybridloader.engine.contract import Backend
from hybridloader.engine.feed import RelayQueue
from hybridloader.engine.messages import Fetch
from hybridloader.engine.stage import Stage
from hybridloader.fetching.on_error import ErrorBudget
from hybridloader.loader.progress import Progress
from hybridloader.observe.figures import Faults, LoopRecord, Recording, StageRecord
from hybridloader.observe.headroom_trials import KeptBatches
from hybridloader.observe.measures import BRIEF, SourceTimes, record_of_relay
from hybridloader.observe.observation import Observation, Observe
from hybridloader.observe.stats import Stats, stats_of
from hybridloader.observe.tracing import traced

STAGE, SAMPLER = "DataLoader", "sampler"
"""Names of the rows of the stage and of the sampler."""


class LoaderObservation(Observation):
    """Observation of the latest epoch of an iterator, whose stage has `workers` and a `window` of tasks.

    `number` is that of the loader; `options` are those of `StageRecord`. The observation outlives the
    iterator, and refers to no loader, sampler, batch or worker.
    """

    def __init__(
        self,
        observe: bool | Observe,
        number: int,
        backend: Backend,
        fetch: Fetch,
        workers: int,
        window: int,
        options: Mapping[str, Any],
    ) -> None:
        super().__init__(observe, STAGE, number)
        self.stage = self.measures(STAGE, number, backend, fetch, workers, window, options)
        self._batch_size: int | None = None
        # All the other mutable state, of the present epoch:
        self._running: weakref.ref[Stage] | None = None
        self._sampler: SourceTimes | None = None
        self._progress: Progress | None = None
        self._before = 0  # batches of this epoch that an earlier run returned
        self._budget: ErrorBudget | None = None
        self._pin: tuple[str, RelayQueue, Waits, float] | None = None

    def of(self, iterator: object, batch_size: int | None) -> None:
        """Observe `iterator`, and stop counting when it is collected."""
        self._batch_size = batch_size
        finalizer = weakref.finalize(iterator, self.end)
        finalizer.atexit = False

    def begin_again(self) -> None:
        """Begin another epoch; reset all measurements."""
        self.stage.begin_again()
        self._stores = uses()
        self.loop = self._new_loop()
        self._sampler = self._progress = self._budget = self._pin = None
        self.begin()

    def begun(self, stage: Stage, progress: Progress, budget: ErrorBudget | None) -> None:
        """Note that ``iter()`` returns; its time counts as a wait of the loop."""
        self._running, self._progress, self._budget = weakref.ref(stage), progress, budget
        self._before = progress.yielded
        self.stage.of_loop(self.loop)
        if budget is not None:
            self.budget(budget)
        self.loop.note(self.loop.began, time.perf_counter())

    def pinned(self, stage: str, queue: RelayQueue, waits: Waits) -> None:
        """Note that a thread will pin batches, or copy them to a device, and put them into `queue`.

        It notes its `waits` for the stage.
        """
        self._pin = stage, queue, waits, time.perf_counter()
        self.relay(queue)
        traced(self.trace, "wait", waits)

    def drawn(self, source: Iterator[Any]) -> Iterator[Any]:
        """Return the indices of `source`, some of which are timed."""
        self._sampler = SourceTimes(BRIEF)
        traced(self.trace, SAMPLER, self._sampler)
        return self._sampler.timed(source)

    def ended(self, *, finished: bool) -> None:
        self.end()
        super().ended(finished=finished)

    def stats(self) -> Stats:
        # Another thread may be beginning an epoch, in which these are None at first.
        progress, sampler, pin = self._progress, self._sampler, self._pin
        if progress is not None:
            self.loop.items = max(0, progress.yielded - self._before)
        loop = self.loop.record()
        queued = self._queued()
        stages = []
        if sampler is not None:
            stages.append(sampler.record(SAMPLER, loop.items + queued, loop))
        stages.append(self._row_of_stage(loop, queued, 0.0 if sampler is None else sampler.waited))
        if pin is not None:
            name, queue, waits, began = pin
            ended = max(loop.ended, began)
            stages.append(record_of_relay(name, queue, began, ended, waits=[waits]))
        return self._stats_of(tuple(stages), self._batch_size, self.stage.stores)

    def _queued(self) -> int:
        stage = None if self._running is None else self._running()
        return 0 if stage is None or stage.closed else stage.queued

    def _row_of_stage(self, loop: LoopRecord, queued: int, asking: float) -> StageRecord:
        """Return the row of the stage; `asking` are the seconds that the sampler took."""
        measures, budget = self.stage, self._budget
        records = () if budget is None else tuple(budget.records)
        replaced = sum(record.replaced for record in records)
        first = loop.ended if measures.first is None else measures.first
        # Worker seconds: until the start, and without work.
        starting = measures.workers * min(max(0.0, first - loop.began), loop.ended - loop.began)
        whole = measures.workers * (loop.ended - loop.began)
        idle = max(0.0, whole - starting - measures.busy - measures.sending)
        if measures.backend.in_caller:  # the loop's thread does the work
            idle = 0.0
        starved = min(idle, measures.workers * asking)
        faults = Faults(len(records) - replaced, replaced)
        return replace(
            measures.record(STAGE, loop.items, queued, faults, reads=True),
            busy=measures.busy,
            starved=starved,
            blocked=idle - starved,
            other=max(0.0, whole - measures.busy - idle),
        )


def nothing_observed() -> Stats:
    """Return the statistics of a loader that was never iterated."""
    return stats_of(Recording((), LoopRecord(0.0, 0.0)))


_numbers = itertools.count()


class LoaderRecord:
    """Record of one loader."""

    __slots__ = (
        *("begun", "budget", "given", "kept", "loaded", "number", "observation", "progress"),
        "report",
    )

    def __init__(self) -> None:
        self.begun: int | None = None
        """Number of the epoch that began last; None before, and after another epoch was announced."""
        self.progress: Progress | None = None
        """Progress of the latest epoch."""
        self.loaded: Mapping[str, Any] | None = None
        """Loaded state, until the next epoch begins."""
        self.given: Any = None
        """State as passed to `StatefulDataLoader`, and the error if it could not be loaded."""
        self.budget: ErrorBudget | None = None
        """Error records of the latest epoch with an `on_error`."""
        self.observation: LoaderObservation | None = None
        """Observation of the latest iterator, if it is observed."""
        self.kept: KeptBatches | None = None
        """Batches that are returned again, under ``hybridloader run --headroom``."""
        self.report: weakref.WeakMethod[Callable[[], str]] | None = None
        """Method `report` of the latest iterator."""
        self.number = next(_numbers)
        """Number of the loader, by which traces and watches identify it."""


_records: dict[int, tuple[weakref.ref[Any], LoaderRecord]] = {}


def record_of(loader: Any) -> LoaderRecord:
    """Return the record of `loader`. Any thread may call it, and any may collect the loader."""
    place = id(loader)  # no other loader's before `forget` was called: memory is freed after that
    entry = _records.get(place)
    if entry is None:

        def forget(_: weakref.ref[Any]) -> None:
            _records.pop(place, None)

        entry = _records.setdefault(place, (weakref.ref(loader, forget), LoaderRecord()))
    return entry[1]


def announce(loader: Any, epoch: int) -> None:
    """Set the number of the next epoch, as an attribute of the loader that is pickled with it."""
    loader._epoch = epoch
    record_of(loader).begun = None


def upcoming(loader: Any, record: LoaderRecord) -> int:
    """Return the number of the next epoch: the announced one, or the one after the previous epoch."""
    begun = record.begun
    # 0 for a torch loader, which has no such attribute.
    return int(attribute(loader, "_epoch", 0)) if begun is None else begun + 1
