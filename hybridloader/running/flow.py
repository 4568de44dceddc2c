"""Iterators over the items of a pipeline's nodes, each pulled by one thread."""

from __future__ import annotations

from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from hybridloader._support.attributes import close
from hybridloader._support.caller import warn_once
from hybridloader._support.error_handling import (
    add_note,
    counts_as_item,
    described,
    no_answer,
    takes_a_place,
)
from hybridloader.devices.pinning import Pinner, Sent
from hybridloader.engine.diagnosis import name_of
from hybridloader.engine.feed import Feed, TaskBatching, is_forwarded
from hybridloader.engine.fetcher import TaskContext
from hybridloader.engine.refresh import Change
from hybridloader.engine.relay import Relay
from hybridloader.engine.scheduler import Scheduler
from hybridloader.engine.stage import Stage
from hybridloader.engine.stage_flow import StageFlow
from hybridloader.engine.states import ACTIVE
from hybridloader.errors import IteratorClosed, StateError
from hybridloader.fetching.on_error.error_budget import ErrorBudget
from hybridloader.fetching.on_error.places import LeftOut, alike
from hybridloader.fetching.on_error.result_queue import ResultQueue
from hybridloader.fetching.outcome import Note
from hybridloader.observe.measures import StageMeasures
from hybridloader.running.ledger import Ledger
from hybridloader.running.operator import OperatorIterator
from hybridloader.running.reader_log import ReaderLog, ReaderStarts, Turn


class RelayDepth:
    """Depth of a relay, twice the task size of the stage beside it with the larger tasks.

    A flatter relay would wake a thread for each item, and a stage after it would get smaller tasks. Two
    tasks are at most 24 ms of work, or 8 MiB.
    """

    def __init__(self, relay: Relay, least: int) -> None:
        self._relay, self._least = relay, least
        self._beside: list[TaskBatching] = []

    def couple(self, stage: StageItems) -> None:
        """Follow the task size of one more stage."""
        self._beside.append(stage.batching)
        stage.depths.append(self)
        self.adjust()

    def adjust(self) -> None:
        """Take the task sizes as they are now."""
        size = max(batching.size for batching in self._beside)
        self._relay.queue.depth = max(self._least, 2 * size)


_NONE: Mapping[str, Any] = {}


class StageIterator(Iterator[Any]):
    """Base of the iterators over the results of one stage in one pass."""

    def __init__(
        self,
        stage: Stage,
        flow: StageFlow,
        measures: StageMeasures | None,  # None: not observed
        budget: ErrorBudget | None,
    ) -> None:
        self._stage, self.flow, self._measures, self._budget = stage, flow, measures, budget
        self._epoch = 0

    def begin(self, feed: Feed, changes: tuple[Change, ...], epoch: int, item: int = 0) -> None:
        """Begin an epoch of the stage, with item number `item` of its input."""
        self._stage.begin(feed, None, changes, epoch, item)
        self._epoch = self._stage.epoch

    def __next__(self) -> Any:
        return self._next(wait=True)

    def next_nowait(self) -> Any:
        """Return the next item if it is there. Raises `NotReady` if it is not."""
        return self._next(wait=False)

    @abstractmethod
    def _next(self, wait: bool) -> Any: ...

    def _pull(self, wait: bool) -> Any:
        """Return the results of a task."""
        measures = self._measures
        if measures is None:
            return self._stage.pull(self._epoch, wait=wait)
        measures.pulled()
        try:
            return self._stage.pull(self._epoch, wait=wait)
        finally:
            measures.turned_away()

    def _extras(self) -> Mapping[str, Any]:
        """Return the metadata of the last results. They are kept nowhere else."""
        extras, self._stage.last.extras = self._stage.last.extras, None
        return extras or _NONE

    def close(self) -> None:
        """Leave the epoch; the workers stay for the next."""
        self._stage.interrupt(self._epoch)


