"""First loader or pipeline of a script that has had enough results, for ``hybridloader tune SCRIPT``.

While it runs, loaders of torch's class and its subclasses count their batches, and runs of pipelines
their items. At the last of these the loader or pipeline is tuned, in the middle of the script's loop,
and the script ends. Only the script's thread counts. Nothing counts within another loader or run, or
within a measurement.
"""

from __future__ import annotations

import contextlib
import functools
import os
import statistics
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

from hybridloader._support.user_objects import close

ENOUGH = 8  # batches or items that a loader or a run has had when it is tuned


class TunedEnd(BaseException):
    """End of the script, after its loader or pipeline was tuned, with the result of that."""


class Loop:
    """Times of the script's loop over one iterator."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.given: float | None = None  # when the loop got its latest result


class FirstLoader:
    """Context in which the first loader or pipeline with enough results is given to `tuned`, once.

    With it come the seconds of the script's loop for one result, at the median, without waits for it.
    """

    def __init__(
        self,
        tuned: Callable[[Any, float], object],
        enough: int = ENOUGH,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._tuned, self.enough, self._clock = tuned, enough, clock
        self._here = _here()
        # All the mutable state:
        self._done = False
        self._nested = False  # a loader or a run makes a result, or is being opened
        self._loops: weakref.WeakKeyDictionary[Any, Loop] = weakref.WeakKeyDictionary()  # of runs
        self._undo = contextlib.ExitStack()

    def __enter__(self) -> FirstLoader:
        from torch.utils.data import DataLoader

        from hybridloader.running.run import Run
        from hybridloader.tuning.tune import Tuner

        self._wrap(DataLoader, "__iter__", lambda begin, it: _Counted(self, it, begin))
        self._wrap(Run, "__next__", self._run_asked)
        self._wrap(Tuner, "run", self.within)
        return self

    def __exit__(self, *exc: object) -> None:
        self._undo.close()

    def _wrap(self, kind: type, name: str, call: Callable[[Any, Any], Any]) -> None:
        """Have `call` get the method `name` of a class, and the object."""
        method = getattr(kind, name)

        @functools.wraps(method)
        def wrapped(one: Any) -> Any:
            return call(method, one) if self._counts else method(one)

        setattr(kind, name, wrapped)
        self._undo.callback(setattr, kind, name, method)

    @property
    def _counts(self) -> bool:
        """True if a result counts that is asked for here and now."""
        return not (self._done or self._nested) and self._here == _here()

    def within(self, method: Callable[..., Any], *one: Any) -> Any:
        """Call a method, and count nothing meanwhile: loaders and runs within are not the script's."""
        self._nested = True
        try:
            return method(*one)
        finally:
            self._nested = False

    def _run_asked(self, ask: Any, run: Any) -> Any:
        def end() -> Any:
            pipeline = run._executor.chain
            (run if run._owner is None else run._owner).close()
            return pipeline

        return self.next(self._loops.setdefault(run, Loop()), functools.partial(ask, run), end)

    def next(self, loop: Loop, ask: Callable[[], Any], end: Callable[[], Any]) -> Any:
        """Return the result of `ask`; after enough of them, tune the result of `end`."""
        if not self._counts:
            return ask()
        if loop.given is not None:
            loop.seconds.append(self._clock() - loop.given)
            loop.given = None
        if len(loop.seconds) >= self.enough:
            self._done = True
            raise TunedEnd(self._tuned(end(), statistics.median(loop.seconds)))
        result = self.within(ask)
        loop.given = self._clock()
        return result


class _Counted(Iterator[Any]):
    """Iterator of a loader that counts its batches; attributes are those of the iterator."""

    def __init__(self, first: FirstLoader, loader: Any, begin: Callable[[Any], Any]) -> None:
        self._first, self._loader, self._inner = first, loader, first.within(begin, loader)
        self._loop = Loop()

    def __next__(self) -> Any:
        return self._first.next(self._loop, lambda: next(self._inner), self._end)

    def _end(self) -> Any:
        inner, self._inner = self._inner, iter(())
        close(inner)
        return self._loader  # workers of torch's end with their iterator

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def _here() -> tuple[int, int]:
    """Return this process and thread: a forked worker has the wrapped methods, too."""
    return os.getpid(), threading.get_ident()
