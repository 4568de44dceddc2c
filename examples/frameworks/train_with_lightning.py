"""Lightning: pass hybridloader's loader; a checkpoint contains the position in the epoch."""

import tempfile
from pathlib import Path

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import Dataset

from hybridloader import DataLoader


class Points(Dataset):
    def __len__(self):
        return 320

    def __getitem__(self, index):
        x = torch.tensor([index / 320])
        return x, torch.sin(3 * x)


class Line(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = nn.Sequential(nn.Linear(1, 16), nn.Tanh(), nn.Linear(16, 1))
        self.steps = 0

    def training_step(self, batch, _):
        x, y = batch
        self.steps += 1
        self.loss = nn.functional.mse_loss(self.model(x), y)
        return self.loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), 0.01)


def fit(folder, backend, checkpoint=None, **options):
    lightning.seed_everything(0, workers=True, verbose=False)
    model = Line()
    loader = DataLoader(Points(), 32, shuffle=True, num_workers=2, backend=backend)
    trainer = lightning.Trainer(
        accelerator="cpu",
        max_epochs=3,
        callbacks=[ModelCheckpoint(folder, every_n_train_steps=14, filename="{step}")],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )
    trainer.fit(model, loader, ckpt_path=checkpoint, weights_only=False)
    print(f"{backend}: {model.steps} steps, loss {model.loss:.4f}")


def main():
    with tempfile.TemporaryDirectory() as folder:
        # Ends in the second epoch, after 4 of its 10 batches
        fit(folder, "threads", max_steps=14)
        # The other 6, and one more epoch
        fit(folder, "fork", Path(folder) / "step=14.ckpt")


if __name__ == "__main__":
    main()
