"""What a loader itself costs, beside torch's: ``python -m benchmarks [--workers N] [--json FILE]``.

Four cases: the first batch after ``iter()``, the turn of an epoch with persistent workers, batches of
64 ints (all overhead, no work) and batches of 38 MB (all copying). Each loader runs in turn, several
rounds interleaved; the table shows the median of a loader's rounds and its ratio to torch's. Times on
a shared machine are noisy: trust the ratios.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.utils.data

import hybridloader

BACKENDS = ("threads", "fork", "shared-memory", "spawn")
Make = Callable[..., Any]


class Ints(torch.utils.data.Dataset[int]):
    """`length` samples that cost nothing."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        return index


class Images(torch.utils.data.Dataset[torch.Tensor]):
    """`length` times the same 3x224x224 uint8 image: 38 MB in a batch of 256."""

    def __init__(self, length: int) -> None:
        self.image = torch.randint(0, 255, (3, 224, 224), dtype=torch.uint8)
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.image


def first_batch(make: Make) -> float:
    """Seconds from ``iter()`` to the first batch."""
    start = time.perf_counter()
    it = iter(make(Ints(64), 16))
    next(it)
    return time.perf_counter() - start


def epoch_turn(make: Make) -> float:
    """Median seconds from ``iter()`` to the first batch of later epochs, with persistent workers."""
    loader = make(Ints(12), 4, persistent_workers=True)
    seconds = []
    for _ in range(30):
        start = time.perf_counter()
        it = iter(loader)
        next(it)
        seconds.append(time.perf_counter() - start)
        for _ in it:
            pass
    return statistics.median(seconds[1:])


def _per_batch(it: Any) -> float:
    for _ in range(4):
        next(it)
    start, count = time.perf_counter(), len(it) - 5
    for _ in range(count):  # not to the end, where the workers are ended
        next(it)
    return (time.perf_counter() - start) / count


def small_batches(make: Make) -> float:
    """Seconds for a batch of 64 ints."""
    return _per_batch(iter(make(Ints(64 * 1000), 64)))


def large_batches(make: Make) -> float:
    """Seconds for a batch of 38 MB."""
    return _per_batch(iter(make(Images(256 * 24), 256)))


CASES = (first_batch, epoch_turn, small_batches, large_batches)


def loaders(workers: int) -> dict[str, Make]:
    """How to make each loader, by the name that the table gives it."""

    def torchs(dataset: Any, batch: int, **more: Any) -> Any:
        return torch.utils.data.DataLoader(dataset, batch, num_workers=workers, **more)

    def ours(backend: str) -> Make:
        def make(dataset: Any, batch: int, **more: Any) -> Any:
            return hybridloader.DataLoader(
                dataset, batch, num_workers=workers, backend=backend, **more
            )

        return make

    return {"torch": torchs, **{backend: ours(backend) for backend in BACKENDS}}


def measure(workers: int, rounds: int) -> dict[str, dict[str, float]]:
    """Case -> loader -> median seconds."""
    found: dict[str, dict[str, float]] = {}
    for case in CASES:
        seconds: dict[str, list[float]] = {name: [] for name in loaders(workers)}
        for _ in range(rounds):
            for name, make in loaders(workers).items():
                seconds[name].append(case(make))
        found[case.__name__] = {name: statistics.median(s) for name, s in seconds.items()}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    warnings.filterwarnings("ignore", "This DataLoader will create")
    found = measure(options.workers, options.rounds)
    names = list(loaders(options.workers))
    print(f"{'milliseconds (x faster than torch)':36}" + "".join(f"{name:>20}" for name in names))
    for case, seconds in found.items():
        cells = [f"{s * 1e3:.3f} ({seconds['torch'] / s:.2f}x)" for s in seconds.values()]
        print(f"{case:36}" + "".join(f"{cell:>20}" for cell in cells))
    if options.json:
        about = {"machine": platform.platform(), "cpus": torch.get_num_threads()}
        about |= {"torch": torch.__version__, "python": platform.python_version()}
        options.json.write_text(json.dumps({"about": about, "seconds": found}, indent=1))


if __name__ == "__main__":
    main()
