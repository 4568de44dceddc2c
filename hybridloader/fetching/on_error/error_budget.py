"""Samples that were skipped or replaced in one epoch, counted in the parent against the policy's limit.

They are counted in the order in which results are handed out, so the count depends on the data and on
no worker's timing. No exception that is kept here holds a frame.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field
from typing import Any

from hybridloader._support.error_handling import repr_of
from hybridloader._support.failure import Failure, twin
from hybridloader._support.text import cell, table
from hybridloader.errors import TooManyErrors
from hybridloader.fetching.on_error.places import LeftOut, beside, goes_astray
from hybridloader.fetching.on_error.policies import LEAST, Policy, Skip, final
from hybridloader.fetching.outcome import FailureRecord

_SHOWN = 20  # lines of the table in `TooManyErrors`
_WIDE = 120  # characters of an exception in that table

_TRACEBACKS = 1000
"""Records of an epoch that keep a traceback. A traceback takes about 2 KB, so that an epoch that loses
millions of samples would hold gigabytes of the same text."""


@dataclass(frozen=True)
class Skipped:
    """Record of a sample that was left out or replaced.

    Attributes
    ----------
    index
        Index of the sample; in an iterable source its number, from 0, in the shard of that worker; in a
        pipeline the item, shortened unless it is a number or a text.
    error
        The exception, without its frames.
    traceback
        Traceback as text; empty after the first thousand of an epoch.
    worker
        Number of the worker; None where the calling thread did the work.
    stage
        Name of the stage; ``"DataLoader"`` for a loader.
    epoch
        Number of the epoch, from 0.
    replaced
        True if another sample was substituted.
    """

    index: Any
    error: Exception
    traceback: str = field(repr=False)
    worker: int | None
    stage: str
    epoch: int
    replaced: bool = False


class FailureLog:
    """Skipped samples of all stages of one machine: counted over all passes, recorded for one run."""

    def __init__(self) -> None:
        self.counts: Counter[Hashable] = Counter()
        self.replaced: Counter[Hashable] = Counter()  # the replaced ones among them
        self.records: list[Skipped] = []

    @property
    def total(self) -> int:
        return sum(list(self.counts.values()))  # a copy: other threads count too

    def add(self, record: Skipped, key: Hashable, run: list[Skipped]) -> None:
        """Count a record under `key`, and add it to those of its `run`, which may be over."""
        self.counts[key] += 1
        self.replaced[key] += record.replaced
        run.append(record)

    def new_run(self) -> None:
        """Begin the records of another run; the old list stays as it is."""
        self.records = []


class ErrorBudget:
    """Skipped samples of one stage in one pass, and how many more are allowed."""

    def __init__(
        self,
        policy: Policy,  # its `max_failures` is the limit
        stage: str,
        epoch: int = 0,
        log: FailureLog | None = None,  # gets every record, counted under `key`
        key: Hashable = None,
        *,
        gaps: bool = False,  # keep the places of skipped items: `LeftOut` is raised there
    ) -> None:
        last = final(policy)
        self.skips = isinstance(last, Skip)
        self._limit = None if last is None else last.max_failures
        self._stage, self.epoch, self.gaps = stage, epoch, gaps
        self._log, self._key = log, key
        self._shared = None if log is None else log.records
        self.on_record: Callable[[Skipped], None] | None = None  # called with each record
        # All the mutable state:
        self.records: list[Skipped] = []  # in the order in which results were handed out
        self.attempted = 0  # samples so far, failed ones included

    def may_skip(self, failure: Failure) -> bool:
        """Return True if a sample that raised this is left out, and its error not raised."""
        # The rest of a shard is more than one sample, and no sample of it was attempted.
        return self.skips and not goes_astray(failure.exception)

    def count(self, attempted: int, failures: Iterable[FailureRecord], worker: int | None) -> None:
        """Count `attempted` samples, of which `failures` failed.

        Raises `TooManyErrors` if the budget has run out; all failures are recorded. The error stands
        beside the items, in the place of none.
        """
        if self._exceeded_by(attempted, failures, worker):
            raise beside(self._too_many())

    def leave_out(self, failed: FailureRecord, worker: int | None) -> None:
        """Record a sample that failed and is left out.

        Raises, in the place of the sample, `TooManyErrors` if the budget has run out, or `LeftOut` if
        the place must be kept.
        """
        if self._exceeded_by(1, [failed], worker):
            raise self._too_many()
        if self.gaps:
            raise LeftOut

    @property
    def allowed(self) -> float:
        """Number of samples that may have been skipped by now."""
        if self._limit is None:
            return float("inf")
        if isinstance(self._limit, int):
            return self._limit
        # 0.29 * 100 is 28.999999999999996.
        return int(self._limit * max(self.attempted, LEAST) + 1e-9)

    def _exceeded_by(
        self, attempted: int, failures: Iterable[FailureRecord], worker: int | None
    ) -> bool:
        self.attempted += attempted
        before = len(self.records)
        for failed in failures:
            text = failed.failure.text if len(self.records) < _TRACEBACKS else ""
            error = bare(failed.failure.exception)
            record = Skipped(
                failed.index, error, text, worker, self._stage, self.epoch, failed.replaced
            )
            self.records.append(record)
            if self.on_record is not None:
                self.on_record(record)
            if self._log is not None and self._shared is not None:
                self._log.add(record, self._key, self._shared)
        return len(self.records) > max(before, self.allowed)

    def _too_many(self) -> TooManyErrors:
        failed, done = len(self.records), "skipped" if self.skips else "replaced"
        limit = f"max_failures={self._limit}"
        if isinstance(self._limit, float):
            limit += f": {int(self.allowed)} of {max(self.attempted, LEAST)}"
        rows = [(cell(r.index), _line_of(r.error)) for r in self.records[:_SHOWN]]
        lines = table([("index", "exception"), *rows], underlined=False)
        if failed > _SHOWN:
            lines.append(f"and {failed - _SHOWN} more")
        error = TooManyErrors(
            f"In stage {self._stage!r}, {failed} of {self.attempted} samples failed, more than on_error "
            f"allows ({limit}). Fix the data, or raise max_failures; None sets no limit. "
            f"These were {done}:\n" + "\n".join(lines)
        )
        error.__cause__ = self.records[-1].error
        return error


def bare(exception: BaseException) -> Exception:
    """Return a copy of `exception` without frames, cause and context; the text has all these.

    It is a copy because somebody may be handling the exception, or one that was raised from it.
    """
    assert isinstance(exception, Exception)
    other = twin(exception)
    for name in ("__cause__", "__context__", "__traceback__"):
        BaseException.__setattr__(other, name, None)
    return other


def _line_of(error: Exception) -> str:
    text = repr_of(error).replace("\n", "\\n")
    return text if len(text) <= _WIDE else text[: _WIDE - 3] + "..."
