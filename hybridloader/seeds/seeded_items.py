"""The work of a stage under ``seeding="sample"``: each item known by its number in the stage's input."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any

from hybridloader.fanout import fanout_of_this_thread
from hybridloader.faults.careful import Careful
from hybridloader.faults.outcomes import mended, whole_or_damaged
from hybridloader.fetch import numbered
from hybridloader.fetcher import Abandoned, Fetcher, TaskContext
from hybridloader.seeds.draws import SAMPLE, Draws, SeededIterator, now


class SeededItems(Fetcher):
    """The fetcher of such a stage.

    Parameters
    ----------
    careful
        Takes an item through the steps, whose functions are `seeded_by_item`.
    context
        Looked at after every item.
    draws
        Of the stage.
    threads
        That share the items of a task.
    """

    def __init__(self, careful: Careful, context: TaskContext, draws: Draws, threads: int) -> None:
        self._careful, self._context, self._draws = careful, context, draws
        self._fanout = fanout_of_this_thread(threads) if threads > 1 else None

    def fetch(self, items: list[Any]) -> Any:
        context = self._context
        pairs = enumerate(items, self._draws.take(len(items)))
        if self._fanout is not None:
            found = self._fanout.map(self._one, list(pairs), context)
        else:
            found = []
            for pair in numbered(pairs, context) if context.tracked else pairs:
                found.append(self._one(pair))
                if context.cancelled:
                    raise Abandoned
        return whole_or_damaged(list(chain.from_iterable(found)))

    def mend(self, value: Any, error: Exception, check: Callable[[Any], Any]) -> Any:
        """Leave out the results that can't be sent; see `Fetcher.mend`."""
        return mended(value, check)

    def _one(self, pair: tuple[int, Any]) -> list[Any]:
        number, item = pair
        now.item = b"%d" % number
        return self._careful.alone(item)


def of_item(_: Any) -> bytes:
    """By what replacements are seeded: the item that is worked on."""
    return now.item


def seeded_by_item(draws: Draws, kind: str, function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """`function` of an item, seeded by the number of the item that is worked on (`Now.item`).

    The items that a ``"flat_map"`` gives for one are seeded each, as they are asked for.
    """
    call = draws.call
    if kind != "flat_map":
        return lambda item: call(SAMPLE, now.item, function, item)

    def several(item: Any) -> Iterator[Any]:
        key = now.item
        return SeededIterator(draws, key + b"/", iter(call(SAMPLE, key, function, item)))

    return several
