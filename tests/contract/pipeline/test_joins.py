"""Several pipelines as one, and rows of a `zip` when something fails."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from support.pipeline_model import CLOSED, Event, events
from support.scripts import Oops, Script, drain, scripted

from hybridloader import Pipeline, Replace, TooManyErrors, get_worker_info
from hybridloader.errors import IteratorClosed, ShardLost

THREADS: dict[str, Any] = {"backend": "threads", "num_workers": 2}


def numbers(count: int = 6) -> Pipeline:
    return Pipeline.from_dataset(range(count))


def fails_at(*bad: int) -> Callable[[Any], Any]:
    def function(item: Any) -> Any:
        if item in bad:
            raise ValueError(item)
        return item

    return function


def items(*found: Any) -> list[Event]:
    return [("item", item) for item in found]


# -- zip ---------------------------------------------------------------------------------------------


def test_a_strict_zip_says_which_pipeline_ended() -> None:
    uneven = "zip: pipeline {} ended after {} items"
    for scripts, expected, told in [
        ([[1, 2], [3]], [(1, 3)], uneven.format(1, 1)),
        ([[1], [3, 4]], [(1, 3)], uneven.format(0, 1)),
        ([[1], [3], []], [], uneven.format(2, 0)),
        ([[], [], [5]], [], uneven.format(0, 0)),
        ([[1, 2], [3, 4]], [(1, 3), (2, 4)], None),
    ]:
        first, *others = [scripted(*script) for script in scripts]
        found = drain(first.zip(*others).run())
        if told is not None:
            assert str(found.pop()).startswith(told)
        assert found == expected
        shortest = min(map(len, scripts))
        assert drain(first.zip(*others, strict=False).run())[:shortest] == expected[:shortest]


@pytest.mark.parametrize("place", [{}, {"backend": "inline"}, THREADS], ids=str)
def test_a_budget_that_runs_out_shifts_no_row(place: dict[str, Any]) -> None:
    def row_or_error(run: Iterator[Any]) -> Any:
        try:
            return next(run, "end")
        except TooManyErrors:
            return "error"

    policy = Replace(lambda item, error: -item, max_failures=1)
    replacing = numbers(5).map(fails_at(1, 3), on_error=policy, **place)
    with replacing.zip(numbers(5)).run() as run:
        found = [*iter(lambda: row_or_error(run), "end")]
        assert found.index("error") == 3
        assert [row for row in found if row != "error"] == [
            (0, 0), (-1, 1), (2, 2), (-3, 3), (4, 4)
        ]  # fmt: skip


def test_a_pipeline_that_skips_items_is_refused() -> None:
    skipping = numbers().map(fails_at(2), on_error="skip")
    refusal = r"zip: in pipeline 1, map\(function\) skips items that fail"
    for pipe in (skipping, skipping.batch(2, collate_fn=list), numbers().concat(skipping)):
        with pytest.raises(ValueError, match=refusal):
            numbers().zip(pipe)


@pytest.mark.parametrize("place", [{}, THREADS], ids=str)
def test_an_error_says_that_it_ends_the_rows(place: dict[str, Any]) -> None:
    pipe = numbers().zip(numbers().map(fails_at(2), **place))
    with pipe.run() as run:
        assert events(run, 2) == items((0, 0), (1, 1))
        with pytest.raises(ValueError, match="2") as caught:
            next(run)
        assert caught.value.__notes__[-1].startswith(
            "zip: an error of pipeline 1 at row 2 has ended"
        )
        for _ in range(2):
            with pytest.raises(IteratorClosed):
                next(run)
        state = run.state_dict()
    with pipe.run(state=state) as run:  # after the error, which comes again and is dropped
        assert events(run) == [CLOSED]


@pytest.mark.parametrize("place", [{}, {"backend": "threads", "num_workers": 1}], ids=str)
def test_a_generator_that_fails_is_over_and_says_so(place: dict[str, Any]) -> None:
    def three() -> Iterator[int]:
        yield from map(fails_at(1), range(3))

    source = Pipeline.from_iterable(three, **place)
    run = source.concat(numbers()).run()
    assert events(run, 2) == [("item", 0), ("error", "1")]
    with pytest.raises(ShardLost):
        next(run)
    assert events(run) == items(*range(6))


@pytest.mark.parametrize(
    ("backend", "seeding"), [("inline", "sample"), ("threads", None), ("fork", "sample")]
)
def test_a_reader_that_can_not_be_opened_says_so_once_and_the_others_go_on(
    backend: str, seeding: Any
) -> None:
    def part() -> Iterator[int]:
        info = get_worker_info()
        assert info is not None
        if info.id == 0:
            raise ValueError("open")
        return iter(range(3))

    pipe = Pipeline.from_iterable(part, backend=backend, num_workers=2, seeding=seeding)
    with pipe.run() as run:
        assert events(run) == [("error", "open"), *items(0, 1, 2)]


# -- concat, mix, interleave -------------------------------------------------------------------------


def test_a_pipeline_is_opened_in_its_turn_and_one_that_cannot_be_is_passed_over() -> None:
    opened: list[int] = []

    def opens(number: int) -> Pipeline:
        def begun() -> Script:
            opened.append(number)
            if number == 1:
                raise Oops("open")
            return Script(number, number)

        return Pipeline.from_iterable(begun)

    found = opens(0).concat(opens(1), opens(2)).run()
    assert opened == []
    assert next(found) == 0
    assert opened == [0]
    assert drain(found) == [0, Oops("open"), 2, 2]
    for how in ("zip", "mix", "interleave"):
        with pytest.raises(Oops):
            getattr(opens(0), how)(opens(1), opens(2)).run()


def test_an_error_of_opening_that_was_prefetched_comes_after_a_resume() -> None:
    opened = threading.Event()

    def fails() -> Script:
        raise Oops("open")

    def last() -> Script:
        opened.set()
        return Script(2)

    parts = [Pipeline.from_iterable(source) for source in ([0, 1], fails, last)]
    pipe = parts[0].concat(*parts[1:]).prefetch(9)
    with pipe.run() as run:
        assert [next(run), next(run)] == [0, 1]
        assert opened.wait(60)
        state = run.state_dict()
    assert drain(pipe.run(state=state)) == [Oops("open"), 2]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("how", ["zip", "concat", "interleave"])
def test_closing_closes_what_was_opened_although_closing_one_fails(how: str) -> None:
    class Failing(Script):
        def close(self) -> None:
            super().close()
            raise Oops("close")

    opened = [Failing(*range(9)), Script(*range(9)), Script(*range(9))]
    first, *others = [Pipeline.from_iterable(lambda source=source: source) for source in opened]
    found = getattr(first, how)(*others).prefetch(1).run()
    next(found)
    found.close()
    assert [source.closed for source in opened] == ([1, 0, 0] if how == "concat" else [1, 1, 1])


class SetUpOnce:
    """A function that the first worker alone can set up."""

    def __init__(self) -> None:
        self.setups: list[int] = []

    def setup(self) -> None:
        self.setups.append(0)
        if len(self.setups) > 1:
            raise ValueError("no second")

    def __call__(self, item: int) -> int:
        return item


def test_every_item_of_a_worker_that_can_not_be_set_up_fails_in_its_place() -> None:
    numbers = Pipeline.from_dataset(range(1500))
    found = events(iter(numbers.map(SetUpOnce(), **THREADS)), most=5000)
    assert len(found) == 1500
    assert {kind for kind, _ in found} == {"item", "error"}
    assert all(item == place for place, (kind, item) in enumerate(found) if kind == "item")
