"""A program of a user: loaders, a pipeline, a sampler, and the handling of errors."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.utils.data import Dataset
from typing_extensions import assert_type

from hybridloader import DataLoader, Fork, Pipeline, Skip, TooManyErrors
from hybridloader.observe import Stats
from hybridloader.sampling import ShuffleSampler


class Squares(Dataset[torch.Tensor]):
    def __init__(self, size: int, bad: Iterable[int] = ()) -> None:
        self.size = size
        self.bad = frozenset(bad)

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> torch.Tensor:
        if index in self.bad:
            raise ValueError(f"sample {index} is damaged")
        return torch.tensor(index * index)


def half(value: int) -> float:
    return value / 2


def load(backend: str) -> None:
    dataset = Squares(100)
    sampler = ShuffleSampler(dataset, seed=0)
    loader = DataLoader(dataset, 8, sampler=sampler, num_workers=2, backend=backend)
    assert_type(len(loader), int)
    values = sorted(int(value) for batch in loader for value in batch)
    assert values == [index * index for index in range(100)], backend
    assert_type(sampler.state_dict(), dict[str, Any])


def leave_out() -> None:
    loader = DataLoader(Squares(20, bad=[3]), batch_size=4, on_error=Skip(max_failures=1))
    assert sum(len(batch) for batch in loader) == 19
    assert [skipped.index for skipped in loader.skipped] == [3]
    refused = ""
    try:
        list(DataLoader(Squares(20, bad=[3, 5]), batch_size=4, on_error=Skip(max_failures=1)))
    except TooManyErrors as error:
        refused = str(error)
    assert "sample 5 is damaged" in refused


def stream(backend: str) -> None:
    pipe = Pipeline.from_dataset(range(100)).map(half, backend=backend, num_workers=2)
    assert_type(pipe.batch(10), Pipeline)
    with pipe.batch(10).run(observe=True) as run:
        assert sum(float(batch.sum()) for batch in run) == 2475.0
        assert_type(run.stats(), Stats)


def mistakes() -> None:
    """Calls that a type checker must refuse: a comment that it does not need is an error itself."""
    DataLoader(Squares(1), batch_sizes=1)  # type: ignore[call-arg]
    Skip(max_failure=1)  # type: ignore[call-arg]
    Fork(daemon=3)  # type: ignore[call-arg]
    ShuffleSampler(1)  # type: ignore[call-arg]


if __name__ == "__main__":
    for name in ("threads", "fork", "spawn"):
        load(name)
        stream(name)
    leave_out()
    print("loaders, pipelines and errors: ok")
