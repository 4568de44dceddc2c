"""Measurements of one loader, made in its runner process.

Each takes the loader's name and the parameters of a variant, and returns plain values. Torch and the
loaders are imported when a measurement runs, so that the harness can name one without them.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import hashlib
import itertools
import math
import statistics
import time
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

from benchmarks import timing, usage
from benchmarks.case import Answer, Spec

if TYPE_CHECKING:
    from benchmarks.loaders.work import Running, Work

warnings.filterwarnings("ignore", "This DataLoader will create")
warnings.filterwarnings("ignore", "backend=.* has no workers")

_datasets: dict[str, Any] = {}
_held: list[Any] = []
_lengths: dict[str, timing.Lengths] = {}
"""Lengths of the epochs that were long enough in earlier rounds."""


def dataset(name: str, arguments: dict[str, Any]) -> Any:
    """The dataset of a variant, made once in a process."""
    from benchmarks.datasets.catalogue import DATASETS

    key = f"{name} {arguments}"
    if key not in _datasets:
        forget_datasets()
        _datasets[key] = DATASETS[name](**arguments)
    return _datasets[key]


def forget_datasets() -> None:
    """Let go of the dataset that this process has made."""
    _datasets.clear()


def work_of(spec: Spec) -> Work:
    """The work that a variant describes."""
    from benchmarks.loaders.work import Work

    names = (field.name for field in fields(Work) if field.name != "dataset")
    options = {name: spec[name] for name in names if name in spec}
    return Work(dataset(spec["dataset"], spec.get("arguments", {})), **options)


def open_running(loader: str, work: Work) -> AbstractContextManager[Running]:
    """A loader that is closed in the end, whatever happens."""
    from benchmarks.loaders.opening import open_loader

    return closing(open_loader(loader, work))


@contextmanager
def without_collections() -> Iterator[None]:
    """Objects that exist now are not looked at by the garbage collector: those of torch take 100 ms."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


@contextmanager
def opened(loader: str, spec: Spec) -> Iterator[Running]:
    """The loader of a variant, running, and no long collections of garbage."""
    with open_running(loader, work_of(spec)) as running, without_collections():
        yield running


def digest(batches: list[Any]) -> str:
    """Hash of batches: types of numbers, shapes and every byte."""
    import torch

    found = hashlib.blake2b(digest_size=12)

    def add(value: Any) -> None:
        if isinstance(value, torch.Tensor):
            found.update(f"{value.dtype}{tuple(value.shape)}".encode())
            raw: Any = value.contiguous().reshape(-1).view(torch.uint8).numpy()
            found.update(raw)
        elif isinstance(value, (list, tuple)):
            for item in value:
                add(item)
        elif isinstance(value, dict):
            for key, item in value.items():
                found.update(repr(key).encode())
                add(item)
        else:
            found.update(repr(value).encode())

    add(batches)
    return found.hexdigest()


def of_length(dataset: Any, samples: int) -> Any:
    """A copy of an endless dataset that ends after so many samples."""
    made = copy.copy(dataset)
    made.length = samples
    return made


def whole_epochs(loader: str, spec: Spec) -> Answer:
    """Seconds a batch, from a short whole epoch and a long one: see `timing.whole_epochs`.

    Each epoch has a loader of its own, freshly opened. As details the seconds until the first batch
    (`first_batch`) and the batches of the long epoch.
    """
    work = work_of(spec)
    key = f"{loader} {spec}"
    if key not in _lengths:
        _lengths[key] = _trial(loader, work, spec)

    def epoch(batches: int) -> timing.Epoch:
        with contextlib.ExitStack() as stack:
            stack.enter_context(without_collections())
            ending = replace(work, dataset=of_length(work.dataset, batches * work.batch))

            def request() -> Iterator[Any]:
                return stack.enter_context(open_running(loader, ending)).epoch()

            return timing.epoch_of(request, batches, time.perf_counter, usage.CpuMeter())

    found, long = timing.whole_epochs(epoch, spec["seconds"], _lengths[key])
    details = {"first_batch": long.start, "batches": long.batches}
    return {"value": found.seconds, "cpu": found.cpu, "details": details}


