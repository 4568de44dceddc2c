"""Iterators over the items of a pipeline's nodes, each pulled by one thread."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import count
from time import perf_counter
from typing import Any

from hybridloader._support.text import warn_once
from hybridloader._support.user_objects import (
    add_note,
    attribute,
    close,
    counts_as_item,
    described,
    keeps_number,
    no_answer,
    takes_a_place,
)
from hybridloader.devices.pinning import Pinner, Sent
from hybridloader.engine.dataset_state import Change, DatasetChanges
from hybridloader.engine.feed import Feed, Relay, StageFlow, TaskBatching, is_forwarded
from hybridloader.engine.messages import Abandoned, FollowingContext, TaskContext
from hybridloader.engine.meter import TaskParts
from hybridloader.engine.scheduler import ACTIVE, Scheduler
from hybridloader.engine.stage import Stage
from hybridloader.errors import IteratorClosed, StateError
from hybridloader.fetching.item_loop import ItemLoop, TaskResults, seeded
from hybridloader.fetching.on_error import (
    ErrorBudget,
    Policy,
    ResultQueue,
    alike,
    not_needed,
)
from hybridloader.fetching.readers import Step
from hybridloader.observe.measures import StageMeasures
from hybridloader.running.operator import OperatorIterator
from hybridloader.running.plan import Node, RelayNode, WorkerNode
from hybridloader.running.state import (
    ONE_EACH,
    Ledger,
    Numbers,
    ReaderLog,
    ReaderStarts,
    RunPosition,
    Turn,
)
from hybridloader.seeding.sample_rng import SampleRng, item_key, numbered_item


@dataclass
class RunningStage:
    """A stage that runs; its workers stay for the next epoch."""

    node: WorkerNode
    stage: Stage
    flow: StageFlow
    measures: StageMeasures | None  # None: not observed
    watch: DatasetChanges | None
    readers: ReaderItems | None = None


class RunningRelay:
    """A relay that runs; its queue counts on from those of the relays that had its place before.

    `before` are the nodes of its chain that are before it. Unless the user has set its depth, that is
    twice the task size of the stage beside it with the larger tasks. A flatter relay would wake a thread
    for each item, and a stage after it would get smaller tasks. Two tasks are at most 24 ms of work, or
    8 MiB.
    """

    def __init__(self, node: RelayNode, before: tuple[Node, ...], relay: Relay) -> None:
        self.node, self.before, self.relay = node, before, relay
        self.began = perf_counter()
        self.stage: StageItems | None = None  # that it pulls, if any
        self._beside: list[TaskBatching] = []

    def replace(self, relay: Relay) -> None:
        """Put `relay` in the place of the one before it."""
        self.relay.shut()
        relay.queue.succeed(self.relay.queue)
        self.relay, self._beside = relay, []

    def couple(self, stage: StageItems) -> None:
        """Follow the task size of one more stage."""
        if self.node.options.depth is None:
            self._beside.append(stage.batching)
            stage.relays.append(self)
            self.adjust()

    def adjust(self) -> None:
        """Take the task sizes as they are now."""
        size = max(batching.size for batching in self._beside)
        self.relay.queue.depth = max(self.node.least, 2 * size)


_NONE: Mapping[str, Any] = {}


class StageIterator(Iterator[Any]):
    """Base of the iterators over the results of one stage in one pass."""

    def __init__(self, running: RunningStage, budget: ErrorBudget | None) -> None:
        self._stage, self.flow, self._measures = running.stage, running.flow, running.measures
        self._budget = budget
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

    Those of a `forwarded` stage may reach the next one unopened. `ledger` records which items are made
    of which; None where each is made of one.
    """

    def __init__(
        self,
        running: RunningStage,
        items: Iterator[Any],
        batching: TaskBatching,
        budget: ErrorBudget | None,
        ledger: Ledger | None,
    ) -> None:
        super().__init__(running, budget)
        self._ledger, self._items = ledger, items
        self.batching, self.forwarded = batching, running.node.forwarded
        self.relays: list[RunningRelay] = []  # before and after
        self.flow.learn = self._learn
        # All the mutable state:
        self._results: Iterator[Any] = iter(())
        self._queue = ResultQueue(budget, _places_of(self._stage, "working on"))

    def _learn(self, items: int, seconds: float, nbytes: int) -> None:
        before = self.batching.size
        self.batching.learn(items, seconds, nbytes)
        if self.batching.size != before:
            for relay in self.relays:
                relay.adjust()

    def _next(self, wait: bool) -> Any:
        while True:
            for result in self._results:
                return result
            try:
                results = self._pull(wait)
            except StopIteration:
                raise
            except Exception as error:
                if not takes_a_place(error):
                    raise
                items = max(1, self._stage.items)
                if self._ledger is not None:
                    self._ledger.task(items)
                for _ in range(items - 1):  # one error for each item of the task
                    self._queue.fail(alike(error))
                self._results = self._queue
                raise
            forwarded = self.forwarded and is_forwarded(results)
            extras = self._extras()
            notes = extras.get("notes")
            if self._ledger is not None:
                self._ledger.task(self._stage.items, extras.get("uneven", ()))
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
        running: RunningStage,
        budget: ErrorBudget | None,
        log: ReaderLog,
        readers: ReaderStarts,
    ) -> None:
        super().__init__(running, budget)
        self._log = log
        begins, starts, *_ = readers
        # All the mutable state:
        where = _places_of(self._stage, "reading")
        self._waiting = [
            ResultQueue(budget, where) for _ in range(running.node.placement.num_workers)
        ]
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
        waiting = (each.places for each in self._waiting)
        given = (came - left for came, left in zip(self._came, waiting, strict=True))
        following = (reader + 1) % len(self._came)
        turn = Turn(tuple(given), following, frozenset(self._passed))
        self._log.add((sum(turn.given), turn))

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
            self._log.of(worker).add(1, _NONE, ())
            return
        worker, extras = self._stage.last.worker, self._extras()
        self._starts.pop(worker, None)
        waiting, notes = self._waiting[worker], extras.get("notes", ())
        came = waiting.add(results, notes, worker)
        self._came[worker] += came
        self.flow.items_out += came
        failed = [note for note in notes if note.item is not None]
        gone = [note.position + number for number, note in enumerate(failed) if note.left_out]
        self._log.of(worker).add(came, extras, gone)
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


