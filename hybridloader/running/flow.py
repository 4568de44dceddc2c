"""The running forms of a pipeline's nodes: iterators over items, each pulled by one thread."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

from hybridloader.contract import Payload
from hybridloader.diagnosis import name_of
from hybridloader.errors import IteratorClosed, NotReady, Raised, WorkerTimeout
from hybridloader.faults.losses import Losses
from hybridloader.faults.outcomes import Bad, Damaged, Noted
from hybridloader.faults.places import alike
from hybridloader.feed import Portions, is_sealed
from hybridloader.fetcher import TaskContext
from hybridloader.foreign import close
from hybridloader.refresh import Change
from hybridloader.relay import FINAL, Relay
from hybridloader.running.ledger import Books
from hybridloader.scheduler import ACTIVE, Scheduler
from hybridloader.stage import Stage

_NO_RESULT = (*FINAL, NotReady, WorkerTimeout)
"""Errors of a stage that are not raised in the place of a result."""


class Depth:
    """Keeps a relay as deep as the portions of the stages around it are large: no deeper, because
    what waits takes memory; no flatter, because every portion would wake a thread for each item."""

    def __init__(self, relay: Relay, least: int) -> None:
        self._relay, self._least = relay, least
        self._around: list[Portions] = []

    def follow(self, portions: Portions) -> None:
        """From now on, `portions` matter too."""
        self._around.append(portions)
        self.adjust()

    def adjust(self) -> None:
        """Some of the portions have another size."""
        size = min(portions.size for portions in self._around)
        self._relay.depth = max(self._least, 2 * size)


class StageItems(Iterator[Any]):
    """The results of a stage, one by one.

    Parameters
    ----------
    stage
        Gives the results of a task at a time.
    books
        Of that stage.
    items
        What the stage is fed from; closed when this is.
    portions
        What it is fed with.
    losses
        Of this pass, if there is a policy.
    """

    def __init__(
        self,
        stage: Stage,
        books: Books,
        items: Iterator[Any],
        portions: Portions,
        losses: Losses | None = None,
    ) -> None:
        self._stage, self.books, self._items, self._losses = stage, books, items, losses
        self.portions = portions
        self.sealed = False  # whether results may come unopened
        self.depths: list[Depth] = []  # of the relays before and behind
        books.learn = self._learn
        # All the mutable state:
        self._epoch = 0
        self._results: Iterator[Any] = iter(())
        self._outcomes: deque[Any] = deque()  # of a damaged task

    def begin(self, changes: tuple[Change, ...]) -> None:
        """Begin a pass of the stage."""
        self._stage.begin(self.portions, None, changes)
        self._epoch = self._stage.epoch

    def _learn(self, items: int, seconds: float) -> None:
        before = self.portions.size
        self.portions.learn(items, seconds)
        if self.portions.size != before:
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
            while self._outcomes:
                outcome = self._outcomes.popleft()
                if type(outcome) is Raised:
                    outcome.throw()
                if type(outcome) is not Bad and type(outcome) is not Noted:
                    if self._losses is not None:
                        self._losses.take(1, (), None)
                    return outcome
                sort_out(outcome, self._losses, self._stage, self._stage.last.worker, "working on")
            self.books.pulled()
            try:
                results = self._stage.pull(self._epoch, wait=wait)
            except (StopIteration, *_NO_RESULT):
                raise
            except Exception as error:  # of every item of the task, each in its place
                more = self._stage.items_failed - 1
                self._outcomes.extend(Raised(alike(error)) for _ in range(more))
                raise
            finally:
                self.books.turned_away()
            if self.sealed and is_sealed(results):
                self.books.items_out += results.count
                if self._losses is not None:
                    self._losses.take(results.count, (), None)
                if results.count:
                    return results
                _discard(results)
                continue
            if type(results) is Damaged:
                self._outcomes.extend(results.outcomes)
                self.books.items_out += items_among(results.outcomes, self._losses)
                continue
            self.books.items_out += len(results)
            if self._losses is not None:
                self._losses.take(len(results), (), None)
            self._results = iter(results)

    def close(self) -> None:
        """No more results are wanted in this pass; the workers stay for the next."""
        self._stage.interrupt(self._epoch)
        close(self._items)


def couple(items: StageItems, depth: Depth) -> None:
    """A relay beside a stage follows the size of its portions."""
    depth.follow(items.portions)
    items.depths.append(depth)


class ReaderItems(Iterator[Any]):
    """The items of several readers in turn, one of each, however they come.

    Whose turn it is depends on nothing but how many items each reader has, so the order is the same
    for any timing and for any number of items in a task. Reader ``k`` is worker ``k``.

    Parameters
    ----------
    stage
        Unordered; the `fewest_at_hand` of this object is its dispatch.
    books
        Of that stage.
    losses
        Of this pass, if there is a policy.
    """

    AT_HAND = 2
    """Tasks of one reader that may be under way or wait."""

    def __init__(self, stage: Stage, books: Books, losses: Losses | None = None) -> None:
        self._stage, self.books, self._losses = stage, books, losses
        # All the mutable state:
        self._epoch = 0
        self._waiting: list[deque[Any]] = [deque() for _ in range(books.workers)]
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
            self._find_turn(wait)
            reader = self._turn
            item = self._waiting[reader].popleft()
            gone = type(item) is Noted
            if type(item) is Bad and forgiven(item, self._losses):
                gone = self._losses is None or not self._losses.gaps
            if gone:  # it is as if it were not there, so the turn stays
                sort_out(item, self._losses, self._stage, reader, "reading")
                continue
            self._turn = (reader + 1) % len(self._waiting)
            if type(item) is Raised:
                item.throw()
            if type(item) is Bad:
                sort_out(item, self._losses, self._stage, reader, "reading")
            if self._losses is not None:
                self._losses.take(1, (), None)
            return item

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
        self.books.pulled()
        try:
            results = self._stage.pull(self._epoch, wait=wait)
        except StopIteration:
            self._over = True
            return
        except _NO_RESULT:
            raise
        except Exception as error:
            results = [Raised(error)]
        finally:
            self.books.turned_away()
        if type(results) is Damaged:
            results = results.outcomes
            self.books.items_out += items_among(results, self._losses)
        else:
            self.books.items_out += len(results)
        self._waiting[self._stage.last.worker].extend(results)

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


def forgiven(bad: Bad, losses: Losses | None) -> bool:
    """Whether `bad` is left out, and not raised."""
    return losses is not None and losses.forgives(bad.failure)


def items_among(outcomes: list[Any], losses: Losses | None) -> int:
    """How many of `outcomes` come out of the stage, as items or as what is raised in their places."""
    gone = sum(type(o) is Noted or (type(o) is Bad and forgiven(o, losses)) for o in outcomes)
    return len(outcomes) - gone


def sort_out(
    outcome: Bad | Noted, losses: Losses | None, stage: Stage, worker: int, doing: str
) -> None:
    """Count what was left out or replaced; raise what is to be raised."""
    if isinstance(outcome, Noted):
        if losses is not None:
            losses.take(outcome.tried, outcome.misses, worker)
    elif losses is not None and losses.forgives(outcome.failure):
        losses.leave_out(outcome.miss(), worker)
    else:
        raise_bad(outcome, stage, worker, doing)


def raise_bad(bad: Bad, stage: Stage, worker: int, doing: str) -> NoReturn:
    """Raise what an item of a task raised, with a note on where that was."""
    where = f"In stage {stage.spec.stage!r}, {name_of(stage.handles, worker)}, {doing} {bad.item}."
    Raised(bad.failure.to_exception(where)).throw()


def _discard(item: Any) -> None:
    payload: Payload = item
    payload.discard()
