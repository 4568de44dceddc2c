"""Figures of a device, each with its bound where there is one: the driver, bandwidth, and overlap."""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch.utils.data import DataLoader as Torch

from benchmarks.device.record import Record
from benchmarks.device.steps import Device, each, percentile, stepping
from benchmarks.machine import about
from hybridloader import DataLoader, Memory, SharedMemory, Threads
from hybridloader.devices.pinning import Accelerator

MB = 1_000_000
IMAGE = 3 * 224 * 224
CLOCK = time.perf_counter

STEP = 1.05
"""Greatest time of a loop over the longer of step and copy, which begins in ordinary memory."""

LATE = 2e-3
"""Greatest seconds that the training thread is late, 99th percentile."""


def machine(record: Record, *, small: bool) -> None:
    """Record the facts of the machine; without a device, there is no line "device"."""
    found = about()
    for name in ("date", "cpu", "cores", "memory_gb", "os", "python"):
        record(name, found[name])
    record("torch", torch.__version__)
    if not torch.accelerator.is_available():
        return
    record("CUDA", torch.version.cuda)
    with contextlib.suppress(FileNotFoundError):
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        record("driver", subprocess.run(query, capture_output=True, text=True).stdout[:20].strip())
    record("device", torch.cuda.get_device_name() if _kind() == "cuda" else _kind())


# -- the driver --------------------------------------------------------------------------------------


def driver(record: Record, *, small: bool) -> None:
    """Assumptions about the driver, and the time of its calls."""
    device = _accelerator()
    record("copies are queued beside the loop's stream", passed=device.queues_copies)
    stream, count = device.current_stream(), 2000

    def mark() -> None:
        """Each mark makes an event, and destroys it."""
        for _ in range(count):
            device.mark(stream).query()

    record("a mark", _timed(mark) / count * 1e6, "us")


# -- bandwidth ---------------------------------------------------------------------------------------


