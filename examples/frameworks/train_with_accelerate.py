"""accelerate: after one call, prepared loaders keep backend and options, also in a skip."""

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import Dataset

from hybridloader import DataLoader
from hybridloader.integrations.accelerate import keep_loaders


class Points(Dataset):
    def __len__(self):
        return 320

    def __getitem__(self, index):
        x = torch.tensor([index / 320])
        return x, torch.sin(3 * x)


def main():
    keep_loaders()  # before `prepare`, in each process
    set_seed(0)
    accelerator = Accelerator(cpu=True)
    model = nn.Sequential(nn.Linear(1, 16), nn.Tanh(), nn.Linear(16, 1))
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    loader = DataLoader(
        Points(), 32, shuffle=True, num_workers=2, backend="threads", on_error="skip"
    )
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    print(f"prepared: backend={loader.backend!r}, on_error={loader.on_error!r}")

    for epoch in range(3):
        loader.set_epoch(epoch)
        # As after a checkpoint: the first epoch starts with its fifth batch.
        batches = accelerator.skip_first_batches(loader, 4) if epoch == 0 else loader
        steps = 0
        for x, y in batches:
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(x), y)
            accelerator.backward(loss)
            optimizer.step()
            steps += 1
        print(f"epoch {epoch}: {steps} steps on {batches.backend}, loss {loss:.4f}")


if __name__ == "__main__":
    main()
