"""Measuring variants: asking the runners in turn, comparing batches, making `Measurement`s."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from benchmarks import usage
from benchmarks.case import Answer, Case, Measure, Spec, Variant
from benchmarks.measurements import check, release
from benchmarks.names import LIMITS
from benchmarks.results import Measurement, Take
from benchmarks.runner import Runner, RunnerFailed, RunnerLike, small_devshm
from benchmarks.timing import interleaved


class Mismatch(Exception):
    """Two loaders did not deliver the same batches, so that their times can't be compared."""


@dataclass
class Progress:
    """Functions that are called at every step; those of `display` draw."""

    say: Callable[[str], None] = lambda text: None
    step: Callable[[str], None] = lambda text: None


Runners = dict[str, RunnerLike]
"""Runners that live, by the loader that each of them measures."""

AGAIN = " again"
"""End of the name under which a loader takes part a second time: their difference is noise."""


@dataclass
class Harness:
    """Measurement of variants, in runners.

    Attributes
    ----------
    keep
        True to go on with the same runners from case to case; else each case has new ones.
    make_runner, memory
        For tests: other runners, and the memory of a process and all below it.
    quiet
        Waits for the machine, and says if it is quiet then; called before each round.
    """

    progress: Progress
    keep: bool = False
    make_runner: Callable[[], RunnerLike] = field(default_factory=lambda: Runner)
    memory: Callable[[int], float] = lambda pid: usage.memory_mb(pid, files=False)
    quiet: Callable[[Callable[[str], None]], bool] = lambda say: True
    clock: Callable[[], float] = time.monotonic
    runners: Runners = field(default_factory=dict)
    _case: str = ""

    def measure(self, case: Case, variant: Variant, rounds: int) -> tuple[Take, list[Measurement]]:
        """Measure all loaders of a variant.

        Raises
        ------
        Mismatch
            Loaders did not deliver the same batches.
        """
        began = self.clock()
        rounds = min(rounds, variant.most_rounds)
        # Neither beside a weighing, nor beside 200,000 batches.
        if case.kind != "rounds" or (case.name != self._case and not self.keep):
            self.close()
        self._case = case.name
        take = Take(case.name, variant.name)
        if case.kind == "rounds":
            found = _Race(case, variant, self, take).run(rounds)
        elif case.kind == "weigh":
            found = _weigh(case, variant, rounds, self)
        else:
            found = _pass(case, variant, self.progress)
        take.seconds = self.clock() - began
        return take, found

    def close(self) -> None:
        """End the runners."""
        for runner in self.runners.values():
            runner.close()
        self.runners.clear()


def not_run(cases: Sequence[Case]) -> list[str]:
    """A sentence for each case in which no loader can take part."""
    found = []
    for case in cases:
        reasons = [v.blanks.get(name) for v in case.variants for name in v.loaders]
        if all(reasons):
            found.append(f"{case.name} {'; '.join(dict.fromkeys(map(str, reasons)))}")
    return found


def _rows(case: Case, variant: Variant) -> dict[str, Measurement]:
    """Measurements without values, by loader."""
    return {
        name: Measurement(
            case.name, variant.name, name, case.unit, skipped=variant.blanks.get(name, "")
        )
        for name in variant.loaders
    }


