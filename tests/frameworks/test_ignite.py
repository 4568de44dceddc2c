"""ignite: rebuilds a loader from its public attributes (R3), and resumes in the middle of an epoch."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from support.compat import is_ours
from support.seeded_training import (
    LIKE_TORCHS_PROCESSES,
    WORKERS,
    Augmented,
    Regression,
    torch_loader,
)
from torch.utils.data import BatchSampler

from hybridloader import DataLoader, SharedMemory, install

pytest.importorskip("ignite")
from ignite.distributed import auto_dataloader
from ignite.engine import Engine, Events
from ignite.engine.deterministic import (
    DeterministicEngine,
    ReproducibleBatchSampler,
    update_dataloader,
)

EPOCHS = 3
BATCHES = 5
SETTINGS: list[dict[str, Any]] = [
    {"backend": "threads"},
    {"backend": SharedMemory(start_method="forkserver"), "persistent_workers": True},
    {"backend": "fork", "on_error": "skip", "task_timeout": 9.0, "seeding": "sample"},
    {"prefetch_factor": 3, "timeout": 60, "threads_per_worker": 2},
]


def engine_of(kind: type[Engine], seen: list[float]) -> tuple[Engine, Regression]:
    regression = Regression()

    def update(engine: Engine, batch: Any) -> None:
        seen.append(regression.step(batch))

    return kind(update), regression


def run(kind: type[Engine], loader: Any, **options: Any) -> list[float]:
    torch.manual_seed(7)
    seen: list[float] = []
    engine, _ = engine_of(kind, seen)
    engine.run(loader, max_epochs=EPOCHS, **options)
    return seen


def test_r03_update_dataloader_keeps_class_backend_and_every_option() -> None:
    """But the context, which torch keeps under a private name, as with torch's loader."""
    for options in SETTINGS:
        loader = DataLoader(Augmented(), 4, shuffle=True, num_workers=WORKERS, **options)
        assert isinstance(loader.batch_sampler, BatchSampler)
        sampler = ReproducibleBatchSampler(loader.batch_sampler)
        rebuilt = update_dataloader(loader, sampler)
        assert type(rebuilt) is DataLoader
        assert rebuilt.batch_sampler is sampler
        changed = {"batch_size", "sampler", "drop_last", "batch_sampler"}
        assert list(vars(rebuilt)) == list(vars(loader))
        for name, value in vars(loader).items():
            if not name.startswith("_") and name not in changed:
                assert getattr(rebuilt, name) is value, name
        for name, value in options.items():
            assert getattr(rebuilt, name) == value, name
    for make in (torch_loader, DataLoader):
        loader = make(Augmented(), 4, num_workers=1, multiprocessing_context="spawn")
        rebuilt = update_dataloader(loader, ReproducibleBatchSampler(loader.batch_sampler))
        assert rebuilt.multiprocessing_context is None


@functools.cache
def torchs_losses(kind: type[Engine], noise: float = 0.1) -> list[float]:
    return run(kind, torch_loader(Augmented(noise=noise), 4, shuffle=True, num_workers=WORKERS))


@pytest.mark.parametrize("kind", [Engine, DeterministicEngine])
def test_losses_are_those_of_torchs_loader(kind: type[Engine]) -> None:
    """On threads where nothing is drawn; with random draws they are the same in each run."""

    def losses(workers: int = WORKERS, noise: float = 0.1, **options: Any) -> list[float]:
        data = Augmented(noise=noise)
        return run(kind, DataLoader(data, 4, shuffle=True, num_workers=workers, **options))

    for backend in LIKE_TORCHS_PROCESSES:
        assert losses(backend=backend) == torchs_losses(kind)
    assert len(set(torchs_losses(kind))) == EPOCHS * BATCHES
    assert losses(noise=0, backend="threads") == torchs_losses(kind, noise=0)
    drawn = [losses(workers, backend="threads") for workers in (1, 2, 2, 5)]
    assert drawn[0] == drawn[1] == drawn[2] == drawn[3]
    assert losses(backend="threads", seeding="worker") == torchs_losses(kind)


def test_an_epoch_of_the_engine_may_end_within_one_of_the_loader() -> None:
    """ignite then keeps the loader's iterator for its next epoch, and asks for another at its end."""
    seen = [
        run(Engine, make(Augmented(), 4, num_workers=WORKERS, **options), epoch_length=3)
        for make, options in ((torch_loader, {}), (DataLoader, {"backend": "fork"}))
    ]
    assert seen[0] == seen[1]
    assert len(seen[1]) == 3 * EPOCHS


@pytest.mark.parametrize(("backend", "noise"), [("fork", 0), ("threads", 0.1)])
@pytest.mark.parametrize("stop_at", [3, BATCHES, 7])
def test_a_deterministic_engine_resumes_within_an_epoch(
    stop_at: int, backend: str, noise: float
) -> None:
    """ignite leaves the batches out that were seen, by a batch sampler of its own."""

    def loader() -> DataLoader:
        dataset = Augmented(noise=noise)
        return DataLoader(dataset, 4, shuffle=True, num_workers=WORKERS, backend=backend)

    whole = run(DeterministicEngine, loader())

    torch.manual_seed(7)
    seen: list[float] = []
    engine, regression = engine_of(DeterministicEngine, seen)
    saved: dict[str, Any] = {}

    def save_and_stop(engine: Engine) -> None:
        saved.update(engine.state_dict())
        engine.terminate()

    engine.add_event_handler(Events.ITERATION_COMPLETED(once=stop_at), save_and_stop)
    engine.run(loader(), max_epochs=EPOCHS)
    assert seen == whole[:stop_at]

    torch.manual_seed(7)
    resumed, other = engine_of(DeterministicEngine, seen)
    other.model.load_state_dict(regression.model.state_dict())
    resumed.load_state_dict(saved)
    resumed.run(loader())
    assert seen == whole


def test_the_loader_that_ignite_makes_itself_runs_on_ours_within_install() -> None:
    data = Augmented(noise=0)
    options = {"batch_size": 4, "shuffle": True, "num_workers": WORKERS}
    wanted = run(Engine, torch_loader(data, **options))
    with install(backend="threads"):
        loader = auto_dataloader(data, **options)
        assert is_ours(iter(loader))
        assert run(Engine, loader) == wanted
