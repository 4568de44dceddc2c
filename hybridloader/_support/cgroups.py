"""Cgroups of this process, and the small files of the kernel that tell of them.

What can't be read is empty, or None: nothing here raises. Linux only; elsewhere there are none.
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
        Function that returns where a tree is mounted, from its controllers as /proc names them: several
        may share one in version 1, such as ``"cpu,cpuacct"``. They are ``""`` for version 2, which has
        one tree.

    Yields
    ------
    tuple
        Folder, and True if it is of version 2. In a container the path in /proc may not exist, and the
        mounted cgroup is the container's own, so the folders around it up to the mount follow.
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
    """Read a small file of the kernel's; empty if it can't be read."""
    try:
        with open(path, "rb", buffering=0) as file:  # the layers above take longer than the reading
            return os.fsdecode(file.readall())
    except (OSError, ValueError):  # ValueError: a path with a NUL
        return ""


def number_in(path: Path) -> int | None:
    return whole_number(text_of(path).strip())


def whole_number(word: str) -> int | None:
    """Read a number; no count of the kernel's has more digits, and `int` refuses a word of thousands."""
    return int(word) if word.isascii() and word.isdigit() and len(word) <= 20 else None
