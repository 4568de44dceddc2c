"""What a worker of a pipeline's stage does to the items of one task: the user's functions in turn.

Several functions in a row are one piece of work, so an item crosses to a worker once for all of them.
An item whose function raises spoils neither its task nor its neighbours: its exception takes its place.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from hybridloader.faults.careful import Careful, Opened
from hybridloader.faults.guard import Guard
from hybridloader.faults.on_error import Policy
from hybridloader.faults.outcomes import Damaged, bad, whole_or_damaged
from hybridloader.fetch import (
    Abandoned,
    Fetcher,
    Flag,
    MapFetch,
    Spared,
    noting_the_end,
    numbered,
)
from hybridloader.foreign import attribute


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
        self, cancelled: Flag, on_error: Policy | None = None, number: int = 0
    ) -> tuple[str, Callable[[Any], Any]]:
        """The kind, and the function as this worker calls it: number `number` of its stage.

        An object with a method `setup` is copied (not deeply) and set up, so that every worker has its
        own, threads too.
        """
        function = self.function
        draws = None if cancelled.draws is None else cancelled.draws.of(number)
        if isinstance(function, MapFetch) and draws is not None:
            with draws.opening(cancelled):
                return self._open_fetch(function, cancelled, on_error)
        if isinstance(function, MapFetch):
            return self._open_fetch(function, cancelled, on_error)
        setup = attribute(function, "setup")
        if callable(setup) and not isinstance(function, type):
            function = copy.copy(function)
            function.setup()
        if draws is not None:
            from hybridloader.seeds.seeded_items import seeded_by_item

            function = seeded_by_item(draws, self.kind, function)
        return self.kind, function

    def _open_fetch(
        self, function: MapFetch, cancelled: Flag, on_error: Policy | None
    ) -> tuple[str, Callable[[Any], Any]]:
        if function.batched and on_error is not None:  # what fails is one sample of an item
            function = replace(function, on_error=on_error, fill=False)
            return "batch", function.open(None, cancelled)
        return self.kind, function.open(None, cancelled)


@dataclass(frozen=True)
class WorkFetch:
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

    batched: ClassVar[bool] = True

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

    @staticmethod
    def mend(results: Any, check: Callable[[Any], Any]) -> Damaged:
        """The results of a task of which some can't be sent, which `check` tells by raising."""
        outcomes = results.outcomes if type(results) is Damaged else results
        mended = []
        for outcome in outcomes:
            try:
                check(outcome)
            except Exception as error:
                outcome = bad(error, outcome)
            mended.append(outcome)
        return Damaged(mended)

    def open(self, shared_seed: int | None, cancelled: Flag) -> Fetcher:
        opened = [
            step.open(cancelled, self.on_error, number) for number, step in enumerate(self.steps)
        ]
        draws = cancelled.draws
        if draws is not None:
            from hybridloader.seeds.seeded_items import SeededItems, of_item

            policy = draws.policy(self.on_error, of_item)
            careful = Careful(opened, Guard(policy, cancelled), cancelled)
            return SeededItems(careful, cancelled, draws, self.threads)
        careful = Careful(opened, Guard(self.on_error, cancelled), cancelled)
        if self.threads > 1:
            return careful.spread(self.threads)
        return noting_the_end(self._fetcher(opened, careful, cancelled), cancelled)

    @staticmethod
    def _fetcher(opened: Opened, careful: Careful, cancelled: Flag) -> Fetcher:
        """The shortest way through the steps."""
        kinds = {kind for kind, _ in opened}
        if careful.needed:
            return careful
        if kinds != {"map"}:
            return _one_after_the_other(opened, careful, cancelled)
        if len(opened) == 1:
            return _map_alone(opened[0][1], careful, cancelled)
        return _maps([function for _, function in opened], careful, cancelled)


def _map_alone(function: Callable[[Any], Any], careful: Careful, cancelled: Flag) -> Fetcher:
    notes = cancelled.notes

    def work(items: list[Any]) -> Any:
        if type(items) is Spared:
            return careful(items)
        results: list[Any] = []
        damaged = False
        for item in numbered(items, cancelled) if notes else items:
            try:
                results.append(function(item))
            except Exception as error:
                results.append(bad(error, item))
                damaged = True
            if cancelled.up:
                raise Abandoned
        return Damaged(results) if damaged else results

    return work


def _maps(functions: list[Callable[[Any], Any]], careful: Careful, cancelled: Flag) -> Fetcher:
    notes = cancelled.notes

    def work(items: list[Any]) -> Any:
        if type(items) is Spared:
            return careful(items)
        results: list[Any] = []
        damaged = False
        for item in numbered(items, cancelled) if notes else items:
            try:
                for function in functions:
                    item = function(item)
                results.append(item)
            except Exception as error:
                results.append(bad(error, item))
                damaged = True
            if cancelled.up:
                raise Abandoned
        return Damaged(results) if damaged else results

    return work


def _one_after_the_other(opened: Opened, careful: Careful, cancelled: Flag) -> Fetcher:
    notes = cancelled.notes

    def work(items: list[Any]) -> Any:
        if type(items) is Spared:
            return careful(items)
        results: list[Any] = []
        for item in numbered(items, cancelled) if notes else items:
            _pass(item, opened, 0, results, cancelled)
            if cancelled.up:
                raise Abandoned
        return whole_or_damaged(results)

    return work


def _pass(item: Any, opened: Opened, at: int, results: list[Any], cancelled: Flag) -> None:
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
    while not cancelled.up:
        try:
            one = next(several)
        except StopIteration:
            return
        except Exception as error:
            results.append(bad(error, item))
            return
        _pass(one, opened, at, results, cancelled)