class StageItems(StageIterator):
    """Results of a stage, one by one. `items`, which `batching` cuts into tasks, is closed with this.

    If `forwarded`, results may reach the next stage unopened. `ledger` records which items are made of
    which; None where each is made of one.
    """

    def __init__(
        self,
        stage: Stage,
        flow: StageFlow,
        measures: StageMeasures | None,
        items: Iterator[Any],
        batching: TaskBatching,
        budget: ErrorBudget | None = None,
        ledger: Ledger | None = None,
        *,
        forwarded: bool = False,
    ) -> None:
        super().__init__(stage, flow, measures, budget)
        self._ledger, self._sizes = ledger, deque[int]()
        if ledger is not None:
            batching.drawn = self._sizes
        self._items, self.batching, self.forwarded = items, batching, forwarded
        self.depths: list[RelayDepth] = []  # of the relays before and after
        flow.learn = self._learn
        # All the mutable state:
        self._results: Iterator[Any] = iter(())
        self._queue = ResultQueue(budget, _places_of(stage, "working on"))

    def _learn(self, items: int, seconds: float, nbytes: int) -> None:
        before = self.batching.size
        self.batching.learn(items, seconds, nbytes)
        if self.batching.size != before:
            for depth in self.depths:
                depth.adjust()

    def _next(self, wait: bool) -> Any:
        while True:
            for result in self._results:
                return result
            try:
                results = self._pull(wait)
            except StopIteration:
                raise
            except Exception as error:
                if self._ledger is not None and counts_as_item(error):
                    self._ledger.one_each(self._sizes.popleft())
                if not takes_a_place(error):
                    raise
                # One error for each item of the task.
                for _ in range(self._stage.items_failed - 1):
                    self._queue.fail(alike(error))
                self._results = self._queue
                raise
            forwarded = self.forwarded and is_forwarded(results)
            extras = self._extras()
            notes = extras.get("notes")
            if self._ledger is not None:
                self._note(self._ledger, results, notes or (), extras.get("uneven"))
            if notes is not None:
                worker = self._stage.last.worker
                self.flow.items_out += self._queue.add(results, notes, worker)
                self._results = self._queue
                continue
            count = results.count if forwarded else len(results)
            self.flow.items_out += count
            if self._budget is not None:
                self._budget.count(count, (), None)
            if not forwarded:
                self._results = iter(results)
            elif count:
                return results
            else:
                results.discard()

    def _note(
        self,
        ledger: Ledger,
        results: Any,
        notes: Sequence[Note],
        uneven: Sequence[tuple[int, int]] | None,
    ) -> None:
        """Write in the ledger which of the results were made of which items of their task."""
        size = self._sizes.popleft()
        gone = self._queue.gone_of(notes) if notes else ()
        if uneven is None and not gone:
            ledger.one_each(size)
            return
        counts = [1] * size
        for item, units in uneven or ():
            counts[item] = units
        # Take off the notes that come out neither as an item nor as an error, each from its item.
        item, before = 0, 0  # the item, and the values and notes of those before it
        for unit in gone:
            while before + counts[item] <= unit:
                before += counts[item]
                item += 1
            counts[item] -= 1
            before += 1
        ledger.several(counts)

    def close(self) -> None:
        super().close()
        close(self._items)


