"""Pipelines of many steps in a row, and of many joins within one another."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import pytest

from hybridloader import Pipeline

STEPS: dict[str, Callable[[Pipeline], Pipeline]] = {
    "take": lambda pipe: pipe.take(9),
    "batch": lambda pipe: pipe.batch(1, collate_fn=list),
    "map": lambda pipe: pipe.map(abs),
    "repeat": lambda pipe: pipe.repeat(1),
    "cache": lambda pipe: pipe.cache(),
    "concat": lambda pipe: pipe.concat(Pipeline.from_dataset([])),
    "zip": lambda pipe: pipe.zip(),
}


@pytest.mark.parametrize("name", STEPS)
def test_a_pipeline_of_fifty_steps_runs_and_resumes(name: str) -> None:
    pipe = Pipeline.from_dataset([3, 4])
    for _ in range(50):
        pipe = STEPS[name](pipe)
    assert len(pipe) == len(pickle.loads(pickle.dumps(pipe))) == 2
    assert repr(pipe)
    assert str(pipe)
    with pipe.run() as run:
        next(run)
        state = run.state_dict()
        assert len(list(run)) == 1
    if name != "cache":  # which another run may not fill
        assert len(list(pipe.run(state=state))) == 1


def test_a_table_of_the_steps_has_their_options() -> None:
    work: Any = {"backend": "fork", "num_workers": 1, "fuse": False}
    pipe = Pipeline.from_dataset(range(9)).map(abs, **work).map(abs, **work)
    pipe = pipe.map(str, backend="threads", num_workers=2, prefetch=5, timeout=3)
    *_, first, second, third = (" ".join(row.split()[1:]) for row in str(pipe).splitlines())
    assert [first, second] == ["fork x 1 passed on unopened 9", "fork x 1 9"]
    assert third == "threads x 2 5 items ahead, timeout 3 s 9"


def test_joins_within_one_another_are_planned_once_each() -> None:
    """Planned once for each step around it, the innermost would never begin."""
    pipe = Pipeline.from_dataset([0])
    for number in range(1, 40):
        pipe = pipe.map(abs).prefetch(1).concat(Pipeline.from_dataset([number]))
    assert list(pipe) == list(range(40))
