"""Watch: statistics of all loaders and pipelines of a program, shown while it runs.

An iterator or a run looks for a watch once, by `running_watch`, when it is made. A separate thread shows
the statistics, so the path of a batch has no part of it. On a terminal they are a table below the
cursor, and the cursor stays where the script left it. Each write of the script clears the table first,
and the thread draws it again a second later. So no line of the script is held back, wrapped or moved.
"""

from __future__ import annotations

import importlib.util
import io
import os
import shutil
import sys
import threading
from collections.abc import Callable, Hashable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol, TextIO

from hybridloader._support.arguments import seconds
from hybridloader.observe.figures import LOOP
from hybridloader.observe.program_block import ProgramBlock, numbered
from hybridloader.observe.reporting import Follower
from hybridloader.observe.stats import Stats
from hybridloader.observe.thread_times import LoopWaits

SHOWN = 12
"""Maximum number of loaders to show, the latest ones."""


class WatchedRow(NamedTuple):
    """Statistics of one loader, formatted."""

    name: str
    rate: str
    stall: str
    stages: str
    verdict: str
    items: int


class Display(Protocol):
    """Output for the rows."""

    every: float
    """Seconds between two updates."""

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
        except Exception:  # another thread began an epoch meanwhile: the next look sees it
            return
        if stats is None:
            return
        self.latest = stats
        items, passed = stats.items, stats.seconds
        if before is not None and before.seconds < passed and before.items <= items:
            items, passed = items - before.items, passed - before.seconds
        elif before is not None and before.seconds == passed:
            return  # the epoch is over: keep its rate
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
    """Key that is equal only for the same object, which it keeps alive."""

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
        """Watch the result of `stats`, in place of an earlier entry with this `key`."""
        with self._lock:
            before = self._watched.get(key)
            if before is not None:
                before.stats, before.latest = stats, None
                self._watched[key] = self._watched.pop(key)  # moved to the end: the latest
                return
            number = self._numbers[name] = self._numbers.get(name, 0) + 1
            self._watched[key] = _Watched(numbered(name, number), stats)
            while len(self._watched) > SHOWN:
                del self._watched[next(iter(self._watched))]

    def look(self, key: Hashable) -> None:
        """Remember the statistics of `key` before it is closed."""
        with self._lock:
            watched = self._watched.get(key)
            if watched is not None:
                watched.look()

    def rows(self) -> list[WatchedRow]:
        """Return the rows as of now."""
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


class WatchedEpochs(Follower):
    """Epochs of one loader or pipeline, which `watch` shows as `name` and recognises by `key`."""

    def __init__(self, watch: Watch, name: str, key: Hashable) -> None:
        self._watch, self._name, self._key = watch, name, key

    def begin(self, loop: LoopWaits, stats: Callable[[], Stats]) -> None:
        self._watch.see(self._name, self._key, stats)

    def due(self) -> None:
        """Do nothing: the watch's thread asks for the statistics."""

    def end(self, *, finished: bool) -> None:
        self._watch.look(self._key)


def running_watch() -> Watch | None:
    """Return the watch that runs in this process, or None."""
    return Watch.running()


_BELOW = "\x1b[J"
"""Clears the screen from the cursor to its end."""

_HEADING = ("loader", "batches", "stall", "load of its stages", "verdict")


class Lines:
    """Line of text for each loader with new batches, every 30 seconds and at the end."""

    every = 30.0

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        # All the mutable state:
        self._before: dict[str, WatchedRow] = {}

    def begin(self) -> None:
        pass

    def show(self, rows: Sequence[WatchedRow]) -> None:
        for row in rows:
            before = self._before.get(row.name)
            if before is None or before.items != row.items:
                self._before[row.name] = row
                self._write(row)
        self._stream.flush()

    def _write(self, row: WatchedRow) -> None:
        self._stream.write(
            f"hybridloader: {row.name}: {row.items:,} batches, {row.rate}, stall {row.stall} "
            f"({row.stages}). {row.verdict}\n"
        )

    def end(self, rows: Sequence[WatchedRow]) -> None:
        self.show(rows)


