"""The running forms of a pipeline's nodes: iterators over items, each pulled by one thread."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from hybridloader._support.attributes import close
from hybridloader._support.errors import IteratorClosed, NotReady, WorkerTimeout
from hybridloader.engine.diagnosis import name_of
from hybridloader.engine.feed import TaskBatching, is_forwarded
from hybridloader.engine.fetcher import TaskContext
from hybridloader.engine.payload import Payload
from hybridloader.engine.refresh import Change
from hybridloader.engine.relay import FINAL, Relay
from hybridloader.engine.scheduler import ACTIVE, Scheduler
from hybridloader.engine.stage import Stage
from hybridloader.fetching.on_error.error_budget import ErrorBudget
from hybridloader.fetching.on_error.places import alike
from hybridloader.fetching.on_error.result_queue import ResultQueue
from hybridloader.fetching.outcome import Note
from hybridloader.pipeline.running.stage_metrics import StageMetrics

_NO_RESULT = (*FINAL, NotReady, WorkerTimeout)
"""Errors of a stage that are not raised in the place of a result."""


class Depth:
    """Keeps a relay as deep as the batching of the stages around it are large: no deeper, because
    what waits takes memory; no flatter, because every portion would wake a thread for each item."""

    def __init__(self, relay: Relay, least: int) -> None:
        self._relay, self._least = relay, least
        self._around: list[TaskBatching] = []

    def follow(self, batching: TaskBatching) -> None:
        """From now on, `batching` matter too."""
        self._around.append(batching)
        self.adjust()

    def adjust(self) -> None:
        """Some of the batching have another size."""
        size = min(batching.size for batching in self._around)
        self._relay.queue.depth = max(self._least, 2 * size)


class StageItems(Iterator[Any]):
    """The results of a stage, one by one.

    Parameters
    ----------
    stage
        Gives the results of a task at a time.
    metrics
        Of that stage.
    items
        What the stage is fed from; closed when this is.
    batching
        What it is fed with.
    budget
        Of this pass, if there is a policy.
    """

    def __init__(
        self,
        stage: Stage,
        metrics: StageMetrics,
        items: Iterator[Any],
        batching: TaskBatching,
        budget: ErrorBudget | None = None,
    ) -> None:
        self._stage, self.metrics, self._items, self._budget = stage, metrics, items, budget
        self.batching = batching
        self.forwarded = False  # whether results may come unopened
        self.depths: list[Depth] = []  # of the relays before and behind
        metrics.learn = self._learn
        # All the mutable state:
        self._epoch = 0
        self._results: Iterator[Any] = iter(())
        self._queue = ResultQueue(budget, _places_of(stage, "working on"))

    def begin(self, changes: tuple[Change, ...]) -> None:
        """Begin a pass of the stage."""
        self._stage.begin(self.batching, None, changes)
        self._epoch = self._stage.epoch

    def _learn(self, items: int, seconds: float) -> None:
        before = self.batching.size
        self.batching.learn(items, seconds)
        if self.batching.size != before:
            for depth in self.depths:
                depth.adjust()

    def __next__(self) -> Any:
        return self._next(wait=True)

    def next_nowait(self) -> Any:
        """The next result if it is there. Raises `NotReady` if it is not."""
        return self._next(wait=False)

    def _next(self, wait: bool) -> Any:
        while True:
            for result in self._results:
                return result
            self.metrics.pulled()
            try:
                results = self._stage.pull(self._epoch, wait=wait)
            except (StopIteration, *_NO_RESULT):
                raise
            except Exception as error:  # of every item of the task, each in its place
                more = self._stage.items_failed - 1
                for _ in range(more):
                    self._queue.fail(alike(error))
                self._results = self._queue
                raise
            finally:
                self.metrics.turned_away()
            if self.forwarded and is_forwarded(results):
                self.metrics.items_out += results.count
                if self._budget is not None:
                    self._budget.count(results.count, (), None)
                if results.count:
                    return results
                _discard(results)
                continue
            notes = _notes_of(self._stage)
            if notes is not None:
                worker = self._stage.last.worker
                self.metrics.items_out += self._queue.add(results, notes, worker)
                self._results = self._queue
                continue
            self.metrics.items_out += len(results)
            if self._budget is not None:
                self._budget.count(len(results), (), None)
            self._results = iter(results)

    def close(self) -> None:
        """No more results are wanted in this pass; the workers stay for the next."""
        self._stage.interrupt(self._epoch)
        close(self._items)


def couple(items: StageItems, depth: Depth) -> None:
    """A relay beside a stage follows the size of its batching."""
    depth.follow(items.batching)
    items.depths.append(depth)


class ReaderItems(Iterator[Any]):
    """The items of several readers in turn, one of each, however they come.

    Whose turn it is depends on nothing but how many items each reader has, so the order is the same
    for any timing and for any number of items in a task. Reader ``k`` is worker ``k``.

    Parameters
    ----------
    stage
        Unordered; the `fewest_at_hand` of this object is its dispatch.
    metrics
        Of that stage.
    budget
        Of this pass, if there is a policy.
    """

    AT_HAND = 2
    """Tasks of one reader that may be under way or wait."""

    def __init__(
        self, stage: Stage, metrics: StageMetrics, budget: ErrorBudget | None = None
    ) -> None:
        self._stage, self.metrics, self._budget = stage, metrics, budget
        # All the mutable state:
        self._epoch = 0
        where = _places_of(stage, "reading")
        self._waiting = [ResultQueue(budget, where) for _ in range(metrics.workers)]
        self._turn = 0
        self._over = False

    def begin(self, changes: tuple[Change, ...]) -> None:
        """Begin a pass of the stage."""
        self._stage.begin(_Turns(), None, changes)
        self._epoch = self._stage.epoch

    def fewest_at_hand(self, scheduler: Scheduler) -> int | None:
        """The reader with the least at hand, none if all have enough."""
        found, least = None, self.AT_HAND
        for worker, state in enumerate(scheduler.workers):
            at_hand = scheduler.load[worker] + bool(self._waiting[worker])
            if state in ACTIVE and at_hand < least:
                found, least = worker, at_hand
        return found

    def __next__(self) -> Any:
        return self._next(wait=True)

    def next_nowait(self) -> Any:
        """The next item if it is there. Raises `NotReady` if it is not."""
        return self._next(wait=False)

    def _next(self, wait: bool) -> Any:
        while True:
            waiting = self._waiting[self._turn]
            if not waiting.results or waiting.between:  # else this is the short way
                self._find_turn(wait)
                waiting = self._waiting[self._turn]
                if waiting.gone:  # it is as if it were not there, so the turn stays
                    waiting.settle()
                    continue
            self._turn = (self._turn + 1) % len(self._waiting)
            return next(waiting)

    def _find_turn(self, wait: bool) -> None:
        """Go on to the reader whose turn it is, once something of it has come."""
        while not self._waiting[self._turn]:
            if self._over and not any(self._waiting):
                raise StopIteration
            others = any(self._waiting) or self._stage.active
            if self._over or (others and self._stage.has_ended(self._turn)):
                self._turn = (self._turn + 1) % len(self._waiting)
            else:
                self._take(wait)

    def _take(self, wait: bool) -> None:
        self.metrics.pulled()
        try:
            results = self._stage.pull(self._epoch, wait=wait)
        except StopIteration:
            self._over = True
            return
        except _NO_RESULT:
            raise
        except Exception as error:
            self._waiting[self._stage.last.worker].fail(error)
            self.metrics.items_out += 1
            return
        finally:
            self.metrics.turned_away()
        worker = self._stage.last.worker
        notes = _notes_of(self._stage) or ()
        self.metrics.items_out += self._waiting[worker].add(results, notes, worker)

    def close(self) -> None:
        """No more items are wanted in this pass."""
        self._stage.interrupt(self._epoch)


class _Turns:
    """How many items a reader is to give at a time: few at first, so that the first come soon.

    The feed of a stage of readers. It never ends: the readers do.
    """

    final: tuple[type[Exception], ...] = ()

    def __init__(self) -> None:
        self._drawn = 0

    def draw(self, most: int | None) -> int:
        size = min(1 << (self._drawn // 32), 16)
        self._drawn += 1
        return size if most is None else min(size, most)

    def when_ready(self, wake: Callable[[], None]) -> None:
        wake()

    def take_apart(self, index: Any) -> bool:
        return False


class Guarded(Iterator[Any]):
    """An iterator that ends when nobody wants its items any more, however long it would go on.

    A source is guarded, so that steps that give nothing for a long time can be ended by it.
    """

    def __init__(self, items: Iterator[Any], left: TaskContext) -> None:
        self._items, self._left = items, left
        self._pull = items.__next__

    def __next__(self) -> Any:
        if self._left.cancelled:
            raise IteratorClosed("this pass was left")
        return self._pull()

    def close(self) -> None:
        close(self._items)


class Fragile(Iterator[Any]):
    """A generator that a user's operator gave: after an error it is over, and says so.

    Another `StopIteration` would look as if all items had come.
    """

    def __init__(self, items: Iterator[Any], name: str) -> None:
        self._items, self._name = items, name
        self._broken = False

    def __next__(self) -> Any:
        if self._broken:
            raise IteratorClosed(
                f"operator {self._name!r} ended with the error before, because it is a generator; an "
                "iterator class with __next__ could go on"
            )
        try:
            return next(self._items)
        except StopIteration:
            raise
        except BaseException:
            self._broken = True
            raise

    def close(self) -> None:
        close(self._items)


def _notes_of(stage: Stage) -> Sequence[Note] | None:
    """Notes on the last result; None if there are none. They are kept nowhere else."""
    extras, stage.last.extras = stage.last.extras, None
    return None if extras is None else extras.get("notes")


def _places_of(stage: Stage, doing: str) -> Callable[[str, int | None], str]:
    """Return what says where an item failed; see `ResultQueue`."""

    def where(item: str, worker: int | None) -> str:
        assert worker is not None
        return f"In stage {stage.spec.stage!r}, {name_of(stage.handles, worker)}, {doing} {item}."

    return where


def _discard(item: Any) -> None:
    payload: Payload = item
    payload.discard()
