"""What a worker of a pipeline's stage does to the items of one task: the user's functions in turn.

Several functions in a row are one piece of work, so an item crosses to a worker once for all of them.
An item whose function raises spoils neither its task nor its neighbours: its exception takes its place.
"""

from __future__ import annotations

import copy
import reprlib
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

from hybridloader.errors import Failure
from hybridloader.fanout import fanout_of_this_thread
from hybridloader.fetch import Abandoned, EndOfShard, Fetcher, Flag, MapFetch

_short = reprlib.Repr()
_short.maxother = _short.maxstring = 120

_READING = 0.01
"""Seconds after which a reader gives what it has, if that is less than it was asked for."""


class Bad:
    """An exception in the place of what an item would have given.

    Attributes
    ----------
    failure
        The exception on its way.
    item
        The item, in short.
    """

    __slots__ = ("failure", "item")

    def __init__(self, failure: Failure, item: str) -> None:
        self.failure, self.item = failure, item

    def __reduce__(self) -> Any:
        return Bad, (self.failure, self.item)


class Damaged:
    """The results of a task of which some are `Bad`. Not a list, so that nobody takes it for whole."""

    __slots__ = ("outcomes",)

    def __init__(self, outcomes: list[Any]) -> None:
        self.outcomes = outcomes

    def __reduce__(self) -> Any:
        return Damaged, (self.outcomes,)


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

    def open(self, cancelled: Flag) -> Callable[[Any], Any]:
        """The function as this worker calls it.

        An object with a method `setup` is copied (not deeply) and set up, so that every worker has its
        own, threads too.
        """
        function = self.function
        if isinstance(function, MapFetch):
            return function.open(None, cancelled)
        setup = getattr(function, "setup", None)
        if callable(setup) and not isinstance(function, type):
            function = copy.copy(function)
            function.setup()
        return function  # type: ignore[no-any-return]


@dataclass(frozen=True)
class WorkFetch:
    """The work of a stage: items in, results out, as lists.

    Attributes
    ----------
    steps
        At least one.
    threads
        Threads that share the items of one task, inside the worker.
    """

    steps: tuple[Step, ...]
    threads: int = 1

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
        opened = [(step.kind, step.open(cancelled)) for step in self.steps]
        if self.threads > 1:
            return _spread(opened, self.threads, cancelled)
        if len(opened) == 1 and opened[0][0] == "map":
            return _map_alone(opened[0][1], cancelled)
        if all(kind == "map" for kind, _ in opened):
            return _maps([function for _, function in opened], cancelled)
        return _one_after_the_other(opened, cancelled)


Opened = list[tuple[str, Callable[[Any], Any]]]
"""Kinds of steps, and their functions as one worker calls them."""


def _map_alone(function: Callable[[Any], Any], cancelled: Flag) -> Fetcher:
    def work(items: list[Any]) -> Any:
        results: list[Any] = []
        damaged = False
        for item in items:
            try:
                results.append(function(item))
            except Exception as error:
                results.append(bad(error, item))
                damaged = True
            if cancelled.up:
                raise Abandoned
        return Damaged(results) if damaged else results

    return work


def _maps(functions: list[Callable[[Any], Any]], cancelled: Flag) -> Fetcher:
    def work(items: list[Any]) -> Any:
        results: list[Any] = []
        damaged = False
        for item in items:
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


def _one_after_the_other(opened: Opened, cancelled: Flag) -> Fetcher:
    def work(items: list[Any]) -> Any:
        results: list[Any] = []
        for item in items:
            _pass(item, opened, 0, results, cancelled)
            if cancelled.up:
                raise Abandoned
        return _whole_or_damaged(results)

    return work


def _spread(opened: Opened, threads: int, cancelled: Flag) -> Fetcher:
    """The same, the items of a task shared out to threads."""
    fanout = fanout_of_this_thread(threads)

    def alone(item: Any) -> list[Any]:
        results: list[Any] = []
        _pass(item, opened, 0, results, cancelled)
        return results

    def work(items: list[Any]) -> Any:
        found = fanout.map(alone, items, cancelled)
        return _whole_or_damaged(list(chain.from_iterable(found)))

    return work


def _whole_or_damaged(results: list[Any]) -> Any:
    return Damaged(results) if any(type(result) is Bad for result in results) else results


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


def bad(error: Exception, item: Any) -> Bad:
    """What takes the place of the results of `item`."""
    if isinstance(error, StopIteration):
        leaked = leak(error)
        leaked.__cause__ = error
        error = leaked
    return Bad(Failure(error), _short.repr(item))


def leak(error: StopIteration) -> RuntimeError:
    """As in PEP 479: a `StopIteration` would end the user's loop without a word."""
    return RuntimeError(f"a function of a pipeline raised {error!r}")


class ReadersFetch:
    """The work of a reader: the next items of its own iterator, as many as it is asked for.

    Parameters
    ----------
    source
        An iterable, of which every worker has a copy of its own; or a function that makes one, called in
        the worker.
    """

    def __init__(self, source: Any) -> None:
        self._source = source

    mend = WorkFetch.mend

    @property
    def dataset(self) -> Any:
        return self._source

    @property
    def private(self) -> bool:
        return hasattr(type(self._source), "__iter__")  # a class has it too, and is called

    def with_dataset(self, dataset: Any) -> ReadersFetch:
        return ReadersFetch(dataset)

    def open(self, shared_seed: int | None, cancelled: Flag) -> Fetcher:
        items = iter(self._source if self.private else self._source())
        ended = False

        def read(most: int) -> Any:
            nonlocal ended
            if ended:
                raise EndOfShard
            results: list[Any] = []
            until = time.monotonic() + _READING
            while len(results) < most and not (results and time.monotonic() > until):
                try:
                    results.append(next(items))
                except StopIteration:
                    ended = True
                    break
                except Exception as error:
                    results.append(bad(error, "the next item"))
                    return Damaged(results)
                if cancelled.up:
                    raise Abandoned
            if not results:
                raise EndOfShard
            return results

        return read
