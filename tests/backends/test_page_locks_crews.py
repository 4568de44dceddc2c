"""Page-locked slots on the crews that there are, whole: also when a worker dies."""

from __future__ import annotations

import gc
import os
import signal
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from support.fake_accelerator import FakeAccelerator

from hybridloader import Fork, Inline, Memory, RestartPolicy, Threads
from hybridloader.engine import Stop, Task, WorkerSpec
from hybridloader.engine.stage import Stage
from hybridloader.memory.accelerator import PageLocks
from hybridloader.memory.slots import OWN
from hybridloader.testing import Call

BACKENDS = [Inline(), Threads(), Fork()]
names = [backend.name for backend in BACKENDS]


def collated(index: int) -> Any:
    from torch.utils.data import default_collate

    return default_collate([torch.full((OWN,), index, dtype=torch.uint8)])


def whole(index: int) -> Any:
    """In a fork: torch's threads are not there."""
    return np.full(OWN, index, np.uint8)


@pytest.fixture
def device() -> Iterator[FakeAccelerator]:
    device = FakeAccelerator()
    yield device
    gc.collect()
    device.run()
    PageLocks(device).collect()
    assert device.locked == {}


def stage(backend: Any, device: FakeAccelerator, count: int, **more: Any) -> Stage:
    workers = more.pop("workers", 1)
    made = Stage(
        backend,
        WorkerSpec("pinned", workers, Call(collated if backend.in_process else whole)),
        lookahead=2 * workers,
        locks=PageLocks(device),
        **more,
    )
    made.begin(iter(range(count)))
    return made


@pytest.mark.parametrize("backend", BACKENDS, ids=names)
def test_a_batch_that_outlives_the_stage_keeps_its_lock_until_it_was_read(
    backend: Any, device: FakeAccelerator
) -> None:
    results = stage(backend, device, 5)
    kept = [torch.as_tensor(next(results)) for _ in range(2)]
    results.close()
    device.run()
    PageLocks(device).collect()
    assert len(device.locked) == 2
    copy = device.move(kept[0])
    kept.clear()
    assert len(device.locked) == 2
    device.run()
    assert (copy == 0).all()
    PageLocks(device).collect()
    assert device.locked == {}


def test_locks_are_made_once_and_slots_are_used_again(device: FakeAccelerator) -> None:
    device.manual = False
    for backend in BACKENDS:
        locked = 0
        for result in stage(backend, device, 30):
            locked = max(locked, len(device.locked))
            del result
        assert 1 <= locked <= 6


def test_threads_of_ours_choose_the_device(device: FakeAccelerator) -> None:
    list(stage(Threads(), device, 4, workers=2))
    assert len(device.entered) == 2
    device.entered.clear()
    list(stage(Inline(), device, 4))
    assert device.entered == []


def test_results_that_nobody_asked_for_hold_no_lock_after_the_close(
    device: FakeAccelerator,
) -> None:
    crew = Threads().open()
    crew.page_lock(PageLocks(device))
    crew.start(0, WorkerSpec("pinned", 1, Call(collated)))
    for message in (Task(0, 0), Task(1, 1), Stop()):
        crew.send(0, message)
    crew.handles()[0].join()
    assert len(device.locked) == 2
    crew.close()
    device.run()
    PageLocks(device).collect()
    assert device.locked == {}


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there are no forks here")
def test_a_worker_that_dies_takes_no_lock_along_that_is_looked_at(device: FakeAccelerator) -> None:
    results = stage(Fork(), device, 12, on_worker_death=RestartPolicy.of("restart"))
    kept = torch.as_tensor(next(results))
    copy = device.move(torch.as_tensor(next(results)))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        os.kill(results.handles[0].pid or 0, signal.SIGKILL)
        rest = [int(result[-1]) for result in results]
    assert rest == list(range(2, 12))
    assert device.is_pinned(kept)
    assert (kept == 0).all()
    device.run()
    assert (copy == 1).all()
    del kept
    device.run()
    PageLocks(device).collect()
    assert device.locked == {}


@pytest.mark.parametrize("backend", BACKENDS, ids=names)
def test_slots_that_wait_for_the_device_count_and_the_rest_comes_in_ordinary_memory(
    backend: Any, device: FakeAccelerator
) -> None:
    limited = type(backend)(memory=Memory(limit=8 * OWN))
    results, pinned = stage(limited, device, 30), 0
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "batches are made in, or copied to, ordinary memory")
        for value, result in enumerate(results):
            batch = torch.as_tensor(result)
            assert int(batch.flatten()[-1]) == value
            pinned += device.is_pinned(batch)
            del result, batch
    assert 1 <= pinned <= 8
