"""Errors of a dataset that are of our own types: raised in their places, and the loader goes on."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from support.failing_datasets import Samples, load, of_a_loader_within, outcomes
from support.fake_accelerator import FakeAccelerator
from torch.utils.data import IterableDataset

from hybridloader import StateError, TooManyErrors, WorkerDied, WorkerTimeout
from hybridloader.errors import IteratorClosed, NotReady, ShardLost, TaskTimeout

OURS = (
    *(IteratorClosed, NotReady, ShardLost, StateError, TaskTimeout, TimeoutError, TooManyErrors),
    *(StopIteration, WorkerDied, WorkerTimeout),
)


def names(found: list[Any]) -> list[Any]:
    return [type(x) if isinstance(x, Exception) else x for x in found]


@pytest.mark.parametrize(
    ("backend", "workers", "device", "within"),
    [
        ("inline", 0, None, False),
        ("inline", 0, "fake", True),
        ("threads", 2, "fake", False),
        ("fork", 2, None, True),
    ],
)
def test_an_error_of_a_sample_ends_nothing(
    backend: str, workers: int, device: str | None, within: bool
) -> None:
    def fail_often(index: int) -> int:
        if index % 3 == 2:
            kind = OURS[index // 3]
            raise of_a_loader_within(kind("mine")) if within else kind("mine")
        return index

    options = {} if device is None else {"device": FakeAccelerator()}
    loader = load(Samples(fail_often, 3 * len(OURS)), backend, workers=workers, **options)
    kinds = [RuntimeError if kind is StopIteration else kind for kind in OURS]
    wanted = [x for n, kind in enumerate(kinds) for x in ([3 * n], [3 * n + 1], kind)]
    assert names(outcomes(iter(loader))) == wanted


class Shard(IterableDataset[int]):
    def __init__(self, kind: type[Exception]) -> None:
        self.kind = kind

    def __iter__(self) -> Iterator[int]:
        self.count = -1
        return self

    def __next__(self) -> int:
        self.count += 1
        if self.count == 2:
            raise self.kind("mine")
        if self.count == 5:
            raise StopIteration
        return self.count


@pytest.mark.parametrize(
    ("backend", "workers", "on_error"),
    [("inline", 0, "skip"), ("threads", 2, "raise"), ("fork", 2, "raise")],
)
def test_an_error_of_an_iterable_dataset_ends_no_shard(
    backend: str, workers: int, on_error: str
) -> None:
    for kind in OURS[::3] if backend == "fork" else {*OURS} - {StopIteration}:
        loader = load(Shard(kind), backend, workers=min(1, workers), on_error=on_error)
        wanted = [[0], [1], kind, [3], [4]]
        if on_error == "skip":
            wanted.remove(kind)
        assert names(outcomes(iter(loader))) == wanted
        assert [type(record.error) for record in loader.skipped] == [kind] * (on_error == "skip")
