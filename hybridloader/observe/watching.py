"""Watch: statistics of all loaders and pipelines of a program, shown while it runs.

Whatever begins while a watch runs asks for it once, by `running_watch`. A thread of its own shows the
statistics; nothing of it is on the path of a batch.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple, Protocol

from hybridloader._support.arguments import seconds
from hybridloader.observe.figures import LOOP
from hybridloader.observe.program_block import ProgramBlock, numbered
from hybridloader.observe.stats import Stats

SHOWN = 12
"""Loaders that are shown, the latest ones."""


class WatchedRow(NamedTuple):
    """State of one loader, for people."""

    name: str
    rate: str
    stall: str
    stages: str
    verdict: str
    items: int


class Display(Protocol):
    """Place where the rows are shown."""

    every: float
    """Seconds from one showing to the next."""

    def begin(self) -> None: ...

    def show(self, rows: Sequence[WatchedRow]) -> None: ...

    def end(self, rows: Sequence[WatchedRow]) -> None: ...


class _Watched:
    """Loader or pipeline that is watched; `stats` returns None once it is gone."""

    def __init__(self, name: str, stats: Callable[[], Stats | None]) -> None:
        self.name, self.stats = name, stats
        self.latest: Stats | None = None
        self.rate = 0.0

    def look(self) -> None:
        try:
            stats, before = self.stats(), self.latest
        except Exception:  # a pass began meanwhile, on another thread: the next look sees it
            return
        if stats is None:
            return
        self.latest = stats
        items, passed = stats.items, stats.seconds
        if before is not None and before.seconds < passed and before.items <= items:
            items, passed = items - before.items, passed - before.seconds
        elif before is not None and before.seconds == passed:
            return  # it is over: the rate stays
        self.rate = items / passed if passed > 0 else 0.0

    def row(self) -> WatchedRow | None:
        stats = self.latest
        if stats is None:
            return None
        loads = [
            f"{stage.name} {stage.load:.0%}{' <' if stage.name == stats.verdict.stage else ''}"
            for stage in stats.stages
            if stage.name != LOOP
        ]
        stall = f"{stats.stall.share:.0%}"
        rate = f"{self.rate:,.1f}/s"
        return WatchedRow(self.name, rate, stall, ", ".join(loads), str(stats.verdict), stats.items)


class SameObject:
    """Key that stands for one object, which it keeps."""

    __slots__ = ("_object",)

    def __init__(self, object: object) -> None:
        self._object = object

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SameObject) and other._object is self._object

    def __hash__(self) -> int:
        return id(self._object)


class Watch(ProgramBlock):
    """Watch of all loaders and pipelines whose iterators are made while it runs; for one use."""

    def __init__(self, display: Display) -> None:
        super().__init__()
        seconds("every", display.every, above=True)
        self._display = display
        self._lock, self._over = threading.RLock(), threading.Event()
        # All the mutable state, under that lock:
        self._watched: dict[Hashable, _Watched] = {}
        self._numbers: dict[str, int] = {}
        self._thread: threading.Thread | None = None

    def _begin(self) -> None:
        self._display.begin()
        self._thread = threading.Thread(target=self._run, name="hybridloader-watch", daemon=True)
        self._thread.start()

    def _end(self, error: BaseException | None) -> None:
        self._over.set()
        if self._thread is not None:
            self._thread.join()
        try:
            self._display.end(self.rows())
        except (OSError, ValueError):  # the terminal is gone
            if error is None:
                raise

    def see(self, name: str, key: Hashable, stats: Callable[[], Stats | None]) -> None:
        """Watch what `stats` tells, in the place of what had this `key`."""
        with self._lock:
            before = self._watched.get(key)
            if before is not None:
                before.stats, before.latest = stats, None
                self._watched[key] = self._watched.pop(key)  # it is the latest one now
                return
            number = self._numbers[name] = self._numbers.get(name, 0) + 1
            self._watched[key] = _Watched(numbered(name, number), stats)
            while len(self._watched) > SHOWN:
                del self._watched[next(iter(self._watched))]

    def look(self, key: Hashable) -> None:
        """Remember what is known of `key` before it goes."""
        with self._lock:
            watched = self._watched.get(key)
            if watched is not None:
                watched.look()

    def rows(self) -> list[WatchedRow]:
        """Return what is known now."""
        with self._lock:
            for watched in self._watched.values():
                watched.look()
            rows = [watched.row() for watched in self._watched.values()]
        return [row for row in rows if row is not None]

    def _run(self) -> None:
        while not self._over.wait(self._display.every):
            try:
                self._display.show(self.rows())
            except (OSError, ValueError):  # the terminal is gone
                return


def running_watch() -> Watch | None:
    """Return the watch that runs in this process, if any."""
    return Watch.running()
