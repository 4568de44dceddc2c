"""Samples that fail: policies, the records beside values, and the budget that counts them."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from hybridloader._support.text import beginning, cell, function, policy, seconds, table, whole
from hybridloader._support.user_objects import (
    Failure,
    Raised,
    described,
    mark,
    repr_of,
    twin,
)
from hybridloader.errors import HybridLoaderError, ShardLost, TooManyErrors

# -- failures of samples, as they travel beside the value of a task from a worker to the parent
#
# Plain tuples, by reference or by pickle; nothing is decided here.


class FailureRecord(NamedTuple):
    """Record of a sample that failed, made by its worker."""

    index: Any  # index that the loader requested
    position: int  # number of good samples before it in its task
    failure: Failure  # samples of a batch that failed as a whole share it
    replaced: bool = False  # another sample was put in its place


class Note(NamedTuple):
    """Failures to be counted, raised or left out between two results of a pipeline's task."""

    position: int  # number of results before it
    attempted: int  # samples that count, those of `failures` included, but the one that follows
    failures: Sequence[FailureRecord]
    item: str | None = None  # short repr, if the failure replaces this item; None: only counted
    follows: bool = False  # one of these samples is the next result, and counts with it
    left_out: bool = False  # nothing comes in the place of the item

    @property
    def takes_a_place(self) -> bool:
        """True if an error comes in the place of an item."""
        return self.item is not None and not self.left_out


class Outcome(NamedTuple):
    """Metadata of the value of a loader's task."""

    attempted: int  # samples, those of `failures` included
    failures: Sequence[FailureRecord] = ()
    empty: bool = False  # no sample is left, and the value is no batch


Attempt = tuple[Any, Outcome]  # value of a task, and the outcome of its samples


def nothing_left(failures: Sequence[FailureRecord]) -> Attempt:
    """Return the attempt at a batch of which all samples have failed."""
    return [], Outcome(len(failures), failures, empty=True)


def all_failed(
    asked: Sequence[Any], error: Exception, failures: Sequence[FailureRecord]
) -> Attempt:
    """Return the attempt at a batch whose good samples fail as a whole; `failures` came before."""
    failed = [failed.position for failed in failures if not failed.replaced]
    gone = {place + before for before, place in enumerate(failed)}
    good = (index for place, index in enumerate(asked) if place not in gone)
    batch = [FailureRecord(index, place, Failure(error)) for place, index in enumerate(good)]
    return nothing_left(sorted([*failures, *batch], key=lambda failed: failed.position))


# -- policies of `on_error`: skip, replace or retry samples that fail
#
# They are descriptions, compared by value and sent to workers by pickle. They do nothing by themselves:
# `ItemLoop` repeats and replaces in the worker; `ErrorBudget` counts and records where results are
# handed out.

LEAST = 1000
"""Least number of samples that a share refers to: otherwise the first bad sample would be 100 %."""

MaxFailures = int | float | None


@dataclass(frozen=True)
class Skip:
    """Leave out samples that fail.

    Parameters
    ----------
    max_failures
        Samples that may be left out in one epoch; one more raises `TooManyErrors`. An int is a number
        of samples. A float above 0 and up to 1 is a share of the samples attempted so far in this
        epoch, which count as 1000 at least. None sets no limit.
    """

    max_failures: MaxFailures = 0.01

    def __post_init__(self) -> None:
        _check_max_failures("Skip", self.max_failures)


@dataclass(frozen=True)
class Replace:
    """Substitute another sample for one that fails.

    Parameters
    ----------
    fn
        Function that returns the other sample, called as ``fn(index, error)`` in the worker where the
        sample failed. Its errors are raised. In a pipeline `index` is the item.
    max_failures
        Samples that may be replaced; see `Skip`.
    """

    fn: Callable[[Any, Exception], Any]
    max_failures: MaxFailures = 0.01

    def __post_init__(self) -> None:
        function("Replace: fn", self.fn, "callable as fn(index, error)")
        _check_max_failures("Replace", self.max_failures)


