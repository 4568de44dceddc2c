"""States of samplers and datasets: how often one is taken, copies, checks of a loaded one.

A state is copied when it is taken, and again when it is returned to the user: its owner may change it
later. So neither its owner nor its receiver can change the kept copy.
"""

from __future__ import annotations

import copy
import io
import pickle
import sys
from collections.abc import Callable, Iterable, Mapping
from time import perf_counter
from typing import Any, ClassVar, NamedTuple, NoReturn

from hybridloader._support.inheritance import Shared
from hybridloader._support.user_objects import add_note, attribute, described
from hybridloader.errors import StateError


def copied(state: Any) -> Any:
    """Return a copy of `state` that shares with it only immutable objects and those of `Shared`.

    The copy is made by a pickle, without the tensors: for a list of numbers that is 8 times as fast
    as `copy.deepcopy`. If a part can't be pickled, `copy.deepcopy` makes the copy.
    """
    try:
        stream = io.BytesIO()
        pickler = _Pickler(stream)
        pickler.dump(state)
        stream.seek(0)
        return _Unpickler(stream, pickler.beside).load()
    except Exception:  # a foreign __reduce__ may raise anything
        return copy.deepcopy(state)


def _is_tensor(thing: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and type(thing) in (torch.Tensor, torch.nn.Parameter)


def _found(number: int) -> Any:
    raise AssertionError(f"object {number} beside a pickle is found by _Unpickler")


class _Pickler(pickle.Pickler):
    """Pickler that leaves out tensors: pickling 16 MB by torch's reducer takes 25 ms, a copy 4 ms."""

    def __init__(self, stream: io.BytesIO) -> None:
        super().__init__(stream, protocol=5)
        self._never_copied = Shared()
        self.beside: list[Any] = []

    def reducer_override(self, obj: Any) -> Any:
        if not _is_tensor(obj) and obj not in self._never_copied:
            return NotImplemented
        self.beside.append(obj)
        return _found, (len(self.beside) - 1,)


class _Unpickler(pickle.Unpickler):
    def __init__(self, stream: io.BytesIO, beside: list[Any]) -> None:
        super().__init__(stream)
        self._beside = beside

    def find_class(self, module: str, name: str) -> Any:
        if module == __name__ and name == _found.__name__:
            return self._copy
        return super().find_class(module, name)

    def _copy(self, number: int) -> Any:
        thing = self._beside[number]
        if not _is_tensor(thing):
            return thing
        if thing.requires_grad or not thing.is_contiguous():
            return copy.deepcopy(thing)
        return thing.clone()  # copy.deepcopy takes 10 us more


class Given:
    """State that is kept; `given` returns copies of `kept`, never `kept` itself."""

    keep: ClassVar[staticmethod[[Any], Any]]  # makes `kept` from a state
    opened: ClassVar[staticmethod[[Any], Any]]  # makes a state from `kept`

    def __init__(self, kept: Any) -> None:
        self.kept = kept

    def given(self) -> Any:
        return type(self).opened(self.kept)

    def __reduce__(self) -> Any:
        return type(self), (self.kept,)


class Kept(Given):
    """State kept as a copy."""

    keep = opened = staticmethod(copied)


class Frozen(Given):
    """State kept as a pickle, the form in which processes send it."""

    keep, opened = staticmethod(pickle.dumps), staticmethod(pickle.loads)


class Missing(Given):
    """State that could not be taken: `given` raises the reason."""

    def given(self) -> NoReturn:
        raise StateError(self.kept)


def set_epoch(source: Any, epoch: int) -> None:
    """Call `set_epoch` of a source of samples and of the sampler within it, where they have one."""
    inner = attribute(source, "sampler")
    if is_stateful(inner):  # torch's BatchSampler does not forward the epoch
        set_epoch(inner, epoch)
    own = attribute(source, "set_epoch")
    if callable(own):
        own(epoch)


def is_stateful(thing: Any) -> bool:
    """Return True if `thing` has both methods of torchdata's `Stateful` and its state is complete."""
    return (
        callable(attribute(thing, "state_dict"))
        and callable(attribute(thing, "load_state_dict"))
        and not isinstance(thing, type)
        and not has_buffer(thing)
    )


def kept(
    thing: Any, what: str, kind: type[Given] = Kept, asked: Callable[[], Any] | None = None
) -> Any:
    """Return the state of `thing`, kept as `kind`; None if the state is None.

    Never raises: a state that can't be taken is kept as `Missing`.
    """
    try:
        state = taken(thing, what, lambda s: None if s is None else kind.keep(s), asked)
    except StateError as error:
        return Missing(str(error))
    return None if state is None else kind(state)


def taken(
    thing: Any,
    what: str,
    copying: Callable[[Any], Any],
    asked: Callable[[], Any] | None = None,
) -> Any:
    """Return a copy of the state of `thing`, or of the result of `asked`.

    Raises `StateError`, which names `what`, if that fails.
    """
    name = f"{what} ({type(thing).__name__})"
    try:
        state = (asked or thing.state_dict)()
    except Exception as error:
        raise StateError(f"{name} could not return its state: {described(error)}") from error
    return made(copying, state, name)


def made(copying: Callable[[Any], Any], state: Any, what: str) -> Any:
    """Return ``copying(state)``. Raises `StateError`, which names the part that can't be pickled."""
    try:
        return copying(state)
    except Exception as error:  # a foreign __reduce__ may raise anything
        culprit = ""
        if isinstance(state, dict):
            names = [repr(name) for name, value in state.items() if not _picklable(value)]
            culprit = f", because of {', '.join(names)}" if names else ""
        raise StateError(
            f"the state of {what} could not be copied: it can't be pickled{culprit} "
            f"({described(error)}); leave objects that can be rebuilt out of state_dict()"
        ) from error


def _picklable(value: Any) -> bool:
    try:
        pickle.dumps(value)
    except Exception:  # as above
        return False
    return True


def load_into(thing: Any, state: Any, what: str) -> None:
    """Resume `thing`, named `what` in errors, from `state`. Errors of its method are raised."""
    check_takes(thing, what)
    try:
        thing.load_state_dict(state)
    except Exception as error:
        add_note(error, f"In load_state_dict() of {what} ({type(thing).__name__}).")
        raise


def check_takes(thing: Any, what: str) -> None:
    if not is_stateful(thing):
        raise StateError(
            f"the loaded state includes a state of {what}, but {type(thing).__name__} has no "
            "load_state_dict(); make the loader with the dataset that it had when the state was taken"
        )


# -- how often a state is taken: after every step if that is cheap, else rarely
#
# When the user asks for a state, the sampler and the workers have already prefetched beyond the result
# that the loop received last. So states are taken during the epoch. A resumed epoch starts from the last
# state and repeats the few steps after it. These took at most `SHARE` times as long as taking the state.

SHARE = 50  # reciprocal of the share of time that may be spent on states: 1/50, or 2 %
FREE = 50e-6  # seconds; a state that takes no longer is taken after every step

ASKED = 2e-3
"""Seconds; replaces `FREE` where the user chose how often a state is taken, and so accepts the cost."""

_COLD = 1e-3
"""Seconds; after a first state that took less, the next step is measured too: caches were cold."""


class Cadence:
    """Decides when the state of one object is taken: with the first step, then `every` steps at most.

    A state that takes no more than `free` seconds is taken whenever `every` allows it. One slow call
    at most doubles the estimated cost of a state, so a pause of the process does not make a small
    state seem expensive.
    """

    def __init__(
        self, clock: Callable[[], float] = perf_counter, *, every: int = 1, free: float = FREE
    ) -> None:
        self._clock, self._every, self._free = clock, every, free
        # All the mutable state:
        self._left = 0  # number of steps until a state may be due
        self._began = 0.0
        self._cost = -1.0  # estimated seconds for one state; negative: none was taken yet
        self._next = 0.0  # time at which the next state is due

    def due(self) -> bool:
        """Return True if the state is to be taken now. If so, a call of `taken` must follow."""
        if self._left:
            self._left -= 1
            return False
        self._began = self._clock()
        return self._began >= self._next

    def taken(self) -> None:
        """Record that the state was taken, or that taking it failed."""
        self._left = self._every - 1
        now, before = self._clock(), self._cost
        first, cost = before < 0, now - self._began
        self._cost = cost if first else min(cost, max(2 * before, self._free / 2))
        dear = self._cost > (max(_COLD, self._free) if first else self._free)
        self._next = now + (SHARE - 1) * self._cost if dear else 0.0

    def go_on(self, since: int) -> None:
        """Count `since` steps that an earlier process did after its last state."""
        self._left = max(0, self._every - 1 - since)


# -- checks of a loaded state against a table with a rule for each field
#
# Every error names the field, its value in the state, and the values that are valid. The check changes
# nothing.


class Rule(NamedTuple):
    """Condition of a field, in words and as a function."""

    words: str
    fits: Callable[[Any], bool]


ANY = Rule("anything", lambda value: True)
WHOLE = Rule("a whole number", lambda value: type(value) is int)
COUNT = Rule("a whole number, 0 or more", lambda value: type(value) is int and value >= 0)
TEXT = Rule("a text", lambda value: isinstance(value, str))
TRUTH = Rule("True or False", lambda value: isinstance(value, bool))
LIST = Rule("a list", lambda value: isinstance(value, (list, tuple)))
DICT = Rule("a dict", lambda value: isinstance(value, Mapping))


def up_to(most: int) -> Rule:
    words = f"a whole number from 0 to {most}"
    return Rule(words, lambda value: type(value) is int and 0 <= value <= most)


def among(*values: str) -> Rule:
    return Rule(f"one of {', '.join(map(repr, values))}", lambda value: value in values)


def list_of(rule: Rule, words: str) -> Rule:
    return Rule(
        words, lambda value: LIST.fits(value) and bool(value) and all(map(rule.fits, value))
    )


def dict_of(rule: Rule, words: str) -> Rule:
    def fits(value: Any) -> bool:
        keys_and_values = value.items() if DICT.fits(value) else [(None, None)]
        return all(type(key) is str and rule.fits(one) for key, one in keys_and_values)

    return Rule(words, fits)


def place_dropped(epoch: int, place: int) -> str:
    """Return the warning that `set_epoch` drops the position of a state, which is in epoch `place`."""
    return (
        f"set_epoch({epoch}) drops the position that was loaded, which is in epoch {place}; load the "
        "state after set_epoch(), or start with that epoch"
    )


class Schema:
    """Fields of a state."""

    def __init__(
        self,
        of: str,  # owner of the state, for errors
        *table: tuple[Rule, str],  # a rule and the names of its fields; optional ones end in ``?``
        version: int | None = None,  # version that can be read; None: the state has no version
        kind: tuple[str, str] | None = None,  # field that names the owner, and its value
        exact: bool = False,  # refuse other fields
    ) -> None:
        named = [(name, rule) for rule, names in table for name in names.split()]
        self.of, self.version, self.kind, self.exact = of, version, kind, exact
        self._rules = {name.rstrip("?"): rule for name, rule in named}
        self._needed = {name for name, _ in named if not name.endswith("?")}
        self._headers = {"version"} if version is not None else set()
        if kind is not None:
            self._headers.add(kind[0])

    def check(self, state: Any, agreement: Mapping[str, Any] | None = None) -> None:
        """Raise `StateError` for the first field of `state` that breaks a rule.

        `agreement` maps the names of further fields to the values that they must have.
        """
        if not isinstance(state, Mapping):
            raise StateError(f"the state of a {self.of} is a dict, got {type(state).__name__}")
        self._check_kind(state)
        agreement = agreement or {}
        for name, here in agreement.items():
            there = state.get(name, here)
            if there != here or isinstance(there, bool) != isinstance(here, bool):
                raise StateError(
                    f"{name} is {there!r} in the state and {here!r} in this {self.of}; make the "
                    f"{self.of} with the arguments that it had when the state was taken"
                )
        if missing := {*self._needed, *agreement} - {*state}:
            raise StateError(f"the state lacks {_listed(missing)}: was it truncated?")
        if self.exact and (foreign := {*state} - {*self._rules, *agreement, *self._headers}):
            raise StateError(
                f"the state has {_listed(foreign)}, which no state of this version has"
            )
        for name, rule in self._rules.items():
            if name in state and not rule.fits(state[name]):
                raise StateError(
                    f"{name} is {state[name]!r:.80} in the state, and must be {rule.words}"
                )

    def _check_kind(self, state: Mapping[str, Any]) -> None:
        if not state.keys() >= self._headers:
            raise StateError(f"this is not the state of a {self.of}: {owner_of(state)}")
        if self.kind is not None and state[self.kind[0]] != self.kind[1]:
            raise StateError(
                f"this is the state of a {state[self.kind[0]]}, not of a {self.kind[1]}"
            )
        version = state.get("version")
        if self.version is not None and (type(version) is not int or version != self.version):
            raise StateError(
                f"version is {version!r} in the state, and this hybridloader reads {self.version}; "
                "load it with the hybridloader that saved it"
            )


_OWNERS = {
    ("operators", "marks"): "pipeline's run",
    ("_snapshot",): "StatefulDataLoader",
    ("_worker_snapshots", "_hybridloader"): "hybridloader.DataLoader",
    ("_sampler_iter_yielded", "fetcher_state"): "StatefulDataLoader",
    ("sampler", "version"): "sampler",
}
"""Keys that are in the states of one owner only."""


def owner_of(state: Mapping[Any, Any]) -> str:
    """Return the owner of a state, as a clause for errors; for an unknown state its keys."""
    for keys, owner in _OWNERS.items():
        if state.keys() >= {*keys}:
            return f"it is that of a {owner}"
    return f"it has {_listed(state)}"


def _listed(names: Iterable[Any]) -> str:
    return ", ".join(sorted(map(str, names))) or "nothing"


# -- Hugging Face's streams, whose shuffle buffer is not in their state


def is_stream(dataset: Any) -> bool:
    """Return True for an `IterableDataset` of the package datasets."""
    return any(
        kind.__name__ == "IterableDataset" and kind.__module__.partition(".")[0] == "datasets"
        for kind in type(dataset).__mro__
    )


def has_buffer(dataset: Any) -> bool:
    """Return True for a stream that is shuffled within a buffer: its state omits the buffered samples.

    Resuming from such a state loses these samples, and in a worker raises IndexError (datasets 5.2).
    """
    steps = [attribute(dataset, "_ex_iterable")] if is_stream(dataset) else []
    for step in steps:  # from the last one back to the sources, which are added here
        if type(step).__name__ == "BufferShuffledExamplesIterable":
            return True
        if step is not None:
            steps += [attribute(step, "ex_iterable"), *(attribute(step, "ex_iterables") or ())]
    return False
