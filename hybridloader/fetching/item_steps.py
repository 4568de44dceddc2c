"""What a worker of a pipeline's stage does to the items of one task: the user's functions in turn.

Several functions in a row are one piece of work, so an item crosses to a worker once for all of them.
An item whose function raises spoils neither its task nor its neighbours: its exception takes its place.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

from hybridloader._support.attributes import attribute
from hybridloader.engine.fetcher import Fetch, Fetcher, FollowingContext, Spared, TaskContext
from hybridloader.fetching.fanout import spread_over
from hybridloader.fetching.fetch import MapFetch
from hybridloader.fetching.on_error.error_handler import ErrorHandler, seeded
from hybridloader.fetching.on_error.item_loop import ItemLoop, Opened
from hybridloader.fetching.on_error.policies import Policy
from hybridloader.fetching.on_error.task_results import ItemsFetcher
from hybridloader.seeding.sample_rng import SampleRng, item_key, numbered_item


@dataclass(frozen=True)
class Step:
    """One function of a piece of work.

    Attributes
    ----------
    kind
        ``"map"``: one result for each item. ``"flat_map"``: an iterable of results.
        ``"filter"``: whether to keep the item.
    function
        What the user gave, or a `MapFetch` that is opened in the worker.
    """

    kind: str
    function: Any

    def open(
        self, context: TaskContext, on_error: Policy | None = None, number: int = 0
    ) -> tuple[str, Callable[[Any], Any]]:
        """The kind, and the function as this worker calls it: number `number` of its stage.

        An object with a method `setup` is copied (not deeply) and set up, so that every worker has its
        own, threads too.
        """
        function = self.function
        rng = None if context.rng is None else context.rng.for_function(number)
        if isinstance(function, MapFetch):
            return self._open_fetch(function, context, rng, on_error)
        setup = attribute(function, "setup")
        if callable(setup) and not isinstance(function, type):
            function = copy.copy(function)
            function.setup()
        if rng is not None:
            function = rng.seeded_by_item(self.kind, function)
        return self.kind, function

    def _open_fetch(
        self,
        fetch: MapFetch,
        context: TaskContext,
        rng: SampleRng | None,
        on_error: Policy | None,
    ) -> tuple[str, Callable[[Any], Any]]:
        if context.tracked or rng is not None:
            context = FollowingContext(context, rng)  # what is noted is the number of the item
        kind = self.kind
        if fetch.batched and on_error is not None:  # what fails is one sample of an item
            fetch = replace(fetch, on_error=on_error, fill=False)
            fetcher: Any = fetch.open(None, context)
            kind, function = "batch", fetcher.attempt
        else:
            fetcher = fetch.open(None, context)
            function = fetcher.fetch
        if rng is None:
            return kind, function
        return kind, lambda item: rng.task(fetcher.key, function, item)


@dataclass(frozen=True)
class WorkFetch(Fetch):
    """The work of a stage: items in, results out, as lists.

    Attributes
    ----------
    steps
        At least one.
    threads
        Threads that share the items of one task, inside the worker.
    on_error
        Repeats and replaces here; what is to be skipped is told, as without a policy.
    batched
        The index of a task is a list of items.
    """

    steps: tuple[Step, ...]
    threads: int = 1
    on_error: Policy | None = None

    @property
    def dataset(self) -> Any:
        found = [
            step.function.dataset for step in self.steps if isinstance(step.function, MapFetch)
        ]
        return found[0] if found else None

    @property
    def private(self) -> bool:
        return any(isinstance(s.function, MapFetch) and s.function.private for s in self.steps)

    def with_dataset(self, dataset: Any) -> WorkFetch:
        steps = tuple(
            replace(step, function=step.function.with_dataset(dataset))
            if isinstance(step.function, MapFetch)
            else step
            for step in self.steps
        )
        return replace(self, steps=steps)

    def open(self, shared_seed: int | None, context: TaskContext) -> Fetcher:
        opened = [
            step.open(context, self.on_error, number) for number, step in enumerate(self.steps)
        ]
        policy, rng = self.on_error, context.rng
        if rng is not None:
            policy = seeded(policy, rng, item_key)
        return ItemsLoop(opened, ErrorHandler(policy, context), context, self.threads)


class ItemsLoop(ItemsFetcher):
    """The fetcher of a `WorkFetch`.

    Under ``seeding="sample"`` each item is known by its number in the stage's input, and the steps are
    seeded by that; see `SampleRng.seeded_by_item`.

    Parameters
    ----------
    opened
        The steps.
    handler
        Of each item.
    context
        Looked at after every item.
    threads
        That share the items of a task.
    """

    def __init__(
        self,
        opened: Opened,
        handler: ErrorHandler,
        context: TaskContext,
        threads: int,
    ) -> None:
        super().__init__(handler, context)
        self._rng = context.rng
        enter = None if self._rng is None else numbered_item
        spread = spread_over(threads, context) if threads > 1 else None
        self._loop = ItemLoop(opened, handler, context, spread, enter=enter)

    def fetch(self, items: list[Any]) -> Any:
        spared, rng = type(items) is Spared, self._rng
        if rng is not None:
            items = list(zip(items, count(rng.take(len(items))), strict=False))
        results = self._loop.run(items, spared=spared)
        return results.told(self._context) if results.notes else results.values
