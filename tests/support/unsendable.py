"""Parts of bad input: a dataset with an attribute, and values that can't be pickled."""

from __future__ import annotations

from typing import Any


class WithInner:
    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        return index


def nested(depth: int) -> list[Any]:
    found: list[Any] = []
    for _ in range(depth):
        found = [found]
    return found
