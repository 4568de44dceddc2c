"""Calls of Python functions that a plain batch costs, ours alone, in the middle of an epoch.

No clock is read. What nobody has asked for (statistics, restarts, states, seeds by sample) costs no
call, and a call that comes to every batch is seen here and nowhere else.
"""

from __future__ import annotations

import collections
import contextlib
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.utils.data

import hybridloader
from hybridloader import DataLoader, Threads

OURS = str(Path(hybridloader.__file__).parent), str(Path(inspect.getfile(Threads)).parent)
SIZE, FIRST, BATCHES = 4, 100, 200


class Calls(collections.Counter[str]):
    """Counts calls of our functions, by name, while it is the profiling function of this thread."""

    def __call__(self, frame: Any, event: str, argument: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(OURS):
            self[f"{Path(frame.f_code.co_filename).stem}.{frame.f_code.co_name}"] += 1

    def a_batch(self) -> float:
        return sum(self.values()) / BATCHES

    def __str__(self) -> str:
        return ", ".join(f"{count / BATCHES:.2f} {name}" for name, count in self.most_common())


def least(count: Callable[[], Calls]) -> Calls:
    """Return the smallest of three counts: a late batch, or a collection in between, only adds calls."""
    return min((count() for _ in range(3)), key=Calls.total)


def plainly(samples: Any) -> Any:
    return samples


class Numbers:
    def __len__(self) -> int:
        return 10_000

    def __getitem__(self, index: int) -> Any:
        return index


class Counted(Numbers):
    """Has a worker count its calls; the sample after the last batch that counts is what it counted."""

    def __init__(self) -> None:
        self.calls = Calls()

    def __getitem__(self, index: int) -> Any:
        if index == SIZE * FIRST:
            sys.setprofile(self.calls)
        if index == SIZE * (FIRST + BATCHES):
            sys.setprofile(None)
            return dict(self.calls)
        return index


def calls_of_the_consumer(backend: Any, workers: int, **others: Any) -> tuple[DataLoader, Calls]:
    loader = DataLoader(
        Numbers(),  # type: ignore[arg-type]
        SIZE,
        num_workers=workers,
        backend=backend,
        collate_fn=plainly,
        **others,
    )
    iterator = iter(loader)
    for _ in range(FIRST):
        next(iterator)
    calls, before = Calls(), sys.getprofile()
    sys.setprofile(calls)
    try:
        for _ in range(BATCHES):
            next(iterator)
    finally:
        sys.setprofile(before)
    iterator.close()  # type: ignore[attr-defined]
    return loader, calls


def calls_of_a_worker(backend: Any, **others: Any) -> Calls:
    loader = DataLoader(
        Counted(),  # type: ignore[arg-type]
        SIZE,
        num_workers=1,
        backend=backend,
        collate_fn=plainly,
        **others,
    )
    return Calls(next(batch[0] for batch in loader if type(batch[0]) is dict))


@pytest.mark.parametrize(
    ("backend", "workers", "most"),
    [("inline", 0, 25), ("threads", 2, 22), ("fork", 2, 35)],
)
def test_a_plain_batch_costs_the_consumer_few_calls(backend: Any, workers: int, most: int) -> None:
    calls = least(lambda: calls_of_the_consumer(backend, workers)[1])
    assert calls.a_batch() <= most, str(calls)
    assert not [name for name in calls if name.startswith("progress.")], "states were not asked for"


def test_a_plain_batch_costs_a_worker_few_calls() -> None:
    calls = least(lambda: calls_of_a_worker("fork"))
    assert calls.a_batch() <= 30, str(calls)


class Stream(torch.utils.data.IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(8))

    def __len__(self) -> int:
        return 1


@pytest.mark.parametrize("asked", [False, True])
def test_torchs_profiler_range_is_entered_where_something_is_to_be_seen_by_it(
    asked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch's `__next__`, which enters it, is for who profiles or has asked for the length."""
    entered: list[str] = []

    class Range(contextlib.nullcontext[None]):
        def __init__(self, name: str) -> None:
            super().__init__()
            entered.append(name)

    monkeypatch.setattr(torch.autograd.profiler, "record_function", Range)
    loader = DataLoader(Stream(), 4, backend="threads", num_workers=1)
    if asked:
        assert len(loader) == 1
        with pytest.warns(UserWarning, match="was reported to be 1"):
            list(loader)
    else:
        list(loader)
    assert bool(entered) == asked
