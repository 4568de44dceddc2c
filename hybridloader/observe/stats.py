"""Statistics of a loader or a pipeline, computed from a `Recording`."""

from __future__ import annotations

import os
import textwrap
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from hybridloader._support.store_use import StoreUse
from hybridloader._support.text import Shown, size, time
from hybridloader.observe.figures import LOOP, REST, Figures
from hybridloader.observe.recording import CoreUse, Faults, Recording, StageRecord
from hybridloader.observe.verdict import Verdict, judge

_CAUSES = ("busy", "starved", "blocked", "other")


@dataclass(frozen=True)
class StageStats:
    """Statistics of one stage until now.

    Attributes
    ----------
    name
        Name of the stage; ``"your loop"`` takes the items, ``"sampler"`` is the sampler of a loader.
    backend
        Backend; ``"thread"`` for a thread between two stages, ``"caller"`` for your loop's thread.
    num_workers
        Number of workers.
    items
        Items that left the stage; a loader's are batches.
    busy
        Seconds of work, summed over workers, as are the next four.
    starved
        Idle seconds for lack of input.
    blocked
        Idle seconds because results were not taken.
    other
        Seconds spent starting, receiving tasks or handing over results.
    cpu
        CPU seconds; None if unknown.
    bytes
        Bytes of the results, estimated; None if the results do not report their size.
    queued
        Items in flight in the stage, or waiting after it.
    stall
        Seconds that your loop waited for the stage after the prefetch was full.
    faults
        Faults, by kind.
    """

    name: str
    backend: str
    num_workers: int
    items: int
    busy: float
    starved: float
    blocked: float
    other: float
    cpu: float | None = None
    bytes: int | None = None
    queued: int = 0
    stall: float = 0.0
    faults: Faults = field(default=Faults())

    @property
    def load(self) -> float:
        """Busy share of the workers' time, from 0 to 1."""
        whole = self.busy + self.starved + self.blocked + self.other
        return min(1.0, self.busy / whole) if whole > 0 else 0.0


@dataclass(frozen=True)
class Stall:
    """Seconds that a loop waited in `next()` after the prefetch was full.

    Attributes
    ----------
    seconds
        Total seconds.
    share
        Share of the time after the prefetch was full, from 0 to 1.
    p50, p99
        Median and 99th percentile of the wait for one batch, in seconds.
    by_stage
        Seconds by the name of the stage that was busy meanwhile. ``"none of them"`` has the rest.
    warmup
        Seconds that the loop waited before the prefetch was full.
    """

    seconds: float = 0.0
    share: float = 0.0
    p50: float = 0.0
    p99: float = 0.0
    by_stage: Mapping[str, float] = field(default_factory=dict)
    warmup: float = 0.0


