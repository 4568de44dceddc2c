"""`on_error` on the stages of a pipeline: the same wherever the functions run."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from support.failing_datasets import Samples
from support.platforms import needs_fork

from hybridloader import Pipeline, Replace, RestartPolicy, Retry, Skip, TooManyErrors
from hybridloader.errors import IteratorClosed

WHERE: list[dict[str, Any]] = [
    {},
    {"backend": "inline"},
    {"backend": "threads", "num_workers": 3},
    {"backend": "shared-memory", "num_workers": 1, "threads_per_worker": 3},
]
PLACES = pytest.mark.parametrize("where", WHERE, ids=lambda where: str(where.get("backend")))


@pytest.fixture(scope="module", autouse=True)
def _tasks_are_begun_early() -> Iterator[None]:
    """Threads in a worker work at several tasks, however quick these are."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hybridloader.engine.worker._LEAST", 0.0)
        yield


def tenfold(item: int) -> int:
    if item % 7 == 3:
        raise ValueError("bad", item)
    return item * 10


def swap(item: Any, error: Exception) -> Any:
    return ("swapped", item, type(error).__name__)


def results(pipe: Pipeline) -> tuple[list[Any], list[tuple[Any, ...]]]:
    with pipe.run() as run:
        found = list(run)
        return found, [(r.index, repr(r.error), r.stage, r.replaced) for r in run.skipped]


@pytest.mark.parametrize(
    "where",
    [*WHERE, {"backend": "spawn", "num_workers": 1}],
    ids=lambda where: str(where.get("backend")),
)
def test_what_was_skipped_or_replaced_is_listed_with_its_error(where: dict[str, Any]) -> None:
    numbers, bad = Pipeline.from_dataset(range(30)), (3, 10, 17, 24)
    found, skipped = results(
        numbers.map(tenfold, on_error=Retry(1, 0, then="skip"), **where).batch(4, collate_fn=list)
    )
    good = [n * 10 for n in range(30) if n not in bad]
    assert found == [good[k : k + 4] for k in range(0, len(good), 4)]
    assert skipped == [(n, f"ValueError('bad', {n})", "map(tenfold)", False) for n in bad]
    if where.get("backend") != "spawn":  # which takes long to start
        found, skipped = results(numbers.take(5).map(tenfold, on_error=Replace(swap), **where))
        assert found == [0, 10, 20, ("swapped", 3, "ValueError"), 40]
        assert skipped == [(3, "ValueError('bad', 3)", "map(tenfold)", True)]


class Flaky:
    """Fails twice for each item."""

    def setup(self) -> None:
        self.attempted: dict[Any, int] = {}
        self.counting = threading.Lock()

    def __call__(self, item: int) -> Any:
        with self.counting:
            self.attempted[item] = self.attempted.get(item, 0) + 1
        if self.attempted[item] <= 2:
            raise OSError("again", item)
        return item


class FlakyParts(Flaky):
    def __call__(self, item: int) -> Any:
        yield item
        yield super().__call__(item)


@PLACES
def test_trying_again(where: dict[str, Any]) -> None:
    again = {"on_error": Retry(2, 0, OSError), **where}
    assert results(Pipeline.from_dataset(range(9)).map(Flaky(), **again)) == ([*range(9)], [])
    pipe = Pipeline.from_dataset(range(1, 5)).flat_map(FlakyParts(), **again)
    assert results(pipe) == ([1, 1, 2, 2, 3, 3, 4, 4], [])  # nothing twice
    less = {"on_error": Retry(1, 0, OSError), **where}
    with pytest.raises(OSError, match="again") as caught:
        list(Pipeline.from_dataset(range(9)).map(Flaky(), **less))
    assert "working on 0." in "".join(caught.value.__notes__)
    then = {"on_error": Retry(1, 0, OSError, then=Skip(9)), **where}
    found, skipped = results(Pipeline.from_dataset(range(9)).map(Flaky(), **then))
    assert (found, len(skipped)) == ([], 9)


@PLACES
def test_too_much_is_raised_at_the_same_place(where: dict[str, Any]) -> None:
    pipe = Pipeline.from_dataset(range(30)).map(tenfold, on_error=Skip(2), **where)
    with pipe.run() as run:
        found = [next(run) for _ in range(15)]
        assert found == [n * 10 for n in range(17) if n % 7 != 3]
        with pytest.raises(TooManyErrors, match="3 of 18 samples failed") as caught:
            next(run)
        assert "In stage 'map(tenfold)'" in str(caught.value)
        assert repr(caught.value.__cause__) == "ValueError('bad', 17)"
        assert next(run) == 180


