"""The Trainer of transformers on a pipeline: a callback saves its state into each checkpoint."""

import json
import tempfile
from pathlib import Path

import torch
from torch import nn
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

from hybridloader import Pipeline, PipelineLoader


def sample(index):
    x = torch.tensor([index / 320])
    return {"x": x, "labels": torch.sin(3 * x)}


class Curve(nn.Module):
    def __init__(self):
        super().__init__()
        self.model = nn.Sequential(nn.Linear(1, 16), nn.Tanh(), nn.Linear(16, 1))

    def forward(self, x, labels):
        y = self.model(x)
        return {"loss": nn.functional.mse_loss(y, labels), "logits": y}


class PipelineTrainer(Trainer):
    def __init__(self, loader, **options):
        # Required by the Trainer, not read
        super().__init__(train_dataset=[], **options)
        self.loader = loader

    def get_train_dataloader(self):
        return self.loader


class LoaderState(TrainerCallback):
    def __init__(self, loader):
        self.loader = loader

    def on_save(self, args, state, control, **_):
        checkpoint = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        (checkpoint / "loader.json").write_text(json.dumps(self.loader.state_dict()))


def train(folder, backend, **options):
    pipe = Pipeline.from_dataset(range(320), shuffle=True)
    loader = PipelineLoader(
        pipe.map(sample, backend=backend, num_workers=2).batch(32), seed=0
    )
    checkpoint = get_last_checkpoint(folder)
    if checkpoint:
        loader.load_state_dict(
            json.loads((Path(checkpoint) / "loader.json").read_text())
        )
    arguments = TrainingArguments(
        folder,
        num_train_epochs=3,
        ignore_data_skip=True,  # the loader's state skips them
        learning_rate=0.01,
        save_steps=14,
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        dataloader_pin_memory=False,
        **options,
    )
    trainer = PipelineTrainer(
        loader, model=Curve(), args=arguments, callbacks=[LoaderState(loader)]
    )
    with loader:
        done = trainer.train(resume_from_checkpoint=checkpoint)
    print(f"{backend}: at step {done.global_step}, loss {done.training_loss:.4f}")


def main():
    with tempfile.TemporaryDirectory() as folder:
        # In the second epoch, after 4 of its 10 batches
        train(folder, "threads", max_steps=14)
        train(folder, "fork")  # the other 6, and one more epoch


if __name__ == "__main__":
    main()
