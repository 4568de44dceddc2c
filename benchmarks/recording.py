"""A run on record: variants that are not yet measured, or were too noisy, one after the other.

The file is written after each variant, so a run that was ended goes on there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.case import Case, Variant
from benchmarks.harness import Harness
from benchmarks.results import Results, Take

SETTINGS = (
    "revision",
    "cpu",
    "cores",
    "python",
    "versions",
    "quick",
    "rounds",
    "workers",
    "rivals",
)
"""Parts of `Results.about` that a run must share with a file to go on with it."""

_OPENING = 1.0
"""Seconds to open and close a loader in one repetition, where the variant does not tell."""

_CHECKING = 1.5
"""Seconds in which a loader's first batches are compared."""


def differences(about: dict[str, Any], kept: dict[str, Any]) -> list[str]:
    """Settings in which a kept run differs from this one."""
    return [name for name in SETTINGS if about.get(name) != kept.get(name)]


def estimate(case: Case, variant: Variant, rounds: int) -> float:
    """Seconds that the variant takes, roughly."""
    if case.kind == "pass":
        rounds = 1
    each = variant.seconds
    if each is None:
        # A short epoch and a long one.
        each = _OPENING + 1.5 * variant.spec.get("seconds", 0.5)
    checks = _CHECKING if case.check and case.kind == "rounds" else 0.0
    loaders = len(variant.loaders) - len(variant.blanks) + (case.kind == "rounds")
    return loaders * (min(rounds, variant.most_rounds) * each + checks)


@dataclass
class Recording:
    """A run of cases into results.

    Attributes
    ----------
    keep
        Called after each variant, to write the file.
    order
        Order of the cases in the results.
    retakes
        Number of times that a variant is measured again because the machine was noisy.
    """

    cases: Sequence[Case]
    results: Results
    rounds: int
    harness: Harness
    keep: Callable[[Results], None] = lambda results: None
    order: Sequence[str] = ()
    retakes: int = 0
    _pace: list[tuple[float, float]] = field(default_factory=list)

    def todo(self) -> list[tuple[Case, Variant]]:
        """Variants that the results lack, or that can't be quoted from them."""
        return [pair for pair in self._all() if not self._has(*pair)]

    def seconds_left(self, todo: Sequence[tuple[Case, Variant]]) -> float:
        """Estimate of the time that these variants take, at the pace so far."""
        expected = sum(estimate(case, variant, self.rounds) for case, variant in todo)
        took, estimated = map(sum, zip(*self._pace, strict=True)) if self._pace else (1.0, 1.0)
        return expected * took / estimated

    def run(self) -> None:
        """Measure what is to do; at the end, again what was too noisy or not quiet."""
        todo = self.todo()
        for _ in range(1 + self.retakes):
            for place, (case, variant) in enumerate(todo):
                self._take(case, variant, todo[place + 1 :])
            todo = [pair for pair in todo if not self._settled(*pair)]

    def _all(self) -> Iterator[tuple[Case, Variant]]:
        for case in self.cases:
            for variant in case.variants:
                yield case, variant

    def _has(self, case: Case, variant: Variant) -> bool:
        take = self.results.take(case.name, variant.name)
        return take is not None and take.quotable

    def _settled(self, case: Case, variant: Variant) -> bool:
        take = self.results.take(case.name, variant.name)
        return take is not None and take.quotable and take.quiet

    def _take(self, case: Case, variant: Variant, then: Sequence[tuple[Case, Variant]]) -> None:
        before = self.results.take(case.name, variant.name)
        take, rows = self.harness.measure(case, variant, self.rounds)
        self._pace.append((take.seconds, estimate(case, variant, self.rounds)))
        if before is not None and _rank(before) < _rank(take):
            before.takes += 1  # the one that is kept was less noisy
        else:
            take.takes = before.takes + 1 if before is not None else 1
            self.results.put(take, rows)
            self._derive(case)
        self.results.sort(self.order)
        self.keep(self.results)
        left = self.seconds_left(then) / 60
        self.harness.progress.say(f"{described(take)}; some {left:.0f} minutes left")

    def _derive(self, case: Case) -> None:
        if case.derived is None:
            return
        of = [m for m in self.results.measurements if m.case == case.name]
        derived = case.derived.derive(of)
        name = case.derived.name
        self.results.measurements[:] = [
            m for m in self.results.measurements if m.case != name
        ] + derived


def _rank(take: Take) -> tuple[bool, bool, float]:
    """Less is better to quote."""
    return not take.quotable, not take.quiet, take.noise or 0.0


def described(take: Take) -> str:
    """One line about a variant that was measured."""
    found = f"{take.case} {take.variant}: {take.seconds:.0f} s"
    if take.noise is not None:
        found += f", noise {take.noise:.1%}"
    if not take.quiet:
        found += ", not quiet"
    if not take.quotable:
        found += ": not to be quoted"
    return found
