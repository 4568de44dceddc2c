"""Output of the demo: progress bars and a table; a file or a pipe gets the last state of each bar.

It never starts a thread (the loader may fork at any time).
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table

from hybridloader.demo.comparison import Contender

_REDRAW = 0.1  # seconds between two drawings of a bar


class ProgressBar:
    """Bar for work on a known number of images, with their rate and the loss."""

    def __init__(self, title: str, total: int, progress: Progress) -> None:
        self._progress, self._bar = progress, progress.add_task(title, total=total, said="")
        # All the mutable state:
        self._done = 0
        self._loss: float | None = None  # running mean over some ten batches
        self._start = self._drawn = time.perf_counter()

    def advance(self, images: int, loss: float | None = None) -> None:
        self._done += images
        if loss is not None:
            self._loss = loss if self._loss is None else 0.9 * self._loss + 0.1 * loss
        if time.perf_counter() - self._drawn > _REDRAW:
            self.draw()

    def draw(self) -> None:
        self._drawn = time.perf_counter()
        said = f"{self._done / max(1e-9, self._drawn - self._start):,.0f} images/s"
        said += "" if self._loss is None else f", loss {self._loss:.3f}"
        self._progress.update(self._bar, completed=self._done, said=said, refresh=True)


class DemoDisplay:
    """Writes to standard output; tests give another `console`."""

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console(highlight=False)

    def say(self, text: str) -> None:
        """Print one line, however long, without markup."""
        self.console.print(text, markup=False, soft_wrap=True)

    @contextmanager
    def task(self, title: str, total: int) -> Iterator[ProgressBar]:
        columns = BarColumn(20), MofNCompleteColumn(), TextColumn("{task.fields[said]}")
        # auto_refresh would be a thread; redirected streams would be inherited by forked workers.
        with Progress(
            TextColumn("{task.description}"),
            *columns,
            console=self.console,
            auto_refresh=False,
            redirect_stdout=False,
            redirect_stderr=False,
        ) as progress:
            task = ProgressBar(title, total, progress)
            yield task
            task.draw()

    def table(self, title: str, rows: Sequence[Contender]) -> None:
        """Show the comparison; rates are relative to the first row."""
        table = Table("loader", title=title, title_justify="left", title_style="bold")
        for heading in ("workers", "images/s", "relative", "first batch"):
            table.add_column(heading, justify="right")
        for row in rows:
            found = ("-", "-", "-")
            if not row.skipped:
                relative = row.rate / rows[0].rate
                found = f"{row.rate:,.0f}", f"{relative:.2f}", f"{row.first_batch:.2f} s"
            table.add_row(row.name, str(row.workers), *found)
        self.console.print(table)
        for row in rows:
            if row.skipped:
                self.say(f"{row.name}: {row.skipped}")
