"""First loader of a script that has had enough batches, for ``hybridloader tune SCRIPT``.

While it runs, loaders of torch's class and its subclasses count their batches. At the last of these the
loader is tuned, in the middle of the script's loop, and the script ends.
"""

from __future__ import annotations

import functools
import linecache
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any, NamedTuple

ENOUGH = 8
"""Batches that a loader has had when it is tuned."""

_NOT_THE_SCRIPT = ("torch", "hybridloader", "functools")
"""Packages whose calls of a loader's constructor are not the place that made it."""


class Place(NamedTuple):
    """Place in the code."""

    file: str
    line: int

    def __str__(self) -> str:
        text = linecache.getline(self.file, self.line).strip()
        return f"{self.file}:{self.line}" + (f": {text}" if text else "")


class Found(NamedTuple):
    """Loader that has had enough batches.

    Attributes
    ----------
    loader
        The loader.
    place
        Place that made it; None if that is not known.
    loop
        Seconds of the script's loop for one batch, at the median, without waits for the loader.
    """

    loader: Any
    place: Place | None
    loop: float


class TunedEnd(BaseException):
    """End of the script, after its loader was tuned."""


class FirstLoader:
    """Context in which the first loader with enough batches is given to `tuned`, once."""

    def __init__(
        self,
        tuned: Callable[[Found], object],
        batches: int = ENOUGH,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._tuned, self._batches, self._clock = tuned, batches, clock
        # All the mutable state:
        self.done = False
        self._undo: list[Callable[[], None]] = []

    def __enter__(self) -> FirstLoader:
        from torch.utils.data import DataLoader

        kind: Any = DataLoader
        begin, make = kind.__iter__, kind.__init__
        first = self

        @functools.wraps(make)
        def init(loader: Any, *args: Any, **keywords: Any) -> None:
            make(loader, *args, **keywords)
            vars(loader)["_made_at"] = _place()

        @functools.wraps(begin)
        def iterate(loader: Any) -> Iterator[Any]:
            iterator = begin(loader)
            return iterator if first.done else _Counted(first, loader, iterator)

        kind.__init__, kind.__iter__ = init, iterate
        self._undo = [
            lambda: setattr(kind, "__init__", make),
            lambda: setattr(kind, "__iter__", begin),
        ]
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for undo in self._undo:
            undo()

    def enough(self, loader: Any, loops: list[float]) -> None:
        """Tune the loader and end the script."""
        self.done = True
        place = vars(loader).pop("_made_at", None)
        self._tuned(Found(loader, place, statistics.median(loops)))
        raise TunedEnd

    def now(self) -> float:
        return self._clock()

    @property
    def batches(self) -> int:
        return self._batches


class _Counted(Iterator[Any]):
    """Iterator of a loader that counts its batches; attributes are those of the iterator."""

    def __init__(self, first: FirstLoader, loader: Any, iterator: Any) -> None:
        self._first, self._loader, self._inner = first, loader, iterator
        self._loops: list[float] = []
        self._given = 0.0

    def __next__(self) -> Any:
        first = self._first
        if self._given:
            self._loops.append(first.now() - self._given)
        if len(self._loops) >= first.batches and not first.done:
            inner, self._inner = self._inner, iter(())
            if callable(close := getattr(inner, "close", None)):
                close()
            del inner  # workers of torch's end with their iterator
            first.enough(self._loader, self._loops)
        batch = next(self._inner)
        self._given = first.now()
        return batch

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def _place() -> Place | None:
    """Return the place of the nearest call that is neither torch's nor ours."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        package = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        if package not in _NOT_THE_SCRIPT:
            return Place(frame.f_code.co_filename, frame.f_lineno)
        frame = frame.f_back
    return None
