"""Folder of class folders: its images, found by their names, and the choice of held-out ones."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

SUFFIXES = frozenset({".bmp", ".gif", ".jpeg", ".jpg", ".png", ".ppm", ".tif", ".tiff", ".webp"})
"""Endings of image files; other files, such as notes and checksums, are ignored."""

EVERY = 10
"""Size of a group of images of a class, in the order of their names, whose last one is held out."""

HELDOUT = slice(EVERY - 1, None, EVERY)


class DemoError(Exception):
    """Error in the user's input. The message is one line and names the file or folder."""


class Sample(NamedTuple):
    path: str
    label: int


@dataclass(frozen=True)
class ClassFolders:
    """Content of a folder: the names of the classes, and the images in two parts."""

    classes: tuple[str, ...]
    train: tuple[Sample, ...]
    heldout: tuple[Sample, ...]

    def limited(self, count: int | None) -> ClassFolders:
        """Return a copy with at most `count` training images, always the same ones, in mixed order."""
        if count is None or count >= len(self.train):
            return self
        chosen = random.Random(0).sample(self.train, count)
        return ClassFolders(self.classes, tuple(chosen), self.heldout)


def read_class_folders(folder: Path) -> ClassFolders:
    """List the images of `folder`, which holds one folder per class.

    The classes are ordered by their names; hidden folders are ignored. In every class each tenth image
    is held out, or the last one if there are fewer than ten. Raises `DemoError` if the folder is missing
    or unreadable, or holds fewer than two classes of two images.
    """
    if not folder.exists():
        raise DemoError(f"there is no folder {folder}")
    if not folder.is_dir():
        raise DemoError(f"{folder} is a file; give the folder that holds the class folders")
    names = [entry.name for entry in _entries(folder) if entry.is_dir()]
    if not names:
        raise DemoError(f"{folder} holds no class folders: it needs one folder of images per class")
    if len(names) < 2:
        raise DemoError(f"{folder} holds only one class ({names[0]}); two are needed to tell apart")
    train: list[Sample] = []
    heldout: list[Sample] = []
    for label, name in enumerate(names):
        images = [Sample(str(path), label) for path in _images(folder / name)]
        unseen = HELDOUT if len(images) >= EVERY else slice(-1, None)
        heldout += images[unseen]
        del images[unseen]
        train += images
    return ClassFolders(tuple(names), tuple(train), tuple(heldout))


def _images(folder: Path) -> list[Path]:
    found = [path for path in _entries(folder) if path.suffix.lower() in SUFFIXES]
    if not found:
        raise DemoError(f"the class folder {folder} holds no image")
    if len(found) < 2:
        raise DemoError(
            f"the class folder {folder} holds only one image; one more is to be held out"
        )
    return found


def _entries(folder: Path) -> list[Path]:
    try:
        return sorted(path for path in folder.iterdir() if not path.name.startswith("."))
    except OSError as error:
        raise DemoError(f"can't read the folder {folder}: {error.strerror or error}") from error
