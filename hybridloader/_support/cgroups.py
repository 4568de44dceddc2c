"""Cgroups of this process, and readers of the kernel's small files that describe them.

Nothing here raises: a file that can't be read gives an empty text, or None. Only Linux has cgroups.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path


def cgroups(
    controller: str, proc: Path, mount: Callable[[str], Path]
) -> Iterator[tuple[Path, bool]]:
    """Find the cgroups of this process that may limit a resource, the innermost first.

    Parameters
    ----------
    controller
        Name of the resource's controller: ``"memory"``, ``"cpu"``.
    proc
        Folder ``/proc``.
    mount
        Function that returns the mount point of a tree. Its argument is the tree's controllers as /proc
        lists them. In version 1 several may share a tree, such as ``"cpu,cpuacct"``. Version 2 has one
        tree, and its controllers are ``""``.

    Yields
    ------
    tuple
        Folder, and True if it is of version 2. Its parent folders up to the mount follow: in a container
        the path in /proc may not exist, because the mounted cgroup is that of the container.
    """
    for line in text_of(proc / "self/cgroup").splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        second = number == "0" and not controllers
        if second or controller in controllers.split(","):
            inner = Path(path.strip("/"))
            for place in (inner, *inner.parents):
                yield mount(controllers) / place, second


def text_of(path: Path) -> str:
    """Return the text of a small kernel file; empty if it can't be read."""
    try:
        with open(path, "rb", buffering=0) as file:  # buffers cost more than the read
            return os.fsdecode(file.readall())
    except (OSError, ValueError):  # ValueError: a path with a NUL
        return ""


def number_in(path: Path) -> int | None:
    return whole_number(text_of(path).strip())


def whole_number(word: str) -> int | None:
    """Return `word` as an int; None if it is no number, or longer than any count of the kernel."""
    return int(word) if word.isascii() and word.isdigit() and len(word) <= 20 else None
