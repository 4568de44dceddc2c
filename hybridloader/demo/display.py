"""Output of the demo: progress bars and a table; a file or a pipe gets the last state of each bar.

It never starts a thread (the loader may fork at any time) and never measures anything but the rate
of what it is told of.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table

from hybridloader.demo.comparison import Contender

_REDRAW = 0.1
"""Seconds between two drawings of a bar."""


class ProgressBar:
    """Something that takes a while, a known number of images long."""

    def __init__(self, title: str, total: int, progress: Progress) -> None:
        self._progress, self._bar = progress, progress.add_task(title, total=total, said="")
        # All the mutable state:
        self._done, self._loss = 0, ""
        self._smooth: float | None = None  # the loss, over some ten batches
        self._start = self._drawn = time.perf_counter()

    def advance(self, images: int, loss: float | None = None) -> None:
        """Tell that so many images more are done, and what the loss of these was."""
        self._done += images
        if loss is not None:
            self._smooth = loss if self._smooth is None else 0.9 * self._smooth + 0.1 * loss
            self._loss = f", loss {self._smooth:.3f}"
        if time.perf_counter() - self._drawn > _REDRAW:
            self.draw()

    def draw(self) -> None:
        """Show how far it is."""
        self._drawn = time.perf_counter()
        rate = self._done / max(1e-9, self._drawn - self._start)
        said = f"{rate:,.0f} images/s{self._loss}"
        self._progress.update(self._bar, completed=self._done, said=said, refresh=True)


class Display:
    """Writes to standard output; `console` is for tests."""

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console(highlight=False)

    def say(self, text: str) -> None:
        """One line, however long; nothing in it is taken for markup."""
        self.console.print(text, markup=False, soft_wrap=True)

    @contextmanager
    def task(self, title: str, total: int) -> Iterator[ProgressBar]:
        """Show the progress of what is done within the block."""
        # auto_refresh would be a thread; redirected streams would be inherited by forked workers.
        with Progress(
            TextColumn("{task.description}"),
            BarColumn(20),
            MofNCompleteColumn(),
            TextColumn("{task.fields[said]}"),
            console=self.console,
            auto_refresh=False,
            redirect_stdout=False,
            redirect_stderr=False,
        ) as progress:
            task = ProgressBar(title, total, progress)
            yield task
            task.draw()

    def table(self, title: str, rows: Sequence[Contender]) -> None:
        """Show the comparison; the first row is what the others are measured against."""
        table = Table(title=title, title_justify="left", title_style="bold")
        table.add_column("loader")
        for heading in ("workers", "images/s", "relative", "first batch"):
            table.add_column(heading, justify="right")
        base = rows[0].rate
        for row in rows:
            found = ("-", "-", "-")
            if not row.skipped:
                found = f"{row.rate:,.0f}", f"{row.rate / base:.2f}", f"{row.first_batch:.2f} s"
            table.add_row(row.name, str(row.workers), *found)
        self.console.print(table)
        for row in rows:
            if row.skipped:
                self.say(f"{row.name}: {row.skipped}")
