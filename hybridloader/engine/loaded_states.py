"""Loads of a state for one epoch: no more of a load than the state may reach the next epoch.

A dataset, or a sampler, may begin *each* later iteration at a loaded state, as streams of Hugging Face
do (huggingface/datasets#7447). Every later epoch would lack its first samples. Their state of before the
load would not help: it is no beginning if the user has iterated them, and a level, a seed or a number of
epochs in the state must stay. So an attribute gets its value of before the load if all of this is true:

- the load rebound it, to the loaded state or to an entry of it that is not empty; an attribute that is
  made of the state, such as a generator, may follow the items;
- it still has this value when the next epoch begins;
- no such attribute is a part of the state: with the values before the load, `state_dict` returns the
  same. A state determines the next items (docs/resuming.md), so an attribute beside it must not.

Attributes are those that `bindings` finds.
"""

from __future__ import annotations

import pickle
import weakref
from contextlib import suppress
from typing import Any

from hybridloader._support.states import load_into
from hybridloader.engine.refresh import MISSING, Path, apply, bindings

Change = tuple[Path, Any, Any]  # an attribute, and its values before and after a load

_loads: dict[int, tuple[weakref.ref[Any], list[Change]]] = {}
"""Attributes that the last load of an object has rebound, by the identity of the object."""


def load_for_epoch(thing: Any, state: Any, what: str) -> None:
    """Resume `thing`, named `what` in errors, from `state`, for the epoch that begins."""
    before = {path: value for path, (value, _) in bindings(thing).items()}
    before.update((path, old) for path, old, _ in _left_by_load(thing))
    load_into(thing, state, what)
    rebound = []
    for path, (value, _) in bindings(thing).items():
        old = before.get(path, MISSING)
        if value is not old and not _is_empty(value) and _is_of(state, value):
            rebound.append((path, old, value))
    place = id(thing)
    with suppress(TypeError):  # an object of a class with __slots__ has no weak references
        gone = lambda _, loads=_loads: loads.pop(place, None)  # noqa: E731  # no global at exit
        _loads[place] = weakref.ref(thing, gone), rebound


def undo_load(thing: Any, *, ended: bool = False) -> None:
    """Restore the attributes of `thing` that the last load set beside the state; the next epoch begins.

    With `ended`, no item followed the load: its state was the end of an epoch. Then it is certain that
    the load is in force, and each attribute is judged alone.
    """
    left = _left_by_load(thing)
    for changes in ([change] for change in left) if ended else filter(None, [left]):
        _undo(thing, changes)


def _undo(thing: Any, changes: list[Change]) -> None:
    """Undo `changes`, unless that changes the state."""
    same = False
    try:
        state = pickle.dumps(thing.state_dict())
        apply(thing, tuple((path, old) for path, old, _ in changes))
        same = pickle.dumps(thing.state_dict()) == state
    except Exception:  # of a foreign state_dict: it is raised when the user asks for the state
        pass
    finally:
        if not same:
            apply(thing, tuple((path, value) for path, _, value in changes))


def _left_by_load(thing: Any) -> list[Change]:
    """Return, and forget, the attributes that still have the values of the last load."""
    _, rebound = _loads.pop(id(thing), (None, []))
    now = bindings(thing) if rebound else {}
    return [change for change in rebound if now.get(change[0], (MISSING,))[0] is change[2]]


def _is_of(state: Any, value: Any) -> bool:
    """Return True if `value` is `state`, an entry of it, or a copy of one of these."""
    with suppress(Exception):  # of a foreign `__eq__`, and of tensors of several numbers
        if value is state or (type(value) is type(state) and bool(value == state)):
            return True
    return isinstance(state, dict) and any(_is_of(entry, value) for entry in state.values())


def _is_empty(value: Any) -> bool:
    """Return True if a load that sets `value` only clears an attribute."""
    return value is None or (type(value) in (bool, int, list, dict, set, tuple) and not value)
