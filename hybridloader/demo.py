"""Demo: real JPEG files, a small network that learns from them, and a comparison with torch's loader.

It uses the package by its public names only. The photographs are in the wheels of scikit-image and
scikit-learn, so nothing is downloaded.
"""

from __future__ import annotations

import importlib.resources
import io
import os
import random
import re
import time
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import nn
from torch.utils.data import DataLoader as TorchLoader
from torch.utils.data import Dataset

from hybridloader import DataLoader, rng
from hybridloader._support import system
from hybridloader.engine import get_backend
from hybridloader.sources import Files


class DemoError(Exception):
    """Error in the user's input. The message is one line and names the file or folder."""


# The other pictures in the wheels are textures, drawings, scans, or show the same again.
PHOTOGRAPHS = {
    "astronaut": ("skimage", "data/astronaut.png"), "camera": ("skimage", "data/camera.png"),
    "cat": ("skimage", "data/chelsea.png"), "coffee": ("skimage", "data/coffee.png"),
    "flower": ("sklearn", "datasets/images/flower.jpg"),
    "galaxies": ("skimage", "data/hubble_deep_field.jpg"),
    "motorcycle": ("skimage", "data/motorcycle_left.png"), "retina": ("skimage", "data/retina.jpg"),
    "rocket": ("skimage", "data/rocket.jpg"), "temple": ("sklearn", "datasets/images/china.jpg"),
}  # fmt: skip

SIZE = (320, 240)
CROPS = 450  # crops per photograph: 4,500 in all
QUALITY = 90  # JPEG quality: some 11 kB a file, 51 MB in all
WINDOW = 0.2  # width of a held-out window, as a part of the photograph's width
SMALLEST = 0.6  # width of the smallest crop, as a part of a window's width

EVERY = 10  # size of a group of images of a class, in the order of names, whose last is held out
REACH = 3  # pixels that resizing reads beyond the edge of a box: two, times a scale of at most 1.15

Box = tuple[float, float, float, float]


def photograph(name: str) -> Image.Image:
    """Return the photograph of that name from its wheel."""
    package, file = PHOTOGRAPHS[name]
    with Image.open(str(importlib.resources.files(package) / file)) as image:
        pixels: Image.Image = image.convert("RGB")
    return pixels


def crop_box(name: str, index: int, size: tuple[int, int]) -> Box:
    """Return the box of a crop: if it is held out within four windows, else outside of them."""
    chance = random.Random(f"{name}/{index}")
    heldout = index % EVERY == EVERY - 1
    half = WINDOW * size[0] / 2, WINDOW * size[0] * 3 / 8
    middles = [(size[0] * x, size[1] * y) for x in (0.25, 0.75) for y in (0.25, 0.75)]
    windows = [(x - half[0], y - half[1], x + half[0], y + half[1]) for x, y in middles]
    while True:
        width = size[0] * WINDOW * chance.uniform(SMALLEST, 1)
        height = width * SIZE[1] / SIZE[0]
        left, top, right, bottom = chance.choice(windows) if heldout else (0, 0, *size)
        x, y = chance.uniform(left, right - width), chance.uniform(top, bottom - height)
        box = (x, y, x + width, y + height)
        if heldout or not any(overlap(box, window) for window in windows):
            return box


def overlap(one: Box, other: Box) -> bool:
    """Return True if crops of two boxes read the same pixel of the photograph."""
    ways = (one, other), (other, one)
    return all(a[0] < b[2] + 2 * REACH and a[1] < b[3] + 2 * REACH for a, b in ways)


