"""Exception classes whose own methods raise, one for each; and what raises them.

Importing this imports no torch, so fresh workers that are sent one of the functions start at once.
"""

from __future__ import annotations

from typing import Any

METHODS = (
    *("__getattr__", "__setattr__", "__str__", "__repr__", "__format__"),
    *("__reduce__", "__reduce_ex__", "__getstate__", "__copy__", "__eq__", "__hash__"),
)


class Refused(Exception):
    """Raised by an exception that is looked at, and as hostile itself."""

    def __str__(self) -> str:
        raise LookupError("no text")

    __repr__ = __str__


def _refuse(*args: Any, **kwargs: Any) -> Any:
    raise Refused


def _made(name: str, **parts: Any) -> type[Exception]:
    return type(name, (Exception,), {"__module__": __name__, **parts})


class OfSystem(OSError):
    """With a signature of its own, by which it can't be made again."""

    def __init__(self, *args: Any, path: str = "") -> None:
        super().__init__(*args)
        self.path = path


HOSTILE: dict[str, type[Exception]] = {
    **{name: _made(f"Bad_{name.strip('_')}", **{name: _refuse}) for name in METHODS},
    "everything": _made("Hostile", **dict.fromkeys(METHODS, _refuse)),
    "of the system": OfSystem,
}
globals().update({kind.__name__: kind for kind in HOSTILE.values()})

KINDS = [*HOSTILE.values()]
Hostile = HOSTILE["everything"]


class RaisesAtOdd:
    """A function, and a dataset, that raises an exception of another class at each odd number."""

    def __len__(self) -> int:
        return 2 * len(KINDS)

    def __call__(self, item: int) -> int:
        if item % 2:
            raise KINDS[item // 2]("bad", item)
        return item

    __getitem__ = __call__


class Unsendable:
    """A value that can't be pickled, nor be asked why."""

    def __reduce__(self) -> Any:
        raise Refused
