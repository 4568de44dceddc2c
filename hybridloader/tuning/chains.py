"""Chains of a pipeline: its own, and those of the pipelines that it joins or shares by a fork.

A chain has a path: the number of an operator and of one of its branches, for each level. A fork has one
path, wherever it is met. An operator's address is the path of its chain and its number there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from hybridloader.pipeline.pipeline import Pipeline
from hybridloader.running.operator import Chain, Operator

Path = tuple[int, ...]


class NamedChain(NamedTuple):
    """Chain within a pipeline; the name is empty for the pipeline's own."""

    path: Path
    name: str
    chain: Chain


def chains_of(pipeline: Chain) -> Iterator[NamedChain]:
    """Yield the chains of `pipeline`, its own last, and each fork once."""
    yield from _walk(pipeline, (), "", {})


def _walk(chain: Chain, path: Path, name: str, forks: dict[int, Path]) -> Iterator[NamedChain]:
    for at, operator in enumerate(chain.operators):
        met = len(forks)
        inner = _path(operator, (*path, at), forks)
        if operator.fork_place is not None:
            if len(forks) > met:
                yield from _walk(operator.branches()[0], inner, f"fork {met}", forks)
            continue
        for number, branch in enumerate(operator.branches()):
            told = f"{name}, " if name else ""
            yield from _walk(branch, (*inner, number), f"{told}{operator.name} {number}", forks)
    yield NamedChain(path, name, chain)


def _path(operator: Operator, address: Path, forks: dict[int, Path]) -> Path:
    """Return the path around the branches of `operator`; `forks` are those met before."""
    place = operator.fork_place
    return address if place is None else forks.setdefault(id(place[0]), (-1 - len(forks),))


def with_operators(
    pipeline: Pipeline, changed: Mapping[Path, Operator], *, trial: bool = False
) -> Pipeline:
    """Return a copy of `pipeline` with other operators at some addresses.

    With `trial` it is for a short measurement: see `Operator.in_trial`.
    """
    made = _Copy(changed, trial).of(pipeline, ())
    assert isinstance(made, Pipeline)
    return made


class _Copy:
    def __init__(self, changed: Mapping[Path, Operator], trial: bool) -> None:
        self._changed, self._trial = changed, trial
        # All the mutable state:
        self._forks: dict[int, Path] = {}
        self._trunks: dict[Path, Chain] = {}
        self._shared: dict[Any, Any] = {}

    def of(self, chain: Chain, path: Path) -> Chain:
        """Return the copy of a chain; the chain itself if nothing in it is changed."""
        operators = [
            self._operator(operator, (*path, at)) for at, operator in enumerate(chain.operators)
        ]
        if all(new is old for new, old in zip(operators, chain.operators, strict=True)):
            return chain
        return Pipeline(operators)

    def _operator(self, old: Operator, address: Path) -> Operator:
        operator = self._changed.get(address, old)
        if self._trial:
            operator = operator.in_trial()
        branches = operator.branches()
        path = _path(operator, address, self._forks)
        copies = [self._branch(operator, each, path, n) for n, each in enumerate(branches)]
        if all(new is old for new, old in zip(copies, branches, strict=True)):
            return operator
        return operator.with_branches(tuple(copies), self._shared)

    def _branch(self, operator: Operator, branch: Chain, path: Path, number: int) -> Chain:
        if operator.fork_place is None:
            return self.of(branch, (*path, number))
        if path not in self._trunks:
            self._trunks[path] = self.of(branch, path)
        return self._trunks[path]
