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
from collections.abc import Iterator
from typing import Any, NamedTuple

from hybridloader._support.states import ASKED, Cadence, Frozen, Given, is_stateful, is_stream, kept
from hybridloader._support.text import warn_once
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

    def changes(self) -> tuple[Change, ...]:
        """Return the attributes that were rebound since the last call."""
        before, self._before = self._before, bindings(self._dataset)
        found = []
        for path, (value, by_epoch) in self._before.items():
            if path in before and _same(before[path][0], value):
                continue
            if plain(value) or (by_epoch and _picklable(path, value)):
                found.append((path, value))
        return tuple(found)


def _picklable(path: Path, value: Any) -> bool:
    try:
        pickle.dumps(value)
    except Exception as error:  # a foreign `__reduce__` may raise any error
        where = ".".join(map(str, path))
        warn_once(
            f"attribute {where!r} of the dataset was rebound, but its new value can't be pickled "
            f"({text_of(error)}), so the persistent workers keep the old one; make it picklable, or use "
            "persistent_workers=False",
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
        object.__setattr__(target, name, value)


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


# -- Loads of a state for one epoch


def undo_load(thing: Any) -> None:
    """Let the next iteration over `thing` begin at its start, not at a state that was loaded before.

    Streams of Hugging Face, alone, begin *each* later iteration at a loaded state, so that every later
    epoch would lack its first samples (huggingface/datasets#7447).
    """
    for _, node in _nodes(thing):
        if is_stream(node):
            node._starting_state_dict = None
