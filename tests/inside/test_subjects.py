"""Tuning of real loaders and pipelines, for fractions of a second: what it leaves, and what it gives."""

from __future__ import annotations

import multiprocessing
import os
import random
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.utils.data
from support.failing_datasets import Samples
from support.platforms import needs_fork
from support.tuned_subject import INLINE, Empty, Place, choosing, subject_of

import hybridloader
from hybridloader import DataLoader, Pipeline, WorkerDied, WorkerTimeout, tune

SECONDS = 0.3


def square(index: int) -> int:
    return index * index + 0 * int(torch.rand(()) + random.random())


SQUARES: Any = Samples(square, 100)


def batches(loader: Any) -> list[Any]:
    return [batch.tolist() for batch in loader]


@pytest.mark.parametrize("kind", ["ours", "torch"])
def test_batches_and_generators_are_as_without_tuning(kind: str) -> None:
    def made() -> Any:
        of = DataLoader if kind == "ours" else torch.utils.data.DataLoader
        sampler = torch.utils.data.WeightedRandomSampler(
            [1.0] * 100, 100, generator=torch.Generator().manual_seed(3)
        )
        return of(SQUARES, 8, sampler=sampler)

    torch.manual_seed(1)
    random.seed(1)
    expected = batches(made())
    torch.manual_seed(1)
    random.seed(1)
    tuning = tune(made(), seconds=SECONDS)
    assert batches(tuning.apply()) == expected
    assert isinstance(tuning.apply(), DataLoader)


def test_a_plan_is_applied_to_a_loader_of_ours_and_to_one_of_torch_s() -> None:
    ours = DataLoader(SQUARES, 8, num_workers=2, persistent_workers=True)
    subject = subject_of(ours)
    assert subject.start == (Place("shared-memory", 2),)
    assert subject.apply((Place("threads", 3, 2),)) is ours
    assert (ours.num_workers, ours.backend, ours.threads_per_worker) == (3, "threads", 2)
    assert len(batches(ours)) == 13
    assert "num_workers=3, backend='threads', threads_per_worker=2" in subject.code(
        (Place("threads", 3, 2),)
    )
    assert subject_of(ours).apply((INLINE,)) is ours
    assert len(batches(ours)) == 13
    theirs = torch.utils.data.DataLoader(SQUARES, 8)
    assert "num_workers=0, persistent_workers=False" in subject.code((INLINE,))
    made = subject_of(theirs).apply((Place("threads", 2),))
    assert (made.num_workers, made.backend) == (2, "threads")
    assert len(batches(made)) == 13
    assert theirs.num_workers == 0


class Stream(torch.utils.data.IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(20))


def test_a_loader_of_samples_and_one_of_an_iterable_dataset() -> None:
    """And what a tuning is as text."""
    tuning = tune(DataLoader(SQUARES, None), seconds=SECONDS)
    assert tuning.rate > 0
    text = str(tuning)
    assert "as it was" in text
    assert tuning.code in text
    tuning = tune(DataLoader(SQUARES, 8, num_workers=9999, backend="threads"), seconds=SECONDS)
    assert "beyond the limits: 9999 threads of DataLoader, and" in str(tuning)
    tuning = tune(DataLoader(Stream(), 4), seconds=SECONDS)
    assert tuning.rate > 0
    assert all(place.threads == 1 for trial in tuning.trials for place in trial.plan)


def double(number: int) -> int:
    return 2 * number


def test_a_pipeline_gets_other_placements_and_the_same_items() -> None:
    pipe = (
        Pipeline.from_dataset(range(30), shuffle=True, seed=2)
        .map(double, backend="threads", num_workers=2)
        .map(str)
        .batch(4, collate_fn=list)
    )
    expected = list(pipe.run(seed=0))
    torch.manual_seed(5)
    before = torch.get_rng_state()
    tuning = tune(pipe, seconds=SECONDS)
    assert torch.equal(torch.get_rng_state(), before)
    assert list(tuning.apply().run(seed=0)) == expected
    assert list(pipe.run(seed=0)) == expected
    assert [stage.name for stage in subject_of(pipe).stages] == ["map(double)", "map(str)"]
    plan = (INLINE, Place("threads", 2, 3))
    moved = subject_of(pipe).apply(plan)
    assert subject_of(moved).start == plan
    assert subject_of(pipe).code(plan).splitlines() == [
        "map(double): no backend",
        "map(str): backend='threads', num_workers=2, threads_per_worker=3",
    ]
    assert list(moved.run(seed=0)) == expected


def fails(index: int) -> None:
    raise KeyError("no such file")


