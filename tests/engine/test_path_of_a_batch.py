"""Calls of Python functions that a plain batch costs, ours alone, in the middle of an epoch.

No clock is read. What nobody has asked for (statistics, restarts, states, seeds by sample) costs no
call, and a call that comes to every batch is seen here and nowhere else.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.utils.data

import hybridloader
from hybridloader import DataLoader, Threads

OURS = str(Path(hybridloader.__file__).parent), str(Path(inspect.getfile(Threads)).parent)
FIRST, BATCHES = 100, 200


def calls_of_a_batch(backend: str, workers: int) -> Counter[str]:
    """Count the calls of our functions that batches in the middle of an epoch cost the consumer."""
    data: Any = range(10_000)
    loader = DataLoader(data, 4, num_workers=workers, backend=backend, collate_fn=list)
    iterator: Any = iter(loader)
    for _ in range(FIRST):
        next(iterator)
    calls, before = Counter[str](), sys.getprofile()

    def count(frame: Any, event: str, argument: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(OURS):
            calls[f"{Path(frame.f_code.co_filename).stem}.{frame.f_code.co_name}"] += 1

    sys.setprofile(count)
    try:
        for _ in range(BATCHES):
            next(iterator)
    finally:
        sys.setprofile(before)
    iterator.close()
    return calls


@pytest.mark.parametrize(
    ("backend", "workers", "most"), [("inline", 0, 25), ("threads", 2, 22), ("fork", 2, 35)]
)
def test_a_plain_batch_costs_few_calls_of_ours(backend: str, workers: int, most: int) -> None:
    """The smallest of three counts: a late batch, or a collection in between, only adds calls."""
    calls = min((calls_of_a_batch(backend, workers) for _ in range(3)), key=Counter.total)
    assert calls.total() <= most * BATCHES, calls
    assert not [name for name in calls if name.startswith("progress.")], "states were not asked for"


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