class LiveTable:
    """Table on the terminal `stream`, drawn again every second."""

    every = 1.0

    def __init__(self, stream: TextIO, size: Callable[[], tuple[int, int]] | None = None) -> None:
        self._stream = stream
        self._size = partial(_size_of, stream) if size is None else size
        self._owner = os.getpid()
        self._lock = threading.RLock()
        # All the mutable state, under that lock:
        self._shown = False
        self._at_begin = True  # of a line
        self._proxies: dict[str, _Cleared] = {}

    def begin(self) -> None:
        for name in ("stdout", "stderr"):
            stream = getattr(sys, name)
            if stream is not None and stream.isatty():
                self._proxies[name] = proxy = _Cleared(stream, self)
                setattr(sys, name, proxy)

    def write(self, stream: TextIO, texts: Iterable[str]) -> int:
        """Write the script's `texts` to `stream`, after clearing the table."""
        if os.getpid() != self._owner:  # a forked worker: its parent may have held the lock
            return stream.write(_BELOW + "".join(texts)) - len(_BELOW)
        with self._lock:
            text = "".join(texts)
            if text:
                self._clear()
                self._at_begin = text.endswith(("\n", "\r"))
            return stream.write(text)

    def _clear(self) -> None:
        if self._shown:
            self._shown = False
            self._stream.write(_BELOW)
            self._stream.flush()

    def show(self, rows: Sequence[WatchedRow]) -> None:
        if not rows:
            return
        width, height = self._size()
        lines = drawn(rows, width).splitlines()[: max(1, height - 2)]
        down = "\x1bD" * len(lines)  # scrolls at the bottom, and keeps the column
        with self._lock:
            for proxy in self._proxies.values():
                proxy.flush()
            table = "".join(f"\r\n{line}" for line in lines)
            up = f"\x1b[{len(lines)}A"
            self._stream.write(f"{_BELOW}{down}{up}\x1b7{table}\x1b8")
            self._stream.flush()
            self._shown = True

    def end(self, rows: Sequence[WatchedRow]) -> None:
        with self._lock:
            self._clear()
            for name, proxy in self._proxies.items():
                proxy.flush()
                if getattr(sys, name) is proxy:
                    setattr(sys, name, proxy.stream)
            if rows:
                begin = "" if self._at_begin else "\n"
                self._stream.write(f"{begin}{drawn(rows, self._size()[0])}")
                self._stream.flush()


class _Cleared(io.TextIOBase):
    """Stream of the script that clears the table before each write."""

    def __init__(self, stream: TextIO, table: LiveTable) -> None:
        self.stream, self._table = stream, table

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)

    def writable(self) -> bool:
        return self.stream.writable()

    def write(self, text: str) -> int:
        return self._table.write(self.stream, [text])

    def writelines(self, lines: Iterable[str]) -> None:  # type: ignore[override]
        self._table.write(self.stream, lines)

    def flush(self) -> None:
        self.stream.flush()

    def fileno(self) -> int:
        return self.stream.fileno()

    def isatty(self) -> bool:
        return self.stream.isatty()

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self.stream.encoding

    @property
    def errors(self) -> str | None:  # type: ignore[override]
        return self.stream.errors

    def close(self) -> None:
        """Leave the script's stream open: `io` closes this object when it is collected."""


def _size_of(stream: TextIO) -> tuple[int, int]:
    """Return columns and lines of the terminal `stream`; standard output may be a file."""
    try:
        return os.get_terminal_size(stream.fileno())
    except (OSError, ValueError):
        return shutil.get_terminal_size()


def drawn(rows: Sequence[WatchedRow], width: int) -> str:
    """Return the table as text for a terminal of that width."""
    from rich.console import Console
    from rich.table import Table

    table = Table(expand=True)
    for heading, ratio in zip(_HEADING, (None, None, None, 2, 3), strict=True):
        table.add_column(heading, ratio=ratio, justify="left" if ratio else "right")
    for row in rows:
        table.add_row(row.name, row.rate, row.stall, row.stages, row.verdict)
    text = io.StringIO()
    Console(file=text, width=width, force_terminal=True, markup=False).print(table)
    return text.getvalue()


def watch(stream: TextIO | None = None) -> Watch:
    """Show the statistics of all loaders on `stream`, by default standard error.

    Raises
    ------
    ImportError
        `stream` is a terminal and rich is not installed.
    """
    stream = sys.stderr if stream is None else stream
    display: Display = Lines(stream)
    if stream.isatty():
        if importlib.util.find_spec("rich") is None:
            raise ImportError(
                "--watch needs rich on a terminal; install it with: pip install 'hybridloader[watch]'"
            )
        display = LiveTable(stream)
    return Watch(display)
