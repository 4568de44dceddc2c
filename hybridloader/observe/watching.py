"""Blocks around a whole program, such as a trace, which an iterator looks up once, when it is made.

One of them is here: a watch. A separate thread writes the statistics of each loader with new batches, so
the path of a batch has no part of it.
"""

from __future__ import annotations

import os
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable
from types import TracebackType
from typing import TYPE_CHECKING, ClassVar, TextIO

from hybridloader.observe.figures import LOOP
from hybridloader.observe.stats import Stats

if TYPE_CHECKING:
    from typing_extensions import Self


class ProgramBlock(ABC):
    """Context manager, for one use. `running` returns the latest of each subclass.

    In a process that is forked inside the block it neither runs nor ends.
    """

    _latest: ClassVar[ProgramBlock | None] = None
    """Running block; each subclass sets this attribute on itself."""

    def __init__(self) -> None:
        self._owner = os.getpid()

    def __enter__(self) -> Self:
        self._begin()
        type(self)._latest = self
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if os.getpid() != self._owner:  # a forked child that left the block
            return
        if type(self)._latest is self:
            type(self)._latest = None
        self._end(error)

    def _begin(self) -> None:  # noqa: B027  # most have nothing to do
        """Prepare the block; an error raised here keeps it from running."""

    @abstractmethod
    def _end(self, error: BaseException | None) -> None:
        """Finish the block; `error` is the exception that ended it, or None."""

    @classmethod
    def running(cls) -> Self | None:
        """Return the block that runs in this process, or None."""
        found = cls._latest
        return found if isinstance(found, cls) and found._owner == os.getpid() else None


def numbered(name: str, number: int) -> str:
    """Return `name` for number 1, else `name` with its number: ``"DataLoader 2"``."""
    return name if number == 1 else f"{name} {number}"


SHOWN = 12  # maximum number of loaders to show, the latest ones


class _Watched:
    """Epoch of a loader or pipeline that is watched; `stats` returns None once it is gone."""

    def __init__(self, name: str, stats: Callable[[], Stats | None]) -> None:
        self.name, self.stats = name, stats
        self._latest: Stats | None = None
        self._rate = 0.0
        self._written = 0  # items of the latest line

    def look(self) -> None:
        """Remember the statistics as of now."""
        try:
            stats, before = self.stats(), self._latest
        except Exception:  # another thread began an epoch meanwhile: the next look sees it
            return
        if stats is None:
            return
        self._latest = stats
        items, passed = stats.items, stats.seconds
        if before is not None and before.seconds < passed and before.items <= items:
            items, passed = items - before.items, passed - before.seconds
        elif before is not None and before.seconds == passed:
            return  # the epoch is over: keep its rate
        self._rate = items / passed if passed > 0 else 0.0

    def line(self) -> str | None:
        """Return a line of text; None without a new batch since the previous one."""
        stats = self._latest
        if stats is None or stats.items == self._written:
            return None
        self._written = stats.items
        loads = ", ".join(
            f"{stage.name} {stage.load:.0%}{' <' if stage.name == stats.verdict.stage else ''}"
            for stage in stats.stages
            if stage.name != LOOP
        )
        return (
            f"hybridloader: {self.name}: {stats.items:,} batches, {self._rate:,.1f}/s, "
            f"stall {stats.stall.share:.0%} ({loads}). {stats.verdict}"
        )

    def table(self) -> str | None:
        """Return the statistics of the latest epoch; None without one."""
        return None if self._latest is None else f"hybridloader: {self.name}:\n{self._latest}"


class Watch(ProgramBlock):
    """Watch of all loaders and pipelines whose iterators are made while it runs; for one use.

    Every `every` seconds, and at the end, it writes a line for each to `stream`, by default standard
    error. With None it writes only at the end, the table of statistics of each.
    """

    def __init__(self, stream: TextIO | None = None, every: float | None = 10.0) -> None:
        super().__init__()
        self._every = every
        self._stream = sys.stderr if stream is None else stream
        self._lock, self._over = threading.RLock(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="hybridloader-watch", daemon=True)
        # All the mutable state, under that lock:
        self._watched: dict[Hashable, _Watched] = {}
        self._numbers: dict[str, int] = {}

    def _begin(self) -> None:
        if self._every is not None:
            self._thread.start()

    def _end(self, error: BaseException | None) -> None:
        self._over.set()
        if self._every is not None:
            self._thread.join()
        try:
            self._write()
        except (OSError, ValueError):  # the terminal is gone
            if error is None:
                raise

    def see(self, name: str, key: Hashable, stats: Callable[[], Stats | None]) -> None:
        """Watch the result of `stats`, in place of an earlier entry with this `key`."""
        with self._lock:
            before = self._watched.pop(key, None)
            if before is None:
                number = self._numbers[name] = self._numbers.get(name, 0) + 1
            name = numbered(name, number) if before is None else before.name
            self._watched[key] = _Watched(name, stats)  # at the end: the latest
            if len(self._watched) > SHOWN:
                del self._watched[next(iter(self._watched))]

    def look(self, key: Hashable) -> None:
        """Remember the statistics of `key` before it is closed."""
        with self._lock:
            watched = self._watched.get(key)
            if watched is not None:
                watched.look()

    def lines(self) -> list[str]:
        """Return a line, or the table, for each loader with new batches."""
        with self._lock:
            for watched in self._watched.values():
                watched.look()
            tables = self._every is None
            lines = [one.table() if tables else one.line() for one in self._watched.values()]
        return [line for line in lines if line is not None]

    def _write(self) -> None:
        self._stream.write("".join(f"{line}\n" for line in self.lines()))
        self._stream.flush()

    def _run(self) -> None:
        while not self._over.wait(self._every):
            try:
                self._write()
            except (OSError, ValueError):  # the terminal is gone
                return