@dataclass(frozen=True)
class Stats(Shown):
    """Statistics of a loader's latest epoch, or of a run of a pipeline, until now.

    It prints as a table and the verdict; a notebook shows both.

    Attributes
    ----------
    stages
        Statistics of each stage, in order from the source; your loop is last.
    stall
        Seconds that your loop waited.
    verdict
        Bottleneck of the loop, and advice.
    seconds
        Seconds since the epoch or run began.
    cores
        Cores that this program may use, and how busy they were.
    batch_size
        Samples per item of a loader; None if unknown, and for a pipeline.
    stores
        Use of object stores while it ran, by this process and by its workers.
    """

    stages: tuple[StageStats, ...]
    stall: Stall
    verdict: Verdict
    seconds: float
    cores: CoreUse | None = None
    batch_size: int | None = None
    stores: tuple[StoreUse, ...] = ()

    @property
    def items(self) -> int:
        """Items, or batches, that your loop has received."""
        return self.stages[-1].items

    @property
    def faults(self) -> Faults:
        """Faults of all stages together."""
        return sum((stage.faults for stage in self.stages), Faults())

    def to_dict(self) -> dict[str, Any]:
        """Return the attributes and the properties as a dict of JSON types."""
        return {
            "seconds": self.seconds,
            "items": self.items,
            "batch_size": self.batch_size,
            "stages": [asdict(stage) | {"load": stage.load} for stage in self.stages],
            "stall": {**vars(self.stall), "by_stage": dict(self.stall.by_stage)},
            "verdict": asdict(self.verdict),
            "cores": None if self.cores is None else asdict(self.cores),
            "faults": asdict(self.faults),
            "stores": [asdict(use) for use in self.stores],
        }

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Draw the time of each stage, and the stall by stage, to a PNG or SVG file.

        Raises
        ------
        ImportError
            matplotlib is not installed; `pip install matplotlib` installs it.
        """
        try:
            # Not pyplot, which would pick a display and keep every figure.
            from matplotlib.figure import Figure
        except ImportError as error:
            raise ImportError(
                "plot() needs matplotlib; install it with: pip install matplotlib"
            ) from error
        names = [stage.name for stage in self.stages]
        figure = Figure(figsize=(9, 1.9 + 0.45 * len(names)), layout="constrained")
        times, waits = figure.subplots(1, 2, sharey=True, width_ratios=(2, 1))
        rows = [[getattr(stage, cause) for cause in _CAUSES] for stage in self.stages]
        shares = [[100 * part / (sum(row) or 1.0) for part in row] for row in rows]
        colours = "#4c72b0", "#dddddd", "#dd8452", "#999999"
        for at, (cause, colour) in enumerate(zip(_CAUSES, colours, strict=True)):
            left = [sum(row[:at]) for row in shares]
            times.barh(names, [row[at] for row in shares], left=left, color=colour, label=cause)
        times.invert_yaxis()
        times.set_xlabel("% of the workers' time")
        times.legend(ncols=4, loc="lower center", bbox_to_anchor=(0.5, 1.0), frameon=False)
        marked = ["#c44e52" if name == self.verdict.stage else "#e0a0a2" for name in names]
        waits.barh(names, [stage.stall for stage in self.stages], color=marked)
        waits.set_xlabel("s that your loop waited for it")
        figure.suptitle("\n".join(textwrap.wrap(str(self.verdict), 110)), fontsize=9)
        figure.savefig(path)

    def _tables(self) -> list[list[list[str]]]:
        return [self._rows(), *([self._rows_of_stores()] if self.stores else [])]

    def _rows(self) -> list[list[str]]:
        faults = [name for name, count in vars(self.faults).items() if count]
        sized = any(stage.bytes for stage in self.stages)
        heading = ["stage", "where", "items", *_CAUSES, "load", "cpu", "queued", "stall"]
        rows = [[*heading, *(["bytes"] if sized else []), *faults]]
        for stage in self.stages:
            workers = f" x {stage.num_workers}" if stage.num_workers > 1 else ""
            mark = " <" if stage.name == self.verdict.stage else ""
            row = [stage.name, f"{stage.backend}{workers}", f"{stage.items:,}"]
            row += [f"{getattr(stage, cause):.2f} s" for cause in _CAUSES]
            row += [f"{stage.load:.0%}{mark}", "" if stage.cpu is None else f"{stage.cpu:.2f} s"]
            row += [f"{stage.queued:,}", f"{stage.stall:.2f} s"]
            if sized:
                row.append("" if stage.bytes is None else size(stage.bytes))
            row += [f"{getattr(stage.faults, fault):,}" for fault in faults]
            rows.append(row)
        rows[-1][heading.index("stall")] = ""
        return rows

    def _rows_of_stores(self) -> list[list[str]]:
        heading = ["store", "requests", "retried", "bytes", "a request"]
        rows = [[*heading, "from cache", "alone", "waited"]]
        for use in self.stores:
            blocks = use.hits + use.misses
            rows.append(
                [
                    *(use.store, f"{use.requests:,}", f"{use.retries:,}", size(use.bytes)),
                    time(use.seconds / use.requests) if use.requests else "",
                    f"{use.hits:,} of {blocks:,}" if blocks else "",
                    *(f"{use.alone:,}", f"{use.waited:.2f} s"),
                ]
            )
        return rows

    def _lines(self) -> list[str]:
        stall = self.stall
        return [
            f"{self.items:,} items in {time(self.seconds)}. Your loop waited {time(stall.seconds)} "
            f"({stall.share:.0%}; for a batch {time(stall.p50)} at the median, {time(stall.p99)} at "
            f"99 %), and {time(stall.warmup)} before the prefetch was full.",
            str(self.verdict),
        ]


def stats_of(recording: Recording) -> Stats:
    """Return the statistics of a recording."""
    figures = Figures.of(recording)
    loop = recording.loop
    seconds = loop.ended - loop.began
    named = zip(figures.names, recording.stages, figures.by_stage, strict=True)
    rows = [_row(name, stage, stall) for name, stage, stall in named]
    waited = min(loop.waited, seconds)
    by_stage = {row.name: row.stall for row in rows}
    if figures.rest > 0:
        by_stage[REST] = figures.rest
    mine = StageStats(LOOP, "caller", 1, loop.items, seconds - waited, waited, 0.0, 0.0)
    stall = Stall(
        figures.stall,
        figures.share,
        figures.p50,
        figures.p99,
        by_stage,
        figures.warmup,
    )
    return Stats(
        *((*rows, mine), stall, judge(figures), seconds),
        *(recording.cores, recording.batch_size, recording.stores),
    )


def _row(name: str, stage: StageRecord, stall: float) -> StageStats:
    return StageStats(
        *(name, stage.backend, stage.workers, stage.items),
        *(stage.busy, stage.starved, stage.blocked, stage.other),
        cpu=stage.cpu,
        bytes=stage.bytes,
        queued=stage.queued,
        stall=stall,
        faults=stage.faults,
    )
