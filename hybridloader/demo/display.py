"""What the demo shows: progress bars and a table on a terminal, plain short lines anywhere else.

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


class Task:
    """Something that takes a while, a known number of images long."""

    def __init__(self, title: str, total: int, progress: Progress | None) -> None:
        self.title, self.total, self.done = title, total, 0
        self._loss: float | None = None
        self._progress = progress
        self._start = self._drawn = time.perf_counter()
        if progress is not None:
            self._bar = progress.add_task(title, total=total, rate="", loss="")

    @property
    def rate(self) -> str:
        """Images per second so far, as text."""
        return f"{self.done / max(1e-9, time.perf_counter() - self._start):,.0f} images/s"

    @property
    def loss(self) -> str:
        """The loss, smoothed over some ten batches, as text; empty if there is none."""
        return "" if self._loss is None else f"loss {self._loss:.3f}"

    def advance(self, images: int, loss: float | None = None) -> None:
        """Tell that so many images more are done, and what the loss of these was."""
        self.done += images
        if loss is not None:
            self._loss = loss if self._loss is None else 0.9 * self._loss + 0.1 * loss
        if time.perf_counter() - self._drawn > _REDRAW or self.done >= self.total:
            self._draw()

    def finish(self) -> None:
        """Show the last state."""
        self._draw()

    def _draw(self) -> None:
        self._drawn = time.perf_counter()
        if self._progress is not None:
            self._progress.update(
                self._bar, completed=self.done, rate=self.rate, loss=self.loss, refresh=True
            )


class Display:
    """Writes to standard output; `console` is for tests."""

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console(highlight=False)

    def say(self, text: str) -> None:
        """One line, however long; nothing in it is taken for markup."""
        self.console.print(text, markup=False, soft_wrap=True)

    @contextmanager
    def task(self, title: str, total: int) -> Iterator[Task]:
        """Show the progress of what is done within the block."""
        if not self.console.is_terminal:
            task = Task(title, total, None)
            yield task
            self.say(
                ", ".join(filter(None, (f"{title}: {task.done:,} images", task.rate, task.loss)))
            )
            return
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[rate]}"),
            TextColumn("{task.fields[loss]}"),
        )
        # auto_refresh would be a thread; redirected streams would be inherited by forked workers.
        with Progress(
            *columns,
            console=self.console,
            auto_refresh=False,
            redirect_stdout=False,
            redirect_stderr=False,
        ) as progress:
            task = Task(title, total, progress)
            yield task
            task.finish()

    def table(self, title: str, rows: Sequence[Contender]) -> None:
        """Show the comparison; the first row is what the others are measured against."""
        table = Table(title=title, title_justify="left", title_style="bold")
        table.add_column("loader")
        for heading in ("workers", "images/s", "relative", "first batch"):
            table.add_column(heading, justify="right")
        base = rows[0].rate
        for row in rows:
            if row.skipped:
                table.add_row(row.name, str(row.workers), "-", "-", "-")
                continue
            table.add_row(
                row.name,
                str(row.workers),
                f"{row.rate:,.0f}",
                f"{row.rate / base:.2f}",
                f"{row.first_batch:.2f} s",
            )
        self.console.print(table)
        for row in rows:
            if row.skipped:
                self.say(f"{row.name}: {row.skipped}")