class Images(torch.utils.data.Dataset[Any]):
    """Samples of 150 KB, views of one block: a sample costs nothing, a batch one copy on the host."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.block = torch.randint(0, 255, (1024, 3, 224, 224), dtype=torch.uint8)

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.block[index % len(self.block)]


class Many(Images):
    """Samples of 24 tensors; 8 of them make a batch of 24 tensors of 256 KB."""

    def __getitem__(self, index: int) -> Any:
        return [torch.full((32 << 10,), index % 251, dtype=torch.uint8) for _ in range(24)]


def loaders(data: Any, batch: int, workers: int) -> dict[str, Callable[[], Iterator[Any]]]:
    """Return endless batches on the device, by the name of their loader."""
    memory = Memory(limit=8 << 30)
    common: dict[str, Any] = {"num_workers": workers, "persistent_workers": True}
    method = "spawn" if importlib.util.find_spec("loky") is None else "loky"

    def ours(backend: Any, device: Any) -> Iterator[Any]:
        return _endless(DataLoader(data, batch, backend=backend, device=device, **common))

    return {
        "threads": lambda: ours(Threads(memory=memory), _kind()),
        "processes": lambda: ours(SharedMemory(method, memory=memory), _kind()),
        "torch": lambda: _moved(_endless(Torch(data, batch, pin_memory=True, **common))),
    }


def bandwidth(record: Record, *, small: bool) -> None:
    """Bytes a second end to end, beside a bare loop of copies from pinned memory."""
    gpu, seconds, workers = Device(256), 0.1 if small else 0.8, _workers(small)
    warmup = 2 * workers + 4
    for mb in (1, 2) if small else (50, 200):
        batch = max(1, mb * MB // IMAGE)
        size = batch * IMAGE / 1e9
        found = {"bare": size / each(_ready(batch * IMAGE), gpu, seconds, CLOCK)}
        record(f"{mb} MB, bare copies", found["bare"], "GB/s")
        first = {}
        for name, make in loaders(Images(1000 * batch), batch, workers).items():
            with record.trying(f"{mb} MB, {name}"):
                batches = make()
                first[name] = _timed(partial(_warm, batches, gpu, warmup))
                found[name] = size / each(batches, gpu, seconds, CLOCK)
                record(f"{mb} MB, {name}", found[name], "GB/s")
                record(f"{mb} MB, {name}: first {warmup} batches", first[name], "s")
                del batches
        share = found["threads"] / found["bare"]
        record(f"{mb} MB, threads: share", share, "of bare")
        with record.trying(f"{mb} MB, first batches"):
            late = first["threads"] / first["torch"]
            record(f"{mb} MB, threads: first batches", late, "times torch's", late <= 1)
    found = {}
    for name in ("threads", "torch"):  # each tensor has a slot, and is pinned and copied
        batches = loaders(Many(100_000), 8, workers)[name]()
        _warm(batches, gpu, warmup)
        found[name] = each(batches, gpu, seconds, CLOCK) * 1e3
        record(f"24 tensors of 256 KB, {name}", found[name], "ms / batch")
    late = found["threads"] / found["torch"]
    record("24 tensors of 256 KB, threads", late, "times torch's", late <= 1)


# -- overlap -----------------------------------------------------------------------------------------


def overlap(record: Record, *, small: bool) -> None:
    """Time of a loop with a step for each batch, over the longer of step and copy."""
    gpu, workers = Device(256 if small else 4096), _workers(small)

    def loop(label: str, batches: Any, ms: float, copy: float, *, ours: bool) -> None:
        products = _products(gpu, ms / 1e3)
        alone, _, _ = stepping(itertools.repeat(None), gpu, products, 8, CLOCK)
        whole, waits, late = stepping(batches, gpu, products, max(10, int(800 / ms)), CLOCK)
        ratio, worst = whole / max(alone, copy), percentile(late, 0.99)
        detail = f"step {alone * 1e3:.2f} ms, copy {copy * 1e3:.2f} ms; {STEP} is allowed"
        record(
            f"{label}, loop", ratio, "of max(step, copy)", ratio <= STEP if ours else None, detail
        )
        record(f"{label}, p99 of next()", percentile(waits, 0.99) * 1e3, "ms")
        detail = f"{max(late, default=0.0) * 1e3:.2f} ms at most; {LATE * 1e3:.0f} ms are allowed"
        record(
            f"{label}, thread late, p99", worst * 1e3, "ms", worst <= LATE if ours else None, detail
        )

    for mb in (1, 2) if small else (50, 200):
        batch = max(1, mb * MB // IMAGE)
        copy = each(_pinned_first(batch * IMAGE), gpu, 0.1 if small else 0.3, CLOCK)
        made = loaders(Images(1000 * batch), batch, workers)
        for name in ("threads", "processes", "torch"):
            with record.trying(f"{mb} MB, {name}"):
                batches = made[name]()
                _warm(batches, gpu, 2 * workers + 4)
                for ms in (5, 10) if small else (10, 50):
                    loop(f"{ms} ms, {mb} MB, {name}", batches, ms, copy, ours=name == "threads")
                del batches
    # Slots of many sizes retire all the time, and torch pins memory for each size.
    least = 2 if small else 32
    sizes = [range(least + 37 * number % (8 * least)) for number in range(400)]
    common: dict[str, Any] = {"num_workers": workers, "device": _kind(), "batch_sampler": sizes}
    backend = Threads(memory=Memory(limit=256 << 20))
    varied = _endless(DataLoader(Images(9 * least), backend=backend, **common))
    _warm(varied, gpu, 2 * workers + 4)
    loop("10 ms, sizes that vary", varied, 10, 0.0, ours=True)


# -- for all of them ---------------------------------------------------------------------------------


def _kind() -> str:
    found = torch.accelerator.current_accelerator()
    assert found is not None
    return found.type


def _accelerator() -> Accelerator:
    return Accelerator(torch.device(_kind(), torch.accelerator.current_device_index()))


def _workers(small: bool) -> int:
    return 2 if small else max(2, min(12, len(os.sched_getaffinity(0)) - 3))


def _timed(call: Callable[[], object]) -> float:
    began = CLOCK()
    call()
    return CLOCK() - began


def _products(gpu: Device, seconds: float) -> int:
    """Return the number of matrix products that take so long."""
    gpu.step(None, 5).synchronize()  # the first one loads cuBLAS
    a_product, _, _ = stepping(itertools.repeat(None), gpu, 50, 4, CLOCK)
    return max(1, round(seconds / (a_product / 50)))


def _ready(size: int) -> Iterator[Any]:
    """Yield copies of batches that are in torch's pinned memory already: the limit of the link."""
    made = [torch.full((size,), number, dtype=torch.uint8).pin_memory() for number in range(4)]
    return _moved(itertools.cycle(made))


def _pinned_first(size: int) -> Iterator[Any]:
    """Yield copies of batches in ordinary memory, each pinned before, by one thread."""
    made = [torch.full((size,), number, dtype=torch.uint8) for number in range(4)]
    return _moved(batch.pin_memory() for batch in itertools.cycle(made))


def _endless(loader: Any) -> Iterator[Any]:
    while True:
        yield from loader


def _moved(batches: Iterator[Any]) -> Iterator[Any]:
    """Copy batches on the current stream, as torch's documentation recommends."""
    for batch in batches:
        parts = batch if isinstance(batch, list) else [batch]
        yield [part.to(_kind(), non_blocking=True) for part in parts]


def _warm(batches: Iterator[Any], gpu: Device, count: int) -> None:
    for _ in range(count):
        done = gpu.step(next(batches), 0)
    done.synchronize()
