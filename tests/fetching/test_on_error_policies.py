"""The policies themselves, the loop around one call, the budget, and how batches are filled up."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridloader import Replace, Retry, Skip, TooManyErrors
from hybridloader._support.user_objects import Failure
from hybridloader.engine.messages import Abandoned, GivenUp, PartlyGivenUp, TaskContext
from hybridloader.errors import ShardLost, WorkerDied
from hybridloader.fetching.item_loop import ItemLoop
from hybridloader.fetching.on_error import (
    Attempt,
    ErrorBudget,
    FailureLog,
    FailureRecord,
    Outcome,
    bare,
    final,
    parse_on_error,
    rest_is_lost,
    short_batch,
)
from hybridloader.loader.progress import FullBatches

# -- policies --------------------------------------------------------------------------------------


def nothing(index: Any, error: Exception) -> None:
    return None


@pytest.mark.parametrize(
    ("make", "kind", "message"),
    [
        (lambda: Skip(-1), ValueError, "must not be negative"),
        (lambda: Skip(0.0), ValueError, "is no share"),
        (lambda: Skip(1.5), ValueError, "is no share"),
        (lambda: Skip(float("nan")), ValueError, "is no share"),
        (lambda: Skip(True), TypeError, "Skip: max_failures must be an int"),
        (lambda: Skip("1"), TypeError, "Skip: max_failures must be an int"),  # type: ignore[arg-type]
        (lambda: Replace(3), TypeError, "must be callable"),  # type: ignore[arg-type]
        (lambda: Replace(nothing, 2.0), ValueError, "is no share"),
        (lambda: Retry(0), ValueError, "at least 1"),
        (lambda: Retry(True), TypeError, "must be a whole number"),
        (lambda: Retry(1.5), TypeError, "must be a whole number"),  # type: ignore[arg-type]
        (lambda: Retry(1, -1), ValueError, "backoff is seconds"),
        (lambda: Retry(1, float("inf")), ValueError, "backoff=inf is more seconds"),
        (lambda: Retry(1, float("nan")), ValueError, "backoff is seconds"),
        (lambda: Retry(1, "1"), ValueError, "backoff is seconds"),  # type: ignore[arg-type]
        (lambda: Retry(1, max_backoff=-1), ValueError, "max_backoff is seconds"),
        (lambda: Retry(1, retry_on=()), ValueError, "retries no error"),
        (
            lambda: Retry(1, retry_on=KeyboardInterrupt),
            TypeError,
            "must be subclasses of Exception",
        ),  # type: ignore[arg-type]
        (lambda: Retry(1, retry_on=(OSError, 3)), TypeError, "must be subclasses of Exception"),  # type: ignore[arg-type]
        (lambda: Retry(1, then=Retry(1)), ValueError, "raise `max_retries`"),  # type: ignore[arg-type]
        (lambda: Retry(1, then="ignore"), ValueError, "then must be"),
        (lambda: parse_on_error("ignore"), ValueError, "on_error must be"),
        (lambda: parse_on_error(Skip), ValueError, r"write Skip\(\.\.\.\)"),
        (lambda: parse_on_error(0), ValueError, "on_error must be"),
    ],
)
def test_what_makes_no_sense_is_refused(
    make: Callable[[], Any], kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=message) as caught:
        make()
    assert type(caught.value) is kind


def test_policies_are_values() -> None:
    for policy in (
        Skip(),
        Skip(3),
        Skip(None),
        Replace(nothing, 0.5),
        Retry(3, 0.0, OSError, Skip(2)),
    ):
        assert pickle.loads(pickle.dumps(policy)) == policy
        assert parse_on_error(policy) is policy
        assert hash(policy) == hash(pickle.loads(pickle.dumps(policy)))
    assert parse_on_error("skip") == Skip() == Skip(0.01) != Skip(0.02)
    assert parse_on_error("raise") is parse_on_error(None) is None
    assert final(Retry(1)) is None
    assert final(Retry(1, then="skip")) == Skip()
    assert final(Retry(1, then=Replace(nothing))) == Replace(nothing)
    assert final(None) is None


# -- one call --------------------------------------------------------------------------------------


class Scripted:
    """Raises what it is told, one after the other, and returns what is no exception."""

    def __init__(self, *script: Any) -> None:
        self.script = list(script)
        self.calls: list[Any] = []

    def __call__(self, argument: Any) -> Any:
        self.calls.append(argument)
        found = self.script.pop(0)
        if isinstance(found, BaseException):
            raise found
        return found


def called(
    policy: Any,
    function: Callable[[Any], Any],
    argument: Any,
    context: TaskContext | None = None,
    **options: Any,
) -> Any:
    """Return ``function(argument)``, as the loop over the items of a batch calls it."""
    loop = ItemLoop([("map", function)], policy, context or TaskContext(), batch=True, **options)
    (found,) = loop.run([argument], spared=isinstance(argument, GivenUp)).values
    return found


def test_waits_are_doubled_up_to_the_longest_and_cut_into_slices() -> None:
    slept: list[float] = []
    policy = Retry(5, backoff=0.05, max_backoff=0.3)
    function = Scripted(*[OSError(n) for n in range(5)], "good")
    assert called(policy, function, 7, sleep=slept.append) == "good"
    assert function.calls == [7] * 6
    assert sum(slept) == pytest.approx(0.05 + 0.1 + 0.2 + 0.3 + 0.3)
    assert max(slept) <= 0.02


def test_without_backoff_nobody_sleeps() -> None:
    policy, function = Retry(1, backoff=0), Scripted(OSError(), 1)
    assert called(policy, function, 0, sleep=lambda seconds: pytest.fail("slept")) == 1


def test_a_wait_ends_when_nobody_waits_any_more() -> None:
    flag, slept = TaskContext(), []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        if len(slept) == 3:
            flag.cancelled = True

    function = Scripted(OSError(), "never")
    with pytest.raises(Abandoned):
        called(Retry(1, backoff=60), function, 0, flag, sleep=sleep)
    assert len(slept) == 3
    assert len(function.calls) == 1


def test_only_what_is_worth_it_is_tried_again() -> None:
    policy = Retry(3, 0, OSError)
    function = Scripted(OSError("passes"), ValueError("stays"), "never")
    with pytest.raises(ValueError, match="stays"):
        called(policy, function, 0)
    assert len(function.calls) == 2


def test_times_counts_the_repetitions_and_the_last_error_is_raised() -> None:
    function = Scripted(OSError(0), OSError(1), OSError(2), "never")
    with pytest.raises(OSError, match="2") as caught:
        called(Retry(2, 0), function, 0)
    assert len(function.calls) == 3
    assert caught.value.__context__ is None


def test_a_replacement_is_told_what_failed() -> None:
    seen = []

    def instead(index: int, error: Exception) -> str:
        seen.append((index, repr(error)))
        return "other"

    policy = Retry(1, 0, then=Replace(instead))
    loop = ItemLoop([("map", Scripted(OSError(0), OSError(1)))], policy, TaskContext(), batch=True)
    results = loop.run([7])
    assert results.values == ["other"]
    (failed,) = results.failures
    assert (repr(failed.failure.exception), failed.replaced) == ("OSError(1)", True)
    assert seen == [(7, "OSError(1)")]


def test_what_a_replacement_raises_is_raised_and_says_why_it_was_called() -> None:
    def instead(index: int, error: Exception) -> None:
        raise KeyError(index)

    with pytest.raises(KeyError) as caught:
        called(Replace(instead), Scripted(OSError("first")), 7)
    assert repr(caught.value.__cause__) == "OSError('first')"
    assert "function of Replace" in caught.value.__notes__[0]

    def again(index: int, error: Exception) -> None:
        raise error

    with pytest.raises(OSError, match="first") as second:
        called(Replace(again), Scripted(OSError("first")), 7)
    assert second.value.__cause__ is None


@pytest.mark.parametrize("policy", [Skip(), Retry(3, 0), Replace(nothing)])
def test_what_is_no_exception_passes(policy: Any) -> None:
    for error in (KeyboardInterrupt(), SystemExit(), Abandoned()):
        function = Scripted(error, "never")
        with pytest.raises(type(error)):
            called(policy, function, 0)
        assert len(function.calls) == 1


def test_a_stop_iteration_is_a_runtime_error() -> None:
    policy = Retry(1, 0, retry_on=RuntimeError)
    assert called(policy, Scripted(StopIteration(3), "good"), 0) == "good"
    with pytest.raises(RuntimeError, match="raised StopIteration"):
        called(Retry(1, 0, retry_on=OSError), Scripted(StopIteration()), 0)


def test_what_was_given_up_is_not_tried_but_may_be_replaced() -> None:
    function = Scripted("never")
    lost = GivenUp(7, "it kills")
    with pytest.raises(WorkerDied, match="it kills"):
        called(Retry(5, 0), function, lost)
    policy = Retry(5, 0, then=Replace(lambda i, e: (i, e.args)))
    assert called(policy, function, lost) == (7, ("it kills",))
    assert function.calls == []
    spared = pickle.loads(pickle.dumps(PartlyGivenUp([1, lost])))
    assert type(spared) is PartlyGivenUp
    assert (spared[0], spared[1].index, spared[1].text) == (1, 7, "it kills")


def test_an_error_that_is_raised_leaves_no_cycle() -> None:
    import gc

    gc.collect()
    gc.disable()
    try:
        for policy in (Retry(2, 0), Replace(lambda i, e: 1 / 0)):
            try:
                called(policy, lambda n: {}[n], 0)
            except (ArithmeticError, LookupError):
                pass
        assert gc.collect() == 0
    finally:
        gc.enable()


# -- the budget ------------------------------------------------------------------------------------


def failed(index: Any, error: Exception | None = None) -> FailureRecord:
    return FailureRecord(index, 0, Failure(error or ValueError(index)))


def fails_at(policy: Any, attempted: list[int]) -> int | None:
    """The number of the failure that is one too many, if one fails behind so many good ones each."""
    budget = ErrorBudget(policy, "stage")
    for number, good in enumerate(attempted):
        budget.count(good, (), None)
        try:
            budget.count(1, [failed(number)], 0)
        except TooManyErrors:
            return number
    return None


@pytest.mark.parametrize(
    ("budget", "attempted", "last"),
    [
        (0, [5], 0),
        (2, [0] * 9, 2),
        (2, [10**6] * 9, 2),
        (0.01, [0] * 50, 10),  # of a thousand at least
        (0.01, [99] * 500, None),  # just one in a hundred
        (0.01, [98] * 500, 10),
        (0.01, [2000, *[0] * 99], 20),
        (0.07, [100, *[0] * 99], 70),
        (1.0, [0] * 2000, None),
        (None, [0] * 2000, None),
    ],
)
def test_a_budget_is_a_number_or_a_share(
    budget: Any, attempted: list[int], last: int | None
) -> None:
    assert fails_at(Skip(budget), attempted) == last
    assert fails_at(Replace(nothing, budget), attempted) == last
    assert fails_at(Retry(1, then=Skip(budget)), attempted) == last


def test_the_error_tells_what_was_skipped() -> None:
    budget = ErrorBudget(Skip(22), "the stage")
    for number in range(22):
        budget.count(1, [failed(number, KeyError("x" * 500))], 0)
    with pytest.raises(TooManyErrors) as caught:
        budget.count(1, [failed(22, KeyError("x" * 500))], 0)
    lines = str(caught.value).splitlines()
    assert lines[0].startswith("In stage 'the stage', 23 of 23 samples failed")
    assert "max_failures=22" in lines[0]
    assert lines[1].split() == ["index", "exception"]
    assert [line.split()[0] for line in lines[2:22]] == [str(n) for n in range(20)]
    assert max(map(len, lines[2:22])) < 140
    assert lines[22:-1] == ["and 3 more"]  # before the link
    assert repr(caught.value.__cause__) == repr(KeyError("x" * 500))
    with pytest.raises(TooManyErrors, match="24 of 24"):  # again at the next
        budget.count(1, [failed(0)], 0)
    budget.count(1, (), None)  # and not at what is good


def test_records_hold_no_frames() -> None:
    def fail() -> None:
        secret = object()  # noqa: F841
        try:
            raise KeyError("inner")
        except KeyError as error:
            raise ValueError("outer") from error

    log = FailureLog()
    budget = ErrorBudget(Skip(), "stage", 3, log, "key")
    try:
        fail()
    except ValueError as error:
        original = error
    budget.count(1, [failed(7, original)], 2)
    (record,) = budget.records
    assert (record.index, record.worker, record.stage, record.epoch) == (7, 2, "stage", 3)
    assert "KeyError: 'inner'" in record.traceback
    assert "ValueError: outer" in record.traceback
    assert record.error is not original
    assert record.error.__traceback__ is record.error.__cause__ is record.error.__context__ is None
    assert original.__traceback__ is not None  # somebody may be handling it
    assert original.__cause__ is not None
    assert log.records == [record]
    assert log.counts["key"] == log.total == 1
    log.new_run()
    assert (log.records, log.total) == ([], 1)


def test_an_exception_whose_arguments_are_its_own_affair_is_kept_with_its_type() -> None:
    class Odd(Exception):
        args = property(lambda self: (self.one,))  # type: ignore[assignment]

        def __init__(self, one: int, two: int) -> None:
            super().__init__(one)
            self.one = one

    original = Odd(1, 2)
    error = bare(original)
    assert error is not original
    assert type(error) is Odd
    assert (str(error), error.one) == ("1", 1)


def test_only_so_many_tracebacks_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hybridloader.fetching.on_error._TRACEBACKS", 2)
    budget = ErrorBudget(Skip(None), "stage")
    budget.count(3, [failed(n) for n in range(3)], 0)
    assert [bool(record.traceback) for record in budget.records] == [True, True, False]


def test_the_rest_of_a_shard_is_never_forgiven() -> None:
    assert ErrorBudget(Skip(), "stage").may_skip(Failure(ValueError()))
    assert not ErrorBudget(Skip(), "stage").may_skip(Failure(rest_is_lost("it", OSError())))
    assert ErrorBudget(Skip(), "stage").may_skip(Failure(ShardLost()))  # of a user's code
    assert not ErrorBudget(Replace(nothing), "stage").may_skip(Failure(ValueError()))
    assert not ErrorBudget(Retry(1), "stage").may_skip(Failure(ValueError()))


# -- full batches ----------------------------------------------------------------------------------

patterns = st.lists(st.lists(st.booleans(), min_size=4, max_size=4), max_size=40)


@given(patterns)
def test_nothing_is_lost_or_doubled_and_all_but_the_last_are_full(
    patterns: list[list[bool]],
) -> None:
    results, short_ones, number = [], [], 0
    for pattern in patterns:
        good = [number + n for n, is_good in enumerate(pattern) if is_good]
        number += len(pattern)
        if len(good) == len(pattern):
            results.append(whole(good, len(good)))
        else:
            results.append(short(len(pattern), *good))
            short_ones += good
    batches, _ = batches_of(results, Skip(None), collate=tuple)
    filled = [batch for batch in batches if type(batch) is tuple]
    assert [sample for batch in filled for sample in batch] == short_ones
    assert all(len(batch) == 4 for batch in filled[:-1])


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 8)), max_size=40))
def test_batches_of_different_sizes_never_pile_up(sizes: list[tuple[int, int]]) -> None:
    results, came = [], 0
    for wanted, had in sizes:
        good = range(came, came + min(had, wanted - 1))
        came += len(good)
        results.append(short(wanted, *good))
    batches, _ = batches_of(results, Skip(None), collate=tuple)
    filled = list(batches)
    assert [sample for batch in filled for sample in batch] == [*range(came)]
    assert len(filled[-1] if filled else ()) <= max((wanted for wanted, _ in sizes), default=0)


def batches_of(
    results: list[Any], policy: Any = "skip", drop_last: bool = False, collate: Any = tuple
) -> tuple[FullBatches, ErrorBudget]:
    parsed = parse_on_error(policy)
    assert parsed is not None
    budget = ErrorBudget(parsed, "stage")
    given = Given(results)
    batches = FullBatches(
        given, lambda: (0, given.outcome), budget, collate, drop_last=drop_last, copies=True
    )
    return batches, budget


class Given(Iterator[Any]):
    """Values, and what is beside the last of them."""

    def __init__(self, attempts: list[Attempt]) -> None:
        self._attempts = iter(attempts)
        self.outcome: Outcome | None = None

    def __next__(self) -> Any:
        value, self.outcome = next(self._attempts)
        return value


def whole(value: Any, attempted: int, failures: Any = ()) -> Attempt:
    return value, Outcome(attempted, failures)


def short(wanted: int, *samples: int) -> Attempt:
    lost = [failed(-n) for n in range(wanted - len(samples))]
    return short_batch(list(samples), list(samples), lost, wanted)


def test_full_batches_stand_where_the_short_one_did() -> None:
    results = [whole("a", 3), short(3, 1, 2), whole("b", 3), short(3, 3), whole("c", 3), short(3)]
    batches, budget = batches_of(results)
    assert list(batches) == ["a", "b", (1, 2, 3), "c"]
    assert budget.attempted == 18
    assert len(budget.records) == 1 + 2 + 3
    batches, _ = batches_of([short(3, 1, 2), whole("b", 3)])
    assert list(batches) == ["b", (1, 2)]
    assert list(batches) == []
    batches, _ = batches_of([short(3, 1, 2), whole("b", 3)], drop_last=True)
    assert list(batches) == ["b"]


def test_what_came_with_the_last_straw_is_there_for_who_goes_on() -> None:
    batches, _ = batches_of([short(3, 1, 2), short(3, 3, 4), whole("b", 3)], Skip(1))
    with pytest.raises(TooManyErrors):
        next(batches)
    assert list(batches) == [(1, 2, 3), "b", (4,)]
    swapped = whole("a", 3, [failed(0)._replace(replaced=True)])
    batches, budget = batches_of([swapped, whole("b", 3)], Replace(nothing, 0))
    with pytest.raises(TooManyErrors, match="replaced:"):
        next(batches)
    assert list(batches) == ["a", "b"]
    assert budget.records[0].replaced


def test_samples_that_do_not_fit_together_are_listed() -> None:
    def collate(samples: list[int]) -> Any:
        if 2 in samples:
            raise ValueError("odd one")
        return tuple(samples)

    batches, budget = batches_of([short(2, 1), short(2, 2), short(2, 3)], collate=collate)
    assert list(batches) == [(3,)]
    assert [record.index for record in budget.records] == [0, 0, 1, 2, 0]
    assert budget.attempted == 6


def test_what_waits_is_copied_if_that_can_be() -> None:
    class Sample:
        def __deepcopy__(self, memo: Any) -> Sample:
            raise TypeError("not me")

    kept, stubborn = [0], Sample()
    results = [short_batch([0, 1], [kept, stubborn], [failed(2)], 3)]
    ((first, second),) = batches_of(results)[0]
    kept.append(1)
    assert first == [0]
    assert second is stubborn
