"""`tune`, and ``"auto"`` of loaders: measured choice of workers within a limit of time."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TextIO

from hybridloader._support.text import Shown, table
from hybridloader._support.text import seconds as check_seconds
from hybridloader._support.threads import gil_enabled
from hybridloader._support.user_objects import add_note
from hybridloader.errors import WorkerTimeout
from hybridloader.tuning.planner import Limits, Plan, Search, Trial, limits_here, shown
from hybridloader.tuning.subjects import (
    Empty,
    LoaderSubject,
    Subject,
    measure,
    subject_of,
)

if TYPE_CHECKING:
    from hybridloader.loader.dataloader import Auto


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

    def __str__(self) -> str:
        left_out = "; ".join(f"{name}: {why}" for name, why in self.limits.refused.items())
        ended = "Ended by Ctrl-C after" if self.interrupted else "Took"
        gain = f" {self.rate / self.before:.2f} times as fast as it was." if self.before else ""
        return "\n".join(
            [
                *table(self._rows(), left=(0, 3, 4)),
                self.reason + gain,
                f"{ended} {self.seconds:.1f} s, {len(self.trials)} plans; {self.limits.cores:g} CPUs. "
                f"Not offered: {left_out or 'nothing'}.",
                self.code,
            ]
        )

    def _rows(self) -> list[list[str]]:
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
        why, start = self._search.refused, self._search.start
        # With "auto" nobody has chosen the backend that the loader has until then.
        known = {*self.limits.backends, *self.limits.refused}
        if why is not None and all(place.backend in known for place in start):
            rows.append([shown(start), "", "", "as it was", f"beyond the limits: {why}"])
        return rows if any(row[4] for row in rows) else [row[:4] for row in rows]


TRIALS = 14  # trials for which `seconds` are divided

OVERHEADS = {"inline": 0.0, "threads": 0.02, "fork": 0.3, "spawn": 4.0, "shared-memory": 2.0}
"""Seconds to start and end workers of a backend, before these are measured; 5 for any other."""

KEPT = 4  # batches on which the training step alone is timed


def tune(
    loader_or_pipeline: Any,
    seconds: float = 20,
    step: Callable[[Any], object] | float | None = None,
) -> Tuning:
    """Measure which workers load fastest, or cheapest, and return the choice.

    Plans are tried on real items for about a second each: one thread, two threads, the plan as it is,
    then plans that follow from these, with more and with fewer workers. The random generators, samplers
    and epochs of your program do not change. An iterable dataset, or the source of a pipeline, is read
    from its beginning for every plan. Functions and datasets are called from several threads, and in
    several processes.

    Parameters
    ----------
    loader_or_pipeline
        A `hybridloader.DataLoader`, a loader of torch's, or a `Pipeline`.
    seconds
        Limit of the time. Only a batch that has begun by then is waited for.
    step
        Your training step, called with real batches (it trains the model), or a number of batches (of
        items, for a pipeline) a second. The choice is then the cheapest plan that keeps up with it.
        None: the fastest plan, and the cheapest of those as fast.

    Returns
    -------
    Tuning
        A table of the trials, `apply` and `code`.

    Raises
    ------
    ValueError
        The dataset is empty, or a parameter is out of its range.
    TypeError
        `loader_or_pipeline` is neither a loader nor a pipeline, or is a loader that `from_torch`
        refuses.
    WorkerTimeout
        No batch came within `seconds`.
    Exception
        Errors of the dataset or of a function, if neither one thread nor the present plan returned a
        batch.

    Examples
    --------
    >>> import torch
    >>> from hybridloader import DataLoader, tune
    >>> data = torch.utils.data.TensorDataset(torch.arange(1000))
    >>> tuning = tune(DataLoader(data, 100, num_workers=2), seconds=0.5)
    >>> loader = tuning.apply()
    """
    check_seconds("tune: seconds", seconds, above=True)
    if not (step is None or callable(step) or (isinstance(step, (int, float)) and step > 0)):
        raise TypeError(
            f"tune: step must be a function of a batch, or batches a second above 0, not {step!r}"
        )
    subject = subject_of(loader_or_pipeline)
    return Tuner(subject, limits_here(subject.start), seconds, step).run()


class Tuner:
    """One tuning: it measures the plans that a `Search` proposes, until these or the time end."""

    def __init__(
        self,
        subject: Subject,
        limits: Limits,
        seconds: float,
        step: Callable[[Any], object] | float | None = None,
        clock: Callable[[], float] = time.perf_counter,
        stream: TextIO | None = None,
    ) -> None:
        self.subject, self.seconds, self._clock = subject, seconds, clock
        self._stream = sys.stderr if stream is None else stream
        self._call = step if callable(step) else None
        target = None if step is None or callable(step) else float(step)
        self.search = Search(subject.stages, subject.start, limits, gil_enabled(), target)
        # All the mutable state:
        self._overheads = dict(OVERHEADS)
        self._closings: dict[str, float] = {}  # seconds in which workers of a backend end
        self._first_error: Exception | None = None
        self._shown = 0

    def run(self) -> Tuning:
        """Measure, and return the result."""
        began = self._clock()
        deadline = began + self.seconds
        interrupted = False
        try:
            self._measure_all(began, deadline)
        except KeyboardInterrupt:
            if self.search.best is None:
                raise
            interrupted = True
        finally:
            self._say("")
        best = self.search.best
        if best is None:
            raise self._failure()
        before = self.search.trials.get(self.subject.start)
        return Tuning(
            trials=tuple(self.search.trials.values()),
            plan=best.plan,
            rate=best.rate,
            before=before.rate if before is not None and before.rates else None,
            target=self.search.target,
            keeps_up=None if self.search.target is None else self.search.keeps_up(best),
            seconds=self._clock() - began,
            interrupted=interrupted,
            limits=self.search.limits,
            _search=self.search,
            _subject=self.subject,
        )

    def _measure_all(self, began: float, deadline: float) -> None:
        slice_ = self.seconds / TRIALS
        for plan in self.search.plans():
            now = self._clock()
            backends = [place.backend for place in plan]
            slowest = max(self._closings.values(), default=0.0)  # for those that are not measured
            closing = max(self._closings.get(name, slowest) for name in backends)
            needed = max(closing, *(self._overheads.get(name, 5.0) for name in backends))
            end = deadline - closing
            best = self.search.best
            if best is not None and now + needed + slice_ / 2 > deadline:
                if now + slice_ / 2 > deadline:
                    break
                continue  # another backend may start sooner
            so_far = "" if best is None else f"; best: {shown(best.plan)}, {best.rate:,.1f}/s"
            passed = f"{now - began:.0f} of {self.seconds:.0f} s"
            self._say(f"tune: {passed}, trying {shown(plan)}{so_far}")
            timed = self._call is not None and self.search.target is None
            measured = measure(
                self.subject,
                plan,
                slice_,
                min(end, now + needed + 3 * slice_) if self.search.good else end,
                self._clock,
                step=self._call,
                keep=KEPT if timed else 0,
            )
            self.search.note(measured.trial)
            error = measured.error
            if error is not None:
                if self._first_error is None:
                    self._first_error = error
                hopeless = isinstance(error, (Empty, WorkerTimeout)) or plan == self.subject.start
                if hopeless and not self.search.good:
                    break  # no other plan can do better
            if measured.kept and timed:
                self.search.target = self._rate_of_step(measured.kept, slice_, deadline)
            self._overheads |= dict.fromkeys(backends, measured.overhead)
            if error is None:
                self._closings |= dict.fromkeys(backends, measured.closing)
            if self._call is not None and self.search.target is not None:
                # A trial runs the step, too, so the step alone is at least as fast. Its first calls may
                # be slow: with torch.compile, for example, or beside the load of another program.
                self.search.target = max(self.search.target, measured.trial.rate)

    def _failure(self) -> Exception:
        error = self._first_error
        if error is None:
            return ValueError(
                f"tune() had no time for one trial of {self.subject.name}; give it more seconds"
            )
        add_note(
            error,
            f"tune() had no batch of {self.subject.name} from any plan: "
            + "; ".join(f"{shown(t.plan)}: {t.error}" for t in self.search.trials.values()),
        )
        return error

    def _rate_of_step(
        self, batches: tuple[Any, ...], seconds: float, deadline: float
    ) -> float | None:
        """Return how many calls of the step are possible in a second, if loading took no time."""
        from hybridloader.observe.headroom_trials import synchronize

        assert self._call is not None
        times: list[float] = []
        began = self._clock()
        while len(times) < KEPT or self._clock() - began < seconds:
            synchronize()
            before = self._clock()
            self._call(batches[len(times) % len(batches)])
            synchronize()
            now = self._clock()
            times.append(now - before)
            late = now - began > 2 * seconds and len(times) > 1
            if len(times) >= 100 or late or now >= deadline:
                break
        median = statistics.median(times)
        return 1 / median if median > 0 else None

    def _say(self, text: str) -> None:
        """Show one line of progress in place of the last one, on a terminal."""
        if self._stream is not None and self._stream.isatty():
            self._stream.write(f"\r{text.ljust(self._shown)}" + ("" if text else "\r"))
            self._stream.flush()
            self._shown = len(text)


# -- "auto" ---------------------------------------------------------------------------------------------

SECONDS = 5.0  # limit of the measurement


def choose(loader: Any, auto: Auto) -> Tuning:
    """Measure, set the attributes of `loader` that are ``"auto"``, and report the choice in one line."""
    subject = LoaderSubject(loader, keep_threads=True)
    limits = limits_here(() if auto.backend else subject.start)
    tuning = tuner_of(subject, auto, limits).run()
    if tuning.interrupted:
        raise KeyboardInterrupt
    print(
        f"hybridloader: {subject.name} uses {shown(tuning.plan)}: {tuning.rate:,.1f}/s, chosen from "
        f"{len(tuning.trials)} plans in {tuning.seconds:.1f} s",
        file=sys.stderr,
    )
    tuning.apply()
    return tuning


def tuner_of(subject: LoaderSubject, auto: Auto, limits: Limits, **more: Any) -> Tuner:
    """Return a tuner that changes only the parameters that are ``"auto"``."""
    (start,) = subject.start
    if not auto.backend:
        limits = replace(limits, backends=("inline", start.backend))
    tuner = Tuner(subject, limits, SECONDS, **more)
    if not auto.workers:
        offered = [name for name in limits.backends if name != "inline"]
        tuner.search.given = tuple((start._replace(backend=name, threads=1),) for name in offered)
    return tuner
