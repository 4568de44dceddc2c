"""Copies of states: a sampler or a dataset may later change the state that it returned.

A state is copied when it is taken, and again when it is returned to the user. So neither its owner nor
its receiver can change the kept copy. If copying is slow, all receivers of a kept state share one copy.
`cadence` decides when a state is taken.
"""

from __future__ import annotations

import copy
import io
import pickle
import sys
from collections.abc import Callable
from time import perf_counter
from typing import Any, ClassVar, NoReturn

from hybridloader._support.attributes import attribute
from hybridloader._support.cadence import Cadence
from hybridloader._support.error_handling import add_note, described
from hybridloader._support.hf_streams import has_buffer
from hybridloader._support.inheritance import Shared
from hybridloader.errors import StateError

EXPENSIVE = 100e-6
"""Seconds; a slower copy is shared by all receivers. A list of 5,000 numbers takes this long."""


def copied(state: Any) -> Any:
    """Return a copy of `state` that shares with it only immutable objects and those of `Shared`.

    The copy is made by a pickle: for a list of numbers that is 8 times as fast as `copy.deepcopy`. If a
    part can't be pickled, `copy.deepcopy` makes the copy.
    """
    try:
        return _opened(_pickled(state))
    except Exception:  # a foreign __reduce__ may raise anything
        return copy.deepcopy(state)


class Latest:
    """Latest copy of one state that is taken repeatedly.

    If copying is slow, a state with the same pickle is not copied again.
    """

    def __init__(self) -> None:
        self._cadence = Cadence()
        # All the other mutable state:
        self._pickle: tuple[bytes, list[Any]] | None = None
        self._copy: Any = None

    def copy(self, state: Any) -> Any:
        """Return a copy of `state`, or raise the error of pickling it."""
        due = self._cadence.due()
        found = _pickled(state)
        if due or found != self._pickle:
            self._pickle, self._copy = found, _opened(found)
            self._cadence.taken()
        return self._copy


def _pickled(state: Any) -> tuple[bytes, list[Any]]:
    """Return the pickle of a state, and the shared objects in it."""
    stream = io.BytesIO()
    pickler = _Pickler(stream)
    pickler.dump(state)
    return stream.getvalue(), pickler.beside


def _opened(pickled: tuple[bytes, list[Any]]) -> Any:
    return _Unpickler(*pickled).load()


def _beside(number: int) -> Any:
    raise AssertionError(f"object {number} beside a pickle is found by _Unpickler")


def _tensor(array: Any) -> Any:
    return sys.modules["torch"].from_numpy(array)


class _Pickler(pickle.Pickler):
    """Pickler that leaves out shared objects, and pickles tensors as arrays, nine times as fast."""

    def __init__(self, stream: io.BytesIO) -> None:
        super().__init__(stream, protocol=5)
        self._never_copied = Shared()
        self.beside: list[Any] = []

    def reducer_override(self, obj: Any) -> Any:
        torch = sys.modules.get("torch")
        if torch is not None and type(obj) is torch.Tensor:
            try:
                return _tensor, (obj.numpy(),)
            except (RuntimeError, TypeError):  # of a device, sparse, bfloat16, requires grad
                return NotImplemented
        if obj not in self._never_copied:
            return NotImplemented
        self.beside.append(obj)
        return _beside, (len(self.beside) - 1,)


class _Unpickler(pickle.Unpickler):
    def __init__(self, text: bytes, beside: list[Any]) -> None:
        super().__init__(io.BytesIO(text))
        self._beside = beside

    def find_class(self, module: str, name: str) -> Any:
        if module == __name__ and name == _beside.__name__:
            return self._beside.__getitem__
        return super().find_class(module, name)


def _refuse(reason: str) -> NoReturn:
    raise StateError(reason)


class Given:
    """State that is kept; `given` returns copies of `kept`, never `kept` itself."""

    keep: ClassVar[staticmethod[[Any], Any]]  # makes `kept` from a state
    opened: ClassVar[staticmethod[[Any], Any]]  # makes a state from `kept`

    def __init__(self, kept: Any) -> None:
        self.kept = kept
        self._one: Any = None  # a copy that was slow to make

    def given(self) -> Any:
        """Return a copy; if copying is slow, the same copy each time."""
        if self._one is not None:
            return self._one
        began = perf_counter()
        made = type(self).opened(self.kept)
        if perf_counter() - began > EXPENSIVE:
            self._one = made
        return made

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

    opened = staticmethod(_refuse)


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
