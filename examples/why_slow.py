"""Four ways to make training slow, and their cures: python examples/why_slow.py [DIR]

The training of train_photos.py, one epoch of it for each. docs/why-is-it-slow.md shows what it prints.
"""

import sys
import time

import torch
from torch import nn
from train_photos import Photos, layer

from hybridloader import DataLoader


class FarAway(Photos):
    """1. The files are far away: each takes 10 ms to come."""

    def __getitem__(self, index):
        time.sleep(0.01)
        return super().__getitem__(index)


class InPython(Photos):
    """2. An augmentation is written in pure Python."""

    def __getitem__(self, index):
        image, label = super().__getitem__(index)
        row = image[0, 0].tolist()
        for _ in range(2000):
            row = [min(1.0, value * 1.01) for value in row]
        return image + 0.01 * row[0], label


class BySize(torch.utils.data.Sampler):
    """3. A sampler looks at the files to draw an index: here, at the larger of two for each."""

    def __init__(self, photos, once):
        self.photos = photos
        self.sizes = (
            [self.size(index) for index in range(len(photos))] if once else None
        )

    def size(self, index):
        time.sleep(0.001)  # a file system on a network
        return self.photos.items[index][0].stat().st_size

    def __len__(self):
        return len(self.photos)

    def __iter__(self):
        size = self.size if self.sizes is None else self.sizes.__getitem__
        for _ in range(len(self)):
            yield max(torch.randint(len(self), (2,)).tolist(), key=size)


def network(classes):
    layers = layer(3, 16), layer(16, 32), layer(32, 64), layer(64, 128)
    return nn.Sequential(
        *layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, classes)
    )


def epoch(photos, workers=2, backend="threads", logs_always=False, **options):
    """Train for one epoch; return the statistics of the loader."""
    loader = DataLoader(
        photos, 16, num_workers=workers, backend=backend, observe=True, **options
    )
    model = network(len(photos.classes))
    optimizer = torch.optim.Adam(model.parameters())
    for images, labels in loader:
        loss = nn.functional.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        # 4. the loop does something slow at each step, such as a request
        if logs_always:
            time.sleep(0.2)
    return loader.stats()


def cases(folder):
    """Yield the name, the slow epoch and the cured one of each."""
    yield (
        "far away",
        *both(lambda **cure: epoch(FarAway(folder, True), **cure), workers=8),
    )
    yield (
        "in Python",
        *both(lambda **cure: epoch(InPython(folder, True), **cure), backend="fork"),
    )
    photos = Photos(folder, True)

    def sampled(once=False):
        return epoch(photos, sampler=BySize(photos, once))

    yield "sampler", *both(sampled, once=True)

    def logged(logs_always=True):
        return epoch(photos, logs_always=logs_always)

    yield "loop", *both(logged, logs_always=False)


def both(run, **cure):
    return run(), run(**cure)


if __name__ == "__main__":
    torch.manual_seed(0)
    torch.set_num_threads(1)
    if len(sys.argv) < 2:
        from hybridloader.demo import prepare

        sys.argv.append(prepare())
    for name, slow, cured in cases(sys.argv[1]):
        print(f"{name}: {slow.verdict}")
        faster = slow.seconds / cured.seconds
        print(f"  The cured epoch took {faster:.2f} times less: {cured.verdict}")
