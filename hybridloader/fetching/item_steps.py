"""Work of a pipeline's stage: the items of a task go through the user's functions, one after the other.

Several functions in a row are one piece of work, so an item crosses to a worker once for all of them.
An error of one item takes its place; the other items of the task are not affected.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from typing import Any

from hybridloader._support.user_objects import attribute
from hybridloader.engine.messages import (
    Fetch,
    Fetcher,
    FollowingContext,
    PartlyGivenUp,
    StartedTask,
    TaskContext,
)
from hybridloader.engine.meter import SEEN
from hybridloader.fetching.item_loop import Fanout, ItemLoop, TaskResults, seeded
from hybridloader.fetching.on_error import Policy
from hybridloader.fetching.readers import IndexedFetcher, MapFetch
from hybridloader.seeding.sample_rng import SAMPLE, SampleRng, item_key, numbered_item


def is_async(function: Any) -> bool:
    """Return True if `function` is an ``async def``, or an object whose call is one."""
    for callee in (function, attribute(type(function), "__call__")):
        # Since Python 3.12 it calls `__getattr__` of the object, which may raise anything.
        with suppress(Exception):
            if inspect.iscoroutinefunction(callee):
                return True
    return False


@dataclass(frozen=True)
class Step:
    """One function of a piece of work."""

    kind: str  # "map": returns one result, "flat_map": several, "filter": whether to keep the item
    function: Any  # the user's function, or a `MapFetch` that is opened in the worker
    concurrency: int = 0  # coroutines at a time, for an `async def`
    name: str = ""  # of its slices in a trace

    def open(
        self,
        context: TaskContext,
        on_error: Policy | None = None,
        number: int = 0,
        *,
        of_worker: bool = True,
    ) -> tuple[str, Callable[[Any], Any]]:
        """Return the kind, and the function as this worker calls it: function `number` of its stage.

        A step that runs where its items are asked for is not `of_worker`, also if that is in one.

        An object with a method `setup` is copied (not deeply) and set up, so that every worker, also
        one that is a thread, has its own, from one epoch to the next. If its call is an ``async def``,
        it is set up for each epoch, at whose end its `aclose` is awaited.
        """
        function = self.function
        rng = None if context.rng is None else context.rng.for_function(number)
        if isinstance(function, MapFetch):
            return self._open_fetch(context, rng, on_error)
        setup, aclose = attribute(function, "setup"), None
        if callable(setup) and not isinstance(function, type):
            made = context.set_up.get(number)
            if made is None:
                made = copy.copy(function)
                made.setup()
                if not self.concurrency:
                    context.set_up[number] = made
            function, aclose = made, attribute(made, "aclose")
        if rng is not None and rng.by_function:
            function = rng.seeded_by_item(self.kind, function)
        if self.concurrency:
            from hybridloader.fetching.coroutines import Coroutines

            limit = self.concurrency
            return self.kind, Coroutines(function, limit, context, aclose, of_worker=of_worker)
        return self.kind, context.timed(self.name, function, SEEN)

    def fetcher(
        self, context: TaskContext, rng: SampleRng | None, on_error: Policy | None
    ) -> IndexedFetcher:
        """Return the fetcher of a `MapFetch`, under a policy where a single sample of an item fails."""
        fetch: MapFetch = self.function
        if context.tracked or rng is not None:
            context = FollowingContext(context, rng)  # `at` is the number of the item
        if fetch.batched and on_error is not None:
            fetch = replace(fetch, on_error=on_error, fill=False)
        return fetch.open(None, context)

    def _open_fetch(
        self, context: TaskContext, rng: SampleRng | None, on_error: Policy | None
    ) -> tuple[str, Callable[[Any], Any]]:
        fetcher = self.fetcher(context, rng, on_error)
        kind, fetch = self.kind, fetcher.fetch
        if fetcher.tolerant:
            kind, fetch = "batch", fetcher.attempt
        function = context.timed(self.name, fetch, SEEN)
        if rng is None:
            return kind, function
        return kind, lambda item: rng.task(fetcher.key, function, item)


@dataclass(frozen=True)
class WorkFetch(Fetch):
    """Work of a stage: a list of items in, a list of results out."""

    steps: tuple[Step, ...]  # at least one
    threads: int = 1  # of each worker
    on_error: Policy | None = None  # it retries and replaces here; skips are only noted
    entries: Any = None  # of torch's collate map, for fresh workers: see `with_entries`

    @property
    def dataset(self) -> Any:
        return next((fetch.dataset for fetch in self._fetches), None)

    @property
    def private(self) -> bool:
        return any(fetch.private for fetch in self._fetches)

    @property
    def _fetches(self) -> list[MapFetch]:
        return [step.function for step in self.steps if isinstance(step.function, MapFetch)]

    @property
    def coroutines(self) -> int:  # type: ignore[override]  # a field in the base class
        return self.steps[0].concurrency

    @property
    def spreads(self) -> bool:
        return not self.coroutines

    @property
    def divisible(self) -> bool:
        """True if its first step makes batches of a dataset's samples."""
        first = self.steps[0].function
        return isinstance(first, MapFetch) and first.divisible

    @property
    def waits(self) -> bool:
        first = self.steps[0].function
        return self.divisible and isinstance(first, MapFetch) and first.waits

    def samples_of(self, index: Any) -> Any:
        return index[0] if type(index) is list and len(index) == 1 else None

    @property
    def overlaps(self) -> bool:
        return self.threads > 1 or self.coroutines > 1

    def with_dataset(self, dataset: Any) -> WorkFetch:
        steps = tuple(
            replace(step, function=step.function.with_dataset(dataset))
            if isinstance(step.function, MapFetch)
            else step
            for step in self.steps
        )
        return replace(self, steps=steps)

    def open(self, shared_seed: int | None, context: TaskContext) -> Fetcher:
        return ItemsFetcher(self, context)


