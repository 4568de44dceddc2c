"""Checks of a pipeline before anything is started: they make no worker, thread or device."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from hybridloader.errors import BackendUnavailable
from hybridloader.running.operator import Chain, steps_in
from hybridloader.running.plan import ChainPlan, OperatorNode, Path, RelayNode, WorkerNode

_Repeats = tuple[int, ...]


def check(plan: ChainPlan) -> None:
    """Find steps that can't run, before anything is started: forks, devices, steps and backends.

    Raises `ValueError`, `BackendUnavailable` for a backend that can't serve here, or the error of a
    step.
    """
    _check_devices(plan)
    for operator in steps_in(plan.chain):
        operator.check_run()
    met: dict[Any, set[int]] = {}  # branches, by their fork
    repeated: dict[Any, _Repeats] = {}
    for fork, number, repeats in _fork_places(plan.chain, ()):
        met.setdefault(fork, set()).add(number)
        if repeated.setdefault(fork, repeats) != repeats:
            raise ValueError(
                "a branch of a fork is repeated, but not its other branches, which get the same items; "
                "repeat() before the fork, or after its branches are joined"
            )
    for fork, numbers in met.items():
        missing = sorted(set(range(fork.count)) - numbers)
        if missing:
            raise ValueError(
                f"of the {fork.count} branches of a fork, {_listed(missing)} never joined, so "
                "their items would pile up. Join all of them, as in Pipeline.zip(a, b)"
            )
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
                f"{behind.name} comes after {node.name}, which must be the last step: a later one "
                "would receive batches on another thread, without stream synchronization; move it last"
            )


def _listed(numbers: list[int]) -> str:
    shown = ", ".join(map(str, numbers))
    return f"number {shown} is" if len(numbers) == 1 else f"numbers {shown} are"


def _fork_places(pipeline: Chain, repeats: _Repeats) -> Iterator[tuple[Any, int, _Repeats]]:
    """Yield the fork and number of all branches, each with the repetitions that it is in."""
    inside = repeats + tuple(id(o) for o in pipeline.operators if o.many_passes)
    source = pipeline.operators[0]
    if source.fork_place is not None:
        yield *source.fork_place, inside
    for inner in source.branches():
        yield from _fork_places(inner, inside)


def chains_in_rows(plan: ChainPlan) -> set[Path]:
    """Return the paths of the chains that are in a `zip`, however deep; of a fork, if one branch is."""
    met: set[tuple[Path, bool]] = set()
    todo = [(plan, False)]
    while todo:
        chain, rows = todo.pop()
        if (chain.path, rows) not in met:
            met.add((chain.path, rows))
            for node in chain.nodes:
                inside = rows or (isinstance(node, OperatorNode) and node.operator.joins_by_number)
                todo.extend((branch, inside) for branch in node.branches)
    return {path for path, rows in met if rows}
