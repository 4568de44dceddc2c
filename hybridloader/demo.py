"""Demo: real JPEG files, a small network that learns from them, and a measured choice of workers.

It uses the package by its public names only, as any user would. The photographs are in the wheels of
scikit-image and scikit-learn, so nothing is downloaded.
"""

from __future__ import annotations

import importlib.util
import io
import os
import random
import re
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import nn
from torch.utils.data import Dataset

from hybridloader import DataLoader, rng, tune
from hybridloader.engine import get_backend
from hybridloader.sources import Files


class DemoError(Exception):
    """Error in the user's input. The message is one line and names the file or folder."""


# -- photographs -------------------------------------------------------------------------------------

# All ten are photographs (of a telescope and a fundus camera, too). The wheels carry more pictures,
# left out because they are textures, drawings, scans or microscopy: brick, grass, gravel, text, ...
# motorcycle_right is left out because it shows what motorcycle_left shows.
PHOTOGRAPHS = {
    "astronaut": ("skimage", "data/astronaut.png"),
    "camera": ("skimage", "data/camera.png"),
    "cat": ("skimage", "data/chelsea.png"),
    "coffee": ("skimage", "data/coffee.png"),
    "flower": ("sklearn", "datasets/images/flower.jpg"),
    "galaxies": ("skimage", "data/hubble_deep_field.jpg"),
    "motorcycle": ("skimage", "data/motorcycle_left.png"),
    "retina": ("skimage", "data/retina.jpg"),
    "rocket": ("skimage", "data/rocket.jpg"),
    "temple": ("sklearn", "datasets/images/china.jpg"),
}

SIZE = (320, 240)
CROPS = 450  # crops per photograph: 4,500 in all
QUALITY = 90  # JPEG quality: some 11 kB a file, 51 MB in all
WINDOW = 0.2  # width of a held-out window, as a part of the photograph's width
SMALLEST = 0.6  # width of the smallest crop, as a part of a window's width

EVERY = 10
"""Size of a group of images of a class, in the order of their names, whose last one is held out."""

REACH = 3
"""Pixels that resizing reads beyond the edge of the box: two for bicubic, times the scale (at most 1.15,
for the retina), rounded up."""

Box = tuple[float, float, float, float]


def photograph(name: str) -> Image.Image:
    """Return the photograph of that name from its wheel."""
    package, file = PHOTOGRAPHS[name]
    found = importlib.util.find_spec(package)
    places = list(found.submodule_search_locations or ()) if found is not None else []
    with Image.open(os.path.join(places[0] if places else package, file)) as image:
        pixels: Image.Image = image.convert("RGB")
    return pixels


def crop_box(name: str, index: int, size: tuple[int, int]) -> Box:
    """Return the box of crop number `index` of a photograph of `size`, equal on every machine.

    Held-out crops come from inside of four windows and training crops from outside of them, so no pixel
    of a held-out crop is trained on. The network learns colors and textures of the photograph, and has
    to recognize them in places that it has not seen. One large window would hide whole objects from it.
    """
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
    """Cut the crops that are not there yet, and return the folder that has a folder per photograph.

    The default cache is below ``$XDG_CACHE_HOME``, or ``~/.cache``. Raises `DemoError` if a photograph
    is missing from its wheel, or the cache can't be written.
    """
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


# -- images ------------------------------------------------------------------------------------------

SUFFIXES = (".bmp", ".gif", ".jpeg", ".jpg", ".png", ".ppm", ".tif", ".tiff", ".webp")
SIDE = 96  # pixels of the square that the network sees


def read_folder(folder: Path) -> tuple[Files, list[int], list[int]]:
    """Return the images of `folder`, which holds one folder per class, and two lists of their indices.

    The second list is of the held-out images: in every class each tenth, or the last one if there are
    fewer than ten. Raises `DemoError` if the folder holds fewer than two classes of two images.
    """
    if re.search(r"[*?\[{]", str(folder)):  # `Files` would read a pattern
        raise DemoError(f"{folder}: the demo reads no folder with *, ?, [ or {{ in its path")
    try:
        files = Files(f"{folder}/*/*", class_from_folder=True)
    except OSError as error:
        raise DemoError(
            f"{folder} must hold one folder of images per class, and holds no folder with files"
        ) from error
    members: dict[int, list[int]] = {}
    for index, (path, label) in enumerate(zip(files.paths, files.labels, strict=True)):
        if path.lower().endswith(SUFFIXES):
            members.setdefault(label, []).append(index)
    if len(members) < 2 or min(map(len, members.values())) < 2:
        raise DemoError(f"{folder} must hold two folders or more, of two images or more each")
    heldout = {i for mine in members.values() for i in mine[EVERY - 1 :: EVERY] or mine[-1:]}
    return (
        files,
        [i for mine in members.values() for i in mine if i not in heldout],
        sorted(heldout),
    )