class ItemsFetcher(Fetcher):
    """Fetcher of a `WorkFetch`.

    Where items are seeded, the number of an item in the stage's input seeds its steps: each of them
    (`SampleRng.seeded_by_item`), or all of them together.
    """

    def __init__(self, work: WorkFetch, context: TaskContext) -> None:
        self._context, self._rng, policy = context, context.rng, work.on_error
        self._opened = [
            step.open(context, policy, number) for number, step in enumerate(work.steps)
        ]
        by_function = self._rng is not None and self._rng.by_function
        self._by_item = self._rng is not None and not by_function
        self._policy = seeded(policy, self._rng, item_key) if by_function else policy
        self._enter = numbered_item if by_function else None
        self._helpers = Fanout.of(context, work.threads) if work.threads > 1 else None
        self._loop = ItemLoop(self._opened, self._policy, context, self._helpers, enter=self._enter)
        self._alone = self._alone_in(self._loop)
        self._coroutines: Any = self._opened[0][1] if work.coroutines else None
        self._batches: IndexedFetcher | None = None
        self._samples: Any = None  # of the task that is assembled
        if work.divisible:
            part = None if self._rng is None else self._rng.for_function(0)
            self._divide(work.steps[0].fetcher(context, part, policy))

    def _divide(self, batches: IndexedFetcher) -> None:
        """Prepare for tasks that are one batch each, whose samples `batches` fetches."""
        self._batches = batches
        made = ("batch" if batches.tolerant else "map", self._made)
        later = self._opened[1:]
        # Without later steps nothing draws by the number of the item.
        enter = self._enter if later else None
        loop = ItemLoop([made, *later], self._policy, self._context, enter=enter)
        self._rest = self._alone_in(loop) if later else loop.alone

    def fetch(self, items: list[Any]) -> Any:
        spared, rng = type(items) is PartlyGivenUp, self._rng
        if rng is not None and self._by_item:
            if self._helpers is not None:
                parts = self._helpers.map(self._alone, self._numbered(items), self._context)
                return self._handed_over(self._loop.joined(parts))
            first = rng.first_item
            walk = rng.enter(items, lambda place: b"%d" % (first + place))
            try:
                results = self._loop.run(walk, spared=spared)
            finally:
                rng.leave()
            return self._handed_over(results)
        items = self._numbered(items)
        if self._coroutines is not None:
            items = self._coroutines.through(items)
        return self._handed_over(self._loop.run(items, spared=spared))

    def _numbered(self, items: list[Any]) -> list[Any]:
        rng = self._rng
        return items if rng is None else list(zip(items, count(rng.first_item)))

    def _alone_in(self, loop: ItemLoop) -> Callable[[Any], TaskResults]:
        """Return `ItemLoop.alone` for the items of `_numbered`. For any thread."""
        rng = self._rng
        if rng is None or not self._by_item:
            return loop.alone
        return lambda pair: rng.call(SAMPLE, b"%d" % pair[1], loop.alone, pair[0])

    def _handed_over(self, results: TaskResults) -> Any:
        if results.notes or results.uneven:
            return results.hand_over(self._context)
        return results.values

    def begin(self, items: Any, ring: Callable[[], None]) -> StartedTask:
        if self._helpers is None:
            begun: StartedTask = self._coroutines.begin(items)
            return begun
        return self._helpers.begin(self._alone, self._numbered(items), self._context, "item", ring)

    def wake(self) -> None:
        if self._coroutines is not None:
            self._coroutines.wake()

    def sample(self, index: Any) -> Any:
        assert self._batches is not None
        return self._batches.sample(index)

    def assemble(self, samples: Any, index: Any) -> Any:
        if self._helpers is not None:
            return self._handed_over(self._loop.joined(samples))
        if self._coroutines is not None:
            return self._handed_over(self._loop.run(samples))
        self._samples = samples
        results = self._rest((self._numbered(index) if self._opened[1:] else index)[0])
        results.end_item()
        return self._handed_over(results)

    def _made(self, index: Any) -> Any:
        """Return the batch of the samples of the task that is assembled."""
        batches, samples, self._samples = self._batches, self._samples, None
        assert batches is not None
        if batches.rng is None:
            return batches.made_of(samples, index)
        return batches.rng.task(batches.key, partial(batches.made_of, samples), index)

    def close(self) -> None:
        if self._coroutines is not None:
            self._coroutines.close()

    def mend(self, value: Any, error: Exception, check: Callable[[Any], Any]) -> Any:
        return self._loop.sendable(value, check)