def prepare(cache: Path | None = None, *, crops: int = CROPS) -> Path:
    """Cut the crops that are not in `cache` yet, and return the folder that has one per photograph."""
    chosen = Path(os.environ.get("XDG_CACHE_HOME", ""))
    cache = cache or (chosen if chosen.is_absolute() else Path.home() / ".cache") / "hybridloader"
    folder = cache / ("photographs-v1" if crops == CROPS else f"photographs-v1-{crops}-each")
    sources: dict[str, Image.Image] = {}

    def cut(job: tuple[str, int, Path]) -> None:
        name, index, path = job
        box = crop_box(name, index, sources[name].size)
        crop = sources[name].resize(SIZE, Image.Resampling.BICUBIC, box=box)
        unfinished = path.with_suffix(f".{os.getpid()}")
        crop.save(unfinished, "JPEG", quality=QUALITY)
        unfinished.replace(path)

    try:
        for name in PHOTOGRAPHS:
            (folder / name).mkdir(parents=True, exist_ok=True)
        paths = [
            (name, i, folder / name / f"{i:04d}.jpg") for name in PHOTOGRAPHS for i in range(crops)
        ]
        missing = [job for job in paths if not job[2].exists()]
        if missing:
            sources |= {name: photograph(name) for name in PHOTOGRAPHS}
        # Pillow releases the GIL, so threads use all cores.
        executor = ThreadPoolExecutor(min(8, os.cpu_count() or 1))
        try:
            list(executor.map(cut, missing))
        finally:  # after Ctrl-C, don't cut the rest first
            executor.shutdown(cancel_futures=True)
    except OSError as error:
        raise DemoError(f"can't cut photographs into {folder}: {error}") from error
    return folder


SUFFIXES = (".bmp", ".gif", ".jpeg", ".jpg", ".png", ".ppm", ".tif", ".tiff", ".webp")
SIDE = 96  # pixels of the square that the network sees


def read_folder(folder: Path) -> tuple[Files, list[int], list[int]]:
    """Return the images of `folder`, which holds one folder per class, and two lists of their indices.

    The second list is of the held-out images: in every class each tenth, or the last of fewer.
    """
    if re.search(r"[*?\[{]", str(folder)):  # `Files` would read a pattern
        raise DemoError(f"{folder}: the demo reads no folder with *, ?, [ or {{ in its path")
    try:
        files = Files(f"{folder}/*/*", class_from_folder=True)
    except OSError as error:
        raise DemoError(f"{folder} must hold one folder of images per class") from error
    members: dict[int, list[int]] = {}
    for index, (path, label) in enumerate(zip(files.paths, files.labels, strict=True)):
        if path.lower().endswith(SUFFIXES):
            members.setdefault(label, []).append(index)
    if len(members) < 2 or min(map(len, members.values())) < 2:
        raise DemoError(f"{folder} must hold two folders or more, of two images or more each")
    heldout = {i for mine in members.values() for i in mine[EVERY - 1 :: EVERY] or mine[-1:]}
    train = [i for mine in members.values() for i in mine if i not in heldout]
    return files, train, sorted(heldout)


class Photographs(Dataset[tuple[torch.Tensor, int]]):
    """Images of `files` by their `indices`, decoded when they are asked for.

    With `augment`, each reading gives another part, mirrored or not.
    """

    def __init__(self, files: Files, indices: Sequence[int], *, augment: bool) -> None:
        self.files, self.indices, self.augment = files, indices, augment

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, at: int) -> tuple[torch.Tensor, int]:
        index = self.indices[at]
        data, label = self.files[index]
        try:
            image: Image.Image = Image.open(io.BytesIO(data)).convert("RGB")
        # Pillow's decoders raise all of these for files that are truncated or malicious.
        except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
            raise DemoError(f"can't read the image {self.files.paths[index]}: {error}") from error
        chance = rng().python if self.augment else random.Random(0)
        part = chance.uniform(0.6, 1) if self.augment else 1
        left, top = (chance.uniform(0, (1 - part) * side) for side in image.size)
        box = (left, top, left + part * image.width, top + part * image.height)
        pixels = np.array(image.resize((SIDE, SIDE), Image.Resampling.BILINEAR, box=box))
        if self.augment and chance.random() < 0.5:
            pixels = pixels[:, ::-1].copy()
        return torch.from_numpy(pixels).permute(2, 0, 1).float().div_(255), label


