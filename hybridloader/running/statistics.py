"""Recording of a running pipeline, for its statistics."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from hybridloader.engine.stage import workers_table
from hybridloader.fetching.readers import MapFetch
from hybridloader.observe.measures import LoopWaits, record_of_caller, record_of_relay
from hybridloader.observe.observation import Asked, Observation
from hybridloader.observe.recording import CoroutineUse, Faults, StageRecord
from hybridloader.observe.stats import Stats
from hybridloader.observe.watching import SameObject
from hybridloader.running.operator import Chain
from hybridloader.running.plan import InlineNode, Node, OperatorNode, RelayNode, WorkerNode

if TYPE_CHECKING:
    from hybridloader.running.executor import Executor, RunningRelay


class RunObservation(Observation):
    """Observation of the runs of one executor, over all passes until now. It does not hold it."""

    def __init__(self, asked: Asked, chain: Chain) -> None:
        super().__init__(asked, "Pipeline", SameObject(chain))
        self._executor: weakref.ref[Executor] | None = None

    def of(self, executor: Executor) -> None:
        """Observe `executor`."""
        self._executor = weakref.ref(executor)

    def stats(self) -> Stats:
        executor = None if self._executor is None else self._executor()
        if executor is None:
            raise ReferenceError("the run has ended")
        rows = (*_rows(executor, self.loop), *_row_of_caller(executor, self.loop))
        running = (stage.measures for stage in executor.stages.values())
        reported = (use for measures in running if measures is not None for use in measures.stores)
        return self._stats_of(rows, reported=reported)


def report(executor: Executor) -> str:
    """Return a table of the workers of each stage."""
    tables = []
    for where in sorted(executor.stages):
        running = executor.stages[where]
        tables.append(f"{running.node.name}\n{workers_table(running.stage.report())}")
    return "\n\n".join(tables)


def _rows(executor: Executor, loop: LoopWaits) -> Iterator[StageRecord]:
    """Yield the stages and threads of a pipeline, those of its branches before them."""
    for where in sorted([*executor.stages, *executor.relays]):
        running = executor.stages.get(where)
        if running is not None:
            faults = _faults(executor, [running.node])
            flow, measures = running.flow, running.measures
            assert measures is not None
            yield measures.record(
                running.node.name,
                items=flow.items_out,
                queued=flow.queued,
                skipped=faults.skipped,
                replaced=faults.replaced,
                source=running.node.reads,
                reads=isinstance(running.node.works[0].step().function, MapFetch),
            )
            continue
        row = _row_of_relay(executor, executor.relays[where], loop)
        if row is not None:
            yield row


def _row_of_relay(executor: Executor, running: RunningRelay, loop: LoopWaits) -> StageRecord | None:
    works = list(_pulled(running.before))
    names = [_name(node) for node in works]
    if running.node.pins:
        names.append(running.node.name)
    if not names:
        return None
    return record_of_relay(
        " + ".join(names),
        running.relay.queue,
        running.began,
        max(running.began, loop.began + loop.seconds),
        waits=executor.waits_before(running.before),
        **_of_works(executor, works),
    )


def _row_of_caller(executor: Executor, loop: LoopWaits) -> Iterator[StageRecord]:
    """Yield the row of your loop's thread, if it calls functions in `next()`, or there is no other."""
    nodes = executor.plan.nodes
    works = list(_pulled(nodes))
    alone = not (executor.stages or executor.relays)
    if not alone and not any(isinstance(node, InlineNode) for node in works):
        return
    yield record_of_caller(
        " + ".join(map(_name, works)),
        loop,
        executor.waits_before(nodes),
        **_of_works(executor, works),
    )


def _of_works(executor: Executor, nodes: Sequence[OperatorNode | InlineNode]) -> dict[str, Any]:
    """Return the operators and functions that a thread runs, as a record has them."""
    functions = [node for node in nodes if isinstance(node, InlineNode)]
    uses = [
        CoroutineUse(work.name, work.step().concurrency, parts.coroutines, parts.idle, parts.held)
        for node in functions
        for number, work in enumerate(node.works)
        if (parts := executor.parts_of(node.path, number)) is not None
    ]
    return {
        "faults": _faults(executor, nodes),
        "source": _is_source(nodes),
        "options": {"backend": None} if functions else {},
        "coroutines": max(uses, key=lambda use: use.idle + use.held, default=None),
    }


def _faults(executor: Executor, nodes: Sequence[Node]) -> Faults:
    log = executor.stages.failure_log
    replaced = sum(log.replaced[node.path] for node in nodes)
    skipped = sum(log.counts[node.path] for node in nodes) - replaced
    return Faults(skipped, replaced, sum(executor.retried(node.path) for node in nodes))


def _name(node: OperatorNode | InlineNode) -> str:
    return node.operator.describe() if isinstance(node, OperatorNode) else node.name


def _is_source(nodes: Sequence[Node]) -> bool:
    """True if the nodes read a source and call no function of a step."""
    return all(isinstance(node, OperatorNode) for node in nodes) and any(
        n.path[-1] == 0 for n in nodes
    )


def _pulled(nodes: Sequence[Node]) -> Iterator[OperatorNode | InlineNode]:
    """Yield the nodes that a relay's own thread runs, the last of `nodes` being next to the relay."""
    found: list[OperatorNode | InlineNode] = []
    for node in reversed(nodes):
        if isinstance(node, (WorkerNode, RelayNode)):
            break
        found.append(node)
    yield from reversed(found)
