"""Archives and tables on disk: made once on a machine, in its temporary folder."""

from __future__ import annotations

import functools
import io
import os
import shutil
import tarfile
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

# Not in `pixels`: each fresh worker would import torch with its first sample, and not one process once.
import torch
from PIL import Image

from benchmarks.datasets.pictures import as_jpeg, waves

SIDE = 160
"""Pixels of the width of a picture."""

GROUP = 50_000
"""Rows of a row group."""


def _made(name: str, make: Callable[[Path], None]) -> Path:
    """A folder that `make` has filled, now or in an earlier run."""
    base = Path(tempfile.gettempdir(), f"hybridloader-benchmarks-{os.getuid()}")
    base.mkdir(exist_ok=True, mode=0o700)
    folder = base / name
    if not folder.exists():
        beside = Path(tempfile.mkdtemp(dir=base))
        make(beside)
        try:
            beside.rename(folder)
        except OSError:  # another process was faster
            shutil.rmtree(beside)
    return folder


def archives(samples: int, shards: int = 20, width: int = SIDE) -> list[str]:
    """Paths of tar archives, as webdataset has them: a JPEG file and its class for each sample."""
    each = samples // shards

    def make(folder: Path) -> None:
        pictures = [as_jpeg(waves(width, number)) for number in range(32)]
        for shard in range(shards):
            with tarfile.open(folder / f"{shard:03d}.tar", "w") as archive:
                for number in range(each * shard, each * (shard + 1)):
                    for kind, data in (
                        ("jpg", pictures[number % len(pictures)]),
                        ("cls", str(number).encode()),
                    ):
                        member = tarfile.TarInfo(f"{number:06d}.{kind}")
                        member.size = len(data)
                        archive.addfile(member, io.BytesIO(data))

    name = f"tar-{samples}-{shards}" + (f"-{width}" if width != SIDE else "")
    return sorted(map(str, _made(name, make).glob("*.tar")))


def tables(rows: int, columns: int = 20, files: int = 4) -> list[str]:
    """Paths of Parquet files of numbers: the first column counts the rows, the others are random."""

    def make(folder: Path) -> None:
        import numpy as np
        import pyarrow
        import pyarrow.parquet

        generator = np.random.default_rng(0)
        each = rows // files
        for file in range(files):
            found: dict[str, Any] = {"c00": np.arange(each * file, each * (file + 1))}
            for column in range(1, columns):
                found[f"c{column:02d}"] = generator.random(each, np.float32)
            pyarrow.parquet.write_table(
                pyarrow.table(found), folder / f"{file}.parquet", row_group_size=GROUP
            )

    return sorted(map(str, _made(f"parquet-{rows}-{columns}", make).glob("*.parquet")))


def pixels(data: bytes) -> Any:
    """The picture of a JPEG file."""
    with Image.open(io.BytesIO(data)) as image:
        width, height = image.size
        raw = bytearray(image.convert("RGB").tobytes())
    return torch.frombuffer(raw, dtype=torch.uint8).reshape(height, width, 3)


def decoded(sample: Any) -> tuple[Any, int]:
    """Picture and number of a pair of files."""
    picture, number = sample
    return pixels(picture), int(number)


def members(path: str) -> Any:
    """Pairs of files of an archive, in order, as `tarfile` reads them."""
    with tarfile.open(path) as archive:
        pair: list[bytes] = []
        for member in archive:
            file = archive.extractfile(member)
            assert file is not None
            pair.append(file.read())
            if len(pair) == 2:
                yield tuple(pair)
                pair = []


@functools.cache
def hugging_face(rows: int) -> Any:
    """The tables as a `Dataset`, whose cache is beside them."""
    import datasets

    datasets.disable_progress_bars()
    paths = tables(rows)
    return datasets.Dataset.from_parquet(paths, cache_dir=f"{Path(paths[0]).parent}-cache")
