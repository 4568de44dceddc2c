"""Checks of arguments: types and numbers, refused by name.

torch's constructor looks first, and what it refuses stays its own. Nothing here reads a dataset or
iterates a sampler.
"""

from __future__ import annotations

import operator
import threading
from typing import TYPE_CHECKING, Any, TypeVar

from hybridloader.buffers.memory import Memory

if TYPE_CHECKING:
    from hybridloader.contract import Backend

_Backend = TypeVar("_Backend", bound="Backend")


def check_backend(backend: _Backend) -> _Backend:
    """Give `backend` back, if its options are of their types. Raises `TypeError`."""
    memory: Any = backend.memory
    copies: Any = backend.copies
    if memory is not None and not isinstance(memory, Memory):
        raise TypeError(
            f"{type(backend).__name__}: memory must be a Memory, got {memory!r}; say memory=Memory(...)"
        )
    if not isinstance(copies, bool):
        raise TypeError(
            f"{type(backend).__name__}: copy_dataset must be True or False, got {copies!r}"
        )
    return backend


def index(name: str, value: Any, instead: str) -> int:
    """As torch: True is 1, and a number of numpy's is one."""
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be a whole number, got {value!r}; {instead}") from None


def waiting_time(name: str, value: Any) -> None:
    try:
        sound = 0 <= value <= threading.TIMEOUT_MAX  # False for NaN
    except (TypeError, ValueError, RuntimeError):  # not comparable; an array or tensor of several
        raise TypeError(f"{name} must be a number of seconds, got {value!r}") from None
    if not sound:
        raise ValueError(
            f"{name} must be a number of seconds up to {threading.TIMEOUT_MAX:.0f}, or 0 for no limit, "
            f"got {value!r}"
        )


def function(name: str, value: Any, what: str) -> None:
    if not callable(value):
        raise TypeError(f"{name} must be {what}, got {value!r}")


def truth(name: str, value: Any) -> None:
    """As torch: 0, 1 and None will do, but a text is always true."""
    if not (value is None or isinstance(value, int) or type(value).__name__ in ("bool", "bool_")):
        raise TypeError(f"{name} must be True or False, got {value!r}")
