"""From a folder of photographs to a trained network, each step of the loading on workers that suit it.

python examples/tutorials/photographs.py [DIR] [--crops N] [--epochs N]

DIR holds one folder of images for each class. Without it, N crops of each of the demo's ten photographs
are cut into the current folder. docs/tutorials/photographs.md explains the steps.
"""

# needs: PIL skimage sklearn

import argparse
import io
import math
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import nn

import hybridloader
from hybridloader import Pipeline

SIZE = 96, 72


def list_photographs(folder):
    """Return the names of the classes, and (path, label) to train on and held out."""
    classes = sorted(path.name for path in Path(folder).iterdir() if path.is_dir())
    train, heldout = [], []
    for label, name in enumerate(classes):
        for number, path in enumerate(sorted((folder / name).iterdir())):
            part = heldout if number % 10 == 9 else train
            part.append((path, label))
    return classes, train, heldout


def read(photograph):
    path, label = photograph
    return path.read_bytes(), label


def decode(photograph):
    data, label = photograph
    return np.array(Image.open(io.BytesIO(data)).convert("RGB").resize(SIZE)), label


def augment(photograph):
    pixels, label = photograph
    random = hybridloader.rng().python
    strength, phase = random.uniform(0, 4), random.uniform(0, math.tau)
    rows = []
    for number, row in enumerate(pixels):
        shift = round(strength * math.sin(phase + number / 5))
        rows.append(np.roll(row, shift, axis=0))
    rippled = np.stack(rows)
    return (rippled[:, ::-1].copy() if random.random() < 0.5 else rippled), label


def decoded(photographs, **order):
    return (
        Pipeline.from_dataset(photographs, **order)
        .map(read, backend="threads", num_workers=4)
        .map(decode, backend="threads", num_workers=2)
    )


def for_training(photographs):
    return (
        decoded(photographs, shuffle=True, seed=0)
        .map(augment, backend="shared-memory", num_workers=2, seeding="sample")
        .batch(16)
    )


def layer(before, after):
    convolution = nn.Conv2d(before, after, 3, stride=2, padding=1, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(after), nn.ReLU())


class Network(nn.Module):
    """Four convolutions and a linear layer, for batches of pixels as they come: bytes, colors last."""

    def __init__(self, classes):
        super().__init__()
        self.layers = nn.Sequential(
            *(layer(3, 16), layer(16, 32), layer(32, 64), layer(64, 128)),
            *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, classes)),
        )

    def forward(self, pixels):
        return self.layers(pixels.permute(0, 3, 1, 2).float() / 255)


def train(network, pipe, count):
    """Train for `count` epochs; return the statistics of the loading."""
    network.train()
    optimizer = torch.optim.Adam(network.parameters())
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, 3e-3, total_steps=count * len(pipe)
    )
    with pipe.epochs(count, seed=0, observe=True) as epochs:
        for epoch in epochs:
            for pixels, labels in epoch:
                loss = nn.functional.cross_entropy(network(pixels), labels)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                schedule.step()
            print(f"epoch {epoch.epoch}: loss {loss.item():.3f}")
            stats = epoch.stats()
    return stats


@torch.no_grad()
def accuracy(network, pipe):
    network.eval()
    right = total = 0
    with iter(pipe) as run:
        for pixels, labels in run:
            right += (network(pixels).argmax(1) == labels).sum().item()
            total += len(labels)
    return right / total


def main(folder, count):
    classes, photographs, heldout = list_photographs(folder)
    print(
        f"{len(classes)} classes, {len(photographs)} photographs, {len(heldout)} held out\n"
    )
    pipe = for_training(photographs)
    print(pipe, end="\n\n")
    network = Network(len(classes))
    stats = train(network, pipe, count)
    share = accuracy(network, decoded(heldout).batch(16))
    print(f"{share:.0%} of the held-out photographs are recognized\n")
    print(stats)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", nargs="?", type=Path, metavar="DIR")
    parser.add_argument(
        "--crops", type=int, default=40, metavar="N", help="for each photograph"
    )
    parser.add_argument("--epochs", type=int, default=4, metavar="N")
    options = parser.parse_args()
    torch.manual_seed(0)
    # The network is small, and the workers need the other cores
    torch.set_num_threads(1)
    if options.folder is None:
        from hybridloader.demo import prepare

        options.folder = prepare(Path.cwd(), crops=options.crops)
    main(options.folder, options.epochs)
