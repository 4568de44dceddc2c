"""Copies of states: a sampler or a dataset may go on changing the state that it returned.

A state is copied when it is taken, and again when it is handed out. So neither its owner nor its
receiver can change the kept one. If copying is slow, all who ask for a kept state share one copy.
Nothing here knows when a state is taken.
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
from hybridloader._support.errors import StateError, add_note, described
from hybridloader._support.hf_streams import has_buffer
from hybridloader._support.inheritance import Shared

DEAR = 100e-6
"""Seconds from which one copy is shared by all who ask: that of a list of 5,000 numbers, say."""


def copied(state: Any) -> Any:
    """Copy `state`; only immutable objects, and those shared by nature, are shared with the copy.

    The copy is made by a pickle, without the tensors: for a list of numbers that is 8 times as fast
    as `copy.deepcopy`. If something can't be pickled, it is made by `copy.deepcopy`.
    """
    try:
        return _Fingerprint(state).copy()
    except Exception:  # a foreign __reduce__ may raise anything
        return copy.deepcopy(state)


class Latest:
    """Keeps the latest copy of one state, which is asked for again and again.

    If copying is slow, a state that has not changed is not copied anew. A tensor has changed if its
    version has: every operation of torch that writes to it raises the version. A write through
    ``.data`` or a numpy array over the same memory does not, and is found when the cadence is due.
    """

    def __init__(self) -> None:
        self._cadence = Cadence()
        # All the other mutable state:
        self._fingerprint: _Fingerprint | None = None
        self._copy: Any = None

    def copy(self, state: Any) -> Any:
        """Return a copy of `state`, or raise the error of pickling it."""
        due = self._cadence.due()
        found = _Fingerprint(state)
        if due or self._fingerprint is None or not found.is_like(self._fingerprint):
            self._fingerprint, self._copy = found, found.copy()
            self._cadence.taken()
        return self._copy


class _Fingerprint:
    """Pickle of a state, with its tensors and its shared objects beside it."""

    def __init__(self, state: Any) -> None:
        stream = io.BytesIO()
        pickler = _Pickler(stream)
        pickler.dump(state)
        self._text, self._beside = stream.getvalue(), pickler.beside
        self._marks = [
            _mark_of(thing) if _is_tensor(thing) else id(thing) for thing in self._beside
        ]

    def copy(self) -> Any:
        return _Unpickler(io.BytesIO(self._text), self._beside).load()

    def is_like(self, other: _Fingerprint) -> bool:
        return self._marks == other._marks and self._text == other._text


def _mark_of(tensor: Any) -> Any:
    """Return a value that changes whenever the tensor does.

    While the tensor is held, no other one has the same address.
    """
    try:
        version = tensor._version
        where = tensor.device, tensor.data_ptr(), tensor.storage_offset()
    except RuntimeError:  # an inference tensor has no version, a sparse one no place
        return object()
    return version, *where, tensor.dtype, tensor.shape, tensor.stride(), tensor.requires_grad


def _is_tensor(thing: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and type(thing) in (torch.Tensor, torch.nn.Parameter)


def _found(number: int) -> Any:
    raise AssertionError(f"object {number} beside a pickle is found by _Unpickler")


class _Pickler(pickle.Pickler):
    """Leaves tensors out: pickling 16 MB in torch's way takes 25 ms, and copying them 4 ms."""

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


def _refuse(reason: str) -> NoReturn:
    raise StateError(reason)


class Given:
    """State that is kept; `kept` itself is never handed out."""

    keep: ClassVar[staticmethod[[Any], Any]]  # makes `kept` from a state
    opened: ClassVar[staticmethod[[Any], Any]]  # makes a state from `kept`

    def __init__(self, kept: Any) -> None:
        self.kept = kept
        self._one: Any = None  # a copy that was slow to make

    def given(self) -> Any:
        """Return a copy; if copying is slow, the one that was given before."""
        if self._one is not None:
            return self._one
        began = perf_counter()
        made = type(self).opened(self.kept)
        if perf_counter() - began > DEAR:
            self._one = made
        return made

    def __reduce__(self) -> Any:
        return type(self), (self.kept,)


class Kept(Given):
    """State kept as a copy."""

    keep = opened = staticmethod(copied)


class Frozen(Given):
    """State kept as a pickle, as it travels between processes."""

    keep, opened = staticmethod(pickle.dumps), staticmethod(pickle.loads)


class Missing(Given):
    """State that could not be taken: asking for it raises the reason."""

    opened = staticmethod(_refuse)


def set_epoch(source: Any, epoch: int) -> None:
    """Call `set_epoch` of a source of samples, if it has one, and of a sampler within it."""
    inner = attribute(source, "sampler")
    if is_stateful(inner):  # in torch's BatchSampler, which passes no epoch on
        set_epoch(inner, epoch)
    own = attribute(source, "set_epoch")
    if callable(own):
        own(epoch)


def is_stateful(thing: Any) -> bool:
    """True if `thing` has both methods of torchdata's `Stateful`, and they tell its whole state."""
    return (
        callable(attribute(thing, "state_dict"))
        and callable(attribute(thing, "load_state_dict"))
        and not isinstance(thing, type)
        and not has_buffer(thing)
    )


def kept(
    thing: Any, what: str, kind: type[Given] = Kept, asked: Callable[[], Any] | None = None
) -> Any:
    """Keep the state of `thing` as `taken` gives it; None if that is None. Never raises."""
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
        raise StateError(f"{name} could not tell its state: {described(error)}") from error
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
            f"{what} could not have its state copied: it can't be pickled{culprit} "
            f"({described(error)}); leave out of state_dict() what can be made again"
        ) from error


def _picklable(value: Any) -> bool:
    try:
        pickle.dumps(value)
    except Exception:  # as above
        return False
    return True


def load_into(thing: Any, state: Any, what: str) -> None:
    """Let `thing`, which errors call `what`, go on from `state`. Raises what its method raises."""
    check_takes(thing, what)
    try:
        thing.load_state_dict(state)
    except Exception as error:
        add_note(error, f"In load_state_dict() of {what} ({type(thing).__name__}).")
        raise


def check_takes(thing: Any, what: str) -> None:
    if not is_stateful(thing):
        raise StateError(
            f"the state to go on from holds one of {what}, and {type(thing).__name__} has no "
            "load_state_dict(); make the loader with the dataset that it had when the state was taken"
        )