class _Passing(OperatorIterator):
    """Base of the iterators that can be asked for an item without waiting, if those before can."""

    def __init__(self, items: Iterator[Any]) -> None:
        super().__init__(items)
        self.items = items
        self._pull_now: Callable[[], Any] = attribute(items, "next_nowait", items.__next__)

    def __next__(self) -> Any:
        return self._next(self._pull)

    def next_nowait(self) -> Any:
        """Return the next item if it is there. Raises `NotReady` if it is not."""
        return self._next(self._pull_now)

    @abstractmethod
    def _next(self, pull: Callable[[], Any]) -> Any:
        """Return an item of those that `pull` returns."""


class SourceItems(OperatorIterator):
    """Items of a source until the epoch is left.

    So steps that give nothing for a long time end, however many items the source has.
    """

    def __init__(self, items: Iterator[Any], left: TaskContext) -> None:
        super().__init__(items)
        self._left = left

    def __next__(self) -> Any:
        if self._left.cancelled:
            raise no_answer(IteratorClosed("this epoch was ended early"))
        return self._pull()


class Sending(OperatorIterator):
    """Iterator for the relay's thread: items, pinned or moved one after the other."""

    def __init__(self, items: Iterator[Any], pinner: Pinner, name: str) -> None:
        super().__init__(items)
        self._pinner, self._name = pinner, name
        # All the mutable state:
        self._number = -1

    def __next__(self) -> Sent:
        self._number += 1
        item = self._pull()
        try:
            return self._pinner.send(item)
        except Exception as error:
            add_note(error, f"In stage {self._name!r}, at item {self._number} of this epoch.")
            raise


