"""What a lane does when it is told to: open one loader for one variant, and measure something.

Each job takes the loader's name and the variant's parameters, and gives back plain values.
"""

from __future__ import annotations

import gc
import hashlib
import itertools
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from benchmarks import timing
from benchmarks import usage as cost
from benchmarks.datasets.tensors import DATASETS
from benchmarks.loaders.dataloaders import Running, Work, open_loader

warnings.filterwarnings("ignore", "This DataLoader will create")
warnings.filterwarnings("ignore", "backend=.* has no workers")

Answer = dict[str, Any]

_datasets: dict[str, Any] = {}
_held: list[Any] = []


def dataset(name: str, arguments: dict[str, Any]) -> Any:
    """The dataset of a variant, made once a lane."""
    key = f"{name} {arguments}"
    if key not in _datasets:
        _datasets.clear()
        _datasets[key] = DATASETS[name](**arguments)
    return _datasets[key]


def work_of(spec: dict[str, Any]) -> Work:
    """The work that a variant describes."""
    names = (
        "batch",
        "workers",
        "shuffled",
        "keep",
        "start_method",
        "batch_bytes",
        "stages",
        "cores",
    )
    options = {name: spec[name] for name in names if name in spec}
    return Work(dataset(spec["dataset"], spec.get("arguments", {})), **options)


@contextmanager
def opened(loader: str, spec: dict[str, Any]) -> Iterator[Running]:
    """A loader that is closed in the end, whatever happens."""
    running = open_loader(loader, work_of(spec))
    gc.collect()
    gc.freeze()  # a collection of all that torch imports takes 100 ms, at whatever moment
    try:
        yield running
    finally:
        running.close()
        gc.unfreeze()


def digest(batches: list[Any]) -> str:
    """One string for what batches hold: types of numbers, shapes and every byte."""
    found = hashlib.blake2b(digest_size=12)

    def add(value: Any) -> None:
        if isinstance(value, torch.Tensor):
            found.update(f"{value.dtype}{tuple(value.shape)}".encode())
            raw: Any = value.contiguous().reshape(-1).view(torch.uint8).numpy()
            found.update(raw)
        elif isinstance(value, (list, tuple)):
            for item in value:
                add(item)
        else:
            found.update(repr(value).encode())

    add(batches)
    return found.hexdigest()


def steady(loader: str, spec: dict[str, Any]) -> Answer:
    """Seconds a batch in the middle of an epoch."""
    warmup = spec.get("warmup", 2 * spec["workers"] + 4)
    before = cost.rss_mb()
    with opened(loader, spec) as running:
        found = timing.steady(
            running.epoch(),
            spec["seconds"],
            warmup=warmup,
            most=spec.get("most", 1 << 60),
            meter=cost.CpuMeter(),
        )
        grown = cost.rss_mb() - before
    return {
        "value": found.seconds,
        "cpu": found.cpu,
        "details": {"batches": found.batches, "rss_growth_mb": grown},
    }


def first_batch(loader: str, spec: dict[str, Any]) -> Answer:
    """Seconds from making the loader to its first batch, workers started from nothing.

    Making torch's or ours takes no time, but SPDL starts its process there and not in ``iter()``.
    """
    work = work_of(spec)
    gc.collect()
    meter = cost.CpuMeter()
    meter.start()
    start = time.perf_counter()
    running = open_loader(loader, work)
    try:
        next(running.epoch())
        seconds = time.perf_counter() - start
        cpu = meter.stop()
    finally:
        running.close()
    return {"value": seconds, "cpu": cpu}


def sustained(loader: str, spec: dict[str, Any]) -> Answer:
    """Seconds an item in the middle of an epoch, and as a detail those until its first batch came."""
    work = work_of(spec)
    gc.collect()
    gc.freeze()
    start = time.perf_counter()
    running = open_loader(loader, work)
    try:
        batches = running.epoch()
        next(batches)
        first = time.perf_counter() - start
        found = timing.steady(
            batches,
            spec["seconds"],
            warmup=2 * spec["workers"] + 4,
            # Many workers finish at about the same time: two rounds of them at least.
            least=max(4, 2 * spec["workers"]),
            meter=cost.CpuMeter(),
        )
    finally:
        running.close()
        gc.unfreeze()
    details = {"first_batch": first, "batches": found.batches}
    size = spec["batch"]
    return {"value": found.seconds / size, "cpu": found.cpu / size, "details": details}


def epoch_turn(loader: str, spec: dict[str, Any]) -> Answer:
    """Median seconds from the last batch of an epoch to the first one of the next."""
    with opened(loader, spec) as running:
        meter = cost.CpuMeter()
        trial = timing.turns(running.epoch, 3, time.perf_counter)
        count = max(
            3, min(spec["turns"], int(spec["patience"] / max(trial)))
        )  # some take a second a turn
        meter.start()
        found = timing.turns(running.epoch, count, time.perf_counter)
        return {"value": sorted(found)[len(found) // 2], "cpu": meter.stop() / len(found)}


def epochs(loader: str, spec: dict[str, Any]) -> Answer:
    """Seconds for an epoch from ``iter()`` to its end, with workers that stay."""
    with opened(loader, spec) as running:
        for _ in running.epoch():
            pass
        meter = cost.CpuMeter()
        meter.start()
        start = now = time.perf_counter()
        count = 0
        while now - start < spec["seconds"]:
            for _ in running.epoch():
                pass
            count += 1
            now = time.perf_counter()
        cpu = meter.stop()
    return {"value": (now - start) / count, "cpu": cpu / count, "details": {"epochs": count}}


def check(loader: str, spec: dict[str, Any]) -> Answer:
    """What the first batches hold; then, untimed, some more of them while memory is looked at."""
    with opened(loader, spec) as running:
        batches = running.epoch()
        first = list(itertools.islice(batches, spec.get("checked", 2)))
        found: Answer = {"items": len(first)}
        if not getattr(
            running, "partial", False
        ):  # a part of the work alone delivers other batches
            found["digest"] = digest(first)
        first.clear()
        until = time.perf_counter() + spec.get("look", 0.4)
        while time.perf_counter() < until and next(batches, None) is not None:
            pass
    return found


def hold(loader: str, spec: dict[str, Any]) -> Answer:
    """Go through an epoch but for its last batch, and stay there until told to `release`."""
    running = open_loader(loader, work_of(spec))
    batches = running.epoch()
    size = len(work_of(spec).dataset)
    for _ in itertools.islice(batches, -(-size // spec["batch"]) - 1):
        pass
    _held.extend((running, batches))
    return {}


def release(loader: str, spec: dict[str, Any]) -> Answer:
    """End what `hold` held."""
    running, _ = _held
    _held.clear()
    running.close()
    return {}


JOBS: dict[str, Callable[[str, dict[str, Any]], Answer]] = {
    job.__name__: job
    for job in (steady, first_batch, sustained, epoch_turn, epochs, check, hold, release)
}