def test_bad_datasets_give_their_error_and_leave_nothing() -> None:
    with pytest.raises(KeyError, match="no such file"):
        tune(DataLoader(Samples(fails), 8), seconds=SECONDS)
    with pytest.raises(WorkerDied):
        tune(DataLoader(Samples(lambda _: os._exit(3)), 8, num_workers=1), seconds=SECONDS)
    with pytest.raises(Empty, match="DataLoader gives no batches"):
        tune(DataLoader([], 8), seconds=SECONDS)  # type: ignore[arg-type]
    with pytest.raises(Empty, match="Pipeline gives no items"):
        tune(Pipeline.from_iterable(list).map(double), seconds=SECONDS)


@pytest.mark.full
@pytest.mark.parametrize("words", [{"num_workers": 0}, {"num_workers": 1, "backend": "fork"}])
def test_a_dataset_that_hangs_gives_an_error(words: dict[str, Any]) -> None:
    gate = threading.Event()

    try:
        with pytest.raises(WorkerTimeout) as caught:
            tune(DataLoader(Samples(lambda _: gate.wait(60)), 8, **words), seconds=SECONDS)
    finally:
        gate.set()
    assert "tune() had no batch of DataLoader from any plan" in caught.value.__notes__[0]


def test_what_can_t_be_tuned_is_refused() -> None:
    with pytest.raises(TypeError, match="takes a DataLoader, ours or torch's, or a Pipeline"):
        tune([1, 2])
    with pytest.raises(TypeError, match="can be read only once"):
        tune(Pipeline.from_iterable(iter(range(3))).map(double))
    for pipe in (
        Pipeline.from_dataset(range(3)).batch(2),
        Pipeline.zip(numbers().map(double)),
    ):
        with pytest.raises(TypeError, match="no step of this pipeline to place"):
            tune(pipe)
    loader = DataLoader(SQUARES, 8)
    with pytest.raises(ValueError, match="seconds is seconds, above 0, not 0"):
        tune(loader, seconds=0)
    with pytest.raises(TypeError, match="step must be a function"):
        tune(loader, step="fast")  # type: ignore[arg-type]
    assert hybridloader.tuning.Tuning is type(tune(loader, seconds=SECONDS))


# -- pipelines that are joined, and steps of one name --------------------------------------------------


def numbers() -> Pipeline:
    return Pipeline.from_dataset(range(30), shuffle=True, seed=2)


def test_pipelines_that_are_joined_keep_their_workers() -> None:
    kept = numbers().map(double, backend="threads", num_workers=3)
    for join in (Pipeline.zip, Pipeline.concat, Pipeline.mix, Pipeline.interleave):
        pipe = join(kept, numbers()).map(str)
        subject = subject_of(pipe)
        assert [stage.name for stage in subject.stages] == ["map(str)"]
        assert subject.apply(subject.start) is pipe
        moved = subject.apply((Place("threads", 2),))
        assert moved.operators[0] is pipe.operators[0]
        expected = list(pipe.run(seed=0))
        run = pipe.run(seed=0)
        had = [next(run) for _ in range(7)]
        with moved.run(state=run.state_dict()) as resumed:  # it is the same pipeline for a state
            assert [*had, *resumed] == expected
        run.close()


def test_steps_of_one_name_have_numbers() -> None:
    pipe = numbers().map(double).batch(1, collate_fn=sum).map(double)
    subject = subject_of(pipe)
    assert [stage.name for stage in subject.stages] == ["map(double)", "map(double) #2"]
    with subject.open((Place("threads", 1),) * 2, 60) as running:
        next(running)
        assert None not in running.stages()
    moved = subject.apply((Place("threads", 2), INLINE))
    assert [step.name for step in moved.operators] == [step.name for step in pipe.operators]


# -- backends that are offered -------------------------------------------------------------------------


@needs_fork
def test_spawn_is_offered_where_a_fork_is_impossible_or_not_safe() -> None:
    hazard = SimpleNamespace(runs="grpc runs threads")
    for called, found, why in [
        ("multiprocessing.get_all_start_methods", ["spawn"], "this platform has no fork"),
        ("multiprocessing.get_start_method", "x", "the start method of multiprocessing is 'x'"),
        ("hybridloader._support.torch_env.device_in_use", "cuda", "cuda is initialized, which"),
        ("hybridloader.backends.process.fork_safety.fork_hazard", hazard, hazard.runs),
    ]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("multiprocessing.get_start_method", lambda: "fork")
            patch.setattr(called, lambda found=found: found)
            limits = choosing.limits_here((Place("fork", 1), Place("shared-memory", 2)))
        assert limits.backends == ("inline", "threads", "spawn", "shared-memory")
        assert limits.refused["fork"].startswith(why)


def test_a_daemonic_process_is_offered_no_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(multiprocessing.current_process()._config, "daemon", True)  # type: ignore[attr-defined]
    tuning = tune(DataLoader(SQUARES, 8), seconds=0.1)
    assert tuning.limits.backends == ("inline", "threads")
    why = "this is a daemonic process, which may have no children"
    assert f"Not offered: fork: {why}; spawn: {why}.\n" in str(tuning)