class Taking(_Passing):
    """Iterator for the thread that takes the items of `Sending`, and for its current stream."""

    def __init__(self, relay: Relay, pinner: Pinner) -> None:
        super().__init__(relay)
        self._pull, self.when_ready = relay.get, relay.when_ready
        self._pinner = pinner

    def _next(self, pull: Callable[[], Any]) -> Any:
        return self._pinner.take(pull())


def _places_of(stage: Stage, doing: str) -> Callable[[str, int | None], str]:
    """Return a function that describes where an item failed; see `ResultQueue`."""

    def where(item: str, worker: int | None) -> str:
        assert worker is not None
        return f"In stage {stage.spec.stage!r}, {stage.table.name(worker)}, {doing} {item}."

    return where


# -- functions of a pipeline that are called where their results are asked for
#
# No worker takes part, so a function's error is raised at once, or left out and counted.


class InlineItems(OperatorIterator):
    """Results of a function that is called where they are asked for; its `coroutines`, if it is async.

    `left` is cancelled when the run is left, so that a filter that keeps nothing ends.
    """

    coroutines: Any = None

    def __init__(
        self,
        items: Iterator[Any],
        step: Step,
        stage: str,
        left: TaskContext,
        rng: SampleRng | None = None,
        policy: Policy | None = None,
        budget: ErrorBudget | None = None,
    ) -> None:
        super().__init__(items)
        self._stage, self._left, self._budget = stage, left, budget
        self._rng = rng  # kept: letting it go ends the seeding
        self.context = context = FollowingContext(left, rng)  # counts what was retried
        if rng is not None:
            # The item first: where there is none, no number is used up.
            self._numbers = count(rng.first_item)
            pairs = zip(items, self._numbers, strict=False)
            self._pull = map(numbered_item, pairs).__next__
            policy = seeded(policy, rng, item_key)
        if context.parts is not None:  # observed: time each function separately
            context.parts = TaskParts() if step.concurrency else None
        opened = step.open(context, policy, of_worker=False)
        self._loop = ItemLoop([opened], policy, context)
        self._kind, self._function = opened
        if step.concurrency:
            self.coroutines: Any = opened[1]
            self._pull = self.coroutines.through(items).__next__
        # A function may return a long or endless iterable, so it is read item by item.
        if self._kind == "batch" or (self._kind == "flat_map" and self._loop.acts):
            self._kind, self._function = "results", self._loop.alone
        self._plain = self._kind == "map" and budget is None
        # All the mutable state: further results of the last item.
        self._several: Iterator[Any] | None = None
        self._item: Any = None  # that these are made of
        self._told = False
        self._queue = ResultQueue(
            budget, lambda item, _: f"In stage {stage!r}, the calling thread, working on {item}."
        )

    def __next__(self) -> Any:
        try:
            while True:
                if self._several is not None:
                    try:
                        found = next(self._several)
                        if self._budget is not None:
                            self._budget.count(1, (), None)
                        return found
                    except StopIteration:
                        self._several = None
                    except Exception as raised:
                        self._several, results = None, TaskResults()
                        self._loop.note(self._item, raised, results)
                        self._hand_out(results)
                if self._told:
                    for found in self._queue:
                        return found
                    self._told = False
                if self._left.cancelled:
                    raise Abandoned
                item = self._pull()
                error: Exception | None = None
                try:
                    found = self._function(item)
                    if self._plain:
                        return found
                    if self._kind == "results":
                        self._hand_out(found)
                        continue
                    if self._kind == "flat_map":
                        self._several, self._item = iter(found), item
                        continue
                    if self._kind == "filter":
                        if not found:
                            continue
                        found = item
                except Exception as raised:
                    error = raised
                if error is None:
                    if self._budget is not None:
                        self._budget.count(1, (), None)
                    return found
                try:
                    results = TaskResults()
                    self._loop.failed(item, error, results)
                    self._hand_out(results)
                finally:
                    del error
        except Abandoned:
            text = f"the iterator of stage {self._stage!r} is closed"
            raise no_answer(IteratorClosed(text)) from None
        except Exception as error:
            if self._rng is not None and keeps_number(error):
                next(self._numbers)
            raise

    def log(self, ledger: Ledger, counts: Numbers) -> None:
        """Note in `ledger` each item that is taken, and the number of results that it may have."""
        pull = self._pull

        def logged() -> Any:
            try:
                item = pull()
            except Exception as error:
                if counts_as_item(error):
                    ledger.pulled(ONE_EACH)
                raise
            ledger.pulled(counts)
            return item

        self._pull = logged

    def _hand_out(self, results: TaskResults) -> None:
        self._queue.add(results.values, results.notes)
        self._told = True

    def close(self) -> None:
        if self.coroutines is not None:
            self.coroutines.close()
        super().close()