def network(classes: int) -> nn.Sequential:
    """Return four convolutions that halve the image each, and a linear layer: 0.1 million parameters."""
    layers: list[nn.Module] = []
    for before, after in pairwise((3, 16, 32, 64, 128)):
        layers.append(nn.Conv2d(before, after, 3, stride=2, padding=1, bias=False))
        layers += [nn.BatchNorm2d(after), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, classes))


def train(model: nn.Module, loader: Any, epochs: int) -> None:
    """Train `model`, and print a line for each epoch."""
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    decay = torch.optim.lr_scheduler.LinearLR(optimizer, 1, 0.01, epochs * len(loader))
    model.train()
    for epoch in range(1, epochs + 1):
        start, count, total = time.perf_counter(), 0, 0.0
        for images, labels in loader:
            loss = nn.functional.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            decay.step()
            count += len(labels)
            total += loss.item() * len(labels)
        rate = count / (time.perf_counter() - start)
        print(f"epoch {epoch} of {epochs}: {rate:,.0f} images/s, loss {total / count:.3f}")


@torch.no_grad()
def correct(model: nn.Module, loader: Any) -> int:
    """Return how many of the images in `loader` the model classifies correctly."""
    model.eval()
    return sum(int((model(images).argmax(1) == labels).sum()) for images, labels in loader)


class Slow(list[int]):
    """Samples that wait 3 ms as for a disk, and one in 16 that waits 20 times as long."""

    def __getitem__(self, index: Any) -> Any:
        time.sleep(0.06 if random.Random(index).random() < 1 / 16 else 0.003)
        return index


def took(loader: Any, batches: int | None = None) -> float:
    """Return the milliseconds until a new iterator has so many batches; without a number, of a batch."""
    start, count = time.perf_counter(), sum(1 for _ in islice(loader, batches))
    return 1e3 * (time.perf_counter() - start) / (count if batches is None else 1)


def memory(make: Any) -> float:
    """Return the MB (PSS) of the workers of a new loader after its first batch."""
    batches, total, pids = iter(make()), 0, [os.getpid()]
    next(batches)
    for pid in pids:  # which grows meanwhile
        for file in Path(system.PROC, str(pid), "task").glob("*/children"):
            pids += map(int, file.read_text().split())
    for pid in pids[1:]:
        total += int(
            Path(system.PROC, str(pid), "smaps_rollup").read_text().split("Pss:")[1].split()[0]
        )
    return total / 1e3


def comparisons(images: Photographs, workers: int, backend: str) -> Iterator[Any]:
    """Yield title, unit, a reason to be level, a function, and its argument for torch and for ours."""
    size = min(32, len(images))
    kinds: Any = TorchLoader, partial(DataLoader, backend=backend)
    for title, data, batch, count, reason in (
        (f"{size} photographs, decoded", images, size, workers, ": decoding keeps all cores busy"),
        ("64 integers: overhead alone", range(25_600), 64, workers, ""),
        ("16 samples, some slow; 8 workers", Slow(range(640)), 16, 8, ": all workers wait"),
    ):
        loaders = [kind(data, batch, num_workers=count, persistent_workers=True) for kind in kinds]
        _ = list(map(took, loaders))  # warms up
        yield title, "ms", reason, took, *loaders
        del loaders, _
    torchs = partial(TorchLoader, multiprocessing_context="spawn")
    spawned = torchs, partial(DataLoader, backend="spawn")
    fresh = [partial(kind, range(4096), 16, num_workers=workers) for kind in spawned]
    yield "first batch of fresh workers", "ms", "", lambda make: took(make(), 1), *fresh
    if Path(system.PROC, "self", "smaps_rollup").exists():  # Linux
        yield "memory of fresh workers", "MB", "", memory, *fresh
    theirs, ours = (kind(images, size, num_workers=workers) for kind in kinds)
    at = len(ours) * 3 // 4
    took(ours, at)
    state = ours.state_dict()
    calls = partial(took, theirs, at + 1), lambda: ours.load_state_dict(state) or took(ours, 1)
    yield f"resume after {at} of {len(ours)} batches", "ms", "", lambda call: call(), *calls


