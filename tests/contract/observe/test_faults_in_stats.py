"""Faults in statistics: counted once, at the stage that had them, in all forms."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from support.failing_datasets import Samples

from hybridloader import DataLoader, Pipeline, Replace, Retry, Skip
from hybridloader.observe import Stats

THREADS: dict[str, Any] = {"backend": "threads", "num_workers": 2}
PROCESSES: dict[str, Any] = {"backend": "fork", "num_workers": 2}


def flaky(item: int) -> int:
    """Fails for every tenth, always."""
    if item % 10 == 3:
        raise ValueError(item)
    return item


def faults_of(stats: Stats) -> dict[str, tuple[int, ...]]:
    return {stage.name: stage.faults.counts for stage in stats.stages if stage.faults}


POLICIES: list[tuple[Any, tuple[int, ...]]] = [
    (Skip(), (4, 0, 0, 0)),
    (Replace(lambda index, error: index + 1), (0, 4, 0, 0)),
    (Retry(2, backoff=0.0, then=Skip()), (4, 0, 8, 0)),
    (Retry(1, backoff=0.0, then=Replace(lambda index, error: index + 1)), (0, 4, 4, 0)),
]


@pytest.mark.parametrize("where", [{}, THREADS, PROCESSES], ids=["inline", "threads", "fork"])
@pytest.mark.parametrize(("policy", "wanted"), POLICIES)
def test_loaders_and_runs_count_the_same(
    where: dict[str, Any], policy: Any, wanted: tuple[int, ...]
) -> None:
    loader = DataLoader(Samples(flaky, 40), 4, on_error=policy, observe=True, **where)  # type: ignore[arg-type]
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
    written = json.loads(json.dumps(stats.to_dict()))
    assert written["faults"] == {"skipped": 8, "replaced": 0, "retried": 4, "restarted": 0}
    assert [row["faults"]["skipped"] for row in written["stages"] if row["name"] == "second"] == [4]
    text = str(stats)
    assert "skipped" in text
    assert "retried" in text
    assert "restarted" not in text


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
