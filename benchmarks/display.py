"""Output of a run: a line of progress while it goes on, the tables at the end."""

from __future__ import annotations

import shutil
import statistics
from collections.abc import Callable, Sequence

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from benchmarks import machine
from benchmarks.case import Case
from benchmarks.harness import Progress as Steps
from benchmarks.names import BACKENDS, HYBRIDS, LIMITS, family, is_rival
from benchmarks.results import Measurement, Results
from benchmarks.targets import Verdict

_SECONDS = {"s": 1.0, "ms": 1e3, "us": 1e6}

_ORDER = (*LIMITS, "torch", *HYBRIDS, "inline", *BACKENDS)


class Display:
    """Writer to standard output. It starts no thread; the work is done in runners."""

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console(highlight=False)
        if console is None and not self.console.is_terminal:
            # Into a file or a pipe: as wide as the tables want to be.
            width = max(200, shutil.get_terminal_size((200, 50)).columns)
            self.console = Console(highlight=False, width=width)
        self._progress: Progress | None = None

    def steps(self, cases: Sequence[Case], rounds: int) -> Steps:
        """The progress of a run; `finish` ends it."""
        if not self.console.is_terminal:
            return Steps(say=self.say, step=self._first_of_each())
        self._progress = Progress(
            TextColumn("[bold]benchmarks"),
            BarColumn(30),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.description}"),
            console=self.console,
            auto_refresh=False,
        )
        self._progress.start()
        task = self._progress.add_task("", total=steps_of(cases, rounds))
        progress = self._progress

        def step(text: str) -> None:
            progress.update(task, description=text, advance=1, refresh=True)

        return Steps(say=self.say, step=step)

    def _first_of_each(self) -> Callable[[str], None]:
        """Not a terminal: one line for each variant."""
        seen: set[str] = set()

        def step(text: str) -> None:
            variant = text.partition(":")[0]
            if variant not in seen:
                seen.add(variant)
                self.say(variant)

        return step

    def finish(self) -> None:
        if self._progress is not None:
            self._progress.stop()
            self._progress = None

    def say(self, text: str) -> None:
        """One line, however long."""
        self.console.print(text, markup=False, soft_wrap=True)

    def tables(self, results: Results, verdicts: Sequence[Verdict], titles: dict[str, str]) -> None:
        """Show the table of each case, then targets and verdicts."""
        self.say(machine.sentence(results.about))
        for case in results.cases():
            self._case(results, case, titles.get(case, ""))
        table = Table(title="targets", title_justify="left", title_style="bold")
        for heading in ("case", "target", "reached", "verdict"):
            table.add_column(heading)
        for verdict in verdicts:
            word = {True: "[green]met", False: "[red]missed", None: "[dim]-"}[verdict.met]
            table.add_row(verdict.case, verdict.target, verdict.reached, word)
        self.console.print(table)

    def _case(self, results: Results, case: str, title: str) -> None:
        rows = [m for m in results.measurements if m.case == case]
        unit = rows[0].unit
        columns = column_names(rows)
        ratios = any(m.versus_torch for m in rows if m.passed is None)
        smaller = "smaller" if unit.startswith("MB") else "less" if "CPU" in unit else "faster"
        smaller = "less late" if unit.endswith("late") else smaller
        table = Table(
            title=f"{case}: {title}, {unit}" + (f" (x {smaller} than torch)" if ratios else ""),
            title_justify="left",
            title_style="bold",
        )
        table.add_column("variant")
        for name in columns:
            table.add_column(name, justify="right")
        for variant in results.variants(case):
            group = [m for m in rows if m.variant == variant]
            table.add_row(
                with_noise(results, case, variant), *(cell(group, name) for name in columns)
            )
        self.console.print(table)


