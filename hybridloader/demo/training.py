"""Training of the demo: a small network, its optimiser, and the accuracy on held-out images."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import pairwise

import torch
from torch import nn

Batch = tuple[torch.Tensor, torch.Tensor]

PEAK_RATE = 3e-3  # learning rate at the top of the one-cycle schedule, with Adam, for batches of 64


class Network(nn.Sequential):
    """Four convolutions that halve the image each, and one linear layer: 0.1 million parameters.

    One image takes some 2 ms, forwards and backwards, on one core; reading it takes 1 ms.
    """

    def __init__(self, classes: int) -> None:
        widths = (3, 16, 32, 64, 128)
        layers: list[nn.Module] = []
        for before, after in pairwise(widths):
            layers += [
                nn.Conv2d(before, after, 3, stride=2, padding=1, bias=False),
                nn.BatchNorm2d(after),
                nn.ReLU(),
            ]
        super().__init__(
            *layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(widths[-1], classes)
        )


class Trainer:
    """Network with its optimiser; the learning rate rises and falls over `steps`, the batches in all."""

    def __init__(self, classes: int, steps: int) -> None:
        self.network = Network(classes)
        self._optimiser = torch.optim.Adam(self.network.parameters())
        # The schedule needs two steps to rise and fall.
        self._schedule = torch.optim.lr_scheduler.OneCycleLR(
            self._optimiser, PEAK_RATE, total_steps=max(2, steps)
        )

    def train(self, batches: Iterable[Batch], report: Callable[[int, float], None]) -> None:
        """Train on `batches`; after each, `report` gets its number of images and its loss."""
        self.network.train()
        for images, labels in batches:
            loss = nn.functional.cross_entropy(self.network(images), labels)
            self._optimiser.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            self._optimiser.step()
            self._schedule.step()
            report(len(labels), loss.item())

    @torch.no_grad()
    def correct(self, batches: Iterable[Batch], report: Callable[[int], None]) -> int:
        """Return how many of the images in `batches` the network classifies correctly."""
        self.network.eval()
        right = 0
        for images, labels in batches:
            right += int((self.network(images).argmax(1) == labels).sum())
            report(len(labels))
        return right


@contextmanager
def cores_left_by(workers: int) -> Iterator[None]:
    """Have the network compute on the cores that `workers` leave, at least on one.

    Computing threads wait for each other at the end of every operation, so one that shares its core
    with a worker delays all. On two cores with two workers, 1,920 images took 6 s with one computing
    thread and 20 s with two.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(max(1, min(before, (os.cpu_count() or 1) - workers)))
    try:
        yield
    finally:
        torch.set_num_threads(before)
