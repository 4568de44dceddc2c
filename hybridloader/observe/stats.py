"""Statistics of a loader or a pipeline, computed from a `Recording`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from hybridloader._support.store_use import StoreUse
from hybridloader._support.text import Shown, size, table, time
from hybridloader.observe.figures import LOOP, REST, CoreUse, Faults, Figures, Recording, StageStats
from hybridloader.observe.verdict import Verdict, judge

_CAUSES = ("busy", "starved", "blocked", "other")


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

    It prints as a table and the verdict; a notebook shows the same.

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
    stores
        Use of object stores while it ran, by this process and by its workers.
    """

    stages: tuple[StageStats, ...]
    stall: Stall
    verdict: Verdict
    seconds: float
    cores: CoreUse | None = None
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
        return asdict(self) | {
            "items": self.items,
            "stages": [asdict(stage) | {"load": stage.load} for stage in self.stages],
            "stores": [asdict(use) for use in self.stores],
            "faults": asdict(self.faults),
        }

    def __str__(self) -> str:
        stall = self.stall
        lines = [*table(self._rows()), *(table(self._rows_of_stores()) if self.stores else ())]
        lines.append(
            f"{self.items:,} items in {time(self.seconds)}. Your loop waited {time(stall.seconds)} "
            f"({stall.share:.0%}; for a batch {time(stall.p50)} at the median, {time(stall.p99)} at "
            f"99 %), and {time(stall.warmup)} before the prefetch was full."
        )
        return "\n".join([*lines, str(self.verdict)])

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


def stats_of(recording: Recording) -> Stats:
    """Return the statistics of a recording."""
    figures, loop = Figures.of(recording), recording.loop
    seconds = loop.ended - loop.began
    rows = []
    for name, stage, stall in zip(figures.names, recording.stages, figures.by_stage, strict=True):
        known = {field.name: getattr(stage, field.name) for field in fields(StageStats)}
        rows.append(StageStats(**known | {"name": name, "stall": stall}))
    by_stage = {row.name: row.stall for row in rows}
    if figures.rest > 0:
        by_stage[REST] = figures.rest
    waits = Stall(
        *(figures.stall, figures.share, figures.p50, figures.p99, by_stage, figures.warmup)
    )
    waited = min(loop.waited, seconds)
    mine = StageStats(LOOP, "caller", 1, loop.items, seconds - waited, waited, 0.0, 0.0)
    return Stats(
        *((*rows, mine), waits, judge(figures), seconds),
        *(recording.cores, recording.stores),
    )
