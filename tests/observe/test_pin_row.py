"""Row of the thread that pins a loader's batches."""

from __future__ import annotations

import time

import pytest
import torch
from support.fake_accelerator import FakeAccelerator
from support.pinning_datasets import BACKENDS, Rows

from hybridloader import DataLoader

NAP = 0.01


class Slow(FakeAccelerator):
    """A device to which a copy takes a while."""

    def move(self, tensor: torch.Tensor) -> torch.Tensor:
        time.sleep(NAP)
        return super().move(tensor)


def loader(device: FakeAccelerator, backend: str, **others: object) -> DataLoader:
    return DataLoader(
        Rows(60), 2, num_workers=1, backend=backend, device=device, observe=True, **others
    )  # type: ignore[arg-type]


@pytest.mark.usefixtures("free_cores")
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_slow_copy_is_named(backend: str) -> None:
    observed = loader(Slow(), backend)
    assert len(list(observed)) == 30
    stats = observed.stats()
    names = [stage.name for stage in stats.stages]
    (row,) = (stage for stage in stats.stages if stage.backend == "thread")
    assert names.index(row.name) == len(names) - 2, "next to the loop"
    assert row.items == 30
    assert row.busy >= 30 * NAP
    assert row.load > 0.5, str(stats)
    assert stats.verdict.stage == row.name, str(stats)
    assert sum(stats.stall.by_stage.values()) <= stats.stall.seconds * (1 + 1e-6) + 1e-9


def test_each_epoch_has_a_row_of_its_own() -> None:
    observed = loader(FakeAccelerator(), "threads", persistent_workers=True)
    for _ in range(2):
        list(observed)
        rows = [stage for stage in observed.stats().stages if stage.backend == "thread"]
        assert [row.items for row in rows] == [30]
    observed._iterator.close()  # type: ignore[union-attr]
    assert [stage.items for stage in observed.stats().stages if stage.backend == "thread"] == [30]


def test_without_a_thread_there_is_no_row() -> None:
    observed = DataLoader(Rows(4), 2, device=FakeAccelerator(), observe=True)
    list(observed)
    assert all(stage.backend != "thread" for stage in observed.stats().stages)
