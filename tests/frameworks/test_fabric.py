"""Fabric: re-creates loaders, replays what was set on them, and moves their batches."""

from __future__ import annotations

from typing import Any

import pytest
from support.seeded_training import (
    WORKERS,
    Augmented,
)
from torch.utils.data.distributed import DistributedSampler

from hybridloader import DataLoader, SampleSeeding, SharedMemory, Skip, Threads

pytest.importorskip("lightning")
from lightning.fabric import Fabric
from lightning.fabric.wrappers import _FabricDataLoader

BATCH = 4
OPTIONS: list[dict[str, Any]] = [
    {
        "backend": Threads(copy_dataset=True),
        "threads_per_worker": 2,
        "on_error": Skip(max_failures=3),
    },
    {"backend": SharedMemory(start_method="fork"), "seeding": SampleSeeding(3)},
    {"multiprocessing_context": "fork", "timeout": 60.0, "on_worker_death": "restart"},
]
NAMES = ("backend", "threads_per_worker", "on_error", "on_worker_death", "task_timeout", "seeding")


def fabric() -> Fabric:
    return Fabric(accelerator="cpu", devices=1)


def set_up(loader: Any, replicas: int, monkeypatch: pytest.MonkeyPatch) -> Any:
    """`loader` from `setup_dataloaders`, as on the last of so many ranks."""
    one = fabric()
    if replicas > 1:
        monkeypatch.setattr(one, "_requires_distributed_sampler", lambda loader: True)
        monkeypatch.setattr(
            type(one._strategy),
            "distributed_sampler_kwargs",
            {"num_replicas": replicas, "rank": replicas - 1},
            raising=False,
        )
    wrapped = one.setup_dataloaders(loader)
    assert isinstance(wrapped, _FabricDataLoader)
    return wrapped._dataloader


@pytest.mark.parametrize("options", OPTIONS, ids=range(len(OPTIONS)))
def test_r04_class_and_options_are_kept(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    for replicas in (1, 2):
        loader = DataLoader(Augmented(), BATCH, shuffle=True, num_workers=WORKERS, **options)
        again = set_up(loader, replicas, monkeypatch)
        assert type(again) is DataLoader
        assert (again is loader) is (replicas == 1)
        for name in (*NAMES, "multiprocessing_context", "timeout"):
            assert getattr(again, name) is getattr(loader, name), name
        if replicas > 1:
            assert isinstance(again.sampler, DistributedSampler)
            again.sampler.set_epoch(1)
        assert sum(len(features) for features, _ in again) == 20 / replicas


def test_the_state_is_that_of_the_loader_that_was_given() -> None:
    """Fabric's wrapper has no such methods; on one rank the loader within is the very one."""

    def loader() -> DataLoader:
        return DataLoader(range(20), BATCH, num_workers=WORKERS, backend="threads")  # type: ignore[arg-type]

    one, other = loader(), loader()
    iterator = iter(fabric().setup_dataloaders(one))
    seen = next(iterator).tolist() + next(iterator).tolist()
    other.load_state_dict(one.state_dict())
    iterator.close()
    rest = fabric().setup_dataloaders(other)
    assert seen + [item for batch in rest for item in batch.tolist()] == list(range(20))
