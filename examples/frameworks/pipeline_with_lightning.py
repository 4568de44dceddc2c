"""Lightning and Fabric: the state of a pipeline is saved with the model, and resumes mid-epoch."""

import tempfile
from pathlib import Path

import lightning
import torch
from lightning.fabric import Fabric
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn

from hybridloader import Pipeline, PipelineLoader


def sample(index):
    x = torch.tensor([index / 320])
    return x, torch.sin(3 * x)


def loader_of(backend):
    pipe = Pipeline.from_dataset(range(320), shuffle=True)
    return PipelineLoader(
        pipe.map(sample, backend=backend, num_workers=2).batch(32), seed=0
    )


class Line(lightning.LightningModule):
    def __init__(self, backend):
        super().__init__()
        self.model = nn.Sequential(nn.Linear(1, 16), nn.Tanh(), nn.Linear(16, 1))
        self.backend, self.steps = backend, 0

    def train_dataloader(self):
        loader = loader_of(self.backend)
        # After an epoch's end Lightning loads no state of the loader.
        loader.set_epoch(self.trainer.fit_loop.epoch_progress.current.processed)
        return loader

    def training_step(self, batch, _):
        x, y = batch
        self.steps += 1
        self.loss = nn.functional.mse_loss(self.model(x), y)
        return self.loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), 0.01)


def fit(folder, backend, checkpoint=None, **options):
    lightning.seed_everything(0, verbose=False)
    model = Line(backend)
    trainer = lightning.Trainer(
        accelerator="cpu",
        max_epochs=3,
        callbacks=[ModelCheckpoint(folder, every_n_train_steps=14, filename="{step}")],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )
    trainer.fit(model, ckpt_path=checkpoint)
    print(f"{backend}: {model.steps} steps, loss {model.loss:.4f}")


def with_fabric(folder):
    fabric = Fabric(accelerator="cpu", devices=1)
    with loader_of("threads") as loader, loader_of("fork") as resumed:
        for number, (x, _) in enumerate(loader):
            x = fabric.to_device(x)
            if number == 3:
                break
        fabric.save(folder / "fabric.ckpt", {"loader": loader})
        fabric.load(folder / "fabric.ckpt", {"loader": resumed})
        print(f"fabric: {len(list(resumed))} batches are left")


def main():
    with tempfile.TemporaryDirectory() as folder:
        # Ends in the second epoch, after 4 of its 10 batches
        fit(folder, "threads", max_steps=14)
        # The other 6, and one more epoch
        fit(folder, "fork", Path(folder) / "step=14.ckpt")
        with_fabric(Path(folder))


if __name__ == "__main__":
    main()
