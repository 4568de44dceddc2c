"""Displays of a watch: a table below a script's output on a terminal, or lines now and then.

The table stands below the cursor, which stays where the script has left it. Whatever the script writes
clears the table first; the next showing draws it again. So no line of the script's is held back,
wrapped or moved.
"""

from __future__ import annotations

import importlib.util
import io
import os
import shutil
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, TextIO

from hybridloader.observe.watching import Display, Watch, WatchedRow

_BELOW = "\x1b[J"
"""Clears from the cursor on."""

_HEADING = ("loader", "batches", "stall", "load of its stages", "verdict")


class Lines:
    """Lines of text, every 30 seconds and at the end, of each loader that has gone on."""

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
    """Table on the terminal that `stream` is, drawn anew every second."""

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
        """Write what the script writes."""
        if os.getpid() != self._owner:  # in a worker: its parent may have held the lock
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
        down = "\x1bD" * len(lines)  # scrolls if need be, and stays in its column
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
    """Stream of the script's; the table below is cleared before it is written to."""

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
        """Leave the stream open: letting this go closes it."""


def _size_of(stream: TextIO) -> tuple[int, int]:
    """Return columns and lines of the terminal that a stream is; standard output may be a file."""
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
        It is a terminal, and rich is not installed.
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
