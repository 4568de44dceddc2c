"""Steps of ``hybridloader demo``: cut the photographs, train, report the accuracy, compare."""

from __future__ import annotations

import os
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch

from hybridloader import DataLoader
from hybridloader.demo.comparison import IMAGES, ROUNDS, contenders, measure
from hybridloader.demo.display import DemoDisplay
from hybridloader.demo.folders import ClassFolders, read_class_folders
from hybridloader.demo.images import Photographs
from hybridloader.demo.photographs import CROPS, PHOTOGRAPHS, cut_folder, is_complete, prepare
from hybridloader.demo.training import Trainer, cores_left_by
from hybridloader.engine import get_backend

SEED = 0


def run(
    *,
    data: Path | None = None,
    cache: Path | None = None,
    backend: str | None = None,
    workers: int | None = None,
    batch_size: int = 64,
    epochs: int = 4,
    limit: int | None = None,
    compare: bool = True,
    display: DemoDisplay | None = None,
) -> float:
    """Run the demo; return the accuracy on the held-out images, between 0 and 1.

    The help texts of `hybridloader.cli` describe the options. Raises `DemoError` if a folder or an image
    can't be used, and `BackendUnavailable`.
    """
    display = display or DemoDisplay()
    start = time.perf_counter()
    if backend is not None:
        get_backend(backend)  # before anything takes time
    workers = min(4, os.cpu_count() or 1) if workers is None else workers
    folder = prepared(cache, display) if data is None else data
    images = read_class_folders(folder).limited(limit)
    display.say(
        f"{folder}: {len(images.classes)} classes, {len(images.train):,} images to train on, "
        f"{len(images.heldout):,} held out"
    )
    display.say(
        f"backend {backend or 'as torch would choose'}, {workers} workers, batches of {batch_size}"
    )
    torch.manual_seed(SEED)
    loader = partial(DataLoader, batch_size=batch_size, num_workers=workers, backend=backend)
    with cores_left_by(workers):
        right = _train(loader, epochs, images, display)
    accuracy = right / len(images.heldout)
    display.say(
        f"accuracy on held-out images: {accuracy:.1%} ({right} of {len(images.heldout)}; "
        f"guessing would give {1 / len(images.classes):.0%})"
    )
    if compare:
        _compare(images, batch_size, workers, display)
    display.say(f"done in {time.perf_counter() - start:.0f} s")
    return accuracy


def prepared(cache: Path | None, display: DemoDisplay, crops: int = CROPS) -> Path:
    """Return the folder with the photographs; show a progress bar if they must be cut first."""
    if is_complete(folder := cut_folder(cache, crops), crops):
        return folder
    with display.task("cutting photographs", crops * len(PHOTOGRAPHS)) as task:
        return prepare(cache, crops=crops, report=task.advance)


def _train(loader: Any, epochs: int, images: ClassFolders, display: DemoDisplay) -> int:
    """Train, and return the number of held-out images that are classified correctly."""
    batches = loader(
        Photographs(images.train, augment=True),
        shuffle=True,
        persistent_workers=loader.keywords["num_workers"] > 0,
    )
    trainer = Trainer(len(images.classes), epochs * len(batches))
    for epoch in range(1, epochs + 1):
        with display.task(f"epoch {epoch} of {epochs}", len(images.train)) as task:
            trainer.train(batches, task.advance)
    with display.task("held-out images", len(images.heldout)) as task:
        return trainer.correct(loader(Photographs(images.heldout, augment=False)), task.advance)


def _compare(images: ClassFolders, batch_size: int, workers: int, display: DemoDisplay) -> None:
    chosen = images.limited(IMAGES).train
    rows = contenders(Photographs(chosen, augment=True), batch_size, workers)
    with display.task("comparing", len(chosen) * len(rows) * (ROUNDS + 1)) as task:
        measure(rows, len(chosen), task.advance)
    display.table(
        f"Loading only, {len(chosen):,} images in batches of {batch_size}: "
        f"the median of {ROUNDS} epochs",
        rows,
    )
