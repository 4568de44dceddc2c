"""Data of the demo: crops of ten photographs from the wheels of scikit-image and scikit-learn.

`prepare` cuts them once into a cache folder, one folder per photograph. It never downloads anything,
never imports the two packages, and never leaves a partial cut under the final name: crops are written
next to it and renamed when all are there.
"""

from __future__ import annotations

import importlib.util
import os
import random
import shutil
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from PIL import Image

from hybridloader.demo.folders import EVERY, HELDOUT, DemoError
from hybridloader.demo.images import decode

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
CROPS = 450  # crops per photograph: 4,500 in all, 4,050 to train on and 450 held out (every tenth)
QUALITY = 90  # JPEG quality: some 11 kB a file, 51 MB in all
WINDOW = 0.2  # width of a held-out window, as a part of the photograph's width
SMALLEST = 0.6  # width of the smallest crop, as a part of a window's width

REACH = 3
"""Pixels that resizing reads beyond the edge of the box: two for bicubic, times the scale (at most 1.15,
for the retina), rounded up."""

Box = tuple[float, float, float, float]


def heldout_windows(size: tuple[int, int]) -> list[Box]:
    """Return the four parts of a photograph of `size` that no training crop touches.

    Held-out crops come from inside these windows and training crops from outside of them, so no pixel
    of a held-out crop is trained on. The network learns colours and textures of the photograph, and has
    to recognise them in places that it has not seen. One large window would hide whole objects from it.
    """
    width, height = size
    half = WINDOW * width / 2, WINDOW * width * 3 / 8
    middles = [(width * x, height * y) for x in (0.25, 0.75) for y in (0.25, 0.75)]
    return [(x - half[0], y - half[1], x + half[0], y + half[1]) for x, y in middles]


def crop_box(name: str, index: int, size: tuple[int, int]) -> Box:
    """Return the box of crop number `index` of a photograph, equal on every machine."""
    chance = random.Random(f"{name}/{index}")
    heldout = index % EVERY == HELDOUT.start
    windows = heldout_windows(size)
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
    apart = 2 * REACH
    ways = (one, other), (other, one)
    return all(a[0] < b[2] + apart and a[1] < b[3] + apart for a, b in ways)


def cut_folder(cache: Path | None = None, crops: int = CROPS) -> Path:
    """Return the folder that `prepare` fills; one with fewer crops has another name.

    The default cache is below ``$XDG_CACHE_HOME``, or ``~/.cache``.
    """
    chosen = Path(os.environ.get("XDG_CACHE_HOME", ""))
    cache = cache or (chosen if chosen.is_absolute() else Path.home() / ".cache") / "hybridloader"
    return cache / ("photographs-v1" if crops == CROPS else f"photographs-v1-{crops}-each")


def is_complete(folder: Path, crops: int = CROPS) -> bool:
    wanted = {f"{index:04d}.jpg" for index in range(crops)}
    try:
        return all(set(os.listdir(folder / name)) == wanted for name in PHOTOGRAPHS)
    except OSError:
        return False


def prepare(
    cache: Path | None = None,
    *,
    crops: int = CROPS,
    report: Callable[[int], None] | None = None,
) -> Path:
    """Cut the crops unless they are there, and return the folder that has a folder per photograph.

    `report` is called with 1 after each crop that was cut. Raises `DemoError` if a photograph is missing
    from its wheel, or the cache can't be written.
    """
    folder = cut_folder(cache, crops)
    if is_complete(folder, crops):
        return folder
    sources = {name: photograph(name) for name in PHOTOGRAPHS}
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        _make_way(folder)
        beside = f"{folder.name}.partial-"
        with tempfile.TemporaryDirectory(prefix=beside, dir=folder.parent) as partial:
            whole = Path(partial) / "cut"
            _cut_all(sources, whole, crops, report or (lambda _: None))
            try:
                whole.rename(folder)
            except OSError:
                if not is_complete(folder, crops):  # else another process was faster
                    raise
    except OSError as error:
        raise DemoError(f"can't write to {folder}: {error.strerror or error}") from error
    return folder


def photograph(name: str) -> Image.Image:
    """Return the photograph of that name from its wheel."""
    package, file = PHOTOGRAPHS[name]
    found = importlib.util.find_spec(package)
    places = list(found.submodule_search_locations or ()) if found is not None else []
    return decode(os.path.join(places[0] if places else package, file))


def _make_way(folder: Path) -> None:
    """Remove the rest of an earlier cut, and nothing else."""
    if not folder.exists():
        return
    if not folder.is_dir() or not set(os.listdir(folder)) <= PHOTOGRAPHS.keys():
        raise DemoError(
            f"{folder} is in the way and is not the demo's; move it away, or choose another cache"
        )
    shutil.rmtree(folder)


def _cut_all(
    sources: dict[str, Image.Image], folder: Path, crops: int, report: Callable[[int], None]
) -> None:
    """Cut all photographs into `folder`. Pillow releases the GIL, so threads use all cores."""

    def cut(job: tuple[str, int]) -> None:
        name, index = job
        box = crop_box(name, index, sources[name].size)
        crop = sources[name].resize(SIZE, Image.Resampling.BICUBIC, box=box)
        crop.save(folder / name / f"{index:04d}.jpg", quality=QUALITY)

    for name in sources:
        (folder / name).mkdir(parents=True)
    jobs = [(name, index) for name in sources for index in range(crops)]
    executor = ThreadPoolExecutor(min(8, os.cpu_count() or 1))
    try:
        for _ in executor.map(cut, jobs):
            report(1)
    finally:  # after Ctrl-C, don't cut the rest first
        executor.shutdown(cancel_futures=True)
