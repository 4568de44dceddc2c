"""Plan of a pipeline: which functions share a stage, and where a thread stands between.

    sampler -> [ stage ] -> relay -> [ stage ] -> relay -> batch -> relay -> your loop

A stage is pulled by one thread. A relay's thread pulls a node that one may have to wait for: a stage, a
stream, a user's operator. So neither the stage after it nor your loop waits while it could do something
else. A node that only counts and reorders is pulled by the thread that needs its items.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import ClassVar

from hybridloader._support.system import cached_property
from hybridloader._support.text import table
from hybridloader.engine.contract import Backend, usable
from hybridloader.errors import BackendUnavailable
from hybridloader.running.operator import (
    Chain,
    Length,
    Operator,
    Placement,
    RelayOptions,
    of_length,
    steps_in,
)
from hybridloader.seeding.sample_rng import SampleSeeding

AHEAD = 2  # items that a relay prefetches by default: one to take, one to replace it


Path = tuple[int, ...]
"""Path of a node: its number in its chain, after those of the nodes and branches around the chain."""


@dataclass(frozen=True)
class ChainPlan:
    """One chain as it is laid out."""

    chain: Chain
    path: Path
    nodes: tuple[Node, ...]
    quick: bool
    """True if it need not be waited for."""

    @cached_property
    def live(self) -> bool:
        """True if workers or threads run in it or in its branches."""
        return any(map(_is_live, self.nodes))

    @cached_property
    def all_nodes(self) -> list[Node]:
        """Nodes of this chain, and of those that its items come through."""
        branches = [branch for node in self.nodes for branch in node.branches]
        return [*self.nodes, *(node for branch in branches for node in branch.all_nodes)]


@dataclass(frozen=True)
class _Node:
    path: Path = field(default=(), kw_only=True)
    branches: tuple[ChainPlan, ...] = field(default=(), kw_only=True)


@dataclass(frozen=True)
class OperatorNode(_Node):
    """An operator that runs on the thread that pulls it.

    `number` does not count functions: wherever these run, a seed means the same, and so does a state.
    """

    operator: Operator
    number: int

    @property
    def name(self) -> str:
        return self.operator.name


@dataclass(frozen=True)
class FunctionsNode(_Node):
    """Functions that share a node."""

    works: tuple[Operator, ...]
    placement: Placement
    first: int
    """Number of the first of these functions in the chain."""

    @property
    def last(self) -> int:
        """Number of the last of them."""
        return self.first + len(self.works) - 1

    @cached_property
    def one_by_one(self) -> bool:
        """True if they give one item or error for each that they take."""
        return all(work.seek(1) == 1 for work in self.works)

    @cached_property
    def name(self) -> str:
        return " + ".join([work.name for work in self.works])


@dataclass(frozen=True)
class InlineNode(FunctionsNode):
    """Functions that are called on the thread that pulls them."""


@dataclass(frozen=True)
class WorkerNode(FunctionsNode):
    """Functions, or readers, that run on workers. If `forwarded`, their results go straight to another
    stage of processes."""

    forwarded: bool = False

    @cached_property
    def backend(self) -> Backend:
        assert self.placement.backend is not None
        return self.placement.backend

    @cached_property
    def reads(self) -> bool:
        return bool(self.works[0].step().kind == "read")

    @property
    def window(self) -> int:
        """Tasks that may be in flight or wait to be handed out."""
        placement = self.placement
        return placement.prefetch or placement.at_hand * placement.num_workers


@dataclass(frozen=True)
class RelayNode(_Node):
    """A relay: the nodes before it run on its thread."""

    options: RelayOptions
    name: str = "relay"
    thread: str = ""
    """Name of its thread."""
    least: int = AHEAD
    """Number of items that the stage before may have ready, so that it is driven until it has them. So
    many wait here if the options have no depth, or more where items come several at a time."""
    one_by_one: ClassVar[bool] = True

    @property
    def pins(self) -> bool:
        """True if its thread pins or moves each item."""
        return self.options.pinner is not None


Node = OperatorNode | InlineNode | WorkerNode | RelayNode


Cuts = Mapping[Path, Set[int]]  # numbers of functions that begin a node, by the path of their chain


def lay_out(chain: Chain, cuts: Cuts | None = None, path: Path = ()) -> ChainPlan:
    """Return the plan of one pipeline, and in it those of the chains that it is joined of.

    `path` is that of a chain that is a branch. The plan of a whole pipeline is kept for its next run in
    this process: another one may have to use other backends.
    """
    whole = not (cuts or path)
    if whole and getattr(chain, "planned", (None,))[0] == os.getpid():
        return ChainPlan(chain, path, *chain.planned[1:])
    cuts = cuts or {}
    nodes: list[Node] = []
    kinds = ["quick"]  # of pulling the first so many nodes: see `_kind_after`

    def add(node: Node) -> None:
        nodes.append(node)
        kinds.append(_kind_after(kinds[-1], node))

    for node in _grouped(_with_shards_first(chain.operators), cuts.get(path, frozenset())):
        if isinstance(node, WorkerNode) and not node.reads and kinds[-1] in ("slow", "stage"):
            add(_relay_behind(nodes[-1]))
        if isinstance(node, RelayNode):
            if node.pins and kinds[-1] == "stage" and _runs_ahead(nodes[-1]):
                add(_relay_behind(nodes[-1]))
            before = nodes[-1]
            if not node.pins and isinstance(before, RelayNode) and not before.pins:
                nodes.pop()
                kinds.pop()
        if isinstance(node, WorkerNode):
            node = replace(node, placement=replace(node.placement, backend=usable(node.backend)))
        if isinstance(node, OperatorNode):
            branches = (
                lay_out(branch, cuts, (*path, len(nodes), number))
                for number, branch in enumerate(node.operator.branches())
            )
            node = replace(node, branches=tuple(branches))
        add(node)
    if _needs_relay_at_end(nodes, kinds):
        add(_relay_behind(nodes[-1]))
    _mark_forwarded(nodes)
    placed = [replace(node, path=(*path, at)) for at, node in enumerate(nodes)]
    found = tuple(placed), kinds[-1] == "quick"
    if whole:
        object.__setattr__(chain, "planned", (os.getpid(), *found))
    return ChainPlan(chain, path, *found)


def _relay_behind(node: Node) -> RelayNode:
    ready = node.placement.prefetch if isinstance(node, WorkerNode) else None
    return RelayNode(RelayOptions(), thread=node.name, least=max(AHEAD, ready or 0))


def _with_shards_first(operators: tuple[Operator, ...]) -> list[Operator]:
    """Move a shard before work that would be thrown away, past relays and work that is one to one."""
    ordered: list[Operator] = []
    for operator in operators:
        at = len(ordered)
        while operator.goes_first and _is_one_to_one_work(ordered[at - 1]):
            at -= 1
        ordered.insert(at, operator)
    return ordered


def _is_one_to_one_work(operator: Operator) -> bool:
    return (operator.placement or operator.relay) is not None and operator.length(1) == 1


def _grouped(operators: list[Operator], cuts: Set[int]) -> Iterator[Node]:
    """Yield nodes, neighbors that may share workers as one; the functions of `cuts` begin one."""
    group: list[Operator] = []
    shared = Placement()
    functions = others = 0  # before this one
    for operator in operators:
        placement, relay = operator.placement, operator.relay
        may_join = group and placement is not None and functions + len(group) not in cuts
        if may_join and placement is not None and _may_join(group, shared, operator, placement):
            group.append(operator)
            shared = replace(shared, in_order=shared.in_order and placement.in_order)
            continue
        if group:
            yield _group(group, shared, functions)
            functions += len(group)
        group = []
        if placement is not None:
            group, shared = [operator], placement
        elif relay is not None:
            name = operator.describe()
            yield RelayNode(relay, name, name if relay.pinner is None else operator.name)
        else:
            yield OperatorNode(operator, others)
            others += 1
    if group:
        yield _group(group, shared, functions)


def _may_join(
    group: list[Operator], shared: Placement, work: Operator, placement: Placement
) -> bool:
    if group[-1].step().kind == "read" or work.step().concurrency:  # coroutines begin a task
        return False
    # A step that seeds by item number needs one-to-one steps before it.
    counted = not isinstance(placement.seeding, SampleSeeding) or group[-1].seek(1) == 1
    return (
        counted
        and shared.fuse
        and placement.fuse
        # All options that a worker sees must agree.
        and replace(shared, in_order=True) == replace(placement, in_order=True)
        and (shared.in_order or not placement.in_order)
    )


def _group(works: list[Operator], placement: Placement, first: int) -> Node:
    inline = placement.inline and works[0].step().kind != "read"
    return (InlineNode if inline else WorkerNode)(tuple(works), placement, first)


def _kind_after(kind: str, node: Node) -> str:
    """Return the kind of pulling a node after nodes of a kind: quick, a relay, slow, or a stage."""
    if isinstance(node, RelayNode):
        return "relay"
    if isinstance(node, WorkerNode):
        return "stage"
    return "quick" if kind == "quick" and _is_quick(node) else "slow"


def _is_quick(node: Node) -> bool:
    if isinstance(node, InlineNode):
        return all(work.cheap for work in node.works)
    assert isinstance(node, OperatorNode)
    if node.branches:
        return all(branch.quick for branch in node.branches)
    return node.operator.cheap


def _needs_relay_at_end(nodes: list[Node], kinds: list[str]) -> bool:
    """Return True if steps would rest while your loop is busy with an item.

    A stage alone has its window to work off; steps after a stage have none. Items that were moved to a
    device are for the thread that takes them.
    """
    if any(node.options.moves for node in nodes if isinstance(node, RelayNode)):
        return False
    if kinds[-1] == "slow":
        return any(map(_is_live, nodes))
    return kinds[-1] == "stage" and (kinds[-2] == "relay" or _runs_ahead(nodes[-1]))


def _runs_ahead(stage: Node) -> bool:
    """Return True if a stage is to keep more tasks than its workers need."""
    assert isinstance(stage, WorkerNode)
    return stage.window > stage.placement.at_hand * stage.placement.num_workers


def _is_live(node: Node) -> bool:
    return isinstance(node, (WorkerNode, RelayNode)) or any(b.live for b in node.branches)


def _mark_forwarded(nodes: list[Node]) -> None:
    """Mark the stages of processes whose results go to the next such stage as they came."""
    for at, (node, relay, later) in enumerate(zip(nodes, nodes[1:], nodes[2:], strict=False)):
        if (
            isinstance(node, WorkerNode)
            and isinstance(relay, RelayNode)
            and isinstance(later, WorkerNode)
            and not (node.reads or relay.pins)
        ):
            same = node.backend.forwards == later.backend.forwards != ""
            nodes[at] = replace(node, forwarded=same)


# -- checks of a pipeline before anything is started: they make no worker, thread or device


def check(plan: ChainPlan) -> None:
    """Find steps that can't run, before anything is started: devices, steps and backends.

    Raises `ValueError`, `BackendUnavailable` for a backend that can't serve here, or the error of a
    step.
    """
    _check_devices(plan)
    for operator in steps_in(plan.chain):
        operator.check_run()
    for node in plan.all_nodes:
        if not isinstance(node, WorkerNode):
            continue
        try:
            node.backend.check()
        except BackendUnavailable as error:
            raise BackendUnavailable(f"stage {node.name!r}: {error}") from error


def _check_devices(plan: ChainPlan) -> None:
    for node in plan.all_nodes:
        if not (isinstance(node, RelayNode) and node.options.moves):
            continue
        if len(node.path) > 1:
            raise ValueError(
                f"{node.name} is in a branch that is joined to others, so the joining thread "
                "would receive its batches; move it after the join"
            )
        later = plan.nodes[node.path[0] + 1 :]
        behind = next((n for n in later if isinstance(n, (WorkerNode, RelayNode))), None)
        if behind is not None:
            raise ValueError(
                f"{behind.name} comes after {node.name}, so it would receive batches on another thread, "
                f"without stream synchronization; only steps without a backend may follow {node.name}"
            )


def as_table(pipeline: Chain) -> str:
    """Return one line for each step as it will run; functions that share a task are on one line."""
    rows = [("step", "runs on", "with", "items"), *_rows(lay_out(pipeline), "", "your loop")]
    return "\n".join(table(rows))


Row = tuple[str, str, str, str]


def _rows(plan: ChainPlan, indent: str, taker: str) -> Iterator[Row]:
    """Yield the rows of a chain and its branches."""
    length: Length = None
    for at, node in enumerate(plan.nodes):
        if isinstance(node, RelayNode):
            if node.options.depth is not None:
                yield f"{indent}{node.name}", "a separate thread", "", of_length(length)
            continue
        where, how, name = _puller(plan.nodes, at, taker), "", node.name
        if isinstance(node, OperatorNode):
            for number, branch in enumerate(node.branches):
                yield f"{indent}{node.name} {number}:", "", "", ""
                yield from _rows(branch, indent + "  ", where)
            name = node.operator.describe()
        elif isinstance(node, WorkerNode):
            where = f"{node.backend.name} x {node.placement.num_workers}"
            how = ", ".join(_options(node))
        for operator in (node.operator,) if isinstance(node, OperatorNode) else node.works:
            length = operator.length(length)
        yield f"{indent}{name}", where, how, of_length(length)


def _puller(nodes: Sequence[Node], at: int, taker: str) -> str:
    """Name the thread that runs a step without workers."""
    for node in nodes[at + 1 :]:
        if isinstance(node, RelayNode):
            return "a separate thread"
        if isinstance(node, WorkerNode):
            return "with the next step"
    return taker


def _options(node: WorkerNode) -> Iterator[str]:
    placement = node.placement
    if placement.ranks > 1:
        yield f"cores of 1 of {placement.ranks} ranks"
    if placement.threads_per_worker > 1:
        yield f"{placement.threads_per_worker} threads in each"
    if not placement.in_order:
        yield "as they come"
    if placement.prefetch is not None:
        yield f"{placement.prefetch} items ahead"
    if placement.timeout:
        yield f"timeout {placement.timeout:g} s"
    if node.forwarded:
        yield "passed on unopened"
