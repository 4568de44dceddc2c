"""Pictures of a pipeline: a table, and a flowchart."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from hybridloader._support.text import table
from hybridloader.running.operator import Chain, Length, of_length
from hybridloader.running.plan import (
    ChainPlan,
    Node,
    OperatorNode,
    Path,
    RelayNode,
    WorkerNode,
    lay_out,
)


def as_table(pipeline: Chain) -> str:
    """Return one line for each step as it will run; functions that share a task are on one line."""
    rows = [("step", "runs on", "with", "items"), *_rows(lay_out(pipeline), "", set(), "your loop")]
    return "\n".join(table(rows))


Row = tuple[str, str, str, str]


def _rows(plan: ChainPlan, indent: str, tees: set[Path], taker: str) -> Iterator[Row]:
    """Yield the rows of a chain and its branches; `tees` are the paths of those that were shown."""
    length: Length = None
    for at, node in enumerate(plan.nodes):
        if isinstance(node, RelayNode):
            if node.options.depth is not None:
                yield f"{indent}{node.name}", "a separate thread", "", of_length(length)
            continue
        where, how, name = _puller(plan.nodes, at, taker), "", node.name
        if isinstance(node, OperatorNode):
            yield from _branches(node, indent, tees, where)
            name, place = node.operator.describe(), node.operator.tee_place
            if place is not None:
                name = f"branch {place[1]} of {_fork(node)}"
        elif isinstance(node, WorkerNode):
            where = f"{node.backend.name} x {node.placement.num_workers}"
            how = ", ".join(_options(node))
        for operator in (node.operator,) if isinstance(node, OperatorNode) else node.works:
            length = operator.length(length)
        yield f"{indent}{name}", where, how, of_length(length)


def _branches(node: OperatorNode, indent: str, tees: set[Path], taker: str) -> Iterator[Row]:
    """Yield the rows of the branches of `node`; a tee is shown where it is met first."""
    for number, branch in enumerate(node.branches):
        name = f"{node.name} {number}"
        if node.operator.tee_place is not None:
            if branch.path in tees:
                continue
            tees.add(branch.path)
            name = _fork(node)
        yield f"{indent}{name}:", "", "", ""
        yield from _rows(branch, indent + "  ", tees, taker)


def _fork(node: OperatorNode) -> str:
    """Name the tee of a branch: the first one has the path -1."""
    return f"tee {-1 - node.branches[0].path[0]}"


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
    if placement.buffer_bytes is not None:
        yield f"{placement.buffer_bytes:,} bytes ahead"
    if placement.timeout:
        yield f"timeout {placement.timeout:g} s"
    if node.forwarded:
        yield "passed on by slot"


def as_mermaid(pipeline: Chain) -> str:
    """Return a flowchart: boxes for steps on workers, round ones for the others."""
    picture = _Picture()
    last, arrow = picture.draw(lay_out(pipeline))
    picture.arrows.append(f"    {last} {arrow} loop([your loop])")
    return "\n".join(["flowchart LR", *picture.boxes, *picture.arrows])


class _Picture:
    """Boxes, the arrows between them, and the tees that were drawn already."""

    def __init__(self) -> None:
        self.boxes: list[str] = []
        self.arrows: list[str] = []
        self._forks: dict[Path, tuple[str, str]] = {}

    def draw(self, plan: ChainPlan) -> tuple[str, str]:
        """Draw one chain; return its last box, and the arrow that leaves it."""
        before, arrow = "", "-->"
        for node in plan.nodes:
            if isinstance(node, RelayNode) and node.options.depth is None:
                arrow = "-. relay .->"
                continue
            if isinstance(node, OperatorNode) and node.operator.tee_place is not None:
                trunk = node.branches[0]
                if trunk.path not in self._forks:
                    self._forks[trunk.path] = self.draw(trunk)
                before, arrow = self._forks[trunk.path]
                continue
            sources = [(before, arrow)] if before else []
            sources += [self.draw(branch) for branch in node.branches]
            name = f"n{len(self.boxes)}"
            self.boxes.append(f"    {name}{_box(node)}")
            self.arrows += [f"    {source} {leaving} {name}" for source, leaving in sources]
            before, arrow = name, "-->"
        return before, arrow


def _box(node: Node) -> str:
    if isinstance(node, WorkerNode):
        where = f"{node.backend.name} x {node.placement.num_workers}"
        return f'["{_safe(node.name)}<br/>{where}"]'
    name = node.operator.describe() if isinstance(node, OperatorNode) else node.name
    return f'("{_safe(name)}")'


def _safe(text: str) -> str:
    return text.replace('"', "#quot;").replace("<", "#lt;").replace(">", "#gt;")