@dataclass(frozen=True)
class Retry:
    """Fetch a sample that fails again, for errors that pass, such as those of a network.

    Parameters
    ----------
    max_retries
        Number of retries, at least 1.
    backoff
        Seconds before the first retry; the wait doubles with each further one.
    retry_on
        Class, or tuple of classes, of the exceptions to retry after. Any other is left to `then` at
        once.
    then
        Policy after the last retry has failed: ``"raise"``, ``"skip"``, a `Skip` or a `Replace`.
    max_backoff
        Longest single wait, in seconds.
    """

    max_retries: int
    backoff: float = 0.1
    retry_on: type[Exception] | tuple[type[Exception], ...] = (Exception,)
    then: str | Skip | Replace = "raise"
    max_backoff: float = 60.0

    def __post_init__(self) -> None:
        whole("Retry: max_retries", self.max_retries, 1)
        seconds("Retry: backoff", self.backoff)
        seconds("Retry: max_backoff", self.max_backoff)
        kinds: Any = self.retry_on if isinstance(self.retry_on, tuple) else (self.retry_on,)
        for kind in kinds:
            if not (isinstance(kind, type) and issubclass(kind, Exception)):
                raise TypeError(f"Retry: retry_on must be subclasses of Exception, not {kind!r}")
        if not kinds:
            raise ValueError(
                "Retry: retry_on=() retries no error; omit it to retry every Exception"
            )
        if isinstance(self.then, Retry):
            raise ValueError("Retry: then can't be another Retry; raise `max_retries` instead")
        try:
            parse_on_error(self.then)
        except ValueError:
            raise ValueError(
                f'Retry: then must be "raise", "skip", a Skip or a Replace, not {self.then!r}'
            ) from None


Policy = Skip | Retry | Replace


def parse_on_error(value: Any, name: str = "on_error") -> Policy | None:
    """Return the policy that `value` of the parameter `name` is or names; None for ``"raise"``.

    Raises `ValueError` for other values.
    """
    if value is None:
        return None
    choices = '"raise", "skip", a Skip, a Retry or a Replace'
    kinds: tuple[type[Policy], ...] = (Skip, Retry, Replace)
    return policy(name, value, {"raise": None, "skip": Skip}, kinds, choices)


def final(policy: Policy | None) -> Skip | Replace | None:
    """Return the policy for a sample that is not retried any more; None raises."""
    if isinstance(policy, Retry):
        last = parse_on_error(policy.then)
        assert not isinstance(last, Retry)
        return last
    return policy


def _check_max_failures(policy: str, value: Any) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(
            f"{policy}: max_failures must be an int (samples), a float (a share of the samples) or "
            f"None, not {value!r}"
        )
    if isinstance(value, int):
        if value < 0:
            raise ValueError(f"{policy}: max_failures={value} samples; it must not be negative")
    elif not 0 < value <= 1:  # NaN is neither
        raise ValueError(
            f"{policy}: max_failures={value} is no share: pass a float above 0 and at most 1, or an int "
            "for a number of samples"
        )


# -- place of an error in a stream of items: in the place of one item, beside the items, or unknown
#
# An error is raised where its item would have been returned, so code that counts items counts it too.
# The functions here distinguish such errors from others. The mark is an attribute of the exception,
# because nothing else goes with it through threads and the steps of users.


class LeftOut(HybridLoaderError):
    """Place of an item that is `not_needed`. No user ever gets this error."""


def not_needed() -> LeftOut:
    """Return the place of an item that a resumed run does not make again: see `Operator.needed`."""
    place = LeftOut()
    mark(place, "not needed")
    return place


def rest_is_lost(which: str, error: Exception) -> ShardLost:
    """Return the error that follows `error`, which `which`, a generator, has raised."""
    lost = ShardLost(
        f"{which} raised {described(error)}. The iterator is a generator, which ends at an error, so "
        "the rest of the shard is lost. Catch the error inside the generator, or write an iterator "
        "class with __next__, which can return more items after an error"
    )
    mark(lost, "astray")
    return lost


def alike(error: Exception, place: str | None = None) -> Exception:
    """Return another exception like `error`, to be raised elsewhere, with another place if one is given.

    ``"beside"`` takes no item's place; after ``"astray"`` items can't be numbered any more. Its
    traceback lacks the last frame, that of the function that caught `error` and keeps the copy.
    """
    other, frames = twin(error), error.__traceback__
    BaseException.__setattr__(other, "__traceback__", frames and frames.tb_next)
    if place is not None:
        mark(other, place)
    return other


# -- samples that were skipped or replaced in one epoch, counted in the parent against the policy's limit
#
# They are counted in the order in which results are handed out, so the count depends on the data and on
# no worker's timing. No exception that is kept here holds a frame.

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

    def add(self, record: Skipped, key: Hashable, run: list[Skipped]) -> None:
        """Count a record under `key`, and add it to those of its `run`, which may be over."""
        self.counts[key] += 1
        self.replaced[key] += record.replaced
        run.append(record)


