"""The functions of a pipeline that are called where their results are asked for.

No worker takes part, so what a function raises is raised here and now, or left out and counted.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NoReturn

from hybridloader.diagnosis import place
from hybridloader.errors import IteratorClosed, Raised, add_note, no_stop
from hybridloader.faults.careful import Careful
from hybridloader.faults.guard import Guard
from hybridloader.faults.losses import Losses
from hybridloader.faults.on_error import Policy
from hybridloader.faults.outcomes import Bad, Noted, bad
from hybridloader.fetcher import Abandoned, FollowingContext, TaskContext
from hybridloader.foreign import attribute
from hybridloader.running.work import Step
from hybridloader.seeds.draws import Draws, now


class InlineItems(Iterator[Any]):
    """The results of a function that is called where they are asked for.

    Parameters
    ----------
    items
        What it is called with.
    step
        The function, and what is made of what it returns.
    stage
        What errors call it.
    left
        Up when nobody wants items any more, so that a filter that keeps nothing ends.
    draws
        What seeds each item, if it is to be seeded.
    """

    def __init__(
        self,
        items: Iterator[Any],
        step: Step,
        stage: str,
        left: TaskContext,
        draws: Draws | None = None,
    ) -> None:
        self._items, self._stage, self._left = items, stage, left
        self._pull = items.__next__ if draws is None else _Counted(items, draws).__next__
        flag = TaskContext()
        flag.draws = draws
        self._kind, self._function = step.open(flag)
        # All the mutable state:
        self._several: Iterator[Any] | None = None
        self._item: Any = None  # what the several are made of

    def __next__(self) -> Any:
        while True:
            if self._several is not None:
                try:
                    return next(self._several)
                except StopIteration:
                    self._several = None
                except Exception as error:
                    self._several = None
                    self._blame(error, self._item)
            if self._left.cancelled:
                raise IteratorClosed(f"the iterator of stage {self._stage!r} is closed")
            item = self._pull()
            try:
                found = self._function(item)
                if self._kind == "map":
                    return found
                if self._kind == "flat_map":
                    self._several, self._item = iter(found), item
                    continue
                keep = bool(found)
            except Exception as error:
                self._blame(error, item)
            if keep:
                return item

    def _blame(self, error: Exception, item: Any) -> NoReturn:
        where = place(self._stage, "the thread that asked", item, "working on")
        error = no_stop(error, "a function of a pipeline")
        add_note(error, where)
        raise error

    def close(self) -> None:
        close = attribute(self._items, "close")
        if close is not None:
            close()


class _Counted(Iterator[Any]):
    """Items, of which the one in hand is known by its number."""

    def __init__(self, items: Iterator[Any], draws: Draws) -> None:
        self._pull, self._draws = items.__next__, draws

    def __next__(self) -> Any:
        item = self._pull()
        now.item = b"%d" % self._draws.take(1)
        return item


class GuardedInlineItems(Iterator[Any]):
    """The same under a policy, a function at a time. See `InlineItems` for the parameters.

    Parameters
    ----------
    policy
        What to do with items that fail.
    losses
        Of this pass.
    """

    def __init__(
        self,
        items: Iterator[Any],
        step: Step,
        stage: str,
        left: TaskContext,
        policy: Policy,
        losses: Losses,
        draws: Draws | None = None,
    ) -> None:
        self._items, self._stage, self._left = items, stage, left
        self._losses = losses
        self._pull = items.__next__
        flag = left
        if draws is not None:
            self._pull = _Counted(items, draws).__next__
            policy = draws.policy(policy, lambda _: now.item)
            flag = FollowingContext(left, draws)
        guard = Guard(policy, left)
        kind, self._function = opened = step.open(flag, policy)
        # An iterable of a function may be long, or endless, so it is not read before it is asked for.
        self._lazy = kind == "flat_map" and not guard.acts
        self._careful = Careful([opened], guard, left)
        # All the mutable state:
        self._outcomes: Iterator[Any] = iter(())  # of the last item

    def __next__(self) -> Any:
        while True:
            try:
                for outcome in self._outcomes:
                    if type(outcome) is Bad or type(outcome) is Noted:
                        self._sort_out(outcome)
                        continue
                    self._losses.take(1, (), None)
                    return outcome
            except Abandoned:
                pass  # and so `left` is up
            if self._left.cancelled:
                raise IteratorClosed(f"the iterator of stage {self._stage!r} is closed")
            item = self._pull()
            self._outcomes = self._several(item) if self._lazy else self._once(item)

    def _once(self, item: Any) -> Iterator[Any]:
        yield from self._careful.alone(item)

    def _several(self, item: Any) -> Iterator[Any]:
        try:
            found = iter(self._function(item))
        except Exception as error:
            yield bad(error, item)
            return
        while True:
            try:
                one = next(found)
            except StopIteration:
                return
            except Exception as error:
                yield bad(error, item)
                return
            yield one

    def _sort_out(self, outcome: Bad | Noted) -> None:
        if isinstance(outcome, Noted):
            self._losses.take(outcome.tried, outcome.misses, None)
        elif self._losses.forgives(outcome.failure):
            self._losses.leave_out(outcome.miss(), None)
        else:
            where = f"In stage {self._stage!r}, the thread that asked, working on {outcome.item}."
            Raised(outcome.failure.to_exception(where)).throw()

    def close(self) -> None:
        close = attribute(self._items, "close")
        if close is not None:
            close()
