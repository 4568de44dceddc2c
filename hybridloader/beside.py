"""What is kept beside a loader, by its identity, and no longer than it lives.

Not on it, since frameworks watch what is set on one, copy it and pickle it; nor in a
`weakref.WeakKeyDictionary`, since a user's subclass may have an ``__eq__``: without a ``__hash__`` it
would be refused, and two equal loaders would have one entry.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, MutableMapping
from typing import Any, TypeVar

V = TypeVar("V")


class Beside(MutableMapping[Any, V]):
    """A mapping from objects that can be referred to weakly. Any of them may die on any thread."""

    def __init__(self) -> None:
        self._entries: dict[int, tuple[weakref.ref[Any], V]] = {}

    def __getitem__(self, owner: Any) -> V:
        return self._entries[id(owner)][1]

    def __setitem__(self, owner: Any, value: V) -> None:
        place = id(owner)  # nobody else's before `forget` was called: memory is freed after that

        def forget(_: weakref.ref[Any]) -> None:
            self._entries.pop(place, None)

        self._entries[place] = weakref.ref(owner, forget), value

    def __delitem__(self, owner: Any) -> None:
        del self._entries[id(owner)]

    def __iter__(self) -> Iterator[Any]:
        """Those that live."""
        owners = [reference() for reference, _ in list(self._entries.values())]
        return iter([owner for owner in owners if owner is not None])

    def __len__(self) -> int:
        return len(self._entries)