class ReaderItems(StageIterator):
    """Items of several readers in turn, one of each, whichever has something first.

    The turn depends on nothing but how many items each reader has, so the order does not depend on
    timing or on the number of items in a task. Reader ``k`` is worker ``k``. The stage is unordered, and
    `fewest_at_hand` of this object is its dispatch.
    """

    AT_HAND = 2
    """Tasks of one reader that may be in flight or wait."""

    def __init__(
        self,
        stage: Stage,
        flow: StageFlow,
        measures: StageMeasures | None,
        budget: ErrorBudget | None = None,
        log: ReaderLog | None = None,
        readers: ReaderStarts | None = None,
    ) -> None:
        super().__init__(stage, flow, measures, budget)
        self._log = log
        begins, starts, *_ = readers or ReaderStarts(Turn((0,) * flow.workers))
        # All the mutable state:
        where = _places_of(stage, "reading")
        self._waiting = [ResultQueue(budget, where) for _ in range(flow.workers)]
        self._turn = begins.turn
        self._over = False
        self._came = list(begins.given)  # items and errors of each reader
        self._firsts: dict[bytes, int] = {}  # readers, by the hash of their first item
        self._passed = set(begins.ended)  # readers that had ended at their turn
        self._starts = dict(enumerate(starts))  # of those from which nothing has come yet
        self.count = self._rereading

    @property
    def _rereading(self) -> int:
        """Number of items that readers have yet to read again."""
        return sum(start.skip - start.position for start in self._starts.copy().values())

    @property
    def done(self) -> int:
        """Number of items, of `count`, that were read again."""
        return self.count - self._rereading

    def fewest_at_hand(self, scheduler: Scheduler) -> int | None:
        """Return the reader with the fewest tasks; None if all have enough."""
        found, least = None, self.AT_HAND
        for worker, state in enumerate(scheduler.workers):
            at_hand = scheduler.load[worker] + bool(self._waiting[worker])
            if state in ACTIVE and at_hand < least:
                found, least = worker, at_hand
        return found

    def _next(self, wait: bool) -> Any:
        while True:
            waiting = self._waiting[self._turn]
            if not waiting.results or waiting.between:  # else this is the short way
                self._find_turn(wait)
                waiting = self._waiting[self._turn]
                if waiting.gone:  # it has no item, so the turn stays
                    waiting.settle()
                    continue
            self._turn = (self._turn + 1) % len(self._waiting)
            return next(waiting)

    def _find_turn(self, wait: bool) -> None:
        """Turn to the next reader that has not ended, once something of it has come."""
        while not self._waiting[self._turn]:
            if self._over and not any(self._waiting):
                raise StopIteration
            others = any(self._waiting) or self._stage.active
            if self._over or (others and self._stage.has_ended(self._turn)):
                if self._turn not in self._passed:
                    self._pass_over(self._turn)
                self._turn = (self._turn + 1) % len(self._waiting)
            else:
                self._take(wait)

    def _pass_over(self, reader: int) -> None:
        """Note that a reader had ended at its turn."""
        self._passed.add(reader)
        self._starts.pop(reader, None)
        if self._log is not None:
            waiting = (each.places for each in self._waiting)
            given = (came - left for came, left in zip(self._came, waiting, strict=True))
            following = (reader + 1) % len(self._came)
            self._log.add(Turn(tuple(given), following, frozenset(self._passed)))

    def _take(self, wait: bool) -> None:
        try:
            results = self._pull(wait)
        except StopIteration:
            self._over = True
            return
        except Exception as error:
            if not takes_a_place(error):
                raise
            worker = self._stage.last.worker
            start = self._starts.pop(worker, None)
            if start is not None and start.stateful:  # opening it raised this error
                raise no_answer(
                    StateError(
                        f"stage {self._stage.spec.stage!r}: reader {worker} could not resume from the "
                        f"state that was saved after its item {start.position}: {described(error)}"
                    )
                ) from error
            self._waiting[worker].fail(error)
            self._came[worker] += 1
            self.flow.items_out += 1
            if self._log is not None:
                self._log.of(worker).add(1, (), ())
            return
        worker, extras = self._stage.last.worker, self._extras()
        self._starts.pop(worker, None)
        waiting, notes = self._waiting[worker], extras.get("notes", ())
        came = waiting.add(results, notes, worker)
        self._came[worker] += came
        self.flow.items_out += came
        if self._log is not None:
            reads = self._log.of(worker)
            reads.add(came, extras.get("ends", ()), waiting.left_out_of(notes))
            if "state" in extras:
                reads.add_state(extras["state"])
            if "shards" in extras:
                reads.add_shards(extras["shards"])
        if "first" in extras and self._firsts.setdefault(extras["first"], worker) != worker:
            readers = len(self._waiting)
            warn_once(
                f"stage {self._stage.spec.stage!r}: its readers begin with the same item, and the "
                "source does not ask for a worker's number, so each item may come "
                f"{readers} times. Divide the source by the id and num_workers of "
                "hybridloader.get_worker_info(), or read it with one reader: give backend and "
                "num_workers to a later step, such as map",
                "same-items",
            )


