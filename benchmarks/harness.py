"""Running the cases: who is asked when, what is checked, and what becomes a `Measurement`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks import usage as cost
from benchmarks.results import Measurement
from benchmarks.runner import Answer, Asked, Lane, LaneFailed, small_devshm
from benchmarks.timing import interleaved


class Mismatch(Exception):
    """Two loaders did not deliver the same batches: whatever was measured means nothing."""


@dataclass(frozen=True)
class Variant:
    """One row of a case.

    Attributes
    ----------
    spec
        What a lane needs to know: the dataset by name, batch, workers, seconds, ...
    loaders
        Who takes part.
    blanks
        Loader -> why it takes no part although it is in others.
    most_rounds
        Of what is slow and steady, or takes long to start, fewer rounds will do.
    """

    name: str
    spec: dict[str, Any]
    loaders: tuple[str, ...]
    blanks: dict[str, str] = field(default_factory=dict)
    most_rounds: int = 1 << 30


@dataclass(frozen=True)
class Case:
    """One row of the requirement: what is measured and how.

    Attributes
    ----------
    job
        What a lane does in each round; see `jobs`.
    scale
        From a job's value (seconds, mostly) to the unit of the case.
    kind
        "rounds" (interleaved lanes), "weigh" (memory while an epoch is under way, one fresh process
        after the other) or "pass" (one repetition, passed or failed).
    check
        Whether all loaders must deliver the same batches.
    """

    name: str
    title: str
    unit: str
    job: str
    variants: tuple[Variant, ...]
    kind: str = "rounds"
    scale: float = 1.0
    check: bool = True


@dataclass
class Progress:
    """Told of every step; `display` brings one that draws."""

    say: Callable[[str], None] = lambda text: None
    step: Callable[[str], None] = lambda text: None


LIMITS = ("limit", "together")
"""One process alone, divided by the workers; and as many processes as workers at the same time."""


def limit_name(spec: dict[str, Any], name: str = "limit") -> str:
    """The opener behind the loader "limit" or "together" of a variant."""
    return f"{name} (recycled)" if spec.get("recycled") else name


Lanes = dict[str, Asked]
"""Lanes that run, by the loader that each of them measures."""


def run_case(
    case: Case,
    rounds: int,
    progress: Progress,
    make_lane: Callable[[], Asked] = Lane,
    memory: Callable[[int], float] | None = None,
    lanes: Lanes | None = None,
) -> list[Measurement]:
    """All measurements of a case.

    Parameters
    ----------
    make_lane, memory
        For tests: other lanes, and the memory of a process and what is below it.
    lanes
        Those to go on with, and to leave running; None for new ones that are closed in the end.

    Raises
    ------
    Mismatch
        Loaders did not deliver the same batches.
    """
    if case.kind != "rounds":
        if lanes is not None:
            close_all(lanes)  # neither beside a weighing, nor beside 200,000 batches
        if case.kind == "weigh":
            return _weigh(case, rounds, progress, make_lane)
        return _pass(case, progress)
    running: Lanes = {} if lanes is None else lanes
    found: list[Measurement] = []
    try:
        for variant in case.variants:
            for loader in variant.loaders:
                if loader not in running and loader not in variant.blanks:
                    running[loader] = make_lane()
        for variant in case.variants:
            enough = min(rounds, variant.most_rounds)
            found += _Race(case, variant, running, progress, make_lane, memory).run(enough)
    finally:
        if lanes is None:
            close_all(running)
    return found


def not_run(cases: Sequence[Case]) -> list[str]:
    """A sentence for each case in which nobody can take part."""
    found = []
    for case in cases:
        reasons = [v.blanks.get(name) for v in case.variants for name in v.loaders]
        if all(reasons):
            found.append(f"{case.name} {'; '.join(dict.fromkeys(map(str, reasons)))}")
    return found


def close_all(lanes: Lanes) -> None:
    """End them."""
    for lane in lanes.values():
        lane.close()
    lanes.clear()


class _Race:
    """The loaders of one variant, side by side."""

    def __init__(
        self,
        case: Case,
        variant: Variant,
        lanes: dict[str, Asked],
        progress: Progress,
        make_lane: Callable[[], Asked],
        memory: Callable[[int], float] | None,
    ) -> None:
        self._case, self._variant, self._lanes = case, variant, lanes
        self._progress, self._make_lane = progress, make_lane
        self._where = f"{case.name} {variant.name}"
        self._memory = memory or (lambda pid: cost.memory_mb(pid, files=False))
        self._rows = {
            name: Measurement(
                case.name, variant.name, name, case.unit, skipped=variant.blanks.get(name, "")
            )
            for name in variant.loaders
        }

    def run(self, rounds: int) -> list[Measurement]:
        if self._case.check:
            self._rehearse()
        names = [name for name, row in self._rows.items() if not row.skipped]
        for number, name in interleaved(names, rounds):
            if not self._rows[name].skipped:
                self._step(name, f"round {number + 1} of {rounds}")
                self._round(name)
        for row in self._rows.values():
            if row.skipped:
                row.values, row.cpu = [], []
        return list(self._rows.values())

    def _step(self, name: str, what: str) -> None:
        self._progress.step(f"{self._where}: {name}, {what}")

    def _ask(self, name: str, job: str, idle: Callable[[], None] | None = None) -> Answer:
        spec = self._variant.spec
        loader = limit_name(spec, name) if name in LIMITS else name
        answer = self._try(name, job, loader, idle)
        if answer.get("failed"):
            # Once is an accident: a worker of torch's that is ended while it starts may abort, and
            # the signal of its death reaches the next iterator.
            reason = answer["skipped"]
            self._rows[name].details.setdefault("tried_again", []).append(reason)
            self._progress.say(f"{self._where}: {name}, once more after: {reason}")
            answer = self._try(name, job, loader, idle)
        if "skipped" in answer:
            self._rows[name].skipped = answer["skipped"]
            self._rows[name].failed = answer.get("failed", False)
            self._progress.say(f"{self._where}: {name} left out: {answer['skipped']}")
        return answer

    def _try(self, name: str, job: str, loader: str, idle: Callable[[], None] | None) -> Answer:
        try:
            return self._lanes[name].ask(job, loader, self._variant.spec, idle)
        except LaneFailed as error:
            self._lanes[name] = self._make_lane()
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
                peaks.append(self._memory(self._lanes[name].pid))

            answer = self._ask(name, "check", look)
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
        answer = self._ask(name, self._case.job)
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


def _weigh(
    case: Case, rounds: int, progress: Progress, make_lane: Callable[[], Asked]
) -> list[Measurement]:
    """Memory of whole trees, one after the other, each in fresh processes and nobody beside it."""
    found: list[Measurement] = []
    for variant in case.variants:
        rows = {
            name: Measurement(
                case.name, variant.name, name, case.unit, skipped=variant.blanks.get(name, "")
            )
            for name in variant.loaders
        }
        names = [name for name, row in rows.items() if not row.skipped]
        rounds = min(rounds, variant.most_rounds)
        for number, name in interleaved(names, rounds):
            row = rows[name]
            if row.skipped:
                continue
            progress.step(f"{case.name} {variant.name}: {name}, round {number + 1} of {rounds}")
            # The limit is one process alone, whatever the variant holds its paths in.
            spec = variant.spec | (variant.spec.get("limit_spec", {}) if name == "limit" else {})
            with contextlib.closing(make_lane()) as lane:
                try:
                    loader = "inline" if name == "limit" else name
                    answer = lane.ask(case.job, loader, spec)
                    if "skipped" not in answer:
                        row.values.append(cost.memory_mb(lane.pid, files=True))
                        row.details.setdefault("processes", []).append(len(cost.tree(lane.pid)))
                        lane.ask("release", loader, spec)
                    row.skipped, row.failed = answer.get("skipped", ""), answer.get("failed", False)
                except LaneFailed as error:
                    row.skipped, row.failed = str(error), True
            if row.skipped:
                row.values = []
                progress.say(f"{case.name} {variant.name}: {name} left out: {row.skipped}")
        found += rows.values()
    return found


def _pass(case: Case, progress: Progress) -> list[Measurement]:
    """One repetition each: passed or failed, and why."""
    found = []
    for variant in case.variants:
        for name in variant.loaders:
            row = Measurement(case.name, variant.name, name, case.unit)
            progress.step(f"{case.name} {variant.name}: {name}")
            try:
                prefix = small_devshm() if variant.spec.get("small_devshm") else []
            except LaneFailed as error:
                row.skipped = str(error)
                found.append(row)
                continue
            with contextlib.closing(Lane(prefix, variant.spec["timeout"])) as lane:
                try:
                    answer = lane.ask(case.job, name, variant.spec)
                except LaneFailed as error:
                    answer = {"skipped": str(error), "failed": True}
            row.skipped, row.failed = answer.get("skipped", ""), answer.get("failed", False)
            row.passed = False if answer.get("failed") else answer.get("passed")
            row.details = answer.get("details", {})
            if "value" in answer:
                row.values = [answer["value"] * case.scale]
            found.append(row)
    return found
