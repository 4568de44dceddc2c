"""Result of a tuning: the trials, and the plan that was chosen."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from hybridloader._support.text import Shown
from hybridloader.tuning.planner import Limits, Plan, Search, Trial, shown

if TYPE_CHECKING:
    from hybridloader.tuning.trials import Subject


@dataclass(frozen=True)
class Tuning(Shown):
    """Result of `tune`. Printed, it is a table of the trials, the reason, and the code to paste.

    Attributes
    ----------
    trials
        Trials, in the order in which they ran: plan, rate, and error if it failed.
    plan
        Chosen plan: backend, number of workers and threads of each worker, for each stage.
    rate
        Results a second with that plan: batches of a loader, items of a pipeline.
    before
        Results a second with the plan before tuning; None if it was not measured.
    target
        Results a second that `step` needs; None: as many as possible.
    keeps_up
        True if the plan reaches the target; None without one.
    seconds
        Seconds that tuning took.
    interrupted
        True if Ctrl-C ended the measurement.
    limits
        Limits that no plan exceeded.
    """

    trials: tuple[Trial, ...]
    plan: Plan
    rate: float
    before: float | None
    target: float | None
    keeps_up: bool | None
    seconds: float
    interrupted: bool
    limits: Limits
    _search: Search = field(repr=False, compare=False)
    _subject: Subject = field(repr=False, compare=False)
    _left = (0, 3, 4)

    def apply(self) -> Any:
        """Return the loader or pipeline with the chosen plan.

        A `hybridloader.DataLoader` is changed, and returned: its next ``iter()`` uses the plan. For a
        loader of torch's, `from_torch` makes a new one. A pipeline is not changed; a new one is made.
        """
        return self._subject.apply(self.plan)

    @property
    def code(self) -> str:
        """Code to paste into the program."""
        return self._subject.code(self.plan)

    @property
    def reason(self) -> str:
        """Reason of the choice, as a sentence or two."""
        return self._search.reason()

    def to_dict(self) -> dict[str, Any]:
        """Return the result as a dict of JSON types."""
        return {
            "trials": [trial.to_dict() for trial in self.trials],
            "plan": [place._asdict() for place in self.plan],
            "stages": [stage.name for stage in self._search.stages],
            "costs": [cost and cost.to_dict() for cost in self._search.costs],
            "rate": self.rate,
            "before": self.before,
            "target": self.target,
            "keeps_up": self.keeps_up,
            "seconds": self.seconds,
            "interrupted": self.interrupted,
            "cores": self.limits.cores,
            "memory": self.limits.memory,
            "refused": dict(self.limits.refused),
            "reason": self.reason,
            "code": self.code,
        }

    def _tables(self) -> list[list[list[str]]]:
        rows = [["plan", f"{self._subject.unit}/s", "+-", "", ""]]
        best = self._search.best
        for trial in self.trials:
            marks = []
            if trial.plan == self._search.start:
                marks.append("as it was")
            if trial is best:
                marks.append("chosen")
            rate = f"{trial.rate:,.1f}" if trial.rates else ""
            noise = f"{trial.noise:.0%}" if len(trial.rates) > 1 else ""
            rows.append([shown(trial.plan), rate, noise, ", ".join(marks), trial.error or ""])
        for plan, why in self._search.refused.items():
            rows.append([shown(plan), "", "", "as it was", f"beyond the limits: {why}"])
        return [rows if any(row[4] for row in rows) else [row[:4] for row in rows]]

    def _lines(self) -> list[str]:
        left_out = "; ".join(f"{name}: {why}" for name, why in self.limits.refused.items())
        ended = "Ended by Ctrl-C after" if self.interrupted else "Took"
        gain = f" {self.rate / self.before:.2f} times as fast as it was." if self.before else ""
        return [
            self.reason + gain,
            f"{ended} {self.seconds:.1f} s, {len(self.trials)} plans; {self.limits.cores:g} CPUs. "
            f"Not offered: {left_out or 'nothing'}.",
            self.code,
        ]