class _Race:
    """The loaders of one variant, side by side."""

    def __init__(self, case: Case, variant: Variant, harness: Harness, take: Take) -> None:
        self._case, self._variant, self._take = case, variant, take
        self._runners, self._make_runner = harness.runners, harness.make_runner
        self._progress, self._memory, self._quiet = harness.progress, harness.memory, harness.quiet
        self._where = f"{case.name} {variant.name}"
        self._rows = _rows(case, variant)
        measured = [name for name, row in self._rows.items() if not row.skipped]
        for name in measured:
            if name not in self._runners:
                self._runners[name] = harness.make_runner()
        take.again = variant.measured_again(measured)
        if take.again:
            twin = take.again + AGAIN
            self._rows[twin] = Measurement(case.name, variant.name, twin, case.unit)
            if twin not in self._runners:
                self._runners[twin] = harness.make_runner()

    def run(self, rounds: int) -> list[Measurement]:
        if self._case.check:
            self._rehearse()
        names = [name for name, row in self._rows.items() if not row.skipped]
        before = None
        for number, name in interleaved(names, rounds):
            if number != before:
                self._take.quiet &= self._quiet(self._progress.say)
                before = number
            if not self._rows[name].skipped:
                self._step(name, f"round {number + 1} of {rounds}")
                self._round(name)
        for row in self._rows.values():
            if row.skipped:
                row.values, row.cpu = [], []
        twin = self._rows.pop(self._take.again + AGAIN, None)
        if twin is not None:
            pairs = zip(self._rows[self._take.again].values, twin.values, strict=False)
            self._take.pairs = [[first, second] for first, second in pairs]
        return list(self._rows.values())

    def _step(self, name: str, what: str) -> None:
        self._progress.step(f"{self._where}: {name}, {what}")

    def _ask(self, name: str, measure: Measure, idle: Callable[[], None] | None = None) -> Answer:
        recycled = name in LIMITS and self._variant.spec.get("recycled")
        loader = f"{name} (recycled)" if recycled else name.removesuffix(AGAIN)
        answer = self._try(name, measure, loader, idle)
        if answer.get("failed"):
            # Once is an accident: a worker of torch's that is ended while it starts may abort, and
            # the signal of its death reaches the next iterator.
            reason = answer["skipped"]
            self._rows[name].details.setdefault("tried_again", []).append(reason)
            self._progress.say(f"{self._where}: {name}, once more after: {reason}")
            answer = self._try(name, measure, loader, idle)
        if "skipped" in answer:
            self._rows[name].skipped = answer["skipped"]
            self._rows[name].failed = answer.get("failed", False)
            self._progress.say(f"{self._where}: {name} left out: {answer['skipped']}")
        return answer

    def _try(
        self, name: str, measure: Measure, loader: str, idle: Callable[[], None] | None
    ) -> Answer:
        try:
            return self._runners[name].ask(measure, loader, self._variant.spec, idle)
        except RunnerFailed as error:
            self._runners[name] = self._make_runner()
            return {"skipped": str(error), "failed": True}

    def _rehearse(self) -> None:
        """Let each deliver some batches, untimed: compare them, and look at the memory."""
        digests: dict[str, str] = {}
        for name, row in self._rows.items():
            if row.skipped:
                continue
            self._step(name, "batches compared")
            peaks = [0.0]

            def look(name: str = name, peaks: list[float] = peaks) -> None:
                peaks.append(self._memory(self._runners[name].pid))

            answer = self._ask(name, check, look)
            if "skipped" not in answer:
                row.memory_mb = max(peaks)
            if "digest" in answer:
                digests[name] = answer["digest"]
        expected = digests.get("torch") or next(iter(digests.values()), "")
        wrong = [name for name, value in digests.items() if value != expected]
        if wrong:
            raise Mismatch(
                f"{self._where}: {', '.join(wrong)} did not deliver the "
                f"batches that torch's loader delivers"
            )

    def _round(self, name: str) -> None:
        answer = self._ask(name, self._case.measure)
        if "skipped" in answer:
            return
        row = self._rows[name]
        scale = self._case.scale
        if name in LIMITS:
            # One process was measured; the limit is what the workers could do together.
            scale /= self._variant.spec.get("limit_workers", 1)
        row.values.append(answer["value"] * scale)
        row.cpu.append(answer.get("cpu", 0.0))
        for key, value in answer.get("details", {}).items():
            row.details.setdefault(key, []).append(value)


def _weigh(case: Case, variant: Variant, rounds: int, harness: Harness) -> list[Measurement]:
    """Memory of whole trees, one after the other, each in fresh processes and with nothing beside it."""
    progress = harness.progress
    rows = _rows(case, variant)
    names = [name for name, row in rows.items() if not row.skipped]
    for number, name in interleaved(names, rounds):
        row = rows[name]
        if row.skipped:
            continue
        progress.step(f"{case.name} {variant.name}: {name}, round {number + 1} of {rounds}")
        # The limit is one process alone, whatever container the variant has.
        spec: Spec = variant.spec | (variant.spec.get("limit_spec", {}) if name == "limit" else {})
        with contextlib.closing(harness.make_runner()) as runner:
            try:
                loader = "inline" if name == "limit" else name
                answer = runner.ask(case.measure, loader, spec)
                if "value" in answer:
                    row.values.append(answer["value"])
                    for key, value in answer.get("details", {}).items():
                        row.details.setdefault(key, []).append(value)
                elif "skipped" not in answer:
                    row.values.append(usage.memory_mb(runner.pid, files=True))
                    row.details.setdefault("processes", []).append(len(usage.tree(runner.pid)))
                    runner.ask(release, loader, spec)
                row.skipped, row.failed = answer.get("skipped", ""), answer.get("failed", False)
            except RunnerFailed as error:
                row.skipped, row.failed = str(error), True
        if row.skipped:
            row.values = []
            progress.say(f"{case.name} {variant.name}: {name} left out: {row.skipped}")
    return list(rows.values())


def _pass(case: Case, variant: Variant, progress: Progress) -> list[Measurement]:
    """One repetition each: passed or failed, and why."""
    found = []
    for name in variant.loaders:
        row = Measurement(case.name, variant.name, name, case.unit)
        found.append(row)
        progress.step(f"{case.name} {variant.name}: {name}")
        try:
            prefix = small_devshm() if variant.spec.get("small_devshm") else []
        except RunnerFailed as error:
            row.skipped = str(error)
            continue
        with contextlib.closing(Runner(prefix, variant.spec["timeout"])) as runner:
            try:
                answer = runner.ask(case.measure, name, variant.spec)
            except RunnerFailed as error:
                answer = {"skipped": str(error), "failed": True}
        row.skipped, row.failed = answer.get("skipped", ""), answer.get("failed", False)
        row.passed = False if answer.get("failed") else answer.get("passed")
        row.details = answer.get("details", {})
        if "value" in answer:
            row.values = [answer["value"] * case.scale]
    return found