class Photographs(Dataset[tuple[torch.Tensor, int]]):
    """Images of `files` by their `indices`, decoded when they are asked for.

    With `augment`, each reading gives another crop, mirror image, brightness and contrast.
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
        if self.augment:
            return augmented(image, rng().python), label
        return as_tensor(image.resize((SIDE, SIDE), Image.Resampling.BILINEAR)), label


def augmented(image: Image.Image, chance: random.Random) -> torch.Tensor:
    """Return a random part of `image` (60 % to 100 % of each side), mirrored or not, relit."""
    scale = chance.uniform(0.6, 1)
    width, height = scale * image.width, scale * image.height
    left, top = chance.uniform(0, image.width - width), chance.uniform(0, image.height - height)
    box = (left, top, left + width, top + height)
    image = image.resize((SIDE, SIDE), Image.Resampling.BILINEAR, box=box)
    if chance.random() < 0.5:
        image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    pixels = as_tensor(image)
    mean = pixels.mean()
    contrast, brightness = chance.uniform(0.8, 1.2), chance.uniform(-0.1, 0.1)
    return ((pixels - mean) * contrast + mean + brightness).clamp_(0, 1)


def as_tensor(image: Image.Image) -> torch.Tensor:
    """Return a float tensor of shape ``(3, height, width)`` with values between 0 and 1."""
    return torch.from_numpy(np.array(image)).permute(2, 0, 1).float().div_(255)


# -- training ----------------------------------------------------------------------------------------

PEAK_RATE = 3e-3  # learning rate at the top of the one-cycle schedule, with Adam, for batches of 64


def network(classes: int) -> nn.Sequential:
    """Return four convolutions that halve the image each, and one linear layer: 0.1 million parameters.

    One image takes some 2 ms, forwards and backwards, on one core; reading it takes 1 ms.
    """
    widths = (3, 16, 32, 64, 128)
    layers: list[nn.Module] = []
    for before, after in pairwise(widths):
        convolution = nn.Conv2d(before, after, 3, stride=2, padding=1, bias=False)
        layers += [convolution, nn.BatchNorm2d(after), nn.ReLU()]
    head = nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(widths[-1], classes)
    return nn.Sequential(*layers, *head)


def train(model: nn.Module, loader: Any, epochs: int) -> None:
    """Train `model`, and print a line for each epoch."""
    optimizer = torch.optim.Adam(model.parameters())
    # The schedule needs two steps to rise and fall.
    steps = max(2, epochs * len(loader))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, PEAK_RATE, total_steps=steps)
    model.train()
    for epoch in range(1, epochs + 1):
        start, count, total = time.perf_counter(), 0, 0.0
        for images, labels in loader:
            loss = nn.functional.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            schedule.step()
            count += len(labels)
            total += loss.item() * len(labels)
        rate = count / (time.perf_counter() - start)
        print(f"epoch {epoch} of {epochs}: {rate:,.0f} images/s, loss {total / count:.3f}")


@torch.no_grad()
def correct(model: nn.Module, loader: Any) -> int:
    """Return how many of the images in `loader` the model classifies correctly."""
    model.eval()
    return sum(int((model(images).argmax(1) == labels).sum()) for images, labels in loader)


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
) -> float:
    """Run the demo; return the accuracy on the held-out images, between 0 and 1.

    The help texts of `hybridloader.cli` describe the options. Raises `DemoError` if a folder or an image
    can't be used, and `BackendUnavailable`.
    """
    start = time.perf_counter()
    if backend is not None:
        get_backend(backend)  # before anything takes time
    workers = min(4, os.cpu_count() or 1) if workers is None else workers
    if data is None:
        print("looking for the photographs, of which the first run cuts 4,500 crops")
    folder = prepare(cache) if data is None else data
    files, chosen, heldout = read_folder(folder)
    if limit is not None and limit < len(chosen):
        chosen = random.Random(0).sample(chosen, limit)
    classes = len(files.classes)
    print(
        f"{folder}: {classes} classes, {len(chosen):,} images to train on, {len(heldout):,} held out"
    )
    print(
        f"backend {backend or 'as torch would choose'}, {workers} workers, batches of {batch_size}"
    )
    options: dict[str, Any] = {"batch_size": batch_size, "num_workers": workers, "backend": backend}
    loader = DataLoader(
        Photographs(files, chosen, augment=True),
        shuffle=True,
        persistent_workers=workers > 0,
        seeding="sample",
        **options,
    )
    torch.manual_seed(0)
    model = network(classes)
    # Computing threads wait for each other at the end of every operation, so one that shares its core
    # with a worker delays all. On two cores with two workers, 1,920 images took 6 s with one computing
    # thread and 20 s with two.
    threads = torch.get_num_threads()
    torch.set_num_threads(max(1, min(threads, (os.cpu_count() or 1) - workers)))
    try:
        train(model, loader, epochs)
        right = correct(model, DataLoader(Photographs(files, heldout, augment=False), **options))
    finally:
        torch.set_num_threads(threads)
    print(
        f"accuracy on held-out images: {right / len(heldout):.1%} ({right} of {len(heldout)}; "
        f"guessing would give {1 / classes:.0%})"
    )
    if compare:
        print("measuring for 20 s which workers load these images fastest")
        print(tune(loader, seconds=20))
    print(f"done in {time.perf_counter() - start:.0f} s")
    return right / len(heldout)
