"""The Trainer of transformers: with `keep_loaders` what it prepares stays ours, also on resume."""

from __future__ import annotations

import gc
import json
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from support.pipeline_loaders import PLACES, SEED
from support.seeded_training import WORKERS, Augmented, Regression
from torch.utils.data import DataLoader as TorchLoader

from hybridloader import DataLoader, Pipeline, PipelineLoader

pytest.importorskip("accelerate")
pytest.importorskip("transformers")
from support.accelerate_loaders import kept_loaders
from transformers import Trainer, TrainingArguments
from transformers.trainer_callback import PrinterCallback, TrainerCallback

BATCH = 4
EPOCHS = 3
STEPS = 5
"""Steps of one epoch."""


class Rows(Augmented):
    """Rows as the Trainer wants them."""

    def __getitem__(self, index: int) -> Any:
        return as_rows(super().__getitem__(index))


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = Regression().model

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        out = self.linear(x).squeeze(1)
        return {"loss": torch.nn.functional.mse_loss(out, labels), "logits": out}


class Losses(TrainerCallback):
    """The loss of each step."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        if logs and "loss" in logs:
            self.seen.append(logs["loss"])


class HybridTrainer(Trainer):
    """Trainer with our loader for training; everything else is the Trainer's."""

    options: dict[str, Any]
    made: list[Any]

    def get_train_dataloader(self) -> Any:
        theirs = super().get_train_dataloader()
        base = theirs.base_dataloader
        loader = self.accelerator.prepare(
            DataLoader(
                base.dataset,
                self.args.train_batch_size,
                sampler=self._get_train_sampler(),
                collate_fn=base.collate_fn,
                worker_init_fn=base.worker_init_fn,
                num_workers=base.num_workers,
                **self.options,
            )
        )
        self.made.append(loader)
        return loader


@pytest.fixture(autouse=True)
def _kept() -> Iterator[None]:
    with kept_loaders():
        yield


def arguments(folder: Path, **options: Any) -> TrainingArguments:
    return TrainingArguments(
        **{
            "output_dir": str(folder),
            "num_train_epochs": EPOCHS,
            "per_device_train_batch_size": BATCH,
            "dataloader_num_workers": WORKERS,
            "dataloader_pin_memory": False,
            "logging_steps": 1,
            "save_strategy": "steps",
            "save_steps": 7,
            "report_to": [],
            "disable_tqdm": True,
            "use_cpu": True,
            "seed": 1,
            "learning_rate": 0.1,
            "lr_scheduler_type": "constant",
            **options,
        }
    )


def trained(
    folder: Path, kind: type[Trainer], data: Any, resume: Any = None, **options: Any
) -> tuple[list[float], Any]:
    losses = Losses()
    trainer = kind(model=Model(), args=arguments(folder), train_dataset=data, callbacks=[losses])
    trainer.remove_callback(PrinterCallback)
    if isinstance(trainer, HybridTrainer):
        trainer.options, trainer.made = options, []
    trainer.train(resume_from_checkpoint=resume)
    return losses.seen, trainer


def test_losses_equal_those_of_torchs_loader(tmp_path: Path) -> None:
    wanted, trainer = trained(tmp_path / "torch", Trainer, Rows())
    assert type(trainer.get_train_dataloader().base_dataloader) is TorchLoader
    assert len(wanted) == EPOCHS * STEPS
    for backend in (None, "fork", "inline"):
        seen, trainer = trained(tmp_path / str(backend), HybridTrainer, Rows(), backend=backend)
        assert type(trainer.made[0].base_dataloader) is DataLoader
        assert seen == wanted


def test_a_run_goes_on_from_a_checkpoint_in_the_middle_of_an_epoch_on_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[Any] = []
    iterate = DataLoader._get_iterator

    def watching(self: DataLoader) -> Any:
        begun.append((type(self), self.backend, type(self.batch_sampler).__name__))
        return iterate(self)

    monkeypatch.setattr(DataLoader, "_get_iterator", watching)
    whole, _ = trained(tmp_path, HybridTrainer, Rows(noise=0), backend="threads")
    assert [name for _, _, name in begun] == ["BatchSampler"] * 3
    begun.clear()
    checkpoint = str(tmp_path / "checkpoint-7")
    rest, _ = trained(tmp_path, HybridTrainer, Rows(noise=0), resume=checkpoint, backend="threads")
    assert rest == whole[7:]
    ours = (DataLoader, "threads")
    assert begun == [(*ours, "SkipBatchSampler"), (*ours, "BatchSampler")]
    gc.collect()
    assert not [t for t in threading.enumerate() if t.name.startswith("hybridloader")]


# -- a `PipelineLoader`, and a callback that saves its state -----------------------------------------


def counted(place: str) -> PipelineLoader:
    pipe = Pipeline.from_dataset(Augmented(noise=0), shuffle=True, **PLACES[place])
    return PipelineLoader(pipe.batch(BATCH).map(as_rows), seed=SEED)


def as_rows(batch: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
    return {"x": batch[0], "labels": batch[1]}


class PipelineTrainer(Trainer):
    def __init__(self, loader: PipelineLoader, **options: Any) -> None:
        super().__init__(train_dataset=[], **options)
        self.loader = loader

    def get_train_dataloader(self) -> Any:
        return self.loader


class Saved(TrainerCallback):
    """Saves the loader's state into each checkpoint."""

    def __init__(self, loader: PipelineLoader) -> None:
        self.loader = loader

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        (folder / "loader.json").write_text(json.dumps(self.loader.state_dict()))


def shown(
    folder: Path, loader: PipelineLoader, resume: Path | None = None, **options: Any
) -> list[float]:
    losses = Losses()
    trainer = PipelineTrainer(
        loader,
        model=Model(),
        args=arguments(folder, **{"ignore_data_skip": True, **options}),
        callbacks=[Saved(loader), losses],
    )
    trainer.remove_callback(PrinterCallback)
    if resume is not None:
        loader.load_state_dict(json.loads((resume / "loader.json").read_text()))
    with loader:
        trainer.train(resume_from_checkpoint=resume and str(resume))
    return losses.seen


@pytest.mark.parametrize("step", [3, 5])
def test_a_run_resumes_after_a_checkpoint(tmp_path: Path, step: int) -> None:
    """In the middle of an epoch, and at its last step."""
    whole = shown(tmp_path, counted("threads"), save_steps=step)
    assert len(whole) == 5 * EPOCHS
    rest = shown(tmp_path, counted("fork"), tmp_path / f"checkpoint-{step}", save_steps=100)
    assert rest == whole[step:]


def test_the_trainer_can_not_skip_batches_of_a_loader_that_is_not_torchs(tmp_path: Path) -> None:
    shown(tmp_path, counted("inline"), save_steps=3, max_steps=3)
    with pytest.raises(AttributeError, match="dataset"):
        shown(tmp_path, counted("inline"), tmp_path / "checkpoint-3", ignore_data_skip=False)
