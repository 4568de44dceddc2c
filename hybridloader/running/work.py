"""What a worker of a pipeline's stage does to the items of one task: the user's functions in turn.

Several functions in a row are one piece of work, so an item crosses to a worker once for all of them.
An item whose function raises spoils neither its task nor its neighbours: its exception takes its place.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from hybridloader.faults.careful import Careful, Opened, SpreadCareful
from hybridloader.faults.guard import Guard
from hybridloader.faults.on_error import Policy
from hybridloader.faults.outcomes import Damaged, bad, mended, whole_or_damaged
from hybridloader.fetch import MapFetch, Spared, numbered
from hybridloader.fetcher import Abandoned, Fetch, Fetcher, FollowingContext, TaskContext
from hybridloader.foreign import attribute
from hybridloader.seeds.draws import Draws


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
        draws = None if context.draws is None else context.draws.of(number)
        if isinstance(function, MapFetch):
            return self._open_fetch(function, context, draws, on_error)
        setup = attribute(function, "setup")
        if callable(setup) and not isinstance(function, type):
            function = copy.copy(function)
            function.setup()
        if draws is not None:
            from hybridloader.seeds.seeded_items import seeded_by_item

            function = seeded_by_item(draws, self.kind, function)
        return self.kind, function

    def _open_fetch(
        self, fetch: MapFetch, context: TaskContext, draws: Draws | None, on_error: Policy | None
    ) -> tuple[str, Callable[[Any], Any]]:
        if context.tracked or draws is not None:
            context = FollowingContext(context, draws)  # what is noted is the number of the item
        kind = self.kind
        if fetch.batched and on_error is not None:  # what fails is one sample of an item
            fetch = replace(fetch, on_error=on_error, fill=False)
            fetcher: Any = fetch.open(None, context)
            kind, function = "batch", fetcher.attempt
        else:
            fetcher = fetch.open(None, context)
            function = fetcher.fetch
        if draws is None:
            return kind, function
        return kind, lambda item: draws.task(fetcher.key, function, item)


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
        Repeats and replaces here; what is to be skipped is `Bad`, as without a policy.
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
        draws = context.draws
        if draws is not None:
            from hybridloader.seeds.seeded_items import SeededItems, of_item

            policy = draws.policy(self.on_error, of_item)
            careful = Careful(opened, Guard(policy, context), context)
            return SeededItems(careful, context, draws, self.threads)
        careful = Careful(opened, Guard(self.on_error, context), context)
        if self.threads > 1:
            return SpreadCareful(careful, self.threads, context)
        if careful.needed:
            return careful
        if any(kind != "map" for kind, _ in opened):
            return StepsFetcher(opened, careful, context)
        return MapsFetcher([function for _, function in opened], careful, context)


class MapsFetcher(Fetcher):
    """The shortest way through functions that give one result for each item."""

    def __init__(
        self, functions: list[Callable[[Any], Any]], careful: Careful, context: TaskContext
    ) -> None:
        self._functions, self._careful, self._context = functions, careful, context

    def fetch(self, items: list[Any]) -> Any:
        if type(items) is Spared:
            return self._careful.fetch(items)
        functions, context = self._functions, self._context
        results: list[Any] = []
        damaged = False
        for item in numbered(items, context) if context.tracked else items:
            try:
                for function in functions:
                    item = function(item)
                results.append(item)
            except Exception as error:
                results.append(bad(error, item))
                damaged = True
            if context.cancelled:
                raise Abandoned
        return Damaged(results) if damaged else results

    def mend(self, value: Any, error: Exception, check: Callable[[Any], Any]) -> Any:
        """Leave out the results that can't be sent; see `Fetcher.mend`."""
        return mended(value, check)


class StepsFetcher(Fetcher):
    """The shortest way through steps of any kind."""

    def __init__(self, opened: Opened, careful: Careful, context: TaskContext) -> None:
        self._opened, self._careful, self._context = opened, careful, context

    def fetch(self, items: list[Any]) -> Any:
        if type(items) is Spared:
            return self._careful.fetch(items)
        context = self._context
        results: list[Any] = []
        for item in numbered(items, context) if context.tracked else items:
            _pass(item, self._opened, 0, results, context)
            if context.cancelled:
                raise Abandoned
        return whole_or_damaged(results)

    def mend(self, value: Any, error: Exception, check: Callable[[Any], Any]) -> Any:
        """Leave out the results that can't be sent; see `Fetcher.mend`."""
        return mended(value, check)


def _pass(item: Any, opened: Opened, at: int, results: list[Any], context: TaskContext) -> None:
    """Take `item` through the steps from number `at` on; what comes out is added to `results`.

    An exception takes the place of what that one step would have given: what other steps made of
    other items stays, as if each step were a stage of its own.
    """
    while at < len(opened):
        kind, function = opened[at]
        at += 1
        try:
            if kind == "map":
                item = function(item)
            elif kind == "filter":
                if not function(item):
                    return
            else:
                several = iter(function(item))
                break
        except Exception as error:
            results.append(bad(error, item))
            return
    else:
        results.append(item)
        return
    while not context.cancelled:
        try:
            one = next(several)
        except StopIteration:
            return
        except Exception as error:
            results.append(bad(error, item))
            return
        _pass(one, opened, at, results, context)
