"""A fork: several pipelines share one iteration of the steps before them.

Every branch gets every item, the same object as the others. Items that one branch has returned and
another has not yet wait in a queue without bound, as with `itertools.tee`: for a branch that is never
pulled, every item of the others is kept. No thread is started here; whichever branch comes first pulls.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from hybridloader._support.text import short
from hybridloader._support.user_objects import Raised, close
from hybridloader.fetching.on_error.places import alike
from hybridloader.pipeline.operators.parameters import settle_whole
from hybridloader.running.operator import (
    Chain,
    Context,
    Length,
    Mark,
    Source,
    UpstreamPart,
    steps_in,
)


@dataclass(frozen=True, eq=False)
class ForkPoint:
    """Place where `pipeline` continues in `count` branches.

    Every fork is another, even with the same parts. All branches are to be pulled, or closed: see the
    module.
    """

    pipeline: Chain
    count: int

    @property
    def name(self) -> str:
        return "fork"

    def __post_init__(self) -> None:
        if not isinstance(self.pipeline, Chain):
            raise TypeError(
                f"{self.name}: pipeline must be a pipeline, not {short(self.pipeline)}; make one of an "
                "iterable or a dataset first"
            )
        settle_whole(self, "count", 1, "give the number of branches")


@dataclass(frozen=True)
class Branch(Source):
    """One of the pipelines that a fork makes, opened once in an epoch; `number` counts from 0."""

    fork: ForkPoint = field(repr=False)
    number: int

    not_fingerprinted = ("fork",)

    def __post_init__(self) -> None:
        if not isinstance(self.fork, ForkPoint):
            raise TypeError(f"{self.name}: fork must be a ForkPoint, not {short(self.fork)}")
        instead = f"a fork of {self.fork.count} has branches 0 to {self.fork.count - 1}"
        settle_whole(self, "number", 0, instead)
        if self.number >= self.fork.count:
            raise ValueError(f"{self.name}: there is no branch {self.number}: {instead}")

    @property
    def fork_place(self) -> tuple[ForkPoint, int]:
        return self.fork, self.number

    def branches(self) -> tuple[Chain, ...]:
        return (self.fork.pipeline,)

    def start(self, context: Context) -> Iterator[Any]:
        trunk = context.shared.setdefault(self.fork, _Trunk(self.fork.count))
        return trunk.branch(self, context)  # type: ignore[no-any-return]

    def seek(self, n: int) -> int:
        return n  # of all branches of a fork, which `may_begin_at` sees to

    def before(self, n: int, epoch: int, mark: Mark | None) -> Sequence[UpstreamPart] | None:
        if n and leaves_out([self.fork.pipeline]):  # in a zip, what is left out has a number
            return None
        return [UpstreamPart(0, n, epoch)]

    def length(self, upstream: Length) -> Length:
        return self.fork.pipeline.length


class _Trunk:
    """Items and queues that the branches of one fork share in one pass."""

    def __init__(self, count: int) -> None:
        self._pulling = threading.Lock()
        self._opened: set[int] = set()
        self._items: Iterator[Any] | None = None
        # All the mutable state; a branch takes from its queue without the lock, all else is under it:
        self.queues: list[deque[Any] | None] = [deque() for _ in range(count)]  # None: closed
        self._ended = False

    def branch(self, branch: Branch, context: Context) -> BranchIterator:
        number = branch.number
        with self._pulling:
            if number in self._opened:
                raise ValueError(
                    f"branch {number} of a fork was opened twice in one pass; repeat what comes before "
                    "the fork, or fork into more branches"
                )
            if self._items is None:
                self._items = context.open(branch.fork.pipeline, context.start)
            self._opened.add(number)
        queue = self.queues[number]
        assert queue is not None  # only its iterator closes it
        return BranchIterator(self, number, queue)

    def pull(self, number: int, queue: deque[Any]) -> Any:
        """Return the next item for a branch whose queue was empty, and give it to the others too."""
        with self._pulling:
            if queue:  # another branch has pulled meanwhile
                return queue.popleft()
            if self._ended or self._items is None:
                raise StopIteration
            try:
                item = next(self._items)
            except StopIteration:
                self._ended = True
                raise
            except Exception as error:
                for other, waiting in enumerate(self.queues):
                    if other != number and waiting is not None:
                        waiting.append(Raised(alike(error)))  # this frame holds the queues
                raise
            for other, waiting in enumerate(self.queues):
                if other != number and waiting is not None:
                    waiting.append(item)
            return item

    def forget(self, number: int) -> None:
        """Stop queueing for one branch. Takes no lock, because a finalizer may call it."""
        self.queues[number] = None

    def close(self, number: int) -> None:
        """Forget one branch, and close the steps before all once none is left."""
        self.forget(number)
        if self._items is not None and not any(q is not None for q in self.queues):
            self._ended = True
            close(self._items)


class BranchIterator(Iterator[Any]):
    """Iterator of `Branch`; each may be pulled by another thread."""

    def __init__(self, trunk: _Trunk, number: int, queue: deque[Any]) -> None:
        self._trunk, self._number = trunk, number
        # All the mutable state, besides the trunk:
        self._queue = queue
        self._closed = False

    def __next__(self) -> Any:
        if self._closed:
            raise StopIteration
        queue = self._queue
        # Only this branch takes from it, so what is there now stays there.
        item = queue.popleft() if queue else self._trunk.pull(self._number, queue)
        if type(item) is Raised:
            item.throw()
        return item

    def close(self) -> None:
        """Leave the others alone; the last one closes the steps before. Idempotent."""
        if not self._closed:
            self._closed = True
            self._trunk.close(self._number)
            self._queue.clear()

    def __del__(self) -> None:
        self._trunk.forget(self._number)


# -- resuming ----------------------------------------------------------------------------------------


def leaves_out(pipelines: Sequence[Chain]) -> bool:
    """Return True if a step in one of `pipelines` leaves out items that fail."""
    return any(step.leaves_out for pipeline in pipelines for step in steps_in(pipeline))


def may_begin_at(pipelines: Sequence[Chain], n: int) -> bool:
    """Return True if pipelines that are pulled in step can each begin after `n` items.

    Branches of a fork can if all of them are here and want the same items next: else one of them
    would have to be given items that the others are not to see again.
    """
    wanted: dict[ForkPoint, dict[int, int | None]] = {}
    for pipeline in pipelines:
        place = pipeline.operators[0].fork_place
        if place is not None:
            wanted.setdefault(place[0], {})[place[1]] = _begins_at(pipeline, n)
        elif reaches_out(pipeline):
            return False
    return not any(
        len(places) < fork.count
        or len({*places.values()}) > 1
        or None in places.values()
        or reaches_out(fork.pipeline)
        for fork, places in wanted.items()
    )


def _begins_at(pipeline: Chain, n: int) -> int | None:
    """Return how many items of its source make its first `n`; None if a step does not know."""
    for operator in reversed(pipeline.operators[1:]):
        found = operator.seek(n)
        if found is None:
            return None
        n = found
    return n


def reaches_out(pipeline: Chain) -> bool:
    """Return True if it holds some branches of a fork, and not all of them."""
    met: dict[ForkPoint, set[int]] = {}
    for operator in steps_in(pipeline):
        if operator.fork_place is not None:
            met.setdefault(operator.fork_place[0], set()).add(operator.fork_place[1])
    return any(len(numbers) < fork.count for fork, numbers in met.items())
