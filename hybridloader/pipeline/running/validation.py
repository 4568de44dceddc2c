"""What of a pipeline can't run, found before anything is started.

It looks at the plan alone: no worker, no thread and no device is made for it.
"""

from __future__ import annotations

from collections.abc import Iterator

from hybridloader._support.errors import BackendUnavailable
from hybridloader.pipeline.operators.base import Chain
from hybridloader.pipeline.operators.join import Branch, Zip
from hybridloader.pipeline.operators.order import Repeat
from hybridloader.pipeline.running.plan import Node, OperatorNode, RelayNode, WorkerNode, lay_out


def check(pipeline: Chain) -> None:
    """Find what can't run, before anything is started.

    Raises
    ------
    ValueError
        A fork of which some branches lead nowhere; a device that is not there, or that something comes
        behind which another thread would run.
    BackendUnavailable
        A backend that can't serve here.
    """
    _check_devices(pipeline)
    met: dict[int, tuple[Branch, set[int]]] = {}
    repeated: dict[int, tuple[int, ...]] = {}
    for branch, repeats in _all_branches(pipeline, ()):
        met.setdefault(id(branch.fork), (branch, set()))[1].add(branch.number)
        if repeated.setdefault(id(branch.fork), repeats) != repeats:
            raise ValueError(
                "a branch of a fork is repeated apart from the others, which take what it gives; "
                "repeat() before the fork, or behind where its branches are joined"
            )
    for branch, numbers in met.values():
        missing = sorted(set(range(branch.fork.count)) - numbers)
        if missing:
            raise ValueError(
                f"of the {branch.fork.count} branches of a fork, {_listed(missing)} never joined: what "
                "goes there would pile up. Join all of them, as in Pipeline.zip(a, b)"
            )
    for node in every_stage(pipeline):
        assert node.placement.backend is not None
        try:
            node.placement.backend.check()
        except BackendUnavailable as error:
            raise BackendUnavailable(f"stage {node.name!r}: {error}") from error


def _check_devices(pipeline: Chain) -> None:
    own = lay_out(pipeline)
    for at, node in enumerate(own):
        if not (isinstance(node, RelayNode) and node.moves):
            continue
        behind = next((n for n in own[at + 1 :] if isinstance(n, (WorkerNode, RelayNode))), None)
        if behind is not None:
            raise ValueError(
                f"{behind.name} comes behind {node.name}, so another thread than your loop's would take "
                "what was moved, and the stream of your loop would not wait for it; move it last"
            )
    for number, line in enumerate(every_line(pipeline)):
        for node in line:
            if not isinstance(node, RelayNode) or node.operator is None:
                continue
            if node.moves and number:
                raise ValueError(
                    f"{node.name} is in a part of a pipeline that is joined to others, so whoever joins "
                    "them would take what was moved; move the items behind that"
                )
            node.operator.check()


def _listed(numbers: list[int]) -> str:
    shown = ", ".join(map(str, numbers))
    return f"number {shown} is" if len(numbers) == 1 else f"numbers {shown} are"


def _all_branches(
    pipeline: Chain, repeats: tuple[int, ...]
) -> Iterator[tuple[Branch, tuple[int, ...]]]:
    """All branches of forks, each with the repetitions that it is in."""
    inside = repeats + tuple(id(o) for o in pipeline.operators if isinstance(o, Repeat))
    source = pipeline.operators[0]
    if isinstance(source, Branch):
        yield source, inside
    for inner in source.branches():
        yield from _all_branches(inner, inside)


def forks_in_rows(pipeline: Chain) -> set[int]:
    """Forks of which a branch is in a `zip`, however deep, by identity."""
    found: set[int] = set()
    seen: set[tuple[int, bool]] = set()
    todo = [(pipeline, False)]
    while todo:
        line, rows = todo.pop()
        if (id(line), rows) in seen:
            continue
        seen.add((id(line), rows))
        for operator in line.operators:
            if isinstance(operator, Branch):
                if rows:
                    found.add(id(operator.fork))
                todo.append((operator.fork.pipeline, rows))
            else:
                inside = rows or isinstance(operator, Zip)
                todo.extend((inner, inside) for inner in operator.branches())
    return found


def every_stage(pipeline: Chain) -> Iterator[WorkerNode]:
    """All stages with workers, those of branches included; a fork's own pipeline once."""
    for line in every_line(pipeline):
        yield from (node for node in line if isinstance(node, WorkerNode))


def every_line(pipeline: Chain) -> Iterator[tuple[Node, ...]]:
    """The nodes of a pipeline, then those of its branches; those of a fork's own pipeline once."""
    seen: set[int] = set()

    def walk(pipeline: Chain) -> Iterator[tuple[Node, ...]]:
        line = lay_out(pipeline)
        yield line
        for node in line:
            if isinstance(node, OperatorNode):
                for inner in node.operator.branches():
                    if id(inner) not in seen:
                        seen.add(id(inner))
                        yield from walk(inner)

    return walk(pipeline)
