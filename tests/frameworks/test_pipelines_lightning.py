"""Lightning and Fabric save and resume a `PipelineLoader` as they do a loader."""

from __future__ import annotations

import gc
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from support.pipeline_loaders import counted, numbers, uncounted, whole
from support.seeded_training import Regression

from hybridloader import PipelineLoader

pytest.importorskip("lightning")
import lightning
from lightning.fabric import Fabric
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.combined_loader import CombinedLoader

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*`isinstance\\(treespec, LeafSpec\\)` is deprecated"),
    pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before"),
    pytest.mark.filterwarnings("ignore:.*exists and is not empty"),
    pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`"),
]

EPOCHS = 3


class Model(lightning.LightningModule):
    """The regression of `seeded_training`, and the samples that it was shown."""

    def __init__(self) -> None:
        super().__init__()
        self.regression = Regression()
        self.model = self.regression.model
        self.seen: list[list[float]] = []

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        features, target = batch
        self.seen.append(numbers(batch))
        return torch.nn.functional.mse_loss(self.model(features).squeeze(1), target)

    def configure_optimizers(self) -> Any:
        return self.regression.optimizer


def fitted(
    loader: Any, checkpoint: Path | None = None, kind: type[Model] = Model, **options: Any
) -> list[list[float]]:
    trainer = lightning.Trainer(
        **{
            "accelerator": "cpu",
            "logger": False,
            "enable_checkpointing": "callbacks" in options,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "max_epochs": EPOCHS,
            **options,
        }
    )
    model = kind()
    trainer.fit(model, loader, ckpt_path=checkpoint, weights_only=True)
    return model.seen


def saving(folder: Path, **when: int) -> dict[str, Any]:
    return {"callbacks": [ModelCheckpoint(folder, save_top_k=-1, filename="{step}", **when)]}


@pytest.mark.parametrize(("before", "after"), [("threads", "fork"), ("inline", "threads")])
@pytest.mark.parametrize("step", [3, 7])
def test_fit_resumes_after_a_checkpoint_in_the_middle_of_an_epoch(
    tmp_path: Path, before: str, after: str, step: int
) -> None:
    wanted = whole(counted(), EPOCHS)
    options = saving(tmp_path, every_n_train_steps=step)
    with counted(before) as loader:
        assert fitted(loader, max_steps=step, **options) == wanted[:step]
    with counted(after) as loader:
        assert fitted(loader, tmp_path / f"step={step}.ckpt") == wanted[step:]


def test_after_a_checkpoint_of_an_epochs_end_the_hook_names_the_epoch(tmp_path: Path) -> None:
    """Lightning gives the loader no state then, and its `current_epoch` is still 0."""

    class Hooked(Model):
        def train_dataloader(self) -> PipelineLoader:
            loader = counted("inline")
            loader.set_epoch(self.trainer.fit_loop.epoch_progress.current.processed)
            return loader

    wanted = whole(counted(), EPOCHS)
    at_end, within = (tmp_path / name for name in ("at_end", "within"))
    assert fitted(None, max_epochs=1, kind=Hooked, **saving(at_end, every_n_epochs=1)) == wanted[:5]
    assert fitted(None, at_end / "step=5.ckpt", kind=Hooked) == wanted[5:]
    fitted(None, max_steps=7, kind=Hooked, **saving(within, every_n_train_steps=7))
    assert fitted(None, within / "step=7.ckpt", kind=Hooked) == wanted[7:]
    with counted() as loader:  # which begins with epoch 0
        assert fitted(loader, at_end / "step=5.ckpt") == wanted[:10]


def test_without_a_length_a_limit_of_batches_keeps_the_state_from_running_ahead(
    tmp_path: Path,
) -> None:
    """Lightning asks for a batch more than it has trained on, unless it knows how many there are."""
    wanted = whole(uncounted(), EPOCHS)
    for limit, lost in ((None, 1), (4, 0)):
        options = saving(tmp_path / str(limit), every_n_train_steps=6)
        with uncounted() as loader:
            fitted(loader, max_steps=6, limit_train_batches=limit, **options)
        checkpoint = tmp_path / str(limit) / "step=6.ckpt"
        with uncounted() as loader:
            assert fitted(loader, checkpoint, limit_train_batches=limit) == wanted[6 + lost :]


def test_each_loader_of_a_combined_one_has_its_state(tmp_path: Path) -> None:
    def combined() -> CombinedLoader:
        return CombinedLoader([counted("inline"), uncounted("inline")], "min_size")

    class Both(Model):
        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            self.both = [*getattr(self, "both", []), [numbers(one) for one in batch]]
            return super().training_step(batch[0], index)

    def fit(checkpoint: Path | None, **options: Any) -> list[Any]:
        model = Both()
        lightning.Trainer(
            accelerator="cpu",
            logger=False,
            enable_checkpointing="callbacks" in options,
            enable_progress_bar=False,
            enable_model_summary=False,
            limit_train_batches=4,
            **options,
        ).fit(model, combined(), ckpt_path=checkpoint, weights_only=True)
        return model.both

    found = fit(None, max_epochs=1, **saving(tmp_path, every_n_train_steps=2))
    assert fit(tmp_path / "step=2.ckpt", max_epochs=1) == found[2:]


def test_fit_leaves_the_workers_to_the_loader() -> None:
    def workers() -> list[threading.Thread]:
        return [one for one in threading.enumerate() if one.name.startswith("hybridloader")]

    loader: PipelineLoader | None = counted()
    fitted(loader, max_epochs=1)
    assert workers()
    loader = None
    gc.collect()
    assert not workers()


# -- Fabric ----------------------------------------------------------------------------------------


def test_fabric_saves_and_loads_the_loader_with_the_model(tmp_path: Path) -> None:
    wanted = whole(uncounted(), EPOCHS)
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


def test_fabric_sets_up_loaders_of_torchs_alone() -> None:
    with pytest.raises(TypeError, match="Only PyTorch DataLoader"):
        Fabric(accelerator="cpu", devices=1).setup_dataloaders(counted())
