"""A cached pipeline whose arguments have reprs that differ between processes; it needs no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hybridloader import Pipeline


@dataclass(frozen=True)
class Crop:
    """Has a set, whose order differs between processes, and a function, whose repr is an address."""

    kept: frozenset[str]
    size: int = 3
    then: Any = len

    def __call__(self, item: Any) -> Any:
        return item


def cached(path: Any) -> Pipeline:
    data = [{"b", None, "c", "d"}, {"k": object()}, (len, 0.1, b"x", 1j, None, dict)]
    return Pipeline.from_dataset(data).map(Crop(frozenset("abc"))).cache(path)
