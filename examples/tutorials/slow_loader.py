"""A slow DataLoader, measured and cured: python examples/tutorials/slow_loader.py [STEP...]

STEP is import, verdict, cure or tune; without one, the first three run. docs/tutorials/slow_loader.md
explains them.
"""

# needs: PIL

import io
import sys
import time

import numpy as np
import torch
from PIL import Image
from torch import nn

import hybridloader
from hybridloader.observe import headroom


class Photos(torch.utils.data.Dataset):
    """JPEG files on a file server that takes 15 ms to send one."""

    def __init__(self, count):
        random = np.random.default_rng(0)
        self.files = []
        for number in range(count):
            file, label = io.BytesIO(), number % 3
            pixels = random.integers(0, 200, (72, 96, 3), dtype=np.uint8)
            pixels[..., label] += 55
            Image.fromarray(pixels).save(file, "JPEG")
            self.files.append((file.getvalue(), label))

    def __len__(self):
        return len(self.files)

    def __getitem__(self, index):
        data, label = self.files[index]
        time.sleep(0.015)  # the file server
        image = np.array(Image.open(io.BytesIO(data)))
        return torch.from_numpy(image).permute(2, 0, 1).float() / 255, label


class Training:
    """A network with its optimizer."""

    def __init__(self):
        torch.manual_seed(0)
        self.model = nn.Sequential(
            nn.AvgPool2d(8), nn.Flatten(), nn.Linear(3 * 9 * 12, 3)
        )
        self.optimizer = torch.optim.Adam(self.model.parameters())

    def step(self, batch):
        images, labels = batch
        loss = nn.functional.cross_entropy(self.model(images), labels)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        time.sleep(0.02)  # a larger network, on a GPU
        return loss


def epoch(loader):
    """Train for one epoch; return the last loss."""
    training = Training()
    for batch in loader:
        loss = training.step(batch)
    return loss.item()


def step_import():
    """Change the import, and nothing else."""
    photos = Photos(120)
    for library in torch.utils.data, hybridloader:
        loader = library.DataLoader(photos, batch_size=8, shuffle=True, num_workers=2)
        # The first use of a library imports its modules
        Training().step(next(iter(loader)))
        start = time.perf_counter()
        loss = epoch(loader)
        seconds = time.perf_counter() - start
        print(
            f"{library.__name__}: {len(photos) / seconds:.0f} images/s, last loss {loss:.6f}"
        )


def step_verdict():
    """Measure an epoch, and the possible gain."""
    loader = hybridloader.DataLoader(
        Photos(160), 8, shuffle=True, num_workers=2, observe=True
    )
    epoch(loader)
    print(loader.stats())
    print(headroom(loader, Training().step, steps=12))


def step_cure():
    """Follow the advice, and measure again."""
    options = {"shuffle": True, "backend": "threads", "observe": True}
    loader = hybridloader.DataLoader(
        Photos(160), 8, num_workers=4, threads_per_worker=4, **options
    )
    epoch(loader)
    print(loader.stats())


def step_tune():
    """Measure how many workers keep up with the training step."""
    loader = hybridloader.DataLoader(Photos(320), 8, shuffle=True, num_workers=2)
    tuning = hybridloader.tune(loader, step=Training().step, seconds=5)
    print(tuning)
    loader = tuning.apply()


STEPS = {
    "import": step_import,
    "verdict": step_verdict,
    "cure": step_cure,
    "tune": step_tune,
}

if __name__ == "__main__":
    torch.set_num_threads(1)  # the network is small
    for name in sys.argv[1:] or ["import", "verdict", "cure"]:
        STEPS[name]()