def steps_of(cases: Sequence[Case], rounds: int) -> int:
    """Number of steps of a run, if nothing is left out."""
    total = 0
    for case in cases:
        for variant in case.variants:
            each = min(rounds, variant.most_rounds) + (case.check and case.kind == "rounds")
            each = 1 if case.kind == "pass" else each
            twice = case.kind == "rounds"  # one loader takes part twice
            total += each * (len(variant.loaders) - len(variant.blanks) + twice)
    return total


def column_names(rows: Sequence[Measurement]) -> list[str]:
    """A column for each loader of torch's and ours, one for each rival project."""
    names = list(dict.fromkeys(family(m.loader) for m in rows))
    known = [name for name in _ORDER if name in names]
    return known + [name for name in names if name not in known]


def best(group: Sequence[Measurement], column: str) -> Measurement | None:
    """The measurement that a column shows: of a rival's forms, the fastest."""
    rows = [m for m in group if family(m.loader) == column]
    measured = [m for m in rows if m.values]
    if measured:
        return min(measured, key=lambda m: m.median)
    return rows[0] if rows else None


def cell(group: Sequence[Measurement], column: str) -> str:
    """Ratio, median and spread; for a rival also which of its forms."""
    found = best(group, column)
    if found is None:
        return ""
    if found.passed is not None:
        return ("pass" if found.passed else "FAIL") + (
            f"\n{number(found.median)}" if found.values else ""
        )
    if not found.values:
        return "-"
    lines = [f"{number(found.median)} ± {number(found.spread)}"]
    if found.versus_torch is not None and found.loader != "torch":
        lines.insert(0, f"{number(found.versus_torch)}x")
    if is_rival(found.loader):
        lines[0] += f" {found.loader.partition(' ')[2]}"
    return "\n".join(filter(None, (*lines, cost_of(found))))


def with_noise(results: Results, case: str, variant: str) -> str:
    """Name of a variant, and below it the noise, if that was measured."""
    noise = results.noise(case, variant)
    return variant if noise is None else f"{variant}\nnoise {percent(noise)}"


def percent(value: float) -> str:
    """0.1 as "10 %"."""
    return f"{number(100 * value) if value >= 0.01 else '< 1'} %"


def cost_of(row: Measurement) -> str:
    """CPU time for what the value is about, in its unit, peak PSS and more, as far as measured."""
    found = []
    unit = row.unit.partition(" ")[0]
    if unit in _SECONDS and any(row.cpu):
        found.append(f"cpu {number(statistics.median(row.cpu) * _SECONDS[unit])}")
    if row.memory_mb and not row.unit.endswith("late"):
        found.append(f"{number(row.memory_mb)} MB")
    if row.details.get("first_batch"):
        found.append(f"first after {number(statistics.median(row.details['first_batch']))} s")
    if row.details.get("second_epoch"):
        found.append(f"epoch 2 in {number(statistics.median(row.details['second_epoch']))} s")
    if row.details.get("requests"):
        found.append(f"{statistics.median(row.details['requests']):.0f} requests")
        found.append(f"{number(statistics.median(row.details['MB']))} MB read")
    if row.details.get("end_of_epoch_mb"):
        found.append(f"{number(statistics.median(row.details['end_of_epoch_mb']))} MB at the end")
    if row.details.get("close"):
        found.append(f"closed in {number(statistics.median(row.details['close']))} s")
    if row.details.get("bound"):
        found.append(f"{number(row.median / row.details['bound'][0])} of the bound")
    if row.details.get("loop_us"):
        found.append(f"loop {number(statistics.median(row.details['loop_us']))}")
    if row.details.get("next_p99_ms"):
        found.append(f"p99 of next() {number(statistics.median(row.details['next_p99_ms']))} ms")
    if row.details.get("max"):
        found.append(f"at most {number(max(row.details['max']))}")
    found += map(str, row.details.get("plan", ())[:1])
    if row.details.get("load"):
        found.append(f"load {number(statistics.median(row.details['load']))}")
    return ", ".join(found)


def number(value: float) -> str:
    """Three digits that count."""
    if value == 0:
        return "0"
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}"
