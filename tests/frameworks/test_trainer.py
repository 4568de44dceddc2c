"""The Trainer of transformers: with `keep_loaders` what it prepares stays ours, also on resume."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.seeded_training import WORKERS, Regression
from torch.utils.data import DataLoader as TorchLoader
from torch.utils.data import Dataset

from hybridloader import DataLoader

pytest.importorskip("accelerate")
pytest.importorskip("transformers")
from transformers import Trainer, TrainingArguments
from transformers.trainer_callback import PrinterCallback, TrainerCallback

from hybridloader.integrations.accelerate import keep_loaders

BATCH = 4
STEPS = 5
"""Steps of one epoch."""


class Rows(Dataset[dict[str, torch.Tensor]]):
    """Rows as the Trainer wants them, with noise that the worker's generator gives."""

    def __init__(self, noise: float = 0.1) -> None:
        self.noise = noise

    def __len__(self) -> int:
        return BATCH * STEPS

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        noise = self.noise * torch.randn(3) if self.noise else torch.zeros(3)
        return {
            "x": torch.tensor([1.0, index / 20, index / 10]) + noise,
            "labels": torch.tensor(index % 5 / 5),
        }


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
    with keep_loaders():
        yield


def trained(
    folder: Path, kind: type[Trainer], data: Any, resume: Any = None, stop: int = -1, **options: Any
) -> tuple[list[float], Any]:
    arguments = TrainingArguments(
        output_dir=str(folder),
        num_train_epochs=3,
        max_steps=stop,
        per_device_train_batch_size=BATCH,
        dataloader_num_workers=WORKERS,
        dataloader_pin_memory=False,
        logging_steps=1,
        save_strategy="steps",
        save_steps=7,
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        seed=1,
        learning_rate=0.1,
        lr_scheduler_type="constant",
    )
    losses = Losses()
    trainer = kind(model=Model(), args=arguments, train_dataset=data, callbacks=[losses])
    trainer.remove_callback(PrinterCallback)
    if isinstance(trainer, HybridTrainer):
        trainer.options, trainer.made = options, []
    trainer.train(resume_from_checkpoint=resume)
    return losses.seen, trainer


@pytest.fixture(scope="module")
def torchs_losses(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    seen, trainer = trained(tmp_path_factory.mktemp("torch"), Trainer, Rows())
    assert type(trainer.get_train_dataloader().base_dataloader) is TorchLoader
    return seen


@pytest.mark.parametrize("backend", [None, "fork", "inline"])
def test_losses_equal_those_of_torchs_loader(
    backend: str | None, tmp_path: Path, torchs_losses: list[float]
) -> None:
    seen, trainer = trained(tmp_path, HybridTrainer, Rows(), backend=backend)
    assert type(trainer.made[0].base_dataloader) is DataLoader
    assert seen == torchs_losses
    assert len(seen) == 3 * STEPS


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
