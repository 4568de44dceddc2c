"""Statistics of a running pipeline: seconds of each stage, and which one holds up the others."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hybridloader._support.text import table
from hybridloader.engine.diagnosis import workers_table
from hybridloader.pipeline.running.plan import InlineNode, Node, OperatorNode, RelayNode, WorkerNode

if TYPE_CHECKING:
    from hybridloader.pipeline.running.executor import Executor

_IDLE = 0.05
"""A loop that waits for less than this part of its time is what holds everything up."""

_BUSY = 0.2
"""A stage with a lower load holds nobody up: workers are still starting, or items are too few."""


@dataclass(frozen=True)
class StageStats:
    """Statistics of one stage until now.

    Attributes
    ----------
    name
        Name of the stage; ``"your loop"`` for the one that takes the items.
    backend
        Backend that it runs on.
    num_workers
        Number of workers.
    items
        Items that came out of it.
    busy
        Seconds that its workers worked, together.
    starved
        Seconds that they had nothing to do because nothing came in, together.
    blocked
        Seconds that they had nothing to do because nobody took what they had done, together.
    other
        Seconds that they started, were handed tasks or handed over results, or waited for a CPU.
    queued
        Items that are under way in it, or wait behind it.
    skipped
        Items that failed and were left out or replaced.
    """

    name: str
    backend: str
    num_workers: int
    items: int
    busy: float
    starved: float
    blocked: float
    other: float
    queued: int
    skipped: int = 0

    @property
    def load(self) -> float:
        """The part of its workers' time that was work, from 0 to 1."""
        whole = self.busy + self.starved + self.blocked + self.other
        return min(1.0, self.busy / whole) if whole > 0 else 0.0


@dataclass(frozen=True)
class PipelineStats:
    """Statistics of a pipeline until now; printed, it is a table.

    Attributes
    ----------
    stages
        Statistics of each, from the source on, your loop last.
    seconds
        Seconds since it began, over all epochs.
    """

    stages: tuple[StageStats, ...]
    seconds: float

    @property
    def bottleneck(self) -> StageStats | None:
        """The stage that holds up the others: your loop if it hardly waits, else the one with the
        highest load. None as long as no stage has much to do."""
        *stages, loop = self.stages
        if not loop.items:
            return None
        if loop.load > 1 - _IDLE or not stages:
            return loop
        busiest = max(stages, key=lambda stage: stage.load)
        return busiest if busiest.load >= _BUSY else None

    def __str__(self) -> str:
        heading = "stage where items busy starved blocked other load queued"
        rows = [tuple(heading.split())]
        worst = self.bottleneck
        for stage in self.stages:
            where = stage.backend + (f" x {stage.num_workers}" if stage.num_workers > 1 else "")
            spent = (stage.busy, stage.starved, stage.blocked, stage.other)
            seconds = (f"{each:.2f} s" for each in spent)
            load = f"{stage.load:.0%}" + (" <" if stage is worst else "")
            rows.append(
                (stage.name, where, f"{stage.items:,}", *seconds, load, f"{stage.queued:,}")
            )
        if any(stage.skipped for stage in self.stages):
            column = ("skipped", *(f"{stage.skipped:,}" for stage in self.stages))
            rows = [(*row, cell) for row, cell in zip(rows, column, strict=True)]
        lines = table(rows)
        if worst is not None:
            lines.append(f"After {self.seconds:.1f} s, the bottleneck is {worst.name}.")
        return "\n".join(lines)


def collect(executor: Executor) -> PipelineStats:
    """Return the statistics of an executor, over all passes until now."""
    found = list(_line(executor))
    seconds, waited = executor.seconds, executor.waited
    busy = max(0.0, seconds - waited)
    counted = sum(stage.skipped for stage in found)  # the rest was skipped by whoever asked
    skipped = executor.stages.failure_log.total - counted
    loop = StageStats("your loop", "caller", 1, executor.given, busy, waited, 0.0, 0.0, 0, skipped)
    return PipelineStats((*found, loop), seconds)


def report(executor: Executor) -> str:
    """Return a table of the workers of each stage."""
    tables = []
    for where in sorted(executor.stages):
        running = executor.stages[where]
        tables.append(f"{running.node.name}\n{workers_table(running.stage.report())}")
    return "\n\n".join(tables)


def _line(executor: Executor) -> Iterator[StageStats]:
    """Yield the stages and threads of a pipeline, those of its branches before them."""
    for where in sorted([*executor.stages, *executor.relays]):
        running = executor.stages.get(where)
        if running is not None:
            metrics = running.metrics
            yield StageStats(
                running.node.name,
                running.stage.backend.name,
                metrics.workers,
                metrics.items_out,
                metrics.busy,
                metrics.starved,
                metrics.blocked,
                metrics.other,
                metrics.queued,
                executor.stages.failure_log.counts[where],
            )
            continue
        relay = executor.relays[where]
        works = list(_pulled(relay.before))
        names = [
            node.operator.describe() if isinstance(node, OperatorNode) else node.name
            for node in works
        ]
        if relay.node.operator is not None:
            names.append(relay.node.name)
        if not names:
            continue
        waited = executor.waited_before(relay)
        queue = relay.relay.queue
        busy = max(0.0, relay.elapsed - queue.blocked - waited)
        name = " + ".join(names)
        items, blocked, queued = queue.count, queue.blocked, len(queue.items)
        skipped = sum(executor.stages.failure_log.counts[node.path] for node in works)
        yield StageStats(name, "thread", 1, items, busy, waited, blocked, 0.0, queued, skipped)


def _pulled(nodes: Sequence[Node]) -> Iterator[OperatorNode | InlineNode]:
    """Yield the nodes that a relay's own thread runs, the last of `nodes` being next to the relay."""
    found: list[OperatorNode | InlineNode] = []
    for node in reversed(nodes):
        if isinstance(node, (WorkerNode, RelayNode)):
            break
        found.append(node)
    yield from reversed(found)
