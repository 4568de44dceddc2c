"""States of a dataset in workers: sent with results, loaded for an epoch, changed between epochs.

A dataset, or the iterator over it, may have `state_dict` and `load_state_dict`. Its state is taken after
a result, because only then does it belong to that result. A `Cadence` decides how often. The state is
pickled at once, so that the worker can't change it later. A failure to take it raises nothing here: the
loader fails only if the user asks for that state.
"""

from __future__ import annotations

import math
import pickle
import sys
import weakref
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, NamedTuple

from hybridloader._support.states import ASKED, Cadence, Frozen, Given, is_stateful, kept, load_into
from hybridloader._support.text import warn
from hybridloader._support.user_objects import attribute, has, text_of


class ShardStart(NamedTuple):
    """Place and state from which one worker resumes; beside a result, the state without a place."""

    position: int = 0  # samples of the shard before the states `dataset` and `iterator`
    skip: int = 0  # samples of the shard to skip: those after `position` are read and dropped
    dataset: Given | None = None
    iterator: Given | None = None
    ended: bool = False  # the shard has ended
    again: Any = ()  # tasks since `dataset`, to be repeated, if samples are read by index
    next_epoch: bool = False  # the states are of an epoch's end; the worker begins the next epoch
    since: int = 0  # results since the states; if samples are read by index, see `again`

    @property
    def stateful(self) -> bool:
        """True if there is a state to resume from."""
        return self.dataset is not None or self.iterator is not None

    @property
    def results_since(self) -> int:
        """Number of the worker's results since its state was taken."""
        return self.since or len(self.again)


def states_of(
    dataset: Any, samples: Any = None, *, every: int = 0, always: bool = False
) -> DatasetStates | None:
    """Return access to the state of `dataset` and of its iterator `samples`; None if neither has one.

    States are taken as often as is cheap, but at least `every` results apart; with `always`, after
    each result.
    """
    itself = samples is dataset  # then torchdata saves its state once, as the iterator's
    stateful = is_stateful(dataset) and not itself
    if not (stateful or is_stateful(samples)):
        return None
    if always:
        cadence = Cadence(free=math.inf)
    else:
        cadence = Cadence(every=every, free=ASKED) if every else Cadence()
    return DatasetStates(dataset if stateful else None, samples, cadence)


class DatasetStates:
    """Access to the state of the dataset of one fetcher, and of the iterator over it."""

    def __init__(self, dataset: Any, samples: Any, cadence: Cadence) -> None:
        self._dataset = dataset
        self._samples = samples if is_stateful(samples) else None
        self._cadence = cadence

    def due(self, *, ended: bool) -> ShardStart | None:
        """Return the state after the newest result; None if it is not sent with that result."""
        due = self._cadence.due()
        if not (due or ended):
            return None
        state = self.now(ended=ended)
        if due:
            self._cadence.taken()
        return state

    def resume(self, since: int) -> None:
        """Count the results since the state from which this fetcher resumes."""
        self._cadence.go_on(since)

    def now(self, *, ended: bool) -> ShardStart:
        """Return the state as it is now, without a place."""
        dataset = iterator = None
        if self._dataset is not None:
            dataset = kept(self._dataset, "the dataset", Frozen)
        if self._samples is not None:
            iterator = kept(self._samples, "the iterator over the dataset", Frozen)
        return ShardStart(dataset=dataset, iterator=iterator, ended=ended)


# -- Changes of the dataset since the last epoch, which are sent to persistent workers.
#
# Each new epoch sends the attributes that were *rebound* since the last one:
#
# - on any object, those whose new value is plain (a number, a string, None, or a tuple of such);
# - on an object that has a `set_epoch` method, each that can be pickled.
#
# Changes in place are not sent, and changes that a worker makes to its copy stay. The same applies to
# datasets in attributes or lists of the dataset, at any depth. docs/decisions.md has the reasons.


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


MISSING = object()  # stands for the value of an attribute that an object does not have


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


# -- Loads of a state for one epoch: no more of a load than the state may reach the next epoch.
#
# A dataset, or a sampler, may begin *each* later iteration at a loaded state, as streams of Hugging
# Face do (huggingface/datasets#7447). Every later epoch would lack its first samples. Their state of
# before the load would not help: it is no beginning if the user has iterated them, and a level, a seed
# or a number of epochs in the state must stay. So an attribute gets its value of before the load if all
# of this is true:
#
# - the load rebound it, to the loaded state or to an entry of it that is not empty; an attribute that is
#   made of the state, such as a generator, may follow the items;
# - it still has this value when the next epoch begins;
# - no such attribute is a part of the state: with the values before the load, `state_dict` returns the
#   same. A state determines the next items (docs/resuming.md), so an attribute beside it must not.
#
# Attributes are those that `bindings` finds.


LoadedChange = tuple[Path, Any, Any]  # an attribute, and its values before and after a load

_loads: dict[int, tuple[weakref.ref[Any], list[LoadedChange]]] = {}
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
    left = _left_by_load(thing) if id(thing) in _loads else []
    for changes in ([change] for change in left) if ended else filter(None, [left]):
        _undo(thing, changes)


def _undo(thing: Any, changes: list[LoadedChange]) -> None:
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


def _left_by_load(thing: Any) -> list[LoadedChange]:
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
