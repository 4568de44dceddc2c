"""The Trainer of transformers: a `PipelineLoader`, and a callback that saves its state."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support.pipeline_loaders import BATCH, PLACES, SEED, kept, numbers
from support.seeded_training import Augmented, Regression

from hybridloader import Pipeline, PipelineLoader

pytest.importorskip("accelerate")
pytest.importorskip("transformers")
from transformers import Trainer, TrainingArguments
from transformers.trainer_callback import PrinterCallback, TrainerCallback

EPOCHS = 3


def counted(place: str) -> PipelineLoader:
    pipe = Pipeline.from_dataset(Augmented(noise=0), shuffle=True, **PLACES[place])
    return PipelineLoader(pipe.batch(BATCH).map(as_rows), seed=SEED)


def endless(place: str) -> PipelineLoader:
    """Without a length: one epoch that does not end, as the Trainer counts none."""
    pipe = Pipeline.from_dataset(Augmented(noise=0), shuffle=True).filter(kept, **PLACES[place])
    return PipelineLoader(pipe.batch(BATCH).map(as_rows).repeat(), seed=SEED)


def as_rows(batch: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    return {"x": batch[0], "labels": batch[1]}


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = Regression().model
        self.seen: list[Any] = []

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        loss = torch.nn.functional.mse_loss(self.linear(x).squeeze(1), labels)
        self.seen.append([*numbers([x]), loss.item()])
        return {"loss": loss}


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


def trained(
    folder: Path, loader: PipelineLoader, resume: Path | None = None, **options: Any
) -> list[Any]:
    arguments = TrainingArguments(
        **{
            "output_dir": str(folder),
            "num_train_epochs": EPOCHS,
            "dataloader_pin_memory": False,
            "save_strategy": "steps",
            "report_to": [],
            "disable_tqdm": True,
            "use_cpu": True,
            "learning_rate": 0.1,
            "lr_scheduler_type": "constant",
            "ignore_data_skip": True,
            **options,
        }
    )
    model = Model()
    trainer = PipelineTrainer(loader, model=model, args=arguments, callbacks=[Saved(loader)])
    trainer.remove_callback(PrinterCallback)
    if resume is not None:
        loader.load_state_dict(json.loads((resume / "loader.json").read_text()))
    with loader:
        trainer.train(resume_from_checkpoint=resume and str(resume))
    return model.seen


@pytest.mark.parametrize("step", [3, 5, 7])
def test_a_run_resumes_after_a_checkpoint(tmp_path: Path, step: int) -> None:
    """In the middle of an epoch, and at its last step."""
    whole = trained(tmp_path, counted("threads"), save_steps=step)
    assert len(whole) == 5 * EPOCHS
    rest = trained(tmp_path, counted("fork"), tmp_path / f"checkpoint-{step}", save_steps=100)
    assert rest == whole[step:]


def test_a_pipeline_without_a_length_is_repeated_and_resumes_in_any_pass(tmp_path: Path) -> None:
    whole = trained(tmp_path, endless("threads"), max_steps=11, save_steps=6)
    assert len(whole) == 11
    checkpoint = tmp_path / "checkpoint-6"
    rest = trained(tmp_path, endless("inline"), checkpoint, max_steps=11, save_steps=100)
    assert rest == whole[6:]


def test_the_trainer_can_not_skip_batches_of_a_loader_that_is_not_torchs(tmp_path: Path) -> None:
    trained(tmp_path, counted("inline"), save_steps=3, max_steps=3)
    with pytest.raises(AttributeError, match="dataset"):
        trained(tmp_path, counted("inline"), tmp_path / "checkpoint-3", ignore_data_skip=False)
