"""Tar archives to read in tests."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Iterable
from pathlib import Path


def tar_bytes(members: Iterable[tuple[str, bytes]]) -> bytes:
    """Return an archive of `members`: names and contents."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        for name, data in members:
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return packed.getvalue()


def sample_members(first: int, count: int) -> list[tuple[str, bytes]]:
    """Return members of `count` samples, from number `first` on: each a text and a class."""
    members = []
    for number in range(first, first + count):
        members.append((f"s{number:04d}.txt", f"text {number} ".encode() * (number % 7 + 1)))
        members.append((f"s{number:04d}.cls", str(number % 3).encode()))
    return members


def write_shards(folder: Path, counts: Iterable[int]) -> list[str]:
    """Write an archive for each of `counts`, and return their paths."""
    folder.mkdir(exist_ok=True)
    paths, first = [], 0
    for number, count in enumerate(counts):
        path = folder / f"part-{number:03d}.tar"
        path.write_bytes(tar_bytes(sample_members(first, count)))
        paths.append(str(path))
        first += count
    return paths
