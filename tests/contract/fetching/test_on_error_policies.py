"""The policies themselves, the loop around one call, the budget, and how batches are filled up."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable
from typing import Any

import pytest
from support.failing_datasets import Samples

from hybridloader import DataLoader, Pipeline, Replace, Retry, Skip, TooManyErrors

# -- policies --------------------------------------------------------------------------------------


def nothing(index: Any, error: Exception) -> None:
    return None


def parsed(value: Any) -> Any:
    return DataLoader(range(3), on_error=value).on_error  # type: ignore[arg-type]


REFUSED: list[tuple[Callable[[], Any], type[Exception], str]] = [
    (lambda: Skip(-1), ValueError, "must not be negative"),
    (lambda: Skip(0.0), ValueError, "is no share"),
    (lambda: Skip(float("nan")), ValueError, "is no share"),
    (lambda: Skip(True), TypeError, "Skip: max_failures must be an int"),
    (lambda: Replace(3), TypeError, "must be callable"),  # type: ignore[arg-type]
    (lambda: Replace(nothing, 2.0), ValueError, "is no share"),
    (lambda: Retry(0), ValueError, "at least 1"),
    (lambda: Retry(True), TypeError, "must be a whole number"),
    (lambda: Retry(1, -1), ValueError, "backoff is seconds"),
    (lambda: Retry(1, float("inf")), ValueError, "backoff=inf is more seconds"),
    (lambda: Retry(1, "1"), ValueError, "backoff is seconds"),  # type: ignore[arg-type]
    (lambda: Retry(1, max_backoff=-1), ValueError, "max_backoff is seconds"),
    (lambda: Retry(1, retry_on=()), ValueError, "retries no error"),
    (lambda: Retry(1, retry_on=(OSError, 3)), TypeError, "must be subclasses of Exception"),  # type: ignore[arg-type]
    (lambda: Retry(1, then=Retry(1)), ValueError, "raise `max_retries`"),  # type: ignore[arg-type]
    (lambda: Retry(1, then="ignore"), ValueError, "then must be"),
    (lambda: parsed("ignore"), ValueError, "on_error must be"),
    (lambda: parsed(Skip), ValueError, r"write Skip\(\.\.\.\)"),
]


def test_what_makes_no_sense_is_refused() -> None:
    for make, kind, message in REFUSED:
        with pytest.raises(kind, match=message) as caught:
            make()
        assert type(caught.value) is kind


def test_policies_are_values() -> None:
    policies = Skip(3), Skip(None), Replace(nothing, 0.5), Retry(3, 0.0, OSError, Skip(2))
    for policy in policies:
        assert pickle.loads(pickle.dumps(policy)) == policy
        assert hash(policy) == hash(pickle.loads(pickle.dumps(policy)))
    assert Skip() == Skip(0.01) != Skip(0.02)


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


def called(policy: Any, function: Callable[[Any], Any], argument: Any = 7) -> Any:
    """Return ``function(argument)``, as a step with that policy calls it."""
    (found,) = Pipeline.from_iterable([argument]).map(function, on_error=policy)
    return found


def test_waits_are_doubled_up_to_the_longest_and_cut_into_slices(slept: list[float]) -> None:
    function = Scripted(*[OSError(n) for n in range(5)], "good")
    assert called(Retry(5, backoff=0.05, max_backoff=0.3), function) == "good"
    assert function.calls == [7] * 6
    assert sum(slept) == pytest.approx(0.05 + 0.1 + 0.2 + 0.3 + 0.3)
    assert max(slept) <= 0.02
    slept.clear()
    assert called(Retry(1, backoff=0), Scripted(OSError(), 1)) == 1
    assert slept == []


def test_only_what_is_worth_it_is_tried_again_and_so_often() -> None:
    function = Scripted(OSError("passes"), ValueError("stays"), "never")
    with pytest.raises(ValueError, match="stays"):
        called(Retry(3, 0, OSError), function)
    assert len(function.calls) == 2
    function = Scripted(OSError(0), OSError(1), OSError(2), "never")
    with pytest.raises(OSError, match="2") as caught:
        called(Retry(2, 0), function)
    assert len(function.calls) == 3
    assert caught.value.__context__ is None


def test_a_replacement_is_told_what_failed() -> None:
    seen = []

    def instead(index: int, error: Exception) -> str:
        seen.append((index, repr(error)))
        return "other"

    policy = Retry(1, 0, then=Replace(instead))
    pipe = Pipeline.from_iterable([7]).map(Scripted(OSError(0), OSError(1)), on_error=policy)
    with pipe.run() as run:
        assert list(run) == ["other"]
        assert [(repr(r.error), r.replaced) for r in run.skipped] == [("OSError(1)", True)]
    assert seen == [(7, "OSError(1)")]


def test_what_a_replacement_raises_is_raised_and_says_why_it_was_called() -> None:
    def instead(index: int, error: Exception) -> None:
        raise KeyError(index)

    with pytest.raises(KeyError) as caught:
        called(Replace(instead), Scripted(OSError("first")))
    assert repr(caught.value.__cause__) == "OSError('first')"
    assert "function of Replace" in caught.value.__notes__[0]

    def again(index: int, error: Exception) -> None:
        raise error

    with pytest.raises(OSError, match="first") as second:
        called(Replace(again), Scripted(OSError("first")))
    assert second.value.__cause__ is None


@pytest.mark.parametrize("policy", [Skip(), Retry(3, 0), Replace(nothing)])
def test_what_is_no_exception_passes(policy: Any) -> None:
    for error in (KeyboardInterrupt(), SystemExit()):
        function = Scripted(error, "never")
        with pytest.raises(type(error)):
            called(policy, function)
        assert len(function.calls) == 1


def test_a_stop_iteration_is_a_runtime_error() -> None:
    policy = Retry(1, 0, retry_on=RuntimeError)
    assert called(policy, Scripted(StopIteration(3), "good")) == "good"
    with pytest.raises(RuntimeError, match="raised StopIteration"):
        called(Retry(1, 0, retry_on=OSError), Scripted(StopIteration()))


# -- the budget ------------------------------------------------------------------------------------


def bad_at(number: int) -> int:
    if number < 0:
        raise ValueError(number)
    return number


def fails_at(policy: Any, attempted: list[int]) -> int | None:
    """The number of the failure that is one too many, if one fails behind so many good ones each."""
    items = [item for number, good in enumerate(attempted) for item in [*range(good), ~number]]
    with Pipeline.from_iterable(items).map(bad_at, on_error=policy).run() as run:
        try:
            for _ in run:
                pass
        except TooManyErrors:
            return len(run.skipped) - 1
    return None


@pytest.mark.parametrize(
    ("budget", "attempted", "last"),
    [
        (0, [5], 0),
        (2, [1000] * 9, 2),
        (0.01, [0] * 50, 10),  # of a thousand at least
        (0.01, [99] * 30, None),  # just one in a hundred
        (0.01, [98] * 30, 10),
        (0.01, [2000, *[0] * 99], 20),
        (0.69, [341, *[0] * 900], 759),  # 0.69 * 1100 is 758.9999999999999
        (1.0, [0] * 1500, None),
        (None, [0] * 1500, None),
    ],
)
def test_a_budget_is_a_number_or_a_share(
    budget: Any, attempted: list[int], last: int | None
) -> None:
    assert fails_at(Skip(budget), attempted) == last
    assert fails_at(Replace(nothing, budget), attempted) == last
    assert fails_at(Retry(1, 0, then=Skip(budget)), attempted) == last


def test_the_error_tells_what_was_skipped() -> None:
    def fail(number: int) -> None:
        raise KeyError("x" * 500)

    pipe = Pipeline.from_iterable(range(24)).map(fail, on_error=Skip(22), name="the stage")
    with pipe.run() as run:
        with pytest.raises(TooManyErrors) as caught:
            next(run)
        with pytest.raises(TooManyErrors, match="24 of 24"):  # again at the next
            next(run)
    lines = str(caught.value).splitlines()
    assert lines[0].startswith("In stage 'the stage', 23 of 23 samples failed")
    assert "max_failures=22" in lines[0]
    assert lines[1].split() == ["index", "exception"]
    assert [line.split()[0] for line in lines[2:22]] == [str(n) for n in range(20)]
    assert max(map(len, lines[2:22])) < 140
    assert lines[22:-1] == ["and 3 more"]  # before the link
    assert repr(caught.value.__cause__) == repr(KeyError("x" * 500))


def skipped_of(function: Callable[[Any], Any], items: Iterable[Any]) -> Any:
    with Pipeline.from_iterable(items).map(function, on_error=Skip(None)).run() as run:
        list(run)
        return run.skipped


def test_records_hold_no_frames() -> None:
    originals: list[Exception] = []

    def fail(number: int) -> None:
        try:
            raise KeyError("inner")
        except KeyError as error:
            originals.append(ValueError("outer"))
            raise originals[0] from error

    (record,) = skipped_of(fail, [7])
    assert (record.index, record.worker, record.stage, record.epoch) == (7, None, "map(fail)", 0)
    assert "KeyError: 'inner'" in record.traceback
    assert "ValueError: outer" in record.traceback
    assert record.error is not originals[0]
    assert record.error.__traceback__ is record.error.__cause__ is record.error.__context__ is None
    assert originals[0].__traceback__ is not None  # somebody may be handling it
    assert originals[0].__cause__ is not None


def test_only_a_thousand_tracebacks_are_kept() -> None:
    records = skipped_of(bad_at, [-1] * 1003)
    assert [bool(record.traceback) for record in records] == [True] * 1000 + [False] * 3


# -- batches of which samples fail -------------------------------------------------------------------


def of_numbers(numbers: list[int], policy: Any, **options: Any) -> DataLoader:
    """A loader of samples of which those that are negative fail."""
    data: Any = Samples(lambda index: bad_at(numbers[index]), len(numbers))
    return DataLoader(data, collate_fn=tuple, on_error=policy, **options)


def test_what_came_with_the_last_straw_is_there_for_who_goes_on() -> None:
    batches = iter(of_numbers([0, 1, -1, 3, 4, -1, 6, 7, 8], Skip(1), batch_size=3))
    assert next(batches) == (0, 1)
    with pytest.raises(TooManyErrors):
        next(batches)
    assert list(batches) == [(3, 4), (6, 7, 8)]
    loader = of_numbers([-1, 1, 2, -1, 4], Replace(nothing, 0), batch_size=3)
    batches = iter(loader)
    with pytest.raises(TooManyErrors, match="replaced:"):
        next(batches)
    assert next(batches) == (None, 1, 2)
    assert loader.skipped[0].replaced


def test_a_batch_that_the_sampler_left_empty_is_no_failed_one() -> None:
    assert list(of_numbers([0, -1], Skip(1), batch_sampler=[[], [1], [0]])) == [(), (0,)]
