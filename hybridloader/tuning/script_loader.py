"""First loader or pipeline of a script that has had enough results, for ``hybridloader tune SCRIPT``.

While it runs, loaders of torch's class and its subclasses count their batches, and runs of pipelines
their items. At the last of these the loader or pipeline is tuned, in the middle of the script's loop,
and the script ends. Only the script's thread counts. Nothing counts within another loader or run, or
within a measurement.
"""

from __future__ import annotations

import contextlib
import functools
import linecache
import os
import statistics
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any, NamedTuple

ENOUGH = 8
"""Batches or items that a loader or a run has had when it is tuned."""

_NOT_THE_SCRIPT = ("torch", "hybridloader", "functools")
"""Packages whose calls of a constructor are not the place that made a loader or a step."""


class Place(NamedTuple):
    """Place in the code."""

    file: str
    line: int

    def __str__(self) -> str:
        text = linecache.getline(self.file, self.line).strip()
        return f"{self.file}:{self.line}" + (f": {text}" if text else "")


class Found(NamedTuple):
    """Loader or pipeline that has had enough results.

    Attributes
    ----------
    loader
        The loader or pipeline.
    place_of
        Returns the place that made a loader or a step of a pipeline; None if that is not known.
    loop
        Seconds of the script's loop for one result, at the median, without waits for it.
    """

    loader: Any
    place_of: Callable[[Any], Place | None]
    loop: float


class TunedEnd(BaseException):
    """End of the script, after its loader or pipeline was tuned."""


class FirstLoader:
    """Context in which the first loader or pipeline with enough results is given to `tuned`, once."""

    def __init__(
        self,
        tuned: Callable[[Found], object],
        enough: int = ENOUGH,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._tuned, self.enough, self.now = tuned, enough, clock
        self._here = _here()
        # All the mutable state:
        self._done = False
        self._nested = False  # a loader or a run makes a result, or is being opened
        self._places: dict[int, tuple[weakref.ref[Any], Place]] = {}  # by identity
        self._loops: weakref.WeakKeyDictionary[Any, Loop] = weakref.WeakKeyDictionary()  # of runs
        self._settled: list[tuple[Any, Any]] = []  # pipelines with a choice, and without
        self._undo: list[Callable[[], None]] = []

    def __enter__(self) -> FirstLoader:
        from torch.utils.data import DataLoader

        from hybridloader.pipeline.pipeline import Pipeline
        from hybridloader.running.run import Run

        self._wrap(DataLoader, "__init__", self._loader_made)
        self._wrap(DataLoader, "__iter__", self._loader_begun)
        self._wrap(Pipeline, "__init__", self._pipeline_made)
        self._wrap(Pipeline, "settled", self._pipeline_settled)
        self._wrap(Run, "__next__", self._run_asked)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for undo in self._undo:
            undo()

    def _wrap(self, kind: type, name: str, call: Callable[..., Any]) -> None:
        """Have `call` get the method `name` of a class, the object and the arguments."""
        method = getattr(kind, name)

        @functools.wraps(method)
        def wrapped(one: Any, *args: Any, **keywords: Any) -> Any:
            return call(method, one, *args, **keywords)

        setattr(kind, name, wrapped)
        self._undo.append(lambda: setattr(kind, name, method))

    # -- loaders and pipelines of the script ---------------------------------------------------------

    def _loader_made(self, make: Any, loader: Any, *args: Any, **keywords: Any) -> None:
        make(loader, *args, **keywords)
        self._note_place(loader)

    def _loader_begun(self, begin: Any, loader: Any) -> Iterator[Any]:
        if not self.counts:
            return begin(loader)  # type: ignore[no-any-return]
        with self.nesting():
            iterator = begin(loader)
        return _Counted(self, loader, iterator)

    def _pipeline_made(self, make: Any, pipeline: Any, operators: Any) -> None:
        make(pipeline, operators)
        for operator in pipeline.operators:
            if self.place_of(operator) is None:
                self._note_place(operator)

    def _pipeline_settled(self, settled: Any, pipeline: Any) -> Any:
        if not self.counts:
            return settled(pipeline)
        with self.nesting():
            found = settled(pipeline)
        if found is not pipeline:
            self._settled.append((found, pipeline))
        return found

    def _run_asked(self, ask: Any, run: Any) -> Any:
        if not self.counts:
            return ask(run)
        loop = self._loops.get(run)
        if loop is None:
            loop = self._loops[run] = Loop(self)
        if loop.asked() >= self.enough:
            chain, owner = run._executor.chain, run._owner
            (run if owner is None else owner).close()
            self.tune(next((own for found, own in self._settled if found is chain), chain), loop)
        with self.nesting():
            item = ask(run)
        loop.given()
        return item

    # -- counting ------------------------------------------------------------------------------------

    @property
    def counts(self) -> bool:
        """True if a result counts that is asked for here and now."""
        return not (self._done or self._nested) and self._here == _here()

    @contextlib.contextmanager
    def nesting(self) -> Iterator[None]:
        """Count nothing: loaders and runs within another one are not the script's."""
        self._nested = True
        try:
            yield
        finally:
            self._nested = False

    def tune(self, loader: Any, loop: Loop) -> None:
        """Tune a loader or pipeline and end the script."""
        self._done = True
        self._tuned(Found(loader, self.place_of, statistics.median(loop.seconds)))
        raise TunedEnd

    # -- places --------------------------------------------------------------------------------------

    def _note_place(self, made: Any) -> None:
        place = _place()
        if place is not None:
            with contextlib.suppress(TypeError):  # no weak reference: a user's class with slots
                self._places[id(made)] = weakref.ref(made), place

    def place_of(self, made: Any) -> Place | None:
        """Return the place that made a loader or an operator; None if it is not known."""
        found = self._places.get(id(made))
        return found[1] if found is not None and found[0]() is made else None


class Loop:
    """Seconds of the script's loop over one iterator, for each result."""

    def __init__(self, first: FirstLoader) -> None:
        self._first = first
        self.seconds: list[float] = []
        self._given: float | None = None

    def asked(self) -> int:
        """Note that the loop asks for a result; return for how many it was timed."""
        if self._given is not None:
            self.seconds.append(self._first.now() - self._given)
            self._given = None
        return len(self.seconds)

    def given(self) -> None:
        """Note that the loop has a result."""
        self._given = self._first.now()


class _Counted(Iterator[Any]):
    """Iterator of a loader that counts its batches; attributes are those of the iterator."""

    def __init__(self, first: FirstLoader, loader: Any, iterator: Any) -> None:
        self._first, self._loader, self._inner = first, loader, iterator
        self._loop = Loop(first)

    def __next__(self) -> Any:
        first = self._first
        if not first.counts:
            return next(self._inner)
        if self._loop.asked() >= first.enough:
            inner, self._inner = self._inner, iter(())
            if callable(close := getattr(inner, "close", None)):
                close()
            del inner  # workers of torch's end with their iterator
            first.tune(self._loader, self._loop)
        with first.nesting():
            batch = next(self._inner)
        self._loop.given()
        return batch

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def _here() -> tuple[int, int]:
    """Return this process and thread: a forked worker has the wrapped methods, too."""
    return os.getpid(), threading.get_ident()


def _place() -> Place | None:
    """Return the place of the nearest call that is neither torch's nor ours."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        package = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        if package not in _NOT_THE_SCRIPT:
            return Place(frame.f_code.co_filename, frame.f_lineno)
        frame = frame.f_back
    return None
