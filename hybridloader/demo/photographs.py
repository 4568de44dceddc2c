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
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from PIL import Image

from hybridloader.demo.folders import DemoError, is_heldout

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

_STALE = 3600.0
"""Seconds after which a half-made cut can't be somebody else's at work: a cut takes seconds."""

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
    windows = heldout_windows(size)
    while True:
        width = size[0] * WINDOW * chance.uniform(SMALLEST, 1)
        height = width * SIZE[1] / SIZE[0]
        if is_heldout(index):
            left, top, right, bottom = chance.choice(windows)
        else:
            left, top, right, bottom = 0, 0, *size
        x, y = chance.uniform(left, right - width), chance.uniform(top, bottom - height)
        box = (x, y, x + width, y + height)
        if is_heldout(index) or not any(overlap(box, window) for window in windows):
            return box


def overlap(one: Box, other: Box) -> bool:
    """Whether crops of two boxes look at the same pixel of the photograph."""
    apart = 2 * REACH
    return (
        one[0] < other[2] + apart
        and other[0] < one[2] + apart
        and one[1] < other[3] + apart
        and other[1] < one[3] + apart
    )


def default_cache() -> Path:
    """Where caches go: ``$XDG_CACHE_HOME`` if it is set, else what the platform says."""
    chosen = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(chosen):
        return Path(chosen) / "hybridloader"
    if sys.platform == "win32":
        local = os.environ.get("LOCALAPPDATA")
        return Path(local or Path.home() / "AppData" / "Local") / "hybridloader" / "Cache"
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "hybridloader"
    return Path.home() / ".cache" / "hybridloader"


def cut_folder(cache: Path | None = None, crops: int = CROPS) -> Path:
    """The folder that `prepare` fills; one with fewer crops has another name."""
    name = "photographs-v1" if crops == CROPS else f"photographs-v1-{crops}-each"
    return (cache or default_cache()) / name


def is_complete(folder: Path, crops: int = CROPS) -> bool:
    """Whether `folder` holds all crops of all photographs."""
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
        The folder to cut into, in a folder of its own; `default_cache()` if None.
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
    sources = {name: _open(*where) for name, where in PHOTOGRAPHS.items()}
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        _clear(folder)
        with _beside(folder) as partial:
            _cut_all(sources, partial, crops, report or (lambda _: None))
            _rename(partial, folder, crops)
    except OSError as error:
        raise DemoError(f"can't write to {folder}: {error.strerror or error}") from error
    return folder


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
        (folder / name).mkdir()
    jobs = [(name, index) for name in sources for index in range(crops)]
    executor = ThreadPoolExecutor(min(8, os.cpu_count() or 1))
    try:
        for _ in executor.map(cut, jobs):
            report(1)
    finally:  # after Ctrl-C, don't cut the rest first
        executor.shutdown(cancel_futures=True)


def _open(package: str, name: str) -> Image.Image:
    found = importlib.util.find_spec(package)
    places = list(found.submodule_search_locations or ()) if found is not None else []
    path = Path(places[0] if places else package) / name
    try:
        with Image.open(path) as image:
            pixels: Image.Image = image.convert("RGB")
            return pixels
    except OSError as error:
        raise DemoError(f"can't read the photograph {path}, which {package} carries") from error


@contextmanager
def _beside(folder: Path) -> Iterator[Path]:
    """A fresh folder on the same disk, gone afterwards unless it was renamed."""
    partial = Path(tempfile.mkdtemp(prefix=f"{folder.name}.partial-", dir=folder.parent))
    partial.chmod(0o755)  # mkdtemp makes it private, which a shared cache folder need not be
    try:
        yield partial
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _clear(folder: Path) -> None:
    """Remove what an earlier cut left behind, and nothing else."""
    for partial in folder.parent.glob(f"{folder.name}.partial-*"):
        if time.time() - partial.stat().st_mtime > _STALE:
            shutil.rmtree(partial, ignore_errors=True)
    if not folder.exists():
        return
    if not folder.is_dir() or not set(os.listdir(folder)) <= PHOTOGRAPHS.keys():
        raise DemoError(
            f"{folder} is in the way and is not the demo's; move it away, or choose another cache"
        )
    shutil.rmtree(folder)


def _rename(partial: Path, folder: Path, crops: int) -> None:
    try:
        partial.rename(folder)
    except OSError:
        if not is_complete(folder, crops):  # else another process was faster: its cut is as good
            raise
