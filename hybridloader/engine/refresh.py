"""Changes of the dataset since the last epoch, which are sent to persistent workers.

Each new epoch sends the attributes that were *rebound* since the last one:

- on any object, those whose new value is plain (a number, a string, None, or a tuple of such);
- on an object that has a `set_epoch` method, each that can be pickled.

Changes in place are not sent, and changes that a worker makes to its copy stay. The same applies to
datasets in attributes or lists of the dataset, at any depth. docs/decisions.md has the reasons.
"""

from __future__ import annotations

import pickle
import sys
from collections.abc import Iterator
from typing import Any

from hybridloader._support.text import warn
from hybridloader._support.user_objects import attribute, has, text_of

Path = tuple[Any, ...]  # names of attributes and list positions, from the dataset inward
Change = tuple[Path, Any]

_PLAIN = (bool, int, float, complex, str, bytes, type(None))


class DatasetChanges:
    """Remembers the values of the attributes of a dataset."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset
        self._before = bindings(dataset)
        self._warned: set[Path] = set()

    def changes(self) -> tuple[Change, ...]:
        """Return the attributes that were rebound since the last call."""
        before, self._before = self._before, bindings(self._dataset)
        found = []
        for path, (value, by_epoch) in self._before.items():
            if path in before and _same(before[path][0], value):
                continue
            if plain(value) or (by_epoch and self._picklable(path, value)):
                found.append((path, value))
        return tuple(found)

    def _picklable(self, path: Path, value: Any) -> bool:
        try:
            pickle.dumps(value)
        except Exception as error:  # a foreign `__reduce__` may raise any error
            if path not in self._warned:
                self._warned.add(path)
                where = ".".join(map(str, path))
                warn(
                    f"attribute {where!r} of the dataset was rebound, but its new value can't be "
                    f"pickled ({text_of(error)}), so the persistent workers keep the old one; make it "
                    "picklable, or use persistent_workers=False",
                    "rebound-attribute",
                )
            return False
        return True


def apply(dataset: Any, changes: tuple[Change, ...]) -> None:
    for path, value in changes:
        target = dataset
        try:
            for step in path[:-1]:
                target = target[step] if isinstance(step, int) else getattr(target, step)
        except (AttributeError, LookupError, TypeError):
            continue  # an object that was attached after this copy was made
        name = path[-1]
        assert isinstance(name, str)
        if value is MISSING:
            object.__delattr__(target, name)
        elif not _same(attribute(target, name, MISSING), value):
            object.__setattr__(target, name, value)


MISSING = object()
"""Stands for the value of an attribute that an object does not have."""


def _same(a: Any, b: Any) -> bool:
    return a is b or (type(a) is type(b) and plain(a) and bool(a == b))


def plain(value: Any) -> bool:
    """True if it is a number, a string, None, or a tuple of such."""
    if isinstance(value, (tuple, frozenset)):
        return type(value) in (tuple, frozenset) and all(map(plain, value))
    return type(value) in _PLAIN


def bindings(dataset: Any) -> dict[Path, tuple[Any, bool]]:
    """Return the attributes of the dataset and of those within: path -> value, has `set_epoch`."""
    found: dict[Path, tuple[Any, bool]] = {}
    for path, node in _nodes(dataset):
        by_epoch = has(node, "set_epoch")
        for name, value in vars(node).items():
            if not _is_dataset(value):
                here = (*path, name)
                found[here] = value, by_epoch
    return found


def _nodes(dataset: Any) -> Iterator[tuple[Path, Any]]:
    visited: set[int] = set()
    todo: list[tuple[Path, Any]] = [((), dataset)]
    while todo:
        path, node = todo.pop()
        if id(node) in visited or not isinstance(attribute(node, "__dict__"), dict):
            continue
        visited.add(id(node))
        yield path, node
        for name, value in vars(node).items():
            here = (*path, name)
            if _is_dataset(value):
                todo.append((here, value))
            elif isinstance(value, (list, tuple)) and value and _is_dataset(value[0]):
                todo.extend(((*here, i), item) for i, item in enumerate(value))


def _is_dataset(value: Any) -> bool:
    if isinstance(value, type) or not has(value, "__dict__"):
        return False
    if has(value, "set_epoch"):
        return True
    if "torch" not in sys.modules:
        return False
    from torch.utils.data import Dataset

    return isinstance(value, Dataset)