class ErrorBudget:
    """Skipped samples of one stage in one pass, and how many more are allowed."""

    def __init__(
        self,
        policy: Policy,  # its `max_failures` is the limit
        stage: str,
        epoch: int = 0,
        log: FailureLog | None = None,  # gets every record, counted under `key`
        key: Hashable = None,
    ) -> None:
        last = final(policy)
        self.skips = isinstance(last, Skip)
        self._limit = None if last is None else last.max_failures
        self._stage, self.epoch = stage, epoch
        self._log, self._key = log, key
        self._shared = None if log is None else log.records
        self.on_record: Callable[[Skipped], None] | None = None  # called with each record
        # All the mutable state:
        self.records: list[Skipped] = []  # in the order in which results were handed out
        self.attempted = 0  # samples so far, failed ones included

    def count(self, attempted: int, failures: Iterable[FailureRecord], worker: int | None) -> None:
        """Count `attempted` samples, of which `failures` failed.

        Raises `TooManyErrors` if the budget has run out; all failures are recorded. The error stands
        beside the items, in the place of none.
        """
        if self._exceeded_by(attempted, failures, worker):
            raise alike(self._too_many(), "beside")

    def leave_out(self, failed: FailureRecord, worker: int | None) -> None:
        """Record a sample that failed and is left out.

        Raises `TooManyErrors`, in the place of the sample, if the budget has run out.
        """
        if self._exceeded_by(1, [failed], worker):
            raise self._too_many()

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
        shown = self.records[:_SHOWN]
        texts = (repr_of(record.error).replace("\n", "\\n") for record in shown)
        rows = [(cell(r.index), beginning(t, _WIDE)) for r, t in zip(shown, texts, strict=True)]
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


# -- results of a pipeline's stage as they are handed out, each error in the place of its result


class ResultQueue(Iterator[Any]):
    """Results of tasks, and the notes and errors between them.

    It continues after an error, and ends whenever nothing is waiting. Without a `budget` errors are
    raised, and nothing is counted. `where` describes where an item failed at a worker.
    """

    def __init__(self, budget: ErrorBudget | None, where: Callable[[str, int | None], str]) -> None:
        self._budget, self._where = budget, where
        # All the mutable state:
        self.results: deque[Any] = deque()  # the caller may pop from it while `between` is empty
        # Notes and errors, each with its position among all results so far, and the worker.
        self.between: deque[tuple[int, Note | Raised, int | None]] = deque()
        self._added = 0  # results so far

    def add(self, results: Sequence[Any], notes: Sequence[Note], worker: int | None = None) -> int:
        """Add the results of `worker`; return how many come out, as results or as errors."""
        added = self._added
        self.between.extend((added + note.position, note, worker) for note in notes)
        self.results.extend(results)
        self._added = added + len(results)
        return len(results) + sum(note.takes_a_place for note in notes)

    def fail(self, error: Exception) -> None:
        """Add an error that is raised in the place of one result, after all others."""
        self.between.append((self._added, Raised(error), None))

    @property
    def gone(self) -> bool:
        """True if the next entry takes no place: it is counted, or left out with its place."""
        return bool(self.between) and self._due and not _takes_a_place(self.between[0][1])

    @property
    def places(self) -> int:
        """Number of the entries that wait and take a place."""
        return len(self.results) + sum(_takes_a_place(entry) for _, entry, _ in self.between)

    @property
    def _due(self) -> bool:
        return self.between[0][0] <= self._added - len(self.results)

    def __bool__(self) -> bool:
        return bool(self.results or self.between)

    def __next__(self) -> Any:
        while self.between and self._due:
            self.settle()
        if not self.results:
            raise StopIteration
        if self._budget is not None:
            self._budget.count(1, (), None)
        return self.results.popleft()

    def settle(self) -> None:
        """Count the next entry, which is no result, or raise it."""
        _, note, worker = self.between.popleft()
        if isinstance(note, Raised):
            note.throw()
        if note.item is None:
            if self._budget is not None:
                try:
                    self._budget.count(note.attempted + note.follows, note.failures, worker)
                finally:
                    self._budget.attempted -= note.follows
        elif self._budget is not None and note.left_out:
            self._budget.leave_out(note.failures[0], worker)
        else:
            where = self._where(note.item, worker)
            Raised(note.failures[0].failure.to_exception(where)).throw()


def _takes_a_place(entry: Note | Raised) -> bool:
    return isinstance(entry, Raised) or entry.takes_a_place