def test_each_pass_has_a_budget_of_its_own() -> None:
    for where in WHERE[:3]:
        pipe = Pipeline.from_dataset(range(30)).map(tenfold, on_error=Skip(4), **where)
        with pipe.repeat(3).run() as run:
            assert len(list(run)) == 3 * 26
            assert [record.epoch for record in run.skipped] == [0] * 4 + [1] * 4 + [2] * 4
        with pipe.epochs(2, observe=True) as epochs:
            for epoch, run in enumerate(epochs):
                assert len(list(run)) == 26
                assert {record.epoch for record in run.skipped} == {epoch}
                assert len(run.skipped) == 4
                assert run.stats().stages[0].faults.skipped == 4 * (epoch + 1)


def test_what_is_passed_on_unopened_counts_as_attempted() -> None:
    first = Pipeline.from_dataset(range(3000)).map(
        lambda n: 1 // ((n + 1) % 300), on_error=Skip(0.0034), backend="fork", num_workers=1
    )
    found, skipped = results(first.map(abs, backend="fork", num_workers=2))
    assert (len(found), len(skipped)) == (2990, 10)


# -- batches by a sampler --------------------------------------------------------------------------


TENS = Samples(tenfold, 30)


@PLACES
def test_a_batch_of_a_batch_sampler_comes_short(where: dict[str, Any]) -> None:
    lists = [[1, 2, 3], [4, 5, 6], [10, 17], [10, 11]]
    pipe = Pipeline.from_dataset(
        TENS, batch_sampler=lists, collate_fn=tuple, on_error="skip", **where
    )
    found, skipped = results(pipe.map(len, on_error="skip", **where))
    assert found == [2, 3, 1]
    assert [index for index, *_ in skipped] == [3, 10, 17, 10]
    swapped = Pipeline.from_dataset(
        TENS, batch_sampler=lists[:2], collate_fn=list, on_error=Replace(swap), **where
    )
    assert results(swapped)[0] == [[10, 20, ("swapped", 3, "ValueError")], [40, 50, 60]]


def test_shares_are_of_samples_also_where_items_are_batches() -> None:
    lists = [list(range(k, k + 100)) for k in range(0, 3000, 100)]
    for bad, fine in ((range(2000, 3000, 50), True), (range(0, 3000, 99), False)):
        pipe = Pipeline.from_dataset(
            {n: n for n in range(3000) if n not in bad},
            batch_sampler=lists,
            collate_fn=len,
            on_error=Skip(0.01),
            backend="threads",
            num_workers=2,
        )
        if fine:
            assert sum(results(pipe)[0]) == 2980
        else:
            with pytest.raises(TooManyErrors, match="11 of"):
                list(pipe)


# -- several stages --------------------------------------------------------------------------------


def test_only_stages_that_agree_share_workers() -> None:
    def stages(**other: Any) -> int:
        same: dict[str, Any] = {"backend": "threads", "num_workers": 2}
        pipe = Pipeline.from_dataset(range(9)).map(abs, **same).map(abs, **same, **other)
        with pipe.run(observe=True) as run:
            assert list(run) == list(range(9))
            return sum(row.backend == "threads" for row in run.stats().stages)

    assert stages() == stages(on_error="raise") == stages(on_worker_death="raise") == 1
    assert stages(on_error="skip") == 2
    assert stages(on_worker_death="restart") == 2
    assert stages(task_timeout=3) == 2


def test_a_stop_iteration_is_an_error_as_any_other() -> None:
    def leak(item: int) -> int:
        if item == 1:
            raise StopIteration
        return item

    for where in WHERE:
        found, ((_, error, *_),) = results(
            Pipeline.from_dataset(range(3)).map(leak, on_error=Retry(1, 0, then="skip"), **where)
        )
        assert found == [0, 2]
        assert error.startswith("RuntimeError")


def test_closing_ends_a_wait_inline() -> None:
    closed = []

    def fail(item: int) -> int:
        if not closed:
            closed.append(True)
            run.close()
        raise OSError

    run = Pipeline.from_dataset(range(3)).map(fail, on_error=Retry(9, 60)).run()
    with pytest.raises(IteratorClosed):
        next(run)


# -- items that kill workers -----------------------------------------------------------------------


def kills(item: int) -> int:
    if item % 4 == 1:
        os._exit(3)
    return item


@needs_fork
@pytest.mark.parametrize(
    ("kind", "policy"), [("map", "skip"), ("filter", Replace(swap)), ("flat_map", "skip")]
)
def test_an_item_that_kills_its_worker_is_as_one_that_failed(kind: str, policy: Any) -> None:
    functions = {"map": kills, "filter": lambda n: kills(n) >= 0, "flat_map": lambda n: [kills(n)]}
    pipe = getattr(Pipeline.from_dataset(range(4)), kind)(
        functions[kind],
        backend="fork",
        num_workers=1,
        on_error=policy,
        on_worker_death=RestartPolicy(deaths_per_sample=1),
    )
    found, skipped = results(pipe)
    assert found == ([0, 2, 3] if policy == "skip" else [0, ("swapped", 1, "WorkerDied"), 2, 3])
    assert [(index, replaced) for index, _, _, replaced in skipped] == [(1, policy != "skip")]
