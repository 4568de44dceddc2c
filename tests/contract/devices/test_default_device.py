"""A default device, as of `torch.set_default_device`, is for the user's tensors: none of ours follow it.

The device of the tests is "meta": it is there on every machine, and holds no data that could be right.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import ConcatDataset, Dataset, TensorDataset

from hybridloader import DataLoader, Pipeline, SampleSeeding
from hybridloader.pipeline import Pad

ROWS, COLUMNS = 4, 32 * 1024  # 512 KB a batch: beyond what is sent without a slot


class Views(Dataset[Any]):
    """Large and small tensors, views of one storage, an empty one, some in another order."""

    def __init__(self) -> None:
        self.rows = torch.arange(2.0 * ROWS).repeat(COLUMNS, 1).t()

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        row = self.rows[index].contiguous()
        return {
            "large": row,
            "view": row[: COLUMNS // 2],
            "turned": row.view(2, -1).t(),
            "small": row[:3].clone(),
            "empty": row[:0],
            "sparse": row[:3].to_sparse(),
        }


def _same(found: Any, expected: Any) -> bool:
    if isinstance(found, dict):
        return all(_same(found[key], expected[key]) for key in expected)
    if isinstance(found, list):
        return all(map(_same, found, expected))
    return bool(torch.equal(found.to_dense(), expected.to_dense()))


def check(given: Any, workers: int, **options: Any) -> None:
    batches = iter(DataLoader(given, ROWS, num_workers=workers, **options))
    with torch.device("meta"):
        found = list(batches)
    options.pop("backend", None)
    assert _same(found, list(torch.utils.data.DataLoader(given, ROWS, **options)))


@pytest.mark.parametrize("backend", ["inline", "threads", "fork"])
def test_batches_come_from_every_backend(backend: str) -> None:
    check(Views(), 1, backend=backend, collate_fn=list)
    check(Views().rows.contiguous(), 1, backend=backend)


def test_batches_come_without_workers() -> None:
    rows = Views().rows.contiguous()
    parts = [TensorDataset(rows[:3]), TensorDataset(rows[3:])]
    for dataset in (rows, TensorDataset(rows), ConcatDataset(parts)):
        check(dataset, 0)


def test_a_pipeline_draws_its_seed_and_pads() -> None:
    rows = [torch.ones(length) for length in (3, 1)]
    pipeline = Pipeline.from_dataset(rows).batch(2, collate_fn=Pad(lengths=True))
    with torch.device("meta"):
        ((batch, lengths),) = list(pipeline)
    assert batch.tolist() == [[1, 1, 1], [1, 0, 0]]
    assert lengths.tolist() == [3, 1]


class Noise(Dataset[Any]):
    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> Any:
        return torch.empty(3, device="cpu").uniform_().tolist()


def choose_meta(worker: int) -> None:
    torch.set_default_device("meta")  # of this thread


def test_tensors_of_the_cpu_draw_from_the_generators_of_their_sample(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # torch sets it for all threads, when a worker chooses a device for its own.
    monkeypatch.setattr("torch.utils._device.CURRENT_DEVICE", None)
    options: Any = {"num_workers": 1, "backend": "threads", "collate_fn": list}
    options |= {"seeding": SampleSeeding(1), "worker_init_fn": choose_meta}
    first, second = (list(DataLoader(Noise(), **options)) for _ in range(2))
    assert first == second
