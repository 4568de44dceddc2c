"""The Trainer of transformers: one added method returns hybridloader's loader, also on resuming."""

import tempfile

import torch
from torch import nn
from torch.utils.data import Dataset
from transformers import Trainer, TrainingArguments

from hybridloader import DataLoader
from hybridloader.integrations.accelerate import keep_loaders


class Points(Dataset):
    def __len__(self):
        return 320

    def __getitem__(self, index):
        x = torch.tensor([index / 320])
        return {"x": x, "labels": torch.sin(3 * x)}


class Curve(nn.Module):
    def __init__(self):
        super().__init__()
        self.model = nn.Sequential(nn.Linear(1, 16), nn.Tanh(), nn.Linear(16, 1))

    def forward(self, x, labels):
        y = self.model(x)
        return {"loss": nn.functional.mse_loss(y, labels), "logits": y}


class HybridTrainer(Trainer):
    def get_train_dataloader(self):
        loader = DataLoader(
            self.train_dataset,
            self.args.train_batch_size,
            sampler=self._get_train_sampler(),
            collate_fn=self.data_collator,
            num_workers=self.args.dataloader_num_workers,
            backend="threads",
        )
        return self.accelerator.prepare(loader)


def train(folder, resume, **options):
    arguments = TrainingArguments(
        folder,
        num_train_epochs=3,
        per_device_train_batch_size=32,
        dataloader_num_workers=2,
        learning_rate=0.01,
        save_steps=14,
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        **options,
    )
    trainer = HybridTrainer(model=Curve(), args=arguments, train_dataset=Points())
    result = trainer.train(resume_from_checkpoint=resume)
    print(f"at step {result.global_step}: loss {result.training_loss:.4f}")


def main():
    keep_loaders()
    with tempfile.TemporaryDirectory() as folder:
        # In the second epoch, after 4 of 10 batches
        train(folder, resume=False, max_steps=14)
        train(folder, resume=True)


if __name__ == "__main__":
    main()
