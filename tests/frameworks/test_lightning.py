"""Lightning: re-creates loaders from their arguments, wraps their samplers, and saves their states."""

from __future__ import annotations

import os
import signal
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from support.pipeline_loaders import counted, numbers, uncounted
from support.pipeline_loaders import whole as batches_of
from support.seeded_training import (
    LIKE_TORCHS_PROCESSES,
    WORKERS,
    Augmented,
    Regression,
    torch_loader,
)
from torch.utils.data.distributed import DistributedSampler

from hybridloader import (
    DataLoader,
    PipelineLoader,
    SampleSeeding,
    SharedMemory,
    Skip,
    Threads,
)
from hybridloader.sampling import ShuffleSampler

pytest.importorskip("lightning")
import lightning
from lightning.fabric import Fabric
from lightning.fabric.utilities.data import _replace_dunder_methods
from lightning.pytorch.callbacks import BasePredictionWriter, Callback, ModelCheckpoint
from lightning.pytorch.overrides.distributed import _IndexBatchSamplerWrapper
from lightning.pytorch.trainer.states import RunningStage
from lightning.pytorch.utilities.exceptions import SIGTERMException

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:.*`isinstance\\(treespec, LeafSpec\\)` is deprecated"),
    pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before"),
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated"),  # torchdata calls it
    pytest.mark.filterwarnings("ignore:.*exists and is not empty"),
    pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`"),
    pytest.mark.filterwarnings("ignore:.*isn't allowed to serialize"),
]

BATCH = 4
BATCHES = 5
OPTIONS: list[dict[str, Any]] = [
    {
        "backend": Threads(copy_dataset=True),
        "threads_per_worker": 2,
        "on_error": Skip(max_failures=3),
        "seeding": SampleSeeding(3),
    },
    {
        "backend": SharedMemory(start_method="fork"),
        "persistent_workers": True,
        "task_timeout": 60.0,
    },
    {"backend": "fork", "on_worker_death": "restart", "prefetch_factor": 3, "in_order": False},
    {"multiprocessing_context": "fork", "timeout": 60.0},
]
NAMES = ("backend", "threads_per_worker", "on_error", "on_worker_death", "task_timeout", "seeding")
NAMES += ("prefetch_factor", "persistent_workers", "in_order", "timeout")

every_option = pytest.mark.parametrize("options", OPTIONS, ids=range(len(OPTIONS)))


class Model(lightning.LightningModule):
    """The regression of `seeded`, and what it was shown."""

    def __init__(self) -> None:
        super().__init__()
        self.regression = Regression()
        self.model = self.regression.model
        self.seen: list[list[float]] = []
        self.losses: list[float] = []

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        features, target = batch
        self.seen.append(features[:, 1].tolist())
        loss = torch.nn.functional.mse_loss(self.model(features).squeeze(1), target)
        self.losses.append(loss.item())
        return loss

    def predict_step(self, batch: Any, index: int) -> Any:
        return batch[0][:, 1]

    def configure_optimizers(self) -> Any:
        return self.regression.optimizer


def trainer(**options: Any) -> lightning.Trainer:
    return lightning.Trainer(
        **{
            "accelerator": "cpu",
            "logger": False,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "max_epochs": 2,
            **options,
        }
    )


@pytest.fixture(autouse=True)
def _no_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    """seed_everything sets variables of the environment."""
    for name in ("PL_GLOBAL_SEED", "PL_SEED_WORKERS"):
        monkeypatch.setenv(name, "0")
        monkeypatch.delenv(name)


# -- re-creation (R2 to R4, R10) -------------------------------------------------------------------


def injected(loader: Any) -> Any:
    """`loader` as Lightning makes it anew on the second of two ranks."""
    one = trainer()
    connector = one._data_connector
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(connector, "_requires_distributed_sampler", lambda loader: True)
        patch.setattr(
            type(one), "distributed_sampler_kwargs", {"num_replicas": 2, "rank": 1}, raising=False
        )
        return connector._prepare_dataloader(loader, shuffle=True, mode=RunningStage.TRAINING)


def check_kept(again: Any, loader: DataLoader) -> None:
    assert type(again) is DataLoader
    assert again is not loader
    for name in NAMES:
        assert getattr(again, name) is getattr(loader, name), name


@every_option
def test_r04_a_distributed_sampler_is_injected_and_all_options_stay(
    options: dict[str, Any],
) -> None:
    for hook in (False, True):
        with _replace_dunder_methods(DataLoader, "dataset") if hook else warnings.catch_warnings():
            loader = DataLoader(
                Augmented(noise=0), BATCH, shuffle=True, num_workers=WORKERS, **options
            )
            loader.worker_init_fn = print  # set afterwards, in a hook it is replayed (R10)
        again = injected(loader)
        check_kept(again, loader)
        assert isinstance(again.sampler, DistributedSampler)
        assert again.multiprocessing_context is loader.multiprocessing_context or hook
        assert (again.batch_size, again.num_workers) == (BATCH, WORKERS)
        assert again.worker_init_fn is print
        again.worker_init_fn = None
        again.sampler.set_epoch(1)
        assert sum(len(features) for features, _ in again) == 10
        if again._iterator is not None:
            again._iterator.close()


@every_option
def test_r19_predict_keeps_all_options_and_knows_the_indices_of_each_batch(
    options: dict[str, Any],
) -> None:
    indices: list[Any] = []

    class Writing(BasePredictionWriter):
        def write_on_batch_end(
            self, trainer: Any, module: Any, prediction: Any, batch_indices: Any, *rest: Any
        ) -> None:
            indices.append(batch_indices)

    loader = DataLoader(Augmented(noise=0), BATCH, num_workers=WORKERS, **options)
    one = trainer(callbacks=[Writing("batch")])
    seen = one.predict(Model(), loader)
    (again,) = one.predict_loop._combined_loader.flattened
    check_kept(again, loader)
    assert isinstance(again.batch_sampler, _IndexBatchSamplerWrapper)
    found = sorted(float(x) for batch in seen for x in batch)
    assert found == [float(torch.tensor(k / 20)) for k in range(20)]
    if loader.in_order:
        assert indices == [list(range(k, k + BATCH)) for k in range(0, 20, BATCH)]
    if again._iterator is not None:
        again._iterator.close()


# -- the same data ---------------------------------------------------------------------------------


def fitted(kind: Any, data: Any, epochs: int = 2, **options: Any) -> list[float]:
    lightning.seed_everything(11, workers=True, verbose=False)
    model = Model()
    loader = kind(data, BATCH, shuffle=True, num_workers=WORKERS, **options)
    trainer(max_epochs=epochs).fit(model, loader)
    return model.losses


def test_losses_equal_those_of_torchs_loader() -> None:
    """On threads too: Lightning's `worker_init_fn` seeds all generators of each worker."""
    wanted = fitted(torch_loader, Augmented())
    assert len(wanted) == 2 * BATCHES
    for backend in (*LIKE_TORCHS_PROCESSES, "threads"):
        assert fitted(DataLoader, Augmented(), backend=backend) == wanted


# -- state (R35) -----------------------------------------------------------------------------------


def started(backend: str, **options: Any) -> tuple[Model, Any, DataLoader]:
    torch.manual_seed(6)
    loader = DataLoader(
        Augmented(noise=0), BATCH, shuffle=True, num_workers=WORKERS, backend=backend
    )
    return Model(), trainer(max_epochs=3, **options), loader


def stopped(folder: Path, backend: str, step: int, **when: int) -> Path:
    """The checkpoint of a run that stopped behind so many steps."""
    saving = ModelCheckpoint(folder, save_top_k=-1, filename="{step}", **when)
    model, one, loader = started(
        backend, callbacks=[saving], enable_checkpointing=True, max_steps=step
    )
    one.fit(model, loader)
    return folder / f"step={step}.ckpt"


def gone_on(checkpoint: Path, backend: str) -> list[list[float]]:
    model, one, loader = started(backend)
    one.fit(model, loader, ckpt_path=checkpoint, weights_only=False)
    return model.seen


@pytest.fixture(scope="module")
def whole() -> list[list[float]]:
    model, one, loader = started("threads")
    one.fit(model, loader)
    return model.seen


def samples(batches: list[list[float]]) -> list[float]:
    return sorted(sample for batch in batches for sample in batch)


@pytest.mark.parametrize(("before", "after"), [("threads", "fork"), ("fork", "threads")])
@pytest.mark.parametrize("step", [BATCHES + 3])
def test_r35_fit_goes_on_behind_a_checkpoint_in_the_middle_of_an_epoch(
    tmp_path: Path, before: str, after: str, step: int, whole: list[list[float]]
) -> None:
    seen = gone_on(stopped(tmp_path, before, step, every_n_train_steps=step), after)
    left = BATCHES - step % BATCHES
    assert seen[:left] == whole[step : step + left]
    assert len(seen) == len(whole) - step
    for first in range(left, len(seen), BATCHES):  # Lightning does not save torch's generator
        assert samples(seen[first : first + BATCHES]) == samples(whole[:BATCHES])


class Hooked(Model):
    """The loader is made in the hook, with the epoch set, and its sampler has a state."""

    def train_dataloader(self) -> DataLoader:
        data = Augmented(noise=0)
        sampler = ShuffleSampler(len(data), seed=0)
        loader = DataLoader(data, BATCH, sampler=sampler, num_workers=WORKERS, backend="threads")
        loader.set_epoch(self.trainer.fit_loop.epoch_progress.current.processed)
        return loader


class Terminated(Callback):
    """SIGTERM to this process in the middle of a step, as Slurm sends it."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == self.step - 1:
            os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.filterwarnings("ignore:.*there is no last checkpoint available")
@pytest.mark.parametrize("step", [3, BATCHES, 2 * BATCHES])
def test_after_sigterm_at_any_step_fit_resumes_with_the_next_batch(
    step: int, tmp_path: Path
) -> None:
    def fit(folder: Path, *callbacks: Callback) -> list[list[float]]:
        saving = ModelCheckpoint(folder, save_on_exception=True, save_last=True)
        model = Hooked()
        one = trainer(max_epochs=3, callbacks=[saving, *callbacks], enable_checkpointing=True)
        try:
            one.fit(model, ckpt_path="last", weights_only=False)
        except SIGTERMException:
            assert len(model.seen) == step
        return model.seen

    whole = fit(tmp_path / "whole")
    seen = fit(tmp_path / "stopped", Terminated(step))
    assert seen == whole[:step]
    assert seen + fit(tmp_path / "stopped") == whole


# -- pipelines: Lightning and Fabric save and resume a `PipelineLoader` as they do a loader -----------

EPOCHS = 3


def shown(
    loader: Any, checkpoint: Path | None = None, kind: type[Model] = Model, **options: Any
) -> list[list[float]]:
    """The numbers of the samples of each step."""
    saves = "callbacks" in options
    one = trainer(**{"enable_checkpointing": saves, "max_epochs": EPOCHS, **options})
    model = kind()
    one.fit(model, loader, ckpt_path=checkpoint, weights_only=True)
    return [[round(20 * x) for x in batch] for batch in model.seen]


def saving(folder: Path, **when: int) -> dict[str, Any]:
    return {"callbacks": [ModelCheckpoint(folder, save_top_k=-1, filename="{step}", **when)]}


@pytest.mark.parametrize(("before", "after"), [("threads", "fork"), ("inline", "threads")])
@pytest.mark.parametrize("step", [3, 7])
def test_fit_resumes_after_a_checkpoint_in_the_middle_of_an_epoch(
    tmp_path: Path, before: str, after: str, step: int
) -> None:
    wanted = batches_of(counted(), EPOCHS)
    options = saving(tmp_path, every_n_train_steps=step)
    with counted(before) as loader:
        assert shown(loader, max_steps=step, **options) == wanted[:step]
    with counted(after) as loader:
        assert shown(loader, tmp_path / f"step={step}.ckpt") == wanted[step:]


def test_after_a_checkpoint_of_an_epochs_end_the_hook_names_the_epoch(tmp_path: Path) -> None:
    """Lightning gives the loader no state then, and its `current_epoch` is still 0."""

    class Naming(Model):
        def train_dataloader(self) -> PipelineLoader:
            loader = counted("inline")
            loader.set_epoch(self.trainer.fit_loop.epoch_progress.current.processed)
            return loader

    wanted = batches_of(counted(), EPOCHS)
    at_end, within = (tmp_path / name for name in ("at_end", "within"))
    assert shown(None, max_epochs=1, kind=Naming, **saving(at_end, every_n_epochs=1)) == wanted[:5]
    assert shown(None, at_end / "step=5.ckpt", kind=Naming) == wanted[5:]
    shown(None, max_steps=7, kind=Naming, **saving(within, every_n_train_steps=7))
    assert shown(None, within / "step=7.ckpt", kind=Naming) == wanted[7:]
    with counted() as loader:  # which begins with epoch 0
        assert shown(loader, at_end / "step=5.ckpt") == wanted[:10]


def test_without_a_length_a_limit_of_batches_keeps_the_state_from_running_ahead(
    tmp_path: Path,
) -> None:
    """Lightning asks for a batch more than it has trained on, unless it knows how many there are."""
    wanted = batches_of(uncounted(), EPOCHS)
    for limit, lost in ((None, 1), (4, 0)):
        options = saving(tmp_path / str(limit), every_n_train_steps=6)
        with uncounted() as loader:
            shown(loader, max_steps=6, limit_train_batches=limit, **options)
        checkpoint = tmp_path / str(limit) / "step=6.ckpt"
        with uncounted() as loader:
            assert shown(loader, checkpoint, limit_train_batches=limit) == wanted[6 + lost :]


# -- Fabric ----------------------------------------------------------------------------------------


@every_option
def test_r04_fabric_keeps_class_and_options(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    one = Fabric(accelerator="cpu", devices=1)
    for replicas in (1, 2):
        loader = DataLoader(Augmented(), BATCH, shuffle=True, num_workers=WORKERS, **options)
        if replicas > 1:
            monkeypatch.setattr(one, "_requires_distributed_sampler", lambda loader: True)
            given = {"num_replicas": replicas, "rank": replicas - 1}
            strategy = type(one._strategy)
            monkeypatch.setattr(strategy, "distributed_sampler_kwargs", given, raising=False)
        again: Any = one.setup_dataloaders(loader)._dataloader
        assert type(again) is DataLoader
        assert (again is loader) is (replicas == 1)
        for name in (*NAMES, "multiprocessing_context"):
            assert getattr(again, name) is getattr(loader, name), name
        if replicas > 1:
            assert isinstance(again.sampler, DistributedSampler)
            again.sampler.set_epoch(1)
        assert sum(len(features) for features, _ in again) == 20 / replicas
        if again._iterator is not None:
            again._iterator.close()


def test_fabric_gives_the_state_of_the_loader_that_was_given() -> None:
    """Fabric's wrapper has no such methods; on one rank the loader within is the very one."""
    one, other = (
        DataLoader(range(20), BATCH, num_workers=WORKERS, backend="threads")  # type: ignore[arg-type]
        for _ in range(2)
    )
    fabric = Fabric(accelerator="cpu", devices=1)
    iterator = iter(fabric.setup_dataloaders(one))
    seen = next(iterator).tolist() + next(iterator).tolist()
    other.load_state_dict(one.state_dict())
    iterator.close()
    rest = fabric.setup_dataloaders(other)
    assert seen + [item for batch in rest for item in batch.tolist()] == list(range(20))


def test_fabric_saves_and_loads_the_loader_with_the_model(tmp_path: Path) -> None:
    wanted = batches_of(uncounted(), EPOCHS)
    fabric, found = Fabric(accelerator="cpu", devices=1), []

    def parts(loader: PipelineLoader) -> dict[str, Any]:
        return {"model": Regression().model, "loader": loader}

    with uncounted() as loader:
        for _ in range(2):
            for batch in loader:
                found.append(numbers(fabric.to_device(batch)))
                if len(found) == 6:
                    fabric.save(tmp_path / "saved", parts(loader))
                    break
    with uncounted("fork") as resumed:
        fabric.load(tmp_path / "saved", parts(resumed))
        assert [numbers(batch) for _ in range(2) for batch in resumed] == wanted[6:]
    assert found == wanted[:6]
