"""Batches of many small tensors on every backend: each arrives as the plain loop makes it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import default_collate

from hybridloader import DataLoader, Fork, Memory, Pipeline, SharedMemory, Spawn, Threads

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")

BACKENDS = [
    Threads(),
    Fork(),
    Fork(memory=Memory(kind="named")),
    Fork(memory=Memory(kind="stream")),
    Spawn(),
    SharedMemory(start_method="loky"),
]
ONE_OF_A_KIND = [*BACKENDS[:-1], pytest.param(BACKENDS[-1], marks=pytest.mark.full)]  # as Spawn()


class Keyed:
    """Dicts of 60 keys: tensors of three kinds, numbers and text."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> Any:
        sample: dict[str, Any] = {f"row {i}": torch.full((4,), index + i) for i in range(20)}
        sample |= {f"scalar {i}": torch.tensor(index * 0.5 + i) for i in range(20)}
        return sample | {f"number {i}": index + i for i in range(20)} | {"text": f"sample {index}"}


class PlainNumbers:
    """Dicts of 60 numbers, which need no torch."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> Any:
        return {f"{i}": index * 1.5 if i % 2 else index + i for i in range(60)}


class Ragged:
    """Lists of tensors of 1 to 50 elements."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> Any:
        return [torch.arange(1 + (7 * index + i) % 50) for i in range(40)]


def as_they_are(samples: Any) -> Any:
    return samples


def doubled(samples: Any) -> Any:
    return [[2 * tensor for tensor in sample] for sample in samples]


def assert_equal(a: Any, b: Any) -> None:
    assert type(a) is type(b)
    if isinstance(a, torch.Tensor):
        assert (a.dtype, a.shape, a.stride()) == (b.dtype, b.shape, b.stride())
        assert torch.equal(a, b)
    elif isinstance(a, dict):
        assert [*a] == [*b]
        for key in a:
            assert_equal(a[key], b[key])
    elif isinstance(a, list):
        assert len(a) == len(b)
        for left, right in zip(a, b, strict=True):
            assert_equal(left, right)
    else:
        assert a == b


@pytest.mark.parametrize("backend", ONE_OF_A_KIND, ids=repr)
@pytest.mark.parametrize(
    "collate", [pytest.param(default_collate, marks=pytest.mark.full), as_they_are]
)
@pytest.mark.parametrize(
    "dataset",
    [Keyed(), pytest.param(PlainNumbers(), marks=pytest.mark.full), Ragged()],
    ids=lambda d: type(d).__name__,
)
def test_every_backend_delivers_what_the_plain_loop_makes(
    dataset: Any, collate: Any, backend: Any
) -> None:
    if isinstance(dataset, Ragged) and collate is default_collate:
        pytest.skip("can't be stacked")
    expected = [collate([dataset[i] for i in range(at, at + 8)]) for at in range(0, 24, 8)]
    loader = DataLoader(dataset, 8, num_workers=2, backend=backend, collate_fn=collate)
    with iter(loader) as batches:
        assert_equal(list(batches), expected)


def test_they_go_from_process_to_process_unopened() -> None:
    made = (
        Pipeline.from_dataset(Ragged(), backend="fork", num_workers=1)
        .batch(4, collate_fn=as_they_are)
        .map(doubled, backend="fork", num_workers=1)
    )
    dataset = Ragged()
    with iter(made) as batches:
        found = list(batches)
    assert_equal(
        found, [doubled([dataset[i] for i in range(at, at + 4)]) for at in range(0, 24, 4)]
    )
