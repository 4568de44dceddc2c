"""``hybridloader demo`` from its options to its last line: cut, train, tell the accuracy, compare.

It never parses an argument and never ends the process: what can't be done is a `DemoError`, or a
`BackendUnavailable` of the loader.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from hybridloader import DataLoader, get_backend
from hybridloader.demo.comparison import IMAGES, ROUNDS, compare, contenders
from hybridloader.demo.display import Display
from hybridloader.demo.folders import ClassFolders, read_class_folders
from hybridloader.demo.images import Photographs
from hybridloader.demo.photographs import CROPS, PHOTOGRAPHS, cut_folder, is_complete, prepare
from hybridloader.demo.training import Trainer, cores_left_by

SEED = 0


@dataclass(frozen=True)
class Options:
    """What the command line says; the help texts of `hybridloader.cli` tell what each is."""

    data: Path | None = None
    cache: Path | None = None
    backend: str | None = None
    workers: int | None = None
    batch_size: int = 64
    epochs: int = 4
    limit: int | None = None
    compare: bool = True


def run(options: Options, display: Display | None = None) -> float:
    """Run the demo.

    Returns
    -------
    float
        The accuracy on the held-out images, between 0 and 1.

    Raises
    ------
    DemoError
        A folder or an image can't be used.
    BackendUnavailable
        There is no such backend, or it can't serve here.
    """
    display = display or Display()
    start = time.perf_counter()
    if options.backend is not None:
        get_backend(options.backend)  # before anything takes time
    workers = min(4, os.cpu_count() or 1) if options.workers is None else options.workers
    folder = prepared(options.cache, display) if options.data is None else options.data
    images = read_class_folders(folder).limited(options.limit)
    display.say(
        f"{folder}: {len(images.classes)} classes, {len(images.train):,} images to train on, "
        f"{len(images.heldout):,} held out"
    )
    display.say(
        f"backend {options.backend or 'as torch would choose'}, {workers} workers, "
        f"batches of {options.batch_size}"
    )
    torch.manual_seed(SEED)
    with cores_left_by(workers):
        right = _train(options, images, workers, display)
    accuracy = right / len(images.heldout)
    display.say(
        f"accuracy on held-out images: {accuracy:.1%} ({right} of {len(images.heldout)}; "
        f"guessing would give {1 / len(images.classes):.0%})"
    )
    if options.compare:
        _compare(images, options.batch_size, workers, display)
    display.say(f"done in {time.perf_counter() - start:.0f} s")
    return accuracy


def prepared(cache: Path | None, display: Display, crops: int = CROPS) -> Path:
    """The folder with the photographs; a progress bar if they must be cut first."""
    if is_complete(cut_folder(cache, crops), crops):
        return cut_folder(cache, crops)
    with display.task("cutting photographs", crops * len(PHOTOGRAPHS)) as task:
        return prepare(cache, crops=crops, report=task.advance)


def _train(options: Options, images: ClassFolders, workers: int, display: Display) -> int:
    """Train, and give how many held-out images are named rightly."""

    def loader(dataset: Photographs, *, shuffle: bool, persistent: bool) -> DataLoader:
        return DataLoader(
            dataset,
            batch_size=options.batch_size,
            shuffle=shuffle,
            num_workers=workers,
            persistent_workers=persistent and workers > 0,
            backend=options.backend,
        )

    seen = loader(Photographs(images.train, augment=True), shuffle=True, persistent=True)
    trainer = Trainer(len(images.classes), options.epochs * len(seen))
    for epoch in range(1, options.epochs + 1):
        with display.task(f"epoch {epoch} of {options.epochs}", len(images.train)) as task:
            trainer.train(seen, task.advance)
    unseen = loader(Photographs(images.heldout, augment=False), shuffle=False, persistent=False)
    with display.task("held-out images", len(images.heldout)) as task:
        return trainer.correct(unseen, task.advance)


def _compare(images: ClassFolders, batch_size: int, workers: int, display: Display) -> None:
    chosen = images.limited(IMAGES).train
    rows = contenders(Photographs(chosen, augment=True), batch_size, workers)
    with display.task("comparing", len(chosen) * len(rows) * (ROUNDS + 1)) as task:
        compare(rows, len(chosen), task.advance)
    display.table(
        f"Loading only, {len(chosen):,} images in batches of {batch_size}: "
        f"the median of {ROUNDS} epochs",
        rows,
    )
