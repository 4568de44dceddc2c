"""Batches of many small tensors on every backend: each arrives as the plain loop makes it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.comparison import same
from support.named_slots import NamedFork
from torch.utils.data import default_collate

from hybridloader import DataLoader, Fork, Pipeline, Spawn, Threads

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")

FRESH = pytest.param(Spawn(), marks=pytest.mark.full)  # sends as forked workers do
BACKENDS = [Threads(), Fork(), NamedFork(), FRESH]


class Keyed:
    """Dicts of 60 keys: tensors of three kinds, numbers and text."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> Any:
        sample: dict[str, Any] = {f"row {i}": torch.full((4,), index + i) for i in range(20)}
        sample |= {f"scalar {i}": torch.tensor(index * 0.5 + i) for i in range(20)}
        return sample | {f"number {i}": index + i for i in range(20)} | {"text": f"sample {index}"}


class Ragged:
    """Lists of tensors of 1 to 50 elements."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> Any:
        return [torch.arange(1 + (7 * index + i) % 50) for i in range(40)]


class OfAllSizes:
    """Tensors of a few kinds and of sizes about those at which the way to send them changes."""

    kinds = "bool", "uint8", "float32", "bfloat16", "float64", "complex64"

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:
        sample = {}
        for kind in self.kinds:
            dtype = getattr(torch, kind)
            for size in (1, 17, 64, 257, 4096, 4097, 32 * 1024, 256 * 1024):
                for count in {max(1, size // dtype.itemsize + more) for more in (-1, 0, 1)}:
                    sample[f"{kind} {count}"] = torch.full((count,), index).to(dtype)
        return sample


def as_they_are(samples: Any) -> Any:
    return samples


def places_in_a_line(sample: dict[str, torch.Tensor]) -> set[int]:
    return {tensor.data_ptr() % 64 for tensor in sample.values()}


def doubled(samples: Any) -> Any:
    return [[2 * tensor for tensor in sample] for sample in samples]


@pytest.mark.parametrize("backend", BACKENDS, ids=repr)
@pytest.mark.parametrize(
    ("dataset", "collate"),
    [
        (Keyed(), as_they_are),
        (Ragged(), as_they_are),
        pytest.param(Keyed(), default_collate, marks=pytest.mark.full),
    ],
)
def test_every_backend_delivers_what_the_plain_loop_makes(
    dataset: Any, collate: Any, backend: Any
) -> None:
    expected = [collate([dataset[i] for i in range(at, at + 8)]) for at in range(0, 24, 8)]
    loader = DataLoader(dataset, 8, num_workers=2, backend=backend, collate_fn=collate)
    with iter(loader) as batches:
        same(list(batches), expected)


@pytest.mark.parametrize(
    ("backend", "collate"),
    [
        (Fork(), default_collate),
        *((backend, as_they_are) for backend in BACKENDS[:3]),
    ],
)
def test_every_tensor_begins_at_a_cache_line_as_with_torch(backend: Any, collate: Any) -> None:
    dataset = OfAllSizes()
    loader = DataLoader(dataset, 2, num_workers=1, backend=backend, collate_fn=collate)
    for number, batch in enumerate(loader):
        same(batch, collate([dataset[2 * number], dataset[2 * number + 1]]))
        for sample in batch if collate is as_they_are else [batch]:
            assert {key: t.data_ptr() % 64 for key, t in sample.items() if t.data_ptr() % 64} == {}


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (Fork(), NamedFork()),
        (NamedFork(), Fork()),
        pytest.param(Spawn(), Fork(), marks=pytest.mark.full),
    ],
    ids=repr,
)
def test_so_does_every_one_that_goes_from_process_to_process(first: Any, second: Any) -> None:
    pipe = Pipeline.from_dataset(OfAllSizes(), backend=first, num_workers=1)
    for places in pipe.map(places_in_a_line, backend=second, num_workers=1, fuse=False):
        assert places == {0}


def test_they_go_from_process_to_process_unopened() -> None:
    made = (
        Pipeline.from_dataset(Ragged(), backend="fork", num_workers=1)
        .batch(4, collate_fn=as_they_are)
        .map(doubled, backend="fork", num_workers=1)
    )
    dataset = Ragged()
    with iter(made) as batches:
        found = list(batches)
    same(found, [doubled([dataset[i] for i in range(at, at + 4)]) for at in range(0, 24, 4)])
