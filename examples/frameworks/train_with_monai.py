"""MONAI: its loaders on hybridloader's engine; each worker's transforms have another seed."""

import monai.data
import torch
from monai.transforms import Compose, RandFlip, RandGaussianNoise
from monai.utils import set_determinism
from torch import nn

import hybridloader
from hybridloader import Threads


class Loader(monai.data.DataLoader, hybridloader.DataLoader):
    """MONAI's collate and seeding, hybridloader's workers."""


class BufferedLoader(monai.data.ThreadDataLoader, hybridloader.DataLoader):
    """MONAI's collate, seeding and buffer thread, hybridloader's workers."""


def main():
    set_determinism(0)
    images = [torch.full((1, 8, 8), k / 16) for k in range(16)]
    augment = Compose([RandFlip(prob=0.5, spatial_axis=0), RandGaussianNoise(prob=0.5)])
    dataset = monai.data.CacheDataset(images, augment, progress=False)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.ReLU(), nn.Linear(8, 64))
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)

    # MONAI's random transforms keep state: each thread gets a copy.
    threads = Threads(copy_dataset=True)
    options = {"batch_size": 4, "shuffle": True, "num_workers": 2}
    for loader in (
        Loader(dataset, backend=threads, **options),
        BufferedLoader(dataset, **options),
    ):
        for batch in loader:
            wanted = batch.as_tensor().flatten(1)
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(batch.as_tensor()), wanted)
            loss.backward()
            optimizer.step()
        print(f"{type(loader).__name__}: {len(loader)} batches, loss {loss.item():.3f}")


if __name__ == "__main__":
    main()
