"""One line of a pipeline while it is opened: from nodes to the iterators between them, source first.

It makes iterators and hands what outlives them (stages, relays) to the machine. It starts no worker
itself and keeps nothing for the next pass.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from operator import attrgetter
from types import GeneratorType
from typing import TYPE_CHECKING, Any

from hybridloader._support.errors import add_note
from hybridloader._support.native_threads import one_thread_on_this_thread
from hybridloader.engine.feed import TaskBatching
from hybridloader.engine.relay import FINAL, Relay
from hybridloader.pipeline.operators.base import Operator, Source, Upstream
from hybridloader.pipeline.operators.counting import leaves_out
from hybridloader.pipeline.operators.order import Repeat
from hybridloader.pipeline.operators.pin import Sending, Taking
from hybridloader.pipeline.operators.rows import GapsClosed
from hybridloader.pipeline.running.dropping import Dropping
from hybridloader.pipeline.running.flow import (
    Depth,
    Fragile,
    Guarded,
    ReaderItems,
    StageItems,
    couple,
)
from hybridloader.pipeline.running.inline_items import InlineItems
from hybridloader.pipeline.running.passes import Pass, Start
from hybridloader.pipeline.running.plan import InlineNode, Node, OperatorNode, RelayNode, WorkerNode
from hybridloader.pipeline.running.run_position import Path, before, number_of, passes_one_by_one

if TYPE_CHECKING:
    from hybridloader.engine.refresh import Change
    from hybridloader.fetching.on_error.error_budget import ErrorBudget
    from hybridloader.pipeline.running.executor import Machine
    from hybridloader.pipeline.running.running_stages import RunningStage


Opening = Generator[tuple[int, Start], Iterator[Any], Iterator[Any]]
"""Opens one node: yields the number and start of the node it needs, is sent it, returns its own."""


class Line:
    """A line in one pass.

    Parameters
    ----------
    nodes
        Of the line, from its source on.
    path
        Of the line.
    run
        The pass.
    """

    def __init__(self, machine: Machine, nodes: tuple[Node, ...], path: Path, run: Pass) -> None:
        self._machine, self._nodes, self._path, self._run = machine, nodes, path, run
        self._started: list[Relay] = []

    def open(self, at: int, start: Start) -> Iterator[Any]:
        """Open the nodes up to number `at`, and start the relays among them."""
        items = self._open(at, start)
        for relay in self._started:
            relay.start()
        return items

    def _open(self, at: int, start: Start) -> Iterator[Any]:
        """Open the nodes up to number `at`, to go on after the first items.

        Each node asks this loop for the node before it, and does not call it: a long line would be
        too many nested calls.
        """
        todo = [self._opening(at, start)]
        items: Any = None
        while True:
            try:
                wanted = todo[-1].send(items)
            except StopIteration as done:
                todo.pop()
                items = done.value
                if not todo:
                    return items  # type: ignore[no-any-return]
            else:
                todo.append(self._opening(*wanted))
                items = None

    def _opening(self, at: int, start: Start) -> Opening:
        """Open the node number `at`, as `_open` does."""
        node = self._nodes[at]
        if isinstance(node, OperatorNode):
            return (yield from self._open_single(at, start))
        raised = bool(self._run.trail.start.raised)
        if not start.items or passes_one_by_one(node, raised):
            return (yield from self._open_node(at, start))
        items = yield from self._open_node(at, Start())
        return self._run.without(items, start, node.name)

    def _open_node(self, at: int, start: Start) -> Opening:
        """The same, if what comes before is to begin behind as many items."""
        node = self._nodes[at]
        if isinstance(node, WorkerNode) and node.reads:
            return self._open_readers(at)
        if isinstance(node, WorkerNode):
            return (yield from self._open_stage(at, start))
        items = yield at - 1, start
        if isinstance(node, InlineNode):
            return self._open_inline(node, at, items, start)
        assert isinstance(node, RelayNode)
        return self._open_relay(node, (*self._path, at), items)

    def _open_inline(
        self, node: InlineNode, at: int, items: Iterator[Any], start: Start
    ) -> Iterator[Any]:
        run, stations = self._run, self._machine.stations
        if node.placement.worker_init_fn is not None:
            node.placement.worker_init_fn(0)
        for work in node.works:
            rng = stations.sample_rng_of(work, self._path, run.epoch, start.items)
            budget = stations.budget(
                (*self._path, at), node.placement, work.name, run.epoch, gaps=run.rows
            )
            policy = node.placement.on_error
            try:
                items = InlineItems(items, work.step(), work.name, run.left, rng, policy, budget)
            except Exception as error:
                add_note(error, f"In stage {work.name!r}, setting it up.")
                raise
        return items

    def _open_single(self, at: int, start: Start) -> Opening:
        node, run, path = self._nodes[at], self._run, self._path
        assert isinstance(node, OperatorNode)
        operator, number = node.operator, number_of(self._nodes, at)
        saved = run.trail.saved(path, number, run.epoch)
        raised = bool(run.trail.start.raised)
        parts = before(operator, start.items, run.epoch, saved, raised)
        first, begins = start, Start()  # to be dropped here, if it can't begin behind them
        if parts is not None:
            first, begins = Start(), start
        context = run.at((*path, at), number, operator, begins, saved)
        begins = _upstream_of(operator, begins)
        if type(operator).begin is Operator.begin:
            items = operator.open((yield at - 1, begins), context)
        else:
            items = operator.begin(self._upstream(operator, at, begins), context)
        if not isinstance(items, Iterator):
            raise TypeError(
                f"operator {node.name!r}: open() must return an iterator, not {items!r}; "
                "return iter(...) of it"
            )
        if isinstance(operator, Source):
            items = Guarded(items, run.left)
            if not run.rows and leaves_out(operator.branches()):
                items = GapsClosed(items)
        elif isinstance(items, GeneratorType):
            items = Fragile(items, node.name)
        return run.without(items, first, node.name)

    def _open_relay(self, node: RelayNode, where: Path, items: Iterator[Any]) -> Iterator[Any]:
        machine = self._machine
        name = f"hybridloader-{node.what or node.name}"
        pinner = machine.pinner_of(node)
        # It may collate, and all cores are taken: by the workers.
        prepare = one_thread_on_this_thread if pinner is None else pinner.prepare
        relay = Relay(
            items if pinner is None else Sending(items, pinner, node.name),
            name,
            depth=node.depth or node.least,
            weigh=None if pinner is None else attrgetter("size"),
            limit=0 if node.operator is None else node.operator.buffer_bytes,
            prepare=prepare,
            start=False,
        )
        stage = items.items if isinstance(items, Dropping) else items
        if isinstance(stage, StageItems):
            machine.behind[where] = stage
        if isinstance(stage, (StageItems, ReaderItems)):
            stage.books.behind = relay
        if node.depth is None:
            depth = machine.depths[where] = Depth(relay, node.least)
            if isinstance(stage, StageItems):
                couple(stage, depth)
        machine.add_relay(node, where, relay)
        self._started.append(relay)
        return relay if pinner is None else Taking(relay, pinner)

    def _upstream(self, operator: Operator, at: int, begins: Start) -> Upstream:
        """What gives `operator`, the one at number `at`, its passes over what is before it."""
        passes, run = 0, self._run
        repeat = operator if isinstance(operator, Repeat) else None
        times = 1 if repeat is None else (repeat.times or 1)

        def upstream(
            number: int | None = None, *, epoch: int | None = None, start: int = 0
        ) -> Iterator[Any]:
            nonlocal passes
            number = passes if number is None else number
            passes = number + 1
            if number == 0 and repeat is None and epoch is None:
                return self._open(at - 1, begins)
            if epoch is None:
                epoch = run.epoch * times + number
            again = Line(self._machine, self._nodes, self._path, run.another(self._path, epoch))
            return again.open(at - 1, Start(start, begins.slack))

        return upstream

    def _station(
        self, at: int
    ) -> tuple[WorkerNode, RunningStage, tuple[Change, ...], ErrorBudget | None]:
        """Return the stage at number `at` as it begins this pass."""
        node, path, machine = self._nodes[at], self._path, self._machine
        assert isinstance(node, WorkerNode)
        station = machine.stations.of((*path, at), node)
        changes = station.watch.changes() if station.watch is not None and station.begun else ()
        station.begun = True
        budget = machine.stations.budget(
            (*path, at), node.placement, node.name, self._run.epoch, gaps=self._run.rows
        )
        return node, station, changes, budget

    def _open_readers(self, at: int) -> Iterator[Any]:
        _, station, changes, budget = self._station(at)
        station.counter.begin(self._run.epoch)
        station.readers = ReaderItems(station.stage, station.books, budget)
        station.readers.begin(changes)
        return station.readers

    def _open_stage(self, at: int, start: Start) -> Opening:
        nodes, path, run, machine = self._nodes, self._path, self._run, self._machine
        node, station, changes, budget = self._station(at)
        stage, books = station.stage, station.books
        items = yield at - 1, start
        stage_before = nodes[at - 2] if at > 1 else None
        portions = TaskBatching(
            items,
            forwarded=isinstance(stage_before, WorkerNode) and stage_before.sealed,
            least=node.placement.threads_per_worker,
            # What is counted in bytes is counted item by item.
            most=1 if node.placement.buffer_bytes else node.placement.prefetch,
            final=FINAL,
        )
        found = StageItems(stage, books, items, portions, budget)
        found.sealed = node.sealed
        depth, source = machine.depths.get((*path, at - 1)), machine.behind.get((*path, at - 1))
        if depth is not None:
            couple(found, depth)
        if source is not None and source.sealed:
            source.portions.no_larger_than(portions)  # what it gives can't be divided here
        station.counter.begin(run.epoch, start.items)
        found.begin(changes)
        return found


def _upstream_of(operator: Operator, begins: Start) -> Start:
    """Where what is before `operator` begins if that begins there."""
    items, slack = begins
    start = operator.seek(items) if items else 0
    if not start:
        return Start(0, slack)  # it may have several passes, and begin them itself
    certain = items - slack  # items that are there for sure
    least = (operator.seek(certain - 1) or 0) + 1 if certain > 1 else min(certain, 1)
    return Start(start, start - least)
