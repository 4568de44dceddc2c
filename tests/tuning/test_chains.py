"""Tuning of pipelines that are joined, and of those before and after a fork."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from hybridloader import Pipeline, tune
from hybridloader.errors import WorkerTimeout
from hybridloader.pipeline import Operator
from hybridloader.testing import Gate
from hybridloader.tuning import auto as choosing
from hybridloader.tuning.chains import chains_of, with_operators
from hybridloader.tuning.pipeline_subject import PipelineSubject
from hybridloader.tuning.plans import INLINE, Place
from hybridloader.tuning.trials import Empty

SECONDS = 0.3
AUTO: Any = {"backend": "auto"}


def double(number: int) -> int:
    return 2 * number


def negative(number: int) -> int:
    return -number


def numbers(count: int = 30) -> Pipeline:
    return Pipeline.from_dataset(range(count), shuffle=True, seed=2)


def forked(**where: Any) -> Pipeline:
    one, two = numbers().map(double, **where).fork()
    return Pipeline.zip(one.map(negative, **where), two.map(str, **where))


def joined(**where: Any) -> dict[str, Pipeline]:
    """Return pipelines of each kind; `double` and `negative` are steps of those that they join."""
    both = (numbers().map(double, **where), numbers().map(negative, **where))
    return {
        "zip": Pipeline.zip(*both),
        "concat": Pipeline.concat(*both),
        "mix": Pipeline.mix(*both, weights=(1, 2), seed=5),
        "interleave": Pipeline.interleave(*both, block_length=3),
        "fork": forked(**where),
        "nested": Pipeline.concat(Pipeline.zip(*both), forked(**where)),
        "twice": Pipeline.zip(both[0], both[0]),
    }


NAMES = {
    "zip": ["zip 0: map(double)", "zip 1: map(negative)"],
    "concat": ["concat 0: map(double)", "concat 1: map(negative)"],
    "mix": ["mix 0: map(double)", "mix 1: map(negative)"],
    "interleave": ["interleave 0: map(double)", "interleave 1: map(negative)"],
    "fork": ["fork 0: map(double)", "zip 0: map(negative)", "zip 1: map(str)"],
    "nested": [
        "concat 0, zip 0: map(double)",
        "concat 0, zip 1: map(negative)",
        "fork 0: map(double)",
        "concat 1, zip 0: map(negative)",
        "concat 1, zip 1: map(str)",
    ],
    "twice": ["zip 0: map(double)", "zip 1: map(double)"],
}


@pytest.mark.parametrize("kind", NAMES)
def test_steps_get_other_workers_wherever_they_are(kind: str) -> None:
    pipe = joined()[kind]
    subject = PipelineSubject(pipe)
    assert [stage.name for stage in subject.stages] == NAMES[kind]
    assert subject.start == (INLINE,) * len(NAMES[kind])
    plan = tuple(Place("threads", 1 + at) for at in range(len(NAMES[kind])))
    moved = subject.apply(plan)
    assert PipelineSubject(moved).start == plan
    assert PipelineSubject(pipe).start == subject.start
    expected = list(pipe.run(seed=0))
    assert list(moved.run(seed=0)) == expected
    run = pipe.run(seed=0)
    had = [next(run) for _ in range(7)]
    with moved.run(state=run.state_dict()) as resumed:  # it is the same pipeline for a state
        assert [*had, *resumed] == expected
    run.close()
    assert subject.apply(subject.start) is pipe
    lines = subject.code(plan).splitlines()
    assert lines == [
        f"{name}: backend='threads', num_workers={1 + at}" for at, name in enumerate(NAMES[kind])
    ]


@pytest.mark.parametrize("kind", NAMES)
def test_a_trial_has_figures_of_each_step(kind: str) -> None:
    subject = PipelineSubject(joined()[kind])
    plan = (Place("threads", 1),) * len(subject.stages)
    with subject.open(plan, 60) as running:
        for _ in range(20):  # the first pipeline of `concat` has 30
            next(running)
        assert None not in running.stages()


def test_a_fork_is_copied_once_and_still_runs_once() -> None:
    calls: list[int] = []

    def once(number: int) -> int:
        calls.append(number)
        return number

    one, two = Pipeline.from_dataset(range(5)).map(once).fork()
    pipe = Pipeline.zip(one, two)
    assert [chain.path for chain in chains_of(pipe)] == [(-1,), (0, 0), (0, 1), ()]
    assert with_operators(pipe, {}) is pipe
    moved = PipelineSubject(pipe).apply((Place("threads", 2),))
    assert list(moved) == [(number, number) for number in range(5)]
    assert sorted(calls) == [0, 1, 2, 3, 4]


def test_steps_of_one_name_are_told_apart() -> None:
    pipe = numbers().map(double).batch(1, collate_fn=sum).map(double)
    subject = PipelineSubject(pipe)
    assert [stage.name for stage in subject.stages] == ["map(double)", "map(double) #2"]
    with subject.open((Place("threads", 1),) * 2, 60) as running:
        next(running)
        assert None not in running.stages()
    moved = subject.apply((Place("threads", 2), INLINE))
    assert [step.name for step in moved.operators] == [step.name for step in pipe.operators]


@pytest.mark.parametrize("kind", ["mix", "fork"])
def test_tuning_leaves_items_and_generators(kind: str) -> None:
    pipe = joined()[kind]
    expected = list(pipe.run(seed=0))
    torch.manual_seed(5)
    before = torch.get_rng_state()
    tuning = tune(pipe, seconds=SECONDS)
    assert torch.equal(torch.get_rng_state(), before)
    assert list(tuning.apply().run(seed=0)) == expected
    assert all(name in tuning.code for name in NAMES[kind])


@pytest.mark.parametrize("kind", ["zip", "concat", "fork", "nested"])
def test_auto_is_chosen_wherever_it_is(
    kind: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(choosing, "SECONDS", SECONDS)
    pipe, expected = joined(**AUTO)[kind], list(joined()[kind].run(seed=0))
    assert list(pipe.run(seed=0)) == expected
    (line,) = capsys.readouterr().err.splitlines()
    assert all(f"{name} on " in line for name in NAMES[kind])
    chosen = pipe.settled()
    assert not any(
        step.placement is not None and step.placement.auto
        for chain in chains_of(chosen)
        for step in chain.chain.operators
    )
    assert [list(epoch) for epoch in pipe.epochs(1, seed=0)] == [expected]
    assert capsys.readouterr().err == ""


def test_only_what_is_auto_in_a_branch_is_changed() -> None:
    plain = numbers().map(negative, backend="threads", num_workers=3)
    subject = PipelineSubject(Pipeline.zip(numbers().map(double, **AUTO), plain), only_auto=True)
    assert [stage.name for stage in subject.stages] == ["zip 0: map(double)"]
    moved = subject.apply((Place("threads", 5),))
    assert PipelineSubject(moved).start == (Place("threads", 5), Place("threads", 3))


def test_a_pipeline_that_is_not_reached_keeps_its_workers() -> None:
    kept = numbers().map(negative, backend="threads", num_workers=3)
    pipe = Pipeline.mix(numbers().map(double), kept, weights=lambda epoch: (1, 0))
    tuning = tune(pipe, seconds=SECONDS)
    assert tuning.plan[1] == Place("threads", 3)
    assert "No trial had a result of mix 1: map(negative), which keeps its workers." in str(tuning)


# -- bad input -----------------------------------------------------------------------------------------


def empty() -> Pipeline:
    return Pipeline.from_iterable(list).map(double)


def test_an_empty_pipeline_among_others() -> None:
    for join in (Pipeline.concat, Pipeline.mix, Pipeline.interleave):
        tuning = tune(join(numbers().map(double), empty()), seconds=SECONDS)
        assert tuning.rate > 0
        assert tuning.plan[1] == INLINE
        with pytest.raises(Empty, match="Pipeline gives no items"):
            tune(join(empty(), empty()), seconds=SECONDS)
    with pytest.raises(ValueError, match="pipeline 1 ended after 0 items"):
        tune(Pipeline.zip(numbers().map(double), empty()), seconds=SECONDS)
    with pytest.raises(Empty, match="Pipeline gives no items"):
        tune(Pipeline.zip(numbers().map(double), empty(), strict=False), seconds=SECONDS)


def broken(number: int) -> int:
    raise KeyError("no such file")


@pytest.mark.parametrize("join", [Pipeline.zip, Pipeline.concat, Pipeline.mix, Pipeline.interleave])
def test_the_error_of_a_pipeline_among_others_is_raised(join: Callable[..., Pipeline]) -> None:
    with pytest.raises(KeyError, match="no such file") as caught:
        # So long that each trial gets as far as the error, which ends it.
        tune(join(numbers().map(double), numbers().map(broken)), seconds=60)
    assert "tune() had no batch of Pipeline from any plan" in caught.value.__notes__[-1]


def test_the_error_of_a_step_before_a_fork_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choosing, "SECONDS", SECONDS)
    one, two = numbers().map(broken, **AUTO).fork()
    with pytest.raises(KeyError, match="no such file"):
        list(Pipeline.zip(one, two.map(double, **AUTO)))


@pytest.mark.parametrize("backend", ["threads", "fork"])
@pytest.mark.parametrize("join", [Pipeline.zip, Pipeline.concat])
def test_a_pipeline_among_others_that_hangs_gives_an_error(
    backend: str, join: Callable[..., Pipeline]
) -> None:
    gate = Gate()

    def hang(number: int) -> int:
        gate.arrive()
        return number

    where: Any = {"backend": backend, "num_workers": 1, "task_timeout": 0.2}
    try:
        with pytest.raises(WorkerTimeout):
            tune(join(numbers().map(double), numbers().map(hang, **where)), seconds=1)
    finally:
        gate.open()


@dataclass(frozen=True)
class Both(Operator):
    """A user's own join, which says nothing of copies."""

    other: Pipeline

    def open(self, items: Iterator[Any], context: Any) -> Iterator[Any]:
        return zip(items, context.open(self.other), strict=True)

    def branches(self) -> tuple[Pipeline, ...]:
        return (self.other,)


def test_what_can_t_be_tuned_is_refused_before_anything_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(choosing, "SECONDS", SECONDS)
    with pytest.raises(TypeError, match="can be read only once"):
        tune(Pipeline.zip(numbers().map(double), Pipeline.from_iterable(iter(range(3)))))
    with pytest.raises(TypeError, match="no step of this pipeline to place"):
        tune(Pipeline.zip(numbers(), numbers()))
    pipe = numbers().map(double).apply(Both(numbers().map(negative)))
    assert len(list(pipe)) == 30
    with pytest.raises(TypeError, match=r"both has branches and no with_branches\(\)"):
        PipelineSubject(pipe)
    # Its own steps can be placed while those of its branches are left alone.
    assert list(numbers().map(double, **AUTO).apply(Both(numbers())).settled()) == list(
        numbers().map(double).apply(Both(numbers()))
    )
