"""Samples that have killed workers: where they are noted, and what becomes of their batch."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from support.bad_samples import Samples, Together
from torch.utils.data import Subset, TensorDataset

from hybridloader import Replace, Skip
from hybridloader.engine.messages import Abandoned, GivenUp, PartlyGivenUp, TaskContext
from hybridloader.errors import WorkerDied
from hybridloader.fetching.readers import MapFetch


class Answer(NamedTuple):
    """Value of a fetcher, and the metadata beside it."""

    value: Any
    outcome: Any


def opened(dataset: Any, flag: TaskContext, policy: Any = None, **more: Any) -> Any:
    more = {"collate_fn": list, "batched": True, **more}
    fetcher = MapFetch(dataset, on_error=policy, **more).open(None, flag)

    def fetch(index: Any) -> Answer:
        value = fetcher.fetch(index)
        return Answer(value, (flag.take_extras() or {}).get("outcome"))

    return fetch


class At:
    """Notes where the flag is when each sample is fetched."""

    def __init__(self, flag: TaskContext) -> None:
        self.flag, self.seen = flag, []  # type: ignore[var-annotated]

    def __getitem__(self, index: int) -> int:
        self.seen.append(self.flag.at)
        if index < 0:
            raise ValueError(index)
        return index


@pytest.mark.parametrize("policy", [None, Skip()])
@pytest.mark.parametrize("noting", [True, False])
def test_who_wants_to_know_sees_which_sample_a_worker_is_at(policy: Any, noting: bool) -> None:
    flag = TaskContext(tracked=True) if noting else TaskContext()
    dataset = At(flag)
    collated: list[int] = []
    fetch = opened(dataset, flag, policy, collate_fn=lambda batch: collated.append(flag.at))
    fetch([7, 8, 9])
    assert dataset.seen == ([0, 1, 2] if noting else [-1] * 3)
    assert collated == [-1]  # not one of them, if it dies there
    try:
        fetch([7, -8, 9])
    except ValueError:
        pass
    flag.at = -1  # as the worker does after each task
    alone = opened(dataset, flag, policy, batched=False, collate_fn=abs)
    dataset.seen.clear()
    alone(7)
    assert dataset.seen == ([0] if noting else [-1])
    flag.at = -1
    dataset.seen.clear()
    opened(Subset(dataset, range(9)), flag, policy)([3, 4])  # type: ignore[arg-type]
    assert dataset.seen == ([0, 1] if noting else [-1] * 2)


def test_a_sample_that_was_given_up_is_as_one_that_failed() -> None:
    lost = GivenUp(7, "it kills")
    for dataset in (Samples(9, ()), Together(9, ()), TensorDataset(torch.arange(9))):
        with pytest.raises(WorkerDied, match="it kills"):
            opened(dataset, TaskContext())(PartlyGivenUp([1, lost]))
        short = opened(dataset, TaskContext(), Skip())(PartlyGivenUp([1, lost, 2]))
        assert (short.outcome.short, short.outcome.wanted) == ([1, 2], 3)
        ((index, position, failure, replaced),) = short.outcome.failures
        assert (index, position, replaced) == (7, 1, False)
        assert failure.exception.args == ("it kills",)
        whole = opened(dataset, TaskContext(), Replace(lambda i, e: -i))(PartlyGivenUp([lost]))
        assert whole.value == [-7]
        with pytest.raises(WorkerDied, match="it kills"):
            opened(dataset, TaskContext(), batched=False, collate_fn=abs)(lost)
        alone = opened(dataset, TaskContext(), Skip(), batched=False)(lost)
        assert (alone.value, alone.outcome.failures[0].index) == ([], 7)


def test_of_a_batch_that_is_lost_each_sample_keeps_its_own_error() -> None:
    def collate(samples: list[Any]) -> None:
        raise TypeError("odd")

    short = opened(Samples(9, (3,)), TaskContext(), Skip(), collate_fn=collate, fill=False)(
        [2, 3, 4]
    )
    assert [(m.index, type(m.failure.exception)) for m in short.outcome.failures] == [
        (2, TypeError),
        (3, ValueError),
        (4, TypeError),
    ]


class Greedy(Samples):
    def __getitems__(self, indices: list[Any]) -> list[Any]:
        return indices


def test_a_dataset_never_sees_what_was_given_up() -> None:
    short = opened(Greedy(), TaskContext(), Skip())(PartlyGivenUp([1, GivenUp(7, "it kills")]))
    assert [missing.index for missing in short.outcome.failures] == [7]
    assert len(short.value) == 1


def test_a_batch_is_abandoned_between_two_samples() -> None:
    flag = TaskContext()

    class Stops:
        seen = 0

        def __getitem__(self, index: int) -> int:
            self.seen += 1
            flag.cancelled = True
            raise ValueError

    dataset = Stops()
    with pytest.raises(Abandoned):
        opened(dataset, flag, Skip())([1, 2, 3])
    assert dataset.seen == 1
