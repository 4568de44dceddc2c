"""The work of a stage under ``seeding="sample"``: each item known by its number in the stage's input."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from hybridloader.seeding.sample_rng import SAMPLE, SampleRng, SeededIterator, now


def numbered_item(pair: tuple[Any, int]) -> Any:
    """Return the item of a pair, of which the number is from now on what is worked on."""
    now.item = b"%d" % pair[1]
    return pair[0]


def of_item(_: Any) -> bytes:
    """By what replacements are seeded: the item that is worked on."""
    return now.item


def seeded_by_item(
    rng: SampleRng, kind: str, function: Callable[[Any], Any]
) -> Callable[[Any], Any]:
    """`function` of an item, seeded by the number of the item that is worked on (`Now.item`).

    The items that a ``"flat_map"`` gives for one are seeded each, as they are asked for.
    """
    call = rng.call
    if kind != "flat_map":
        return lambda item: call(SAMPLE, now.item, function, item)

    def several(item: Any) -> Iterator[Any]:
        key = now.item
        return SeededIterator(rng, key + b"/", iter(call(SAMPLE, key, function, item)))

    return several
