"""Faults in statistics: counted once, at the stage that had them, in all forms."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hybridloader import DataLoader, Pipeline, Replace, Retry, Skip
from hybridloader.observe import Stats, compare

THREADS: dict[str, Any] = {"backend": "threads", "num_workers": 2}
PROCESSES: dict[str, Any] = {"backend": "fork", "num_workers": 2}
PLACES = pytest.mark.parametrize(
    "where", [{}, THREADS, PROCESSES], ids=["inline", "threads", "fork"]
)


class Flaky:
    """Samples of which every tenth fails, always."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> int:
        if index % 10 == 3:
            raise ValueError(index)
        return index


def flaky(item: int) -> int:
    return Flaky()[item]


def substitute(index: int, error: Exception) -> int:
    return index + 1


def faults_of(stats: Stats) -> dict[str, tuple[int, ...]]:
    return {stage.name: stage.faults.counts for stage in stats.stages if stage.faults}


@PLACES
@pytest.mark.parametrize(
    ("policy", "wanted"),
    [
        (Skip(), (4, 0, 0, 0)),
        (Replace(substitute), (0, 4, 0, 0)),
        (Retry(2, backoff=0.0, then=Skip()), (4, 0, 8, 0)),
        (Retry(1, backoff=0.0, then=Replace(substitute)), (0, 4, 4, 0)),
    ],
    ids=["skip", "replace", "retry-skip", "retry-replace"],
)
def test_both_count_the_same(where: dict[str, Any], policy: Any, wanted: tuple[int, ...]) -> None:
    loader = DataLoader(Flaky(), 4, on_error=policy, observe=True, **where)  # type: ignore[arg-type]
    list(loader)
    assert faults_of(loader.stats()) == {"DataLoader": wanted}
    pipe = Pipeline.from_iterable(range(40)).map(flaky, on_error=policy, **where).batch(4)
    with pipe.run(observe=True) as run:
        list(run)
        stats = run.stats()
    ((name, counts),) = faults_of(stats).items()
    assert "map(flaky)" in name
    assert counts == wanted


def test_each_stage_has_its_own_and_all_forms_show_them() -> None:
    policy = Retry(1, backoff=0.0, then=Skip())
    pipe = (
        Pipeline.from_iterable(range(40))
        .map(flaky, name="first", on_error=policy, **THREADS)
        .map(
            lambda item: flaky(item + 1),
            name="second",
            on_error="skip",
            backend="fork",
            num_workers=1,
        )
    )
    with pipe.run(observe=True) as run:
        list(run)
        stats = run.stats()
    assert faults_of(stats) == {"first": (4, 0, 4, 0), "second": (4, 0, 0, 0)}
    assert stats.faults.counts == (8, 0, 4, 0)
    told = json.loads(json.dumps(stats.to_dict()))
    assert told["faults"] == {"skipped": 8, "replaced": 0, "retried": 4, "restarted": 0}
    assert [row["faults"]["skipped"] for row in told["stages"] if row["name"] == "second"] == [4]
    for text in (str(stats), stats._repr_html_()):
        assert "skipped" in text
        assert "retried" in text
        assert "restarted" not in text
    with (
        Pipeline.from_iterable(range(4)).map(abs, name="first", **THREADS).run(observe=True) as run
    ):
        list(run)
        comparison = compare(stats, run.stats())
    changes = {change.name: (change.before, change.after) for change in comparison.changes}
    assert changes["first: skipped"] == (4, 0)
    assert changes["first: retried"] == (4, 0)
    assert changes["second: skipped"] == (4, None)
    assert "second: retried" not in changes
    assert "first: retried" in str(comparison)


def test_retries_without_workers_are_counted_on_over_epochs() -> None:
    pipe = Pipeline.from_iterable(range(40)).map(flaky, on_error=Retry(1, backoff=0.0, then=Skip()))
    with pipe.epochs(3, observe=True) as epochs:
        for number, run in enumerate(epochs, 1):
            list(run)
            assert run.stats().faults.counts == (4 * number, 0, 4 * number, 0)


class DiesOnce:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> int:
        if index == 7 and not self.marker.exists():
            self.marker.touch()
            os._exit(1)
        return index


def test_a_restart_counts_at_its_stage(tmp_path: Path) -> None:
    loader = DataLoader(
        DiesOnce(tmp_path / "died"),  # type: ignore[arg-type]
        2,
        on_worker_death="restart",
        observe=True,
        **PROCESSES,
    )
    assert len(list(loader)) == 10
    assert faults_of(loader.stats()) == {"DataLoader": (0, 0, 0, 1)}


# -- loaders that were closed, or never started ----------------------------------------------------


def closed_early() -> Iterator[Stats]:
    loader = DataLoader(range(40), 4, observe=True, **THREADS)  # type: ignore[arg-type]
    iterator: Any = iter(loader)
    iterator.close()
    yield loader.stats()
    yield iterator.stats()
    run = Pipeline.from_iterable(range(40)).map(abs, **THREADS).run(observe=True)
    run.close()
    yield run.stats()
    yield DataLoader(range(4), observe=True).stats()  # type: ignore[arg-type]


@pytest.mark.parametrize("place", range(4), ids=["loader", "iterator", "run", "never"])
def test_without_a_batch_all_forms_say_so(place: int) -> None:
    stats = list(closed_early())[place]
    assert stats.items == 0
    assert stats.verdict.cause == "unknown"
    assert stats.verdict.advice
    assert json.loads(json.dumps(stats.to_dict()))["items"] == 0
    assert stats._repr_html_().startswith("<table>")
    assert "0 items" in str(stats)
    assert compare(stats, stats).speedup is None


def test_of_a_closed_run_the_figures_stay() -> None:
    with Pipeline.from_iterable(range(40)).map(abs, **THREADS).run(observe=True) as run:
        next(run)
    first = run.stats()
    assert first.items == 1
    assert run.stats().seconds == first.seconds
