"""Iterators of a pipeline's nodes for one epoch or repetition, made from the source on.

Stages and relays outlive an epoch, so the executor has them. No worker is started here.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from operator import attrgetter
from types import GeneratorType
from typing import TYPE_CHECKING, Any, NamedTuple

from hybridloader._support.text import brief
from hybridloader._support.torch_env import one_thread_on_this_thread
from hybridloader._support.user_objects import add_note, no_answer
from hybridloader.engine.feed import TaskBatching
from hybridloader.engine.fetcher import TaskContext
from hybridloader.engine.meter import TaskParts
from hybridloader.engine.relay import Relay
from hybridloader.errors import StateError
from hybridloader.fetching.on_error import Skipped
from hybridloader.observe.tracing import LocalSlices
from hybridloader.running.executor import Executor, shard_division
from hybridloader.running.flow import (
    Dropping,
    GeneratorItems,
    InlineItems,
    LeavingOut,
    LoggedItems,
    ReaderItems,
    ReaderTaskSizes,
    RelayDepth,
    Sending,
    SourceItems,
    StageItems,
    Taking,
    Withholding,
)
from hybridloader.running.ledger import ONE_EACH, SEVERAL, Computed, Ledger, MarkLog, Point
from hybridloader.running.operator import Chain, Mark, Needed, Operator, Upstream
from hybridloader.running.plan import (
    ChainPlan,
    InlineNode,
    Node,
    OperatorNode,
    RelayNode,
    WorkerNode,
)
from hybridloader.running.reader_log import ReaderLog, ReaderStarts, Turn
from hybridloader.running.run_position import RunPosition, before, is_at, one_by_one

if TYPE_CHECKING:
    from hybridloader.engine.refresh import Change
    from hybridloader.fetching.on_error import ErrorBudget
    from hybridloader.running.executor import RunningStage


class Offset(NamedTuple):
    """Place in a stream of items where something begins."""

    items: int = 0
    """Items before that place."""
    slack: int = 0
    """Number of these that need not be there; see `Dropping`."""
    needed: Needed | None = None
    """Items from that place on that a resumed run needs; None: all."""


NodeOpener = Generator[tuple[int, Offset], Iterator[Any], Iterator[Any]]
"""Opens one node: yields the number and offset of the node it needs, is sent it, returns its own."""


def open_run(executor: Executor, position: RunPosition) -> Iterator[Any]:
    """Make the iterators of one run, and start them. The run before is broken off."""
    executor.break_off()
    executor.left = TaskContext()
    observation = executor.observation
    if observation is not None:
        executor.left.parts = TaskParts()
        if observation.trace is not None:
            executor.left.slices = LocalSlices(observation.trace)
    executor.stages.failure_log.new_run()
    position.opened = True
    heads = position.heads
    if heads and position.own_heads and not any(is_at(node, heads) for node in executor.plan.nodes):
        raise no_answer(
            StateError(
                f"heads: when states were merged, the functions {heads.place!r} shared workers; give "
                "them the same backend and options, until their first items have come"
            )
        )
    run = ChainPass(executor, position, executor.plan, position.epoch, {}, executor.left)
    return run.open(Offset(position.start.given))


@dataclass
class ChainPass:
    """Iterators of one chain for one epoch or repetition."""

    executor: Executor
    position: RunPosition
    """Position of the run that this pass is a part of."""
    plan: ChainPlan
    epoch: int
    shared: dict[Any, Any]
    """Values that the operators of this pass share."""
    left: TaskContext
    """Cancelled when the consumer needs no more items."""
    within_relay: bool = False
    """True if this chain is a branch, and the thread of a relay pulls its items for another chain."""
    _started: list[Relay] = field(default_factory=list, init=False)

    def relayed(self, node: Node) -> bool:
        """Return True if the thread of a relay pulls the items of `node`."""
        behind = self.plan.nodes[node.path[-1] + 1 :]
        return self.within_relay or any(isinstance(one, RelayNode) for one in behind)

    @property
    def _in_rows(self) -> bool:
        return self.plan.path in self.executor.in_rows

    def open(self, start: Offset, at: int | None = None) -> Iterator[Any]:
        """Open the nodes up to number `at`, None being the last, and start the relays among them."""
        items = self._open(len(self.plan.nodes) - 1 if at is None else at, start)
        for relay in self._started:
            relay.start()
        return items

    def drop(self, items: Iterator[Any], first: Offset, name: str) -> Iterator[Any]:
        """Return `items` without the first, which the run before has given."""
        if not first.items:
            return items
        dropping = Dropping(items, first.items, first.slack, self.left, name)
        self.position.droppings.append(dropping)
        return dropping

    def _begun(
        self, items: Iterator[Any], first: Offset, start: Offset, name: str
    ) -> Iterator[Any]:
        """Return `items` from `start` on, without the `first` ones and those that are not needed."""
        items = self.drop(items, first, name)
        return items if start.needed is None else LeavingOut(items, start.items, start.needed)

    def _open(self, at: int, start: Offset) -> Iterator[Any]:
        """Open the nodes up to number `at`, to continue after the first items.

        Each node asks this loop for the node before it, and does not call it: a long chain would be
        too many nested calls.
        """
        todo = [self._opener(at, start)]
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
                todo.append(self._opener(*wanted))
                items = None

    def _opener(self, at: int, start: Offset) -> NodeOpener:
        """Open the node number `at`, as `_open` does."""
        node = self.plan.nodes[at]
        if isinstance(node, OperatorNode):
            return (yield from self._open_operator(node, at, start))
        if isinstance(node, RelayNode):
            items = yield at - 1, start
            return self._open_relay(node, at, items)
        if isinstance(node, WorkerNode) and node.reads:
            items, begins_at = self._open_readers(node, start.items)
            first = Offset(start.items - begins_at, start.slack)
            return self._begun(items, first, start, node.name)
        point = self.position.point(node, start.items, self.epoch) if start.items else Point(0, 0)
        begins = point or Point(0, 0)
        # Items that certainly exist after the node certainly exist before it.
        before = Offset(begins.taken, start.slack if begins.given == start.items else 0)
        if one_by_one(node, raised=bool(self.position.start.raised)):
            before, start = before._replace(needed=start.needed), start._replace(needed=None)
        if isinstance(node, WorkerNode):
            items = yield from self._open_stage(node, at, begins, before)
        else:
            items = yield at - 1, before
            items = self._open_inline(node, items, begins, numbered=before.needed is not None)
        first = Offset(start.items - begins.given, start.slack)
        return self._begun(self._withheld(node, items, begins.given), first, start, node.name)

    def _withheld(self, node: Node, items: Iterator[Any], at: int) -> Iterator[Any]:
        """Return the items of a node from number `at` on, without those that other ranks have had."""
        position = self.position
        if not position.own_heads or position.heads is None or not is_at(node, position.heads):
            return items
        trace = partial(position.source_of, self.plan, node, self.epoch)
        return Withholding(items, at, trace, position.own_heads)

    def _ledger(self, node: InlineNode | WorkerNode, begins: Point) -> Ledger | None:
        """Return the ledger of a node; None if it gives one item for each that it takes."""
        unordered = not node.placement.in_order and node.placement.num_workers > 1
        if unordered or one_by_one(node, raised=False):
            return None
        ledger = Ledger(self.epoch, begins)
        self.position.keep(node, ledger)
        return ledger

    def _open_operator(self, node: OperatorNode, at: int, start: Offset) -> NodeOpener:
        operator = node.operator
        saved = self.position.saved(node, self.epoch, opens=True)
        raised = bool(self.position.start.raised)
        parts = before(node, start.items, self.epoch, saved, raised)
        # If it can't begin after the first items, they are made again and dropped here.
        dropped, begins = (start, Offset()) if parts is None else (Offset(), start)
        marked = parts[0] if parts and parts[0].given is not None else None
        if marked is not None and marked.given is not None:
            begins = Offset(marked.given)
            dropped = Offset(start.items - marked.given, start.slack)
        first = Offset(marked.start) if marked is not None else offset_before(operator, begins)
        context = OperatorContext(self, node, begins, saved if parts is not None else None, first)
        if marked is not None:
            context.needed = operator.needed(context)
            first = first._replace(needed=context.needed)
        elif start.needed is not None and at and parts is not None and _selects(operator):
            first = first._replace(needed=_needed_before(operator, start.needed))
            start = start._replace(needed=None)
        begins = first
        if operator.begins_itself:
            items = operator.begin(self._upstream(at, begins), context)
        else:
            items = operator.open((yield at - 1, begins), context)
        if not isinstance(items, Iterator):
            raise TypeError(
                f"operator {node.name!r}: open() must return an iterator, not {items!r}; "
                "return iter(...) of it"
            )
        if at == 0:
            items = SourceItems(items, self.left, rows=self._in_rows)
        elif isinstance(items, GeneratorType):
            items = GeneratorItems(items, node.name)
        items = self._withheld(node, items, start.items - dropped.items)
        return self._begun(items, dropped, start, node.name)

    def _upstream(self, at: int, begins: Offset) -> Upstream:
        """Return the function with which the operator at number `at` opens the nodes before it."""
        passes = 0

        def upstream(*, epoch: int | None = None, start: int = 0) -> Iterator[Any]:
            nonlocal passes
            passes += 1
            if passes == 1 and epoch is None:
                return self._open(at - 1, begins)
            epoch = self.epoch + passes - 1 if epoch is None else epoch
            again = replace(self, epoch=epoch, shared={})
            return again.open(Offset(start, begins.slack), at - 1)

        return upstream

    def _open_inline(
        self, node: InlineNode, items: Iterator[Any], begins: Point, *, numbered: bool
    ) -> Iterator[Any]:
        stages, policy = self.executor.stages, node.placement.on_error
        init_fn = node.placement.worker_init_fn
        if init_fn is not None and node.path not in self.executor.initialized:
            init_fn(0)  # once for all passes, as in a worker
            self.executor.initialized.add(node.path)
        ledger = self._ledger(node, begins)
        for number, work in enumerate(node.works):
            sample_rng = stages.sample_rng_of(
                node, number, self.epoch, begins.taken, relayed=self.relayed(node)
            )
            budget = stages.error_budget(node, work.name, self.epoch, gaps=self._in_rows)
            try:
                found = InlineItems(
                    items,
                    work.step(),
                    work.name,
                    self.left,
                    sample_rng,
                    policy,
                    budget,
                    numbered=numbered,
                )
                self.executor.add_inline(node.path, number, found.context)
                if found.coroutines is not None:
                    self.executor.add_coroutines(found.coroutines)
                if ledger is not None and number == 0:
                    several = any(work.makes_several for work in node.works)
                    found.log(ledger, SEVERAL if several else ONE_EACH)
                items = found
            except Exception as error:
                add_note(error, f"In stage {work.name!r}, setting it up.")
                raise
        return items if ledger is None else LoggedItems(items, ledger)

    def _open_relay(self, node: RelayNode, at: int, items: Iterator[Any]) -> Iterator[Any]:
        executor = self.executor
        pinner = executor.pinner_of(node)
        relay = Relay(
            items if pinner is None else Sending(items, pinner, node.name),
            f"hybridloader-{node.thread}",
            depth=node.options.depth or node.least,
            weigh=None if pinner is None else attrgetter("size"),
            limit=0 if pinner is None else pinner.buffer_bytes,
            # It may collate, and the workers use all cores.
            prepare=one_thread_on_this_thread if pinner is None else pinner.prepare,
            start=False,
        )
        stage = items
        while isinstance(stage, (Dropping, LeavingOut, Withholding)):
            stage = stage.items
        if isinstance(stage, (StageItems, ReaderItems)):
            stage.flow.relay = relay.queue
        running = executor.add_relay(node, self.plan.nodes[:at], relay)
        running.stage = stage if isinstance(stage, StageItems) else None
        running.depth = RelayDepth(relay, node.least) if node.options.depth is None else None
        if running.depth is not None and running.stage is not None:
            running.depth.couple(running.stage)
        self._started.append(relay)
        return relay if pinner is None else Taking(relay, pinner)

    def _stage(
        self, node: WorkerNode
    ) -> tuple[RunningStage, tuple[Change, ...], ErrorBudget | None]:
        """Return the stage of `node`, with the changes of its dataset that its workers need."""
        stages = self.executor.stages
        stage = stages.of(node)
        if node.reads:
            stages.set_epoch(node, self.epoch)
        changes = () if stage.watch is None else stage.watch.changes()
        budget = stages.error_budget(node, node.name, self.epoch, gaps=self._in_rows)
        return stage, changes, budget

    def _open_readers(self, node: WorkerNode, count: int) -> tuple[Iterator[Any], int]:
        """Begin the readers to continue after `count` items; return how many of these they leave out."""
        stage, changes, budget = self._stage(node)
        resumed, stage.resumed = stage.resumed, None
        if resumed is None:
            division = shard_division(node)
            found = ReaderStarts(Turn((0,) * node.placement.num_workers), (), division)
        else:
            mark, found = resumed
            if mark.epoch != self.epoch or mark.at > count:
                raise no_answer(
                    StateError(
                        f"stage {node.name!r}: the state is after item {mark.at} of pass {mark.epoch}, "
                        f"and item {count} of pass {self.epoch} is needed; begin the epoch again"
                    )
                )
        log = None
        if budget is None or not budget.gaps:  # otherwise skipped items have results too
            log = ReaderLog(self.epoch, found)
            self.position.keep(node, log)
        readers = ReaderItems(stage.stage, stage.flow, stage.measures, budget, log, found)
        stage.readers = readers
        if readers.count:
            self.position.droppings.append(readers)
        readers.begin(ReaderTaskSizes(), changes, self.epoch)
        return readers, sum(found.begins.given)

    def _open_stage(self, node: WorkerNode, at: int, begins: Point, before: Offset) -> NodeOpener:
        placement = node.placement
        stage, changes, budget = self._stage(node)
        items = yield at - 1, before
        stage_before = self.plan.nodes[at - 2] if at > 1 else None
        batching = TaskBatching(
            items,
            forwarded=isinstance(stage_before, WorkerNode) and stage_before.forwarded,
            least=placement.least,
            # A limit in bytes needs tasks of one item.
            most=1 if placement.buffer_bytes else placement.prefetch,
        )
        found = StageItems(
            stage.stage,
            stage.flow,
            stage.measures,
            items,
            batching,
            budget,
            self._ledger(node, begins),
            forwarded=node.forwarded,
        )
        relay = self.executor.relays.get((*self.plan.path, at - 1))
        if relay is not None and relay.depth is not None:
            relay.depth.couple(found)
        if relay is not None and relay.stage is not None and relay.stage.forwarded:
            relay.stage.batching.no_larger_than(batching)  # its results can't be divided here
        found.begin(batching, changes, self.epoch, begins.taken)
        return found


class OperatorContext:
    """The `Context` of the operator of `node` in the epoch or repetition `of`; see there.

    It begins at `begins`, and the items before it at `first`.
    """

    def __init__(
        self, of: ChainPass, node: OperatorNode, begins: Offset, saved: Mark | None, first: Offset
    ) -> None:
        if saved is not None and saved.at > begins.items:
            raise no_answer(
                StateError(
                    f"operator {node.name!r} would have to begin at item {begins.items}, and the state "
                    f"has it from item {saved.at}; begin the epoch again"
                )
            )
        self._pass, self._node, self._begins = of, node, begins
        self.epoch, self.shared, self.start, self.saved = of.epoch, of.shared, begins.items, saved
        self.first = first.items
        self.needed: Needed | None = None
        executor = of.executor
        self.seed = executor.seed if executor.seeded else None
        self.run_seed = executor.seed
        self.locks = executor.stages.locks.get(node.path)
        self._skipped = executor.stages.failure_log.records
        self._opened = 0

    def random(self, seed: int | None) -> random.Random:
        return generator_of(self._node, self._pass.plan, self.epoch, self.run_seed, seed)

    def draw(self) -> int:
        return self._pass.executor.draw(self._pass.plan.path, self.epoch)

    def open(self, pipeline: Chain, start: int = 0, number: int | None = None) -> Iterator[Any]:
        own = self._pass
        branch = self._opened if number is None else number
        self._opened = branch + 1
        plan = self._node.branches[branch]
        if plan.chain is not pipeline:
            raise ValueError(
                f"operator {self._node.name!r} did not name {pipeline!r} as branch {branch}"
            )
        inner = replace(own, plan=plan, within_relay=own.relayed(self._node))
        return inner.open(Offset(start, self._begins.slack))

    def mark(self, at: int, value: Any) -> None:
        self._pass.position.mark(self._node, Mark(self.epoch, at, value))

    def mark_all(self, value_of: Callable[[int], Any]) -> None:
        self._pass.position.keep(self._node, Computed(self.epoch, self.start, value_of))

    def log(self, first: Any, value_of: Callable[[int, Any], Any]) -> MarkLog:
        made = MarkLog(self.epoch, self.start, first, value_of)
        self._pass.position.keep(self._node, made)
        return made

    def left_out(self, item: Any, error: Exception) -> None:
        node, log = self._node, self._pass.executor.stages.failure_log
        shown = item if type(item) in (int, str) else brief(item)
        log.add(Skipped(shown, error, "", None, node.name, self.epoch), node.path, self._skipped)

    def drop(self, items: Iterator[Any], at: int) -> Iterator[Any]:
        start, slack = self._begins.items, self._begins.slack
        return self._pass.drop(items, Offset(start - at, slack), self._node.name)


def generator_of(
    node: OperatorNode, plan: ChainPlan, epoch: int, run_seed: int, seed: int | None
) -> random.Random:
    """Return the generator of an operator in an epoch, from its seed or else from the run's."""
    if seed is not None:
        return random.Random(f"{seed}/{epoch}")
    return random.Random(f"{run_seed}/{plan.path}/{node.number}/{epoch}")


def offset_before(operator: Operator, begins: Offset) -> Offset:
    """Return the offset of the nodes before `operator` if that begins at `begins`."""
    items, slack = begins.items, begins.slack
    start = operator.seek(items) if items else 0
    if not start:
        return Offset(0, slack)  # it may have several passes, and begin them itself
    certain = items - slack  # items that are there for sure
    least = (operator.seek(certain - 1) or 0) + 1 if certain > 1 else min(certain, 1)
    return Offset(start, start - least)


def _selects(operator: Operator) -> bool:
    """Return True if each item of `operator` is one of those before it, which `seek` numbers."""
    return (
        operator.keeps_count
        and not operator.branches()
        and not operator.begins_itself
        and type(operator).before is Operator.before
        and operator.seek(1) is not None
    )


def _needed_before(operator: Operator, needed: Needed) -> Needed:
    """Return which items an operator that selects needs, to give those that are needed of it."""
    numbers = (operator.seek(number + 1) for number in needed.numbers)
    until = operator.seek(needed.until) or 0
    return Needed({number - 1 for number in numbers if number is not None}, until)
