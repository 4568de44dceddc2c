"""Results on their way from a worker: by reference, packed, or in slots."""

from __future__ import annotations

from typing import Any, ClassVar


class Payload:
    """Result on its way. Exactly one of `open` and `discard` is called, once."""

    __slots__ = ()

    forwardable: ClassVar[bool] = False
    """True if the unopened payload may be the index of a `Task` for another crew whose backend
    `forwards`. The worker there gets the value. The payload may be sent again, to another worker of
    that crew, until the task is answered."""

    count: int | None = None
    """Number of items, if the worker's value is a list and can be forwarded; else None."""

    @property
    def nbytes(self) -> int:
        """Size in bytes, as far as it is known without opening it."""
        return 0

    @property
    def array_bytes(self) -> int:
        """Bytes of these that are of tensors and arrays, and are not pickled."""
        return 0

    def open(self) -> Any:
        """Return the value. An exception is reported as the failure of that task alone."""
        raise NotImplementedError

    def discard(self) -> None:
        """Free the payload. Never raises."""


def known_bytes(payload: Any) -> int:
    """Return the bytes of a payload; 0 for one of another class, which a backend may have."""
    return payload.nbytes if isinstance(payload, Payload) else 0


class ByReference(Payload):
    """Payload of a worker in this process: the value itself."""

    __slots__ = ("_value",)

    def __init__(self, value: Any) -> None:
        self._value = value

    def open(self) -> Any:
        return self._value

    peek = open  # both leave the value in place

    def discard(self) -> None:
        self._value = None
