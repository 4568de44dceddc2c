"""Checks of a pipeline before anything is started: they make no worker, thread or device."""

from __future__ import annotations

from collections.abc import Iterator

from hybridloader._support.errors import BackendUnavailable
from hybridloader.pipeline.operators.base import Chain
from hybridloader.pipeline.operators.join import Branch, ForkPoint, Zip
from hybridloader.pipeline.operators.order import Repeat
from hybridloader.pipeline.running.plan import ChainPlan, OperatorNode, Path, RelayNode, WorkerNode


def check(plan: ChainPlan) -> None:
    """Find what can't run, before anything is started: forks, devices and backends.

    Raises `ValueError`, or `BackendUnavailable` for a backend that can't serve here.
    """
    _check_devices(plan)
    met: dict[ForkPoint, set[int]] = {}
    repeated: dict[ForkPoint, tuple[int, ...]] = {}
    for branch, repeats in _all_branches(plan.chain, ()):
        met.setdefault(branch.fork, set()).add(branch.number)
        if repeated.setdefault(branch.fork, repeats) != repeats:
            raise ValueError(
                "a branch of a fork is repeated apart from the others, which take what it gives; "
                "repeat() before the fork, or behind where its branches are joined"
            )
    for fork, numbers in met.items():
        missing = sorted(set(range(fork.count)) - numbers)
        if missing:
            raise ValueError(
                f"of the {fork.count} branches of a fork, {_listed(missing)} never joined: what "
                "goes there would pile up. Join all of them, as in Pipeline.zip(a, b)"
            )
    for node in plan.all_nodes:
        if not isinstance(node, WorkerNode):
            continue
        try:
            node.backend.check()
        except BackendUnavailable as error:
            raise BackendUnavailable(f"stage {node.name!r}: {error}") from error


def _check_devices(plan: ChainPlan) -> None:
    own = plan.nodes
    for at, node in enumerate(own):
        if not (isinstance(node, RelayNode) and node.moves):
            continue
        behind = next((n for n in own[at + 1 :] if isinstance(n, (WorkerNode, RelayNode))), None)
        if behind is not None:
            raise ValueError(
                f"{behind.name} comes behind {node.name}, so another thread than your loop's would take "
                "what was moved, and the stream of your loop would not wait for it; move it last"
            )
    for node in plan.all_nodes:
        if not isinstance(node, RelayNode) or node.operator is None:
            continue
        if node.moves and len(node.path) > 1:
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
    """Yield all branches of forks, each with the repetitions that it is in."""
    inside = repeats + tuple(id(o) for o in pipeline.operators if isinstance(o, Repeat))
    source = pipeline.operators[0]
    if isinstance(source, Branch):
        yield source, inside
    for inner in source.branches():
        yield from _all_branches(inner, inside)


def chains_in_rows(plan: ChainPlan) -> set[Path]:
    """Return the paths of the chains that are in a `zip`, however deep; of a fork, if one branch is."""
    met: set[tuple[Path, bool]] = set()
    todo = [(plan, False)]
    while todo:
        chain, rows = todo.pop()
        if (chain.path, rows) not in met:
            met.add((chain.path, rows))
            for node in chain.nodes:
                inside = rows or (isinstance(node, OperatorNode) and isinstance(node.operator, Zip))
                todo.extend((branch, inside) for branch in node.branches)
    return {path for path, rows in met if rows}