class ReaderTaskSizes(Feed):
    """Feed of a stage of readers: how many items a reader is to give, few at first to be quick.

    It never ends: the readers do.
    """

    def __init__(self) -> None:
        self._drawn = 0

    def draw(self, most: int | None) -> int:
        size = min(1 << (self._drawn // 32), 16)
        self._drawn += 1
        return size if most is None else min(size, most)


class SourceItems(OperatorIterator):
    """Items of a source until the epoch is left, and the places of left-out ones if they are in `rows`.

    So steps that give nothing for a long time end, however many items the source has.
    """

    def __init__(self, items: Iterator[Any], left: TaskContext, *, rows: bool) -> None:
        super().__init__(items)
        self._left, self._rows = left, rows

    def __next__(self) -> Any:
        while not self._left.cancelled:
            try:
                return self._pull()
            except LeftOut:
                if self._rows:
                    raise
        raise no_answer(IteratorClosed("this epoch was ended early"))

    def close(self) -> None:
        close(self._items)


class GeneratorItems(OperatorIterator):
    """Items of a generator that a user's operator returned; asked after its error, it raises another.

    Another `StopIteration` would look as if all items had come.
    """

    def __init__(self, items: Iterator[Any], name: str) -> None:
        super().__init__(items)
        self._name = name
        self._broken = False

    def __next__(self) -> Any:
        if self._broken:
            raise no_answer(
                IteratorClosed(
                    f"operator {self._name!r} ended with the previous error, because it is a generator; "
                    "an iterator class with __next__ can return more items after an error"
                )
            )
        try:
            return self._pull()
        except StopIteration:
            raise
        except BaseException:
            self._broken = True
            raise

    def close(self) -> None:
        close(self._items)


class Sending(OperatorIterator):
    """Iterator for the relay's thread: items, pinned or moved one after the other."""

    def __init__(self, items: Iterator[Any], pinner: Pinner, name: str) -> None:
        super().__init__(items)
        self._pinner, self._name = pinner, name
        # All the mutable state:
        self._number = -1

    def __next__(self) -> Sent:
        self._number += 1
        item = [self._pull()]
        try:
            return self._pinner.send(item)
        except Exception as error:
            add_note(error, f"In stage {self._name!r}, at item {self._number} of this epoch.")
            raise


class Taking(Iterator[Any]):
    """Iterator for the thread that takes the items of `Sending`, and for its current stream."""

    def __init__(self, relay: Relay, pinner: Pinner) -> None:
        self._relay, self._pinner = relay, pinner

    def __next__(self) -> Any:
        return self._pinner.take(next(self._relay))

    def next_nowait(self) -> Any:
        """Return the next item if it is there. Raises `NotReady` if it is not."""
        return self._pinner.take(self._relay.next_nowait())

    def when_ready(self, wake: Callable[[], None]) -> None:
        """See `Relay.when_ready`."""
        self._relay.when_ready(wake)

    def close(self) -> None:
        """End the thread."""
        self._relay.close()


def _places_of(stage: Stage, doing: str) -> Callable[[str, int | None], str]:
    """Return a function that describes where an item failed; see `ResultQueue`."""

    def where(item: str, worker: int | None) -> str:
        assert worker is not None
        return f"In stage {stage.spec.stage!r}, {name_of(stage.handles, worker)}, {doing} {item}."

    return where