class LoggedItems(OperatorIterator):
    """Items of functions that may give none or several for one, counted in a ledger."""

    def __init__(self, items: Iterator[Any], ledger: Ledger) -> None:
        super().__init__(items)
        self._ledger = ledger

    def __next__(self) -> Any:
        try:
            found = self._pull()
        except Exception as error:
            self._ledger.given += counts_as_item(error)
            raise
        self._ledger.given += 1
        return found


# -- leaving out of items when a run is resumed, on the thread that pulls them


class Skipping(_Passing):
    """Items without the first `count`, which come a second time; `done` of these were dropped.

    Fewer are an error, but `slack` of them need not be there: of a batch that was the last, none knows
    its size. An error counts as an item, since it was raised in the place of one. From number `at` on,
    an error comes in the place of each item for whose number `is_gone` is true. It is called once for
    each number, in order, and returns None once no later item is gone.
    """

    def __init__(
        self,
        items: Iterator[Any],
        left: TaskContext,
        name: str,
        at: int,
        is_gone: Callable[[int], bool | None],
        count: int = 0,
        slack: int = 0,
    ) -> None:
        super().__init__(items)
        self._left, self._name, self._slack = left, name, slack
        # All the mutable state:
        self.count, self.done = count, 0
        self._at = at
        self._is_gone: Callable[[int], bool | None] | None = is_gone
        self._opened: Iterator[Any] = iter(())  # rest of several items that arrived as one

    def _next(self, pull: Callable[[], Any]) -> Any:
        while self._is_gone is not None:
            drops = self.done < self.count
            if drops and self._left.cancelled:
                raise no_answer(IteratorClosed("this epoch was ended early"))
            try:
                item = self._one(pull)
            except StopIteration:
                if drops:
                    self._check_end()
                raise
            except Exception as error:
                if not counts_as_item(error):
                    raise
                if drops:  # it was raised before, at the same position
                    self.done += 1
                    continue
                self._at += 1
                raise
            if drops:
                self.done += 1
                continue
            gone, self._at = self._is_gone(self._at), self._at + 1
            if gone:
                raise not_needed()
            if gone is None:
                self._is_gone = None
            return item
        for item in self._opened:
            return item
        return pull()  # also of several items, unopened

    def _one(self, pull: Callable[[], Any]) -> Any:
        for item in self._opened:
            return item
        item = pull()
        if not is_forwarded(item):
            return item
        if item.count <= self.count - self.done:  # all of them are dropped, so none is opened
            item.discard()
            self.done += item.count - 1  # the last one is counted by the caller
            return item
        self._opened = iter(item.open())
        return next(self._opened)

    def _check_end(self) -> None:
        """Raise `StateError` if too few items have come to be dropped."""
        missing, self.count = self.count - self.done, self.done
        if missing > self._slack:
            raise no_answer(
                StateError(
                    f"the state is after item {self.done + missing} of {self._name!r}, which ended "
                    f"after item {self.done}: its items differ from those when the state was taken"
                )
            ) from None


class Withheld(_Passing):
    """Items of a run without the places of those that another rank has had; each counts as an error."""

    def __init__(self, items: Iterator[Any], position: RunPosition) -> None:
        super().__init__(items)
        self._position = position

    def _next(self, pull: Callable[[], Any]) -> Any:
        while True:
            try:
                return pull()
            except Exception as error:
                if not keeps_number(error):
                    raise
            self._position.raised += 1
            self._position.given += 1
