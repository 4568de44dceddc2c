"""What was skipped or replaced in one pass, and whether that is too much: counted in the parent.

It is counted where results are handed out, in their order, so what comes of it depends on the data and
on no worker's timing. No exception that is kept here holds a frame.
"""

from __future__ import annotations

import traceback
from collections import Counter
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from typing import Any

from hybridloader._support.errors import Failure, ShardLost, TooManyErrors, twin
from hybridloader._support.text import cell, table
from hybridloader.fetching.on_error.places import LeftOut, beside
from hybridloader.fetching.on_error.policies import LEAST, Policy, Skip, final
from hybridloader.fetching.outcome import FailureRecord

_SHOWN = 20
"""Lines of the table in `TooManyErrors`."""

_WIDE = 120
"""Characters of an exception in that table."""

_TRACEBACKS = 1000
"""Records of a pass that keep a traceback: at some 2 KB each, a pass that loses millions would hold
gigabytes of the same text."""


@dataclass(frozen=True)
class Skipped:
    """A sample that was left out or replaced.

    Attributes
    ----------
    index
        Its index; of an iterable source its number in what that worker reads, from 0; in a pipeline the
        item, in short unless it is a number or a text.
    error
        The exception, without its frames.
    traceback
        As text; empty after the first thousand of a pass.
    worker
        The number of the worker; None where the thread that asked did the work.
    stage
        The name of the stage; ``"DataLoader"`` for a loader.
    epoch
        The pass, from 0.
    replaced
        Whether another sample was put in its place.
    """

    index: Any
    error: Exception
    traceback: str = field(repr=False)
    worker: int | None
    stage: str
    epoch: int
    replaced: bool = False


class FailureLog:
    """What all stages of one machine have lost: counted over all passes, recorded for one run."""

    def __init__(self) -> None:
        self.counts: Counter[Hashable] = Counter()
        self.records: list[Skipped] = []

    @property
    def total(self) -> int:
        return sum(list(self.counts.values()))  # a copy: other threads count, too

    def new_run(self) -> None:
        """Records from now on are of another run; who has the old ones keeps them."""
        self.records = []


class ErrorBudget:
    """What one stage has lost in one pass.

    Parameters
    ----------
    policy
        What is allowed.
    stage
        Its name.
    epoch
        The number of the pass.
    log
        Is told too, under `key`.
    gaps
        Whether a left-out item keeps its place: `LeftOut` is raised there.

    Attributes
    ----------
    records
        In the order in which results were handed out.
    attempted
        Samples until now, those that failed among them.
    """

    def __init__(
        self,
        policy: Policy,
        stage: str,
        epoch: int = 0,
        log: FailureLog | None = None,
        key: Hashable = None,
        *,
        gaps: bool = False,
    ) -> None:
        last = final(policy)
        self.skips = isinstance(last, Skip)
        self._budget = None if last is None else last.budget
        self._stage, self.epoch, self.gaps = stage, epoch, gaps
        self._log, self._key = log, key
        self._shared = None if log is None else log.records
        # All the mutable state:
        self.records: list[Skipped] = []
        self.attempted = 0

    def may_skip(self, failure: Failure) -> bool:
        """True if what raised this is left out, and not raised."""
        # The rest of a shard is more than one sample, and nobody has attempted it.
        return self.skips and not isinstance(failure.exception, ShardLost)

    def count(self, attempted: int, failures: Iterable[FailureRecord], worker: int | None) -> None:
        """So many samples were attempted, of which these failed.

        Raises
        ------
        TooManyErrors
            The budget has run out. All failures have been recorded. The error stands beside the
            items, in the place of none.
        """
        if self._note(attempted, failures, worker):
            raise beside(self._too_many())

    def leave_out(self, failed: FailureRecord, worker: int | None) -> None:
        """Record a sample that was attempted, failed, and is left out.

        Raises
        ------
        TooManyErrors
            The budget has run out. The error stands in the place of the sample.
        LeftOut
            The place of the sample must be kept.
        """
        if self._note(1, [failed], worker):
            raise self._too_many()
        if self.gaps:
            raise LeftOut

    def _note(self, attempted: int, failures: Iterable[FailureRecord], worker: int | None) -> bool:
        """Count `attempted` samples, record `failures`, and tell whether these exceed the budget."""
        self.attempted += attempted
        before = len(self.records)
        for failed in failures:
            self._record(failed, worker)
        return len(self.records) > before and len(self.records) > self.allowed

    @property
    def allowed(self) -> float:
        """Samples that may have been lost by now."""
        if self._budget is None:
            return float("inf")
        if isinstance(self._budget, int):
            return self._budget
        return int(
            self._budget * max(self.attempted, LEAST) + 1e-9
        )  # 0.07 * 100 is 7.000000000000001

    def _record(self, failed: FailureRecord, worker: int | None) -> None:
        text = ""
        if len(self.records) < _TRACEBACKS:
            text = text_of(failed.failure)
        error = bare(failed.failure.exception)
        record = Skipped(
            failed.index, error, text, worker, self._stage, self.epoch, replaced=failed.replaced
        )
        self.records.append(record)
        if self._log is not None:
            self._log.counts[self._key] += 1
        if self._shared is not None:
            self._shared.append(record)

    def _too_many(self) -> TooManyErrors:
        lost, done = len(self.records), "skipped" if self.skips else "replaced"
        budget = f"budget={self._budget}"
        if isinstance(self._budget, float):
            budget += f": {int(self.allowed)} of {max(self.attempted, LEAST)}"
        rows = [(cell(r.index), _line_of(r.error)) for r in self.records[:_SHOWN]]
        lines = table([("index", "exception"), *rows], underlined=False)
        if lost > _SHOWN:
            lines.append(f"and {lost - _SHOWN} more")
        error = TooManyErrors(
            f"In stage {self._stage!r}, {lost} of {self.attempted} samples failed, more than on_error "
            f"allows ({budget}). Mend the data, or give a larger budget; None sets no limit. "
            f"These were {done}:\n" + "\n".join(lines)
        )
        error.__cause__ = self.records[-1].error
        return error


def text_of(failure: Failure) -> str:
    """The traceback of what failed, as text."""
    if failure.traceback is not None:
        return failure.traceback
    exception = failure.exception
    return "".join(traceback.format_exception(type(exception), exception, exception.__traceback__))


def bare(exception: BaseException) -> Exception:
    """Another exception like this one, without frames, cause and context: all these are in the text.

    Not the same one: somebody may be handling it, or an exception that it was raised from.
    """
    try:
        assert isinstance(exception, Exception)
        other = twin(exception)
    except Exception:  # a class with a constructor or slots of its own
        other = RuntimeError(f"{type(exception).__qualname__}: {exception}")
    other.__cause__ = other.__context__ = None
    return other.with_traceback(None)


def _line_of(error: Exception) -> str:
    text = repr(error).replace("\n", "\\n")
    return text if len(text) <= _WIDE else text[: _WIDE - 3] + "..."