def show(images: Photographs, workers: int, backend: str) -> None:
    """Print a table: the median, and the spread of three rounds in which the loaders take turns."""
    warnings.filterwarnings("ignore", "This DataLoader will create")  # 8 workers on fewer cores
    print(f"{'':36}{'torch':>26}{f'hybridloader, {backend}':>26}")
    for title, unit, reason, took, *loaders in comparisons(images, workers, backend):
        count = 1 if unit == "MB" else 3  # memory does not vary
        rounds = [[took(loader) for loader in loaders] for _ in range(count)] * (3 // count)
        one, other = map(sorted, zip(*rounds, strict=True))
        ratio = one[1] / max(other[1], 1e-9)
        words = ("more", "less") if unit == "MB" else ("slower", "faster")
        verdict = f"{max(ratio, 1 / max(ratio, 1e-9)):.1f} times {words[ratio > 1]}"
        if 0.9 < ratio < 1.1 or (one[0] <= other[2] and other[0] <= one[2]):
            verdict = f"level{reason}"
        digits = ".2f" if other[1] < 10 else ",.0f"
        cells = [f"{b:{digits}} {unit} ({a:{digits}} to {c:{digits}})" for a, b, c in (one, other)]
        print(f"{title:36}{cells[0]:>26}{cells[1]:>26}  {verdict}", flush=True)


def run(
    *,
    data: Path | None = None,
    cache: Path | None = None,
    backend: str | None = None,
    workers: int | None = None,
    batch_size: int = 64,
    epochs: int = 2,
    limit: int | None = None,
    compare: bool = True,
) -> float:
    """Run the demo; return the accuracy on the held-out images. `hybridloader.cli` has the options."""
    start = time.perf_counter()
    if backend is not None:
        get_backend(backend)  # before anything takes time
    workers = min(4, os.cpu_count() or 1) if workers is None else workers
    if data is None:
        print("looking for the photographs, of which the first run cuts 4,500 crops", flush=True)
    folder = prepare(cache) if data is None else data
    files, chosen, heldout = read_folder(folder)
    if limit is not None and limit < len(chosen):
        chosen = random.Random(0).sample(chosen, limit)
    classes = len(files.classes)
    found = f"{classes} classes, {len(chosen):,} images to train on, {len(heldout):,} held out"
    named = backend or "as torch would choose"
    print(f"{folder}: {found}\nbackend {named}, {workers} workers, batches of {batch_size}")
    options: dict[str, Any] = {"batch_size": batch_size, "num_workers": workers, "backend": backend}
    options |= {"persistent_workers": workers > 0, "seeding": "sample"}
    loader = DataLoader(Photographs(files, chosen, augment=True), shuffle=True, **options)
    torch.manual_seed(0)
    model = network(classes)
    # A computing thread that shares its core with a worker delays all: 20 s instead of 6.
    threads = torch.get_num_threads()
    torch.set_num_threads(max(1, min(threads, (os.cpu_count() or 1) - workers)))
    try:
        train(model, loader, epochs)
        right = correct(model, DataLoader(Photographs(files, heldout, augment=False), **options))
    finally:
        torch.set_num_threads(threads)
    counts = f"({right} of {len(heldout)}; guessing would give {1 / classes:.0%})"
    print(f"accuracy on held-out images: {right / len(heldout):.1%} {counts}")
    if compare:
        del loader
        show(Photographs(files, chosen[:512], augment=False), max(1, workers), backend or "threads")
    print(f"done in {time.perf_counter() - start:.0f} s")
    return right / len(heldout)
