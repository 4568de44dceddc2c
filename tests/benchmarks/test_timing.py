"""The timing of batches, with scripted loaders and a fake clock: nothing that was prefetched counts.

No test here looks at how long something took.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

pytest.importorskip("psutil")

from benchmarks import measurements, timing
from benchmarks.case import Spec
from benchmarks.timing import Epoch, Lengths

STEP = 0.25
"""Seconds that a batch of a scripted loader takes."""


class Clock:
    """Moves on when it is told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Meter:
    """Counts as many CPU seconds as the clock does, twice."""

    def __init__(self, clock: Clock) -> None:
        self._clock, self._before = clock, 0.0

    def start(self) -> None:
        self._before = self._clock()

    def stop(self) -> float:
        return 2 * (self._clock() - self._before)


def scripted(
    clock: Clock, *, start: float = 3.0, ahead: int = 0, last: float = 0.0
) -> Callable[[int], Epoch]:
    """Epochs of a loader.

    Parameters
    ----------
    start
        Seconds until the first batch.
    ahead
        Batches that it has ready by then.
    last
        Seconds that the last batch takes longer.
    """

    def batches(count: int) -> Iterator[int]:
        clock.now += start
        for place in range(count):
            if place > ahead:
                clock.now += STEP
            if place == count - 1:
                clock.now += last
            yield place
        clock.now += 50.0  # finding out that there are no more

    return lambda count: timing.epoch_of(lambda: batches(count), count, clock, Meter(clock))


def test_an_epoch_is_timed_from_its_first_batch_to_its_last() -> None:
    assert scripted(Clock())(9) == Epoch(start=3.0, seconds=8 * STEP, cpu=16 * STEP, batches=9)


@pytest.mark.parametrize(("there", "word"), [(4, "fewer"), (6, "more")])
def test_an_epoch_has_as_many_batches_as_it_should(there: int, word: str) -> None:
    with pytest.raises(RuntimeError, match=f"an epoch of 5 batches had {word}"):
        timing.epoch_of(lambda: iter(range(there)), 5, Clock())


@pytest.mark.parametrize("ahead", [0, 4, 12, 100, 1000])
def test_who_prefetches_more_looks_no_faster(ahead: int) -> None:
    lengths = Lengths(24, 100)
    found, long = timing.whole_epochs(scripted(Clock(), ahead=ahead), 20.0, lengths)
    assert (found.seconds, found.cpu) == (STEP, 2 * STEP)
    assert lengths.short >= 2 * ahead, "its short epoch was not prefetched by more than half"
    assert lengths.long == long.batches
    again, _ = timing.whole_epochs(scripted(Clock(), ahead=ahead), 20.0, lengths)
    assert again == found, "the next round begins with lengths that will do"


def test_neither_the_start_nor_the_last_batch_counts() -> None:
    found, long = timing.whole_epochs(
        scripted(Clock(), start=7.0, ahead=3, last=9.0), 20.0, Lengths(24, 200)
    )
    assert found.seconds == STEP
    assert long.start == 7.0


def test_epochs_are_made_long_enough_step_by_step() -> None:
    lengths = Lengths(8, 32)
    found, _ = timing.whole_epochs(scripted(Clock()), 1000.0, lengths)
    assert found.seconds == STEP
    assert found.batches * STEP >= 500
    assert lengths.short == 8


def test_a_loader_without_a_pace_has_no_time_of_a_batch() -> None:
    with pytest.raises(RuntimeError, match="no steady pace"):
        timing.whole_epochs(lambda count: Epoch(0.0, 0.0, 0.0, count), 1.0, Lengths(8, 32))


def test_a_window_counts_neither_the_warmup_nor_what_comes_after() -> None:
    clock = Clock()

    def batches() -> Iterator[int]:
        for place in range(1000):
            clock.now += 50.0 if place < 5 else STEP
            yield place

    it = batches()
    found = timing.window(it, 2.0, warmup=5, ahead=0, clock=clock)
    assert (found.seconds, found.batches) == (STEP, 8)
    assert next(it) == 13, "took more than it counted"


def test_a_window_is_long_beside_what_is_prefetched() -> None:
    clock = Clock()

    def batches(each: float, ready: int = 0) -> Iterator[int]:
        for place in range(10_000):
            clock.now += each if place > ready else 0.0
            yield place

    assert timing.window(batches(10.0), 2.0, warmup=1, ahead=0, clock=clock).batches == 4
    assert timing.window(batches(0.0), 2.0, warmup=1, ahead=0, most=20, clock=clock).batches == 20
    found = timing.window(batches(STEP, ready=6), 2.0, warmup=0, ahead=6, clock=clock)
    assert found.batches == 6 * timing.LONG
    assert found.seconds >= 0.97 * STEP


SMALL: Spec = {"dataset": "ints", "batch": 4, "workers": 2, "seconds": 0.0, "short": 8}


@pytest.mark.parametrize("loader", ["torch", "inline", "threads"])
def test_whole_epochs_of_a_loader_are_timed(loader: str) -> None:
    answer = measurements.whole_epochs(loader, SMALL)
    assert answer["details"]["first_batch"] > 0
    assert answer["details"]["batches"] >= 32


def test_an_endless_dataset_ends_where_it_is_told_to() -> None:
    from benchmarks.datasets.plain import ENDLESS, Ints

    endless = Ints()
    assert len(measurements.of_length(endless, 12)) == 12
    assert len(endless) == ENDLESS


def test_windows_are_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    told = iter([timing.Timing(value, 2 * value, 4) for value in (5.0, 1.0, 3.0)])
    monkeypatch.setattr(timing, "window", lambda *_, **__: next(told))
    answer = measurements.window("inline", SMALL | {"repeats": 3})
    assert (answer["value"], answer["cpu"]) == (3.0, 6.0)
    measurements.forget_datasets()
