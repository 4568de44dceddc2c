"""The demo's data: crops of ten photographs that scikit-image and scikit-learn carry in their wheels.

`prepare` cuts them once into a cache folder, one folder per photograph. It never downloads anything,
never imports the two packages (their folders are enough), and never leaves half a cut under the
final name: crops are written next to it and renamed when all are there.
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
CROPS = 450
"""Per photograph: 4,500 in all, 4,050 to train on and 450 held out (every tenth)."""

QUALITY = 90
"""Some 11 kB a file, 51 MB in all."""

WINDOW = 0.2
"""Width of a held-out window, as a part of the photograph's width."""

SMALLEST = 0.6
"""Crops are between so much and the whole of a window's width."""

REACH = 3
"""Pixels that resizing looks at beyond the edge of the box: two for bicubic, times the scale (at most
1.15, of the retina), rounded up."""

Box = tuple[float, float, float, float]


def heldout_windows(size: tuple[int, int]) -> list[Box]:
    """The four parts of a photograph of `size` that no training crop touches.

    Held-out crops come from inside these windows and training crops from outside of them, so no
    pixel of a held-out crop was ever trained on. It is still the same photograph: the network
    learns its colours and textures, and is asked to recognise them in places it has not seen. One
    large window instead of four small ones would ask it for things it has no way to know, such as
    that the middle of the picture shows a flower.
    """
    width, height = size
    half = WINDOW * width / 2, WINDOW * width * 3 / 8
    middles = [(width * x, height * y) for x in (0.25, 0.75) for y in (0.25, 0.75)]
    return [(x - half[0], y - half[1], x + half[0], y + half[1]) for x, y in middles]


def crop_box(name: str, index: int, size: tuple[int, int]) -> Box:
    """Where crop number `index` of a photograph lies; the same on every machine."""
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
    """True if crops of two boxes look at the same pixel of the photograph."""
    apart = 2 * REACH
    return (
        one[0] < other[2] + apart
        and other[0] < one[2] + apart
        and one[1] < other[3] + apart
        and other[1] < one[3] + apart
    )


def cut_folder(cache: Path | None = None, crops: int = CROPS) -> Path:
    """The folder that `prepare` fills; one with fewer crops has another name.

    Where none is said, caches go below ``$XDG_CACHE_HOME``, or ``~/.cache``.
    """
    chosen = Path(os.environ.get("XDG_CACHE_HOME", ""))
    cache = cache or (chosen if chosen.is_absolute() else Path.home() / ".cache") / "hybridloader"
    return cache / ("photographs-v1" if crops == CROPS else f"photographs-v1-{crops}-each")


def is_complete(folder: Path, crops: int = CROPS) -> bool:
    """True if `folder` holds all crops of all photographs."""
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
    """Make sure that the crops are there, and say where.

    Parameters
    ----------
    cache
        The folder to cut into, in a folder of its own.
    crops
        How many per photograph.
    report
        Called with 1 after each crop that was cut; not at all when they are there already.

    Returns
    -------
    Path
        A folder with one folder per photograph.

    Raises
    ------
    DemoError
        A photograph is missing from its wheel, or the cache can't be written.
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
    """The photograph of that name, which a wheel carries."""
    package, file = PHOTOGRAPHS[name]
    found = importlib.util.find_spec(package)
    places = list(found.submodule_search_locations or ()) if found is not None else []
    return decode(os.path.join(places[0] if places else package, file))


def _make_way(folder: Path) -> None:
    """Remove what is left of an earlier cut, and nothing else."""
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
    """Cut everything into `folder`. Pillow lets go of the GIL, so threads use all cores."""

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
