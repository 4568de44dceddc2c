"""Context for operators that a test opens itself, over scripts of items and errors."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from hypothesis import settings

from hybridloader.running.operator import Chain, Context, Length, Operator
from hybridloader.running.state import Log

no_deadline = settings(deadline=None, max_examples=60)
"""Settings of property tests: no deadline, because a machine may be busy."""


class Oops(Exception):
    """Error that a script raises; equal to another with the same arguments."""

    def __eq__(self, other: object) -> bool:
        return type(other) is Oops and self.args == other.args

    def __hash__(self) -> int:
        return hash(self.args)


class Script(Iterator[Any]):
    """Gives items and raises those that are exceptions; goes on behind them. Counts its calls."""

    def __init__(self, *steps: Any) -> None:
        self._steps = iter(steps)
        self.pulled = self.closed = 0

    def __next__(self) -> Any:
        if self.closed:
            raise AssertionError("pulled after it was closed")
        self.pulled += 1
        step = next(self._steps)
        if isinstance(step, BaseException):
            raise step
        return step

    def close(self) -> None:
        self.closed += 1


@dataclass(unsafe_hash=True)
class ScriptedChain(Chain):
    """A chain that gives the items of a script, without operators."""

    steps: tuple[Any, ...] = ()
    known: float | bool = True  # or the length that it claims
    operators: tuple[Operator, ...] = ()

    @property
    def length(self) -> Length:
        if isinstance(self.known, float):
            return self.known
        return len(items_in(self.steps)) if self.known else None


def scripted(*steps: Any, known: float | bool = True) -> Any:
    return ScriptedChain(steps, known)


class ScriptedContext:
    """Context without a run behind it: see `hybridloader.running.operator.Context`."""

    def __init__(self, epoch: int = 0, seed: int | None = None) -> None:
        self.epoch, self.seed = epoch, seed
        self.shared: dict[Any, Any] = {}
        self.opened: list[Script] = []
        self.start, self.first, self.saved, self.run_seed, self.locks = 0, 0, None, 0, None
        self.needed = None
        self.without: list[Any] = []  # the items that were left out

    def mark(self, at: int, value: Any) -> None:
        pass

    def log(
        self, first: tuple[Any, ...], value_of: Callable[..., Any]
    ) -> Callable[[tuple[Any, ...]], None]:
        return Log(self.epoch, first, value_of).add

    def draw(self) -> int:
        import torch

        return int(torch.empty((), dtype=torch.int64).random_().item())

    def drop(self, items: Iterator[Any], at: int) -> Iterator[Any]:
        return items

    def left_out(self, item: Any, error: Exception) -> None:
        self.without.append(item)

    def random(self, seed: int | None) -> random.Random:
        return random.Random(f"{self.seed if seed is None else seed}/{self.epoch}")

    def open(self, pipeline: Any, start: int = 0, number: int | None = None) -> Iterator[Any]:
        if isinstance(pipeline, ScriptedChain):
            self.opened.append(Script(*pipeline.steps))
            return self.opened[-1]
        items: Iterator[Any] = pipeline()
        return items


def context(epoch: int = 0, seed: int | None = None) -> Context:
    return ScriptedContext(epoch, seed)


def run(operator: Operator, *steps: Any, epoch: int = 0) -> Iterator[Any]:
    """Open the iterator of `operator` over a script."""
    return operator.begin(lambda *_, **__: Script(*steps), context(epoch))


def drain(items: Iterator[Any]) -> list[Any]:
    """Return all items, errors in their places; an iterator that ended must stay ended."""
    found: list[Any] = []
    while True:
        try:
            found.append(next(items))
        except StopIteration:
            break
        except Exception as error:
            found.append(error)
    for _ in range(2):
        try:
            found.append(next(items))
        except StopIteration:
            continue
        raise AssertionError(f"gave {found[-1]!r} after its end")
    return found


def outcome(operator: Operator, *steps: Any, epoch: int = 0) -> list[Any]:
    return drain(run(operator, *steps, epoch=epoch))


def items_in(outcomes: Any) -> list[Any]:
    return [item for item in outcomes if not isinstance(item, BaseException)]


def errors_in(outcomes: Any) -> list[Any]:
    return [item for item in outcomes if isinstance(item, BaseException)]


Reference = Callable[[list[Any]], list[Any]]
