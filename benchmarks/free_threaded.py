"""Threads beside processes, with and without a GIL: ``python -m benchmarks.free_threaded``.

It needs torch, numpy, pillow and psutil alone, so it runs on a free-threaded Python too, for which the
rivals have no wheels. Run it with both, in the same hour, and compare. All loaders take turns; the best
round of each counts.
"""

from __future__ import annotations

import argparse
import io
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import psutil
import torch
from PIL import Image

from hybridloader import DataLoader
from hybridloader._support.threads import gil_enabled


class Work(torch.utils.data.Dataset[Any]):
    """Samples of one kind of work."""

    def __init__(self, sample: Callable[[int], Any], length: int) -> None:
        self.sample, self.length = sample, length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        return self.sample(index)


def jpeg() -> bytes:
    """Return a file of 512 x 512 pixels."""
    rows = np.arange(512, dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(np.add.outer(rows, rows)).convert("RGB").save(file, "jpeg")
    return file.getvalue()


FILE = jpeg()


def in_python(index: int) -> int:
    found = 0
    for number in range(40_000):
        found += number & index
    return found


def decoded(index: int) -> Any:
    return np.array(Image.open(io.BytesIO(FILE)))


def hybrid(index: int) -> Any:
    """Wait, decode, and compute in Python."""
    time.sleep(0.005)
    return decoded(index), in_python(index)


def integer(index: int) -> int:
    return index


WORK: dict[str, tuple[Callable[[int], Any], int, int]] = {
    "Python": (in_python, 16 * 60, 16),
    "JPEG": (decoded, 16 * 60, 16),
    "hybrid": (hybrid, 16 * 30, 16),
    "64 integers": (integer, 64 * 2000, 64),
}
"""Function of a sample, samples of an epoch, and of a batch."""

LOADERS: dict[str, Callable[..., Any]] = {
    "no workers": lambda *given, workers: torch.utils.data.DataLoader(*given),
    "threads": lambda *given, workers: DataLoader(*given, num_workers=workers, backend="threads"),
    "fork": lambda *given, workers: DataLoader(*given, num_workers=workers, backend="fork"),
    "torch": lambda *given, workers: torch.utils.data.DataLoader(*given, num_workers=workers),
}


def memory() -> float:
    """Return the MB of this process and its children, with what they share counted once."""
    mine = psutil.Process()
    found = 0
    for process in (mine, *mine.children(recursive=True)):
        try:
            found += process.memory_full_info().pss
        except psutil.Error:
            continue
    return found / 1e6


def epoch(loader: Any) -> float:
    """Return the seconds of a batch, from the first to the last.

    No pause within it, in which workers would make batches that are not timed. Up to a batch of each
    worker is begun before the first has come, so an epoch must have many more batches than workers.
    """
    batches = iter(loader)
    next(batches)
    began = time.perf_counter()
    count = sum(1 for _ in batches)
    return (time.perf_counter() - began) / count


def memory_within(loader: Any) -> float:
    """Return the MB after some batches of an epoch of its own."""
    batches = iter(loader)
    for _ in range(8):
        next(batches)
    return memory()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()
    version = sys.version.split()[0]
    print(f"Python {version}, GIL: {gil_enabled()}, torch {torch.__version__}")
    print("| samples | loader | ms / batch | of no workers | MB |\n| --- | --- | --- | --- | --- |")
    for name, (sample, length, batch) in WORK.items():
        best = dict.fromkeys(LOADERS, (float("inf"), float("inf")))
        for _ in range(options.rounds):
            for loader, make in LOADERS.items():
                made = make(Work(sample, length), batch, workers=options.workers)
                found = epoch(made), memory_within(made)
                best[loader] = tuple(map(min, best[loader], found))  # type: ignore[assignment]
        alone = best["no workers"][0]
        for loader, (seconds, used) in best.items():
            print(
                f"| {name} | {loader} | {seconds * 1e3:.3g} | {alone / seconds:.2f}x | {used:.0f} |"
            )


if __name__ == "__main__":
    main()