def _trial(loader: str, work: Work, spec: Spec) -> timing.Lengths:
    """Lengths to begin with: the long epoch takes about `seconds` more than the short one."""
    short = spec.get("short", 8 * work.workers + 8)
    with open_running(loader, work) as running:
        batches = running.epoch()
        pace = timing.window(batches, spec["seconds"] / 4, warmup=short, ahead=0).seconds
    return timing.Lengths(short, short + max(3 * short, math.ceil(spec["seconds"] / pace)))


def per_item(loader: str, spec: Spec) -> Answer:
    """Seconds an item, as `whole_epochs` has it of batches."""
    answer = whole_epochs(loader, spec)
    size = spec["batch"]
    return answer | {"value": answer["value"] / size, "cpu": answer["cpu"] / size}


def window(loader: str, spec: Spec) -> Answer:
    """Seconds a batch in the first batches of a long epoch: see `timing.window`.

    The median of `repeats` windows, each of a loader freshly opened.
    """
    before = usage.rss_mb()
    found, grown = [], 0.0
    for _ in range(spec.get("repeats", 1)):
        with opened(loader, spec) as running:
            timed = timing.window(
                running.epoch(),
                spec["seconds"],
                warmup=2 * spec["workers"] + 4,
                ahead=3 * spec["workers"],  # two prefetched and one under way
                most=spec.get("most", 1 << 60),
                meter=usage.CpuMeter(),
            )
            found.append(timed)
            grown = max(grown, usage.rss_mb() - before)
    return {
        "value": statistics.median(timed.seconds for timed in found),
        "cpu": statistics.median(timed.cpu for timed in found),
        "details": {"batches": found[0].batches, "rss_growth_mb": grown},
    }


def first_batch(loader: str, spec: Spec) -> Answer:
    """Seconds from making the loader to its first batch, workers started from nothing.

    Making torch's or ours takes no time, but SPDL starts its process there and not in ``iter()``.
    """
    work = work_of(spec)
    gc.collect()
    meter = usage.CpuMeter()
    meter.start()
    start = time.perf_counter()
    with open_running(loader, work) as running:
        next(running.epoch())
        seconds = time.perf_counter() - start
        cpu = meter.stop()
    return {"value": seconds, "cpu": cpu}


def epoch_turn(loader: str, spec: Spec) -> Answer:
    """Median seconds from the last batch of an epoch to the first one of the next."""
    with opened(loader, spec) as running:
        meter = usage.CpuMeter()
        trial = timing.turns(running.epoch, 3, time.perf_counter)
        # Some take a second a turn.
        count = max(3, min(spec["turns"], int(spec["patience"] / max(trial))))
        meter.start()
        found = timing.turns(running.epoch, count, time.perf_counter)
        return {"value": sorted(found)[len(found) // 2], "cpu": meter.stop() / len(found)}


def epochs(loader: str, spec: Spec) -> Answer:
    """Seconds for an epoch from ``iter()`` to its end, with workers that stay."""
    with opened(loader, spec) as running:
        for _ in running.epoch():
            pass
        meter = usage.CpuMeter()
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


def check(loader: str, spec: Spec) -> Answer:
    """Hash of the first batches; then, untimed, some more of them while memory is looked at."""
    with opened(loader, spec) as running:
        batches = running.epoch()
        first = list(itertools.islice(batches, spec.get("checked", 2)))
        found: Answer = {"items": len(first)}
        if not getattr(running, "partial", False):
            found["digest"] = digest(first)
        first.clear()
        until = time.perf_counter() + spec.get("look", 0.4)
        while time.perf_counter() < until and next(batches, None) is not None:
            pass
    return found


def hold(loader: str, spec: Spec) -> Answer:
    """Go through an epoch but for its last batch, and stay there until `release`."""
    from benchmarks.loaders.opening import open_loader

    work = work_of(spec)
    running = open_loader(loader, work)
    batches = running.epoch()
    for _ in itertools.islice(batches, -(-len(work.dataset) // spec["batch"]) - 1):
        pass
    _held.extend((running, batches))
    return {}


def release(loader: str, spec: Spec) -> Answer:
    """Close the loader that `hold` holds."""
    running, _ = _held
    _held.clear()
    running.close()
    return {}
