"""Train a small network to tell photographs apart: python examples/train_photos.py [DIR]

DIR holds one folder of images per class; without it, the demo's ten photographs are cut and used.
"""

import sys
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import nn

from hybridloader import DataLoader


class Photos(torch.utils.data.Dataset):
    """Every tenth image of a class is held out; the others are cropped and mirrored at random."""

    def __init__(self, folder, train):
        self.train = train
        self.classes = sorted(path for path in Path(folder).iterdir() if path.is_dir())
        self.items = [
            (path, label)
            for label, images in enumerate(self.classes)
            for number, path in enumerate(sorted(images.iterdir()))
            if (number % 10 != 9) == train
        ]

    def __len__(self):
        return len(self.items)

    def __getitem__(self, index):
        path, label = self.items[index]
        image = Image.open(path).convert("RGB").resize((128, 96))
        left = int(torch.randint(33, ())) if self.train else 16
        pixels = np.array(image.crop((left, 0, left + 96, 96)))
        if self.train and torch.rand(()) < 0.5:
            pixels = pixels[:, ::-1].copy()
        return torch.from_numpy(pixels).permute(2, 0, 1).float() / 255, label


def layer(before, after):
    convolution = nn.Conv2d(before, after, 3, stride=2, padding=1, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(after), nn.ReLU())


def main(folder, epochs=3, backend="threads"):
    train, heldout = Photos(folder, train=True), Photos(folder, train=False)
    loader = DataLoader(
        train,
        batch_size=64,
        shuffle=True,
        num_workers=2,
        persistent_workers=True,
        backend=backend,
    )
    layers = layer(3, 16), layer(16, 32), layer(32, 64), layer(64, 128)
    head = nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, len(train.classes))
    model = nn.Sequential(*layers, *head)
    optimizer = torch.optim.Adam(model.parameters())
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, 3e-3, total_steps=epochs * len(loader)
    )

    for epoch in range(epochs):
        for images, labels in loader:
            loss = nn.functional.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
        print(f"epoch {epoch + 1} of {epochs}: loss {loss.item():.3f}")

    model.eval()
    with torch.no_grad():
        right = sum(
            (model(images).argmax(1) == labels).sum().item()
            for images, labels in DataLoader(
                heldout, 64, num_workers=2, backend=backend
            )
        )
    print(
        f"{right / len(heldout):.1%} of {len(heldout)} held-out images are named rightly"
    )


if __name__ == "__main__":  # worker processes may import this file
    torch.manual_seed(0)
    # The network is small, and the workers have use for the other cores
    torch.set_num_threads(1)
    if len(sys.argv) > 1:
        main(sys.argv[1])
    else:
        from hybridloader.demo import prepare

        main(prepare())
