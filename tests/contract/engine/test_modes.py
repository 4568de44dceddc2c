"""Modes of the thread that makes an iterator: they hold wherever its samples are made, as with torch."""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import cycle
from typing import Any

import numpy as np
import pytest
import torch
from support.failing_datasets import Samples
from support.fake_accelerator import FakeAccelerator
from support.installed_torch import get_default_device
from torch.utils.data import DataLoader as TorchLoader

from hybridloader import DataLoader, Pipeline

Modes = tuple[Any, ...]
Around = Callable[[], AbstractContextManager[Any]]

VARIABLE = contextvars.ContextVar("VARIABLE", default=0)


def modes() -> Modes:
    """Return the modes of this thread, by what they do and by name."""
    ones = torch.ones(2, 2)
    return (
        (ones.clone().requires_grad_() * 2).requires_grad if not ones.is_inference() else None,
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        str((ones @ ones).dtype),
        torch.is_autocast_cache_enabled(),
        get_default_device().index,
        VARIABLE.get(),
        np.geterr()["divide"],
    )


@contextmanager
def default_device() -> Iterator[None]:
    torch.set_default_device("cpu:0")
    try:
        yield
    finally:
        torch.set_default_device(None)


@contextmanager
def variable() -> Iterator[None]:
    token = VARIABLE.set(1)
    try:
        yield
    finally:
        VARIABLE.reset(token)


@contextmanager
def several() -> Iterator[None]:
    with torch.no_grad(), torch.autocast("cpu", torch.float16), torch.device("cpu", 0), variable():
        yield


@contextmanager
def grad_within_inference() -> Iterator[None]:
    with torch.inference_mode(), torch.enable_grad():
        yield


AROUND: dict[str, Around] = {
    "none": nullcontext,
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "grad within inference_mode": grad_within_inference,
    "autocast to float16 without a cache": lambda: torch.autocast(
        "cpu", torch.float16, cache_enabled=False
    ),
    "autocast that is off": lambda: torch.autocast("cpu", enabled=False),
    "set_default_device": default_device,
    "device": lambda: torch.device("cpu", 0),
    "a context variable": variable,
    "several": several,
}
if np.lib.NumpyVersion(np.__version__) >= "2.0.0":  # before, it is no context variable
    AROUND["numpy.errstate"] = lambda: np.errstate(divide="raise")


LOOKS: Any = Samples(lambda _: modes())
"""Samples that are the modes in which they are made."""


def look(item: int) -> Modes:
    return modes()


async def look_async(item: int) -> Modes:
    return modes()


def looks_at_source() -> Iterator[Modes]:
    for _ in range(8):
        yield modes()


def as_it_is(samples: list[Any]) -> list[Any]:
    return [*samples, modes()]


def torchs(workers: int) -> list[Modes]:
    context = "fork" if workers else None
    loader = TorchLoader(
        LOOKS, 4, num_workers=workers, collate_fn=as_it_is, multiprocessing_context=context
    )
    return [found for batch in loader for found in batch]


def ours(backend: str, workers: int, **options: Any) -> list[Modes]:
    loader = DataLoader(
        LOOKS, 4, num_workers=workers, backend=backend, collate_fn=as_it_is, **options
    )
    return [found for batch in loader for found in batch]


def pipeline_of(function: Any, **where: Any) -> list[Modes]:
    return list(Pipeline.from_iterable(range(8)).map(function, **where))


PLACES: dict[str, Callable[[], list[Modes]]] = {
    "inline": lambda: ours("inline", 0),
    "inline, threads_per_worker": lambda: ours("inline", 0, threads_per_worker=2),
    "threads": lambda: ours("threads", 2),
    "threads, threads_per_worker": lambda: ours("threads", 1, threads_per_worker=3),
    "threads, on a device": lambda: ours("threads", 2, device=FakeAccelerator()),
    "fork": lambda: ours("fork", 1),
    "a step": lambda: pipeline_of(look),
    "a step on threads": lambda: pipeline_of(look, backend="threads", num_workers=2),
    "coroutines on threads": lambda: pipeline_of(
        look_async, concurrency=2, backend="threads", num_workers=1
    ),
    "a step on a relay": lambda: list(Pipeline.from_iterable(range(8)).map(look).prefetch(2)),
    "a source on a relay": lambda: list(Pipeline.from_iterable(looks_at_source).prefetch(2)),
}


@pytest.fixture(scope="module")
def oracle() -> dict[str, Modes]:
    """The modes that torch has in a forked worker, which are those that it has without one."""
    found = {}
    for name, around in AROUND.items():
        with around():
            forked, own = torchs(1), torchs(0)
        assert set(forked) == set(own)
        (found[name],) = set(own)
    return found


@pytest.mark.parametrize("place", PLACES)
def test_the_modes_around_a_loop_hold_wherever_samples_are_made(
    place: str, oracle: dict[str, Modes]
) -> None:
    for name, around in AROUND.items():
        with around():
            found = PLACES[place]()
        assert set(found) == {oracle[name]}, name
        assert modes() == oracle["none"], name


TORCHS = [name for name in AROUND if name not in ("a context variable", "numpy.errstate")]
"""Modes that follow each epoch. Context variables stay those of the first, as they do in a process."""


@pytest.mark.parametrize(
    ("backend", "options"),
    [("inline", {}), ("threads", {"threads_per_worker": 2}), ("threads", {"seeding": "sample"})],
)
def test_workers_that_stay_have_the_modes_in_which_each_epoch_begins(
    backend: str, options: Any, oracle: dict[str, Modes]
) -> None:
    for first, second in zip(TORCHS, cycle(["none", "no_grad", "several"])):
        loader = DataLoader(
            LOOKS,
            4,
            num_workers=2,
            backend=backend,
            persistent_workers=True,
            collate_fn=as_it_is,
            **options,
        )
        for name in (first, second, first):
            with AROUND[name]():
                found = {modes[:6] for batch in loader for modes in batch}
            assert found == {oracle[name][:6]}, (backend, name)
        loader._iterator.close()  # type: ignore[union-attr]


def test_what_a_worker_sets_for_itself_stays() -> None:
    def init(worker: int) -> None:
        torch.set_grad_enabled(False)

    options: dict[str, Any] = {"num_workers": 1, "backend": "threads", "worker_init_fn": init}
    loader = DataLoader(LOOKS, 4, collate_fn=as_it_is, persistent_workers=True, **options)
    for _ in range(2):
        assert {found[1] for batch in loader for found in batch} == {False}
    loader._iterator.close()  # type: ignore[union-attr]


def test_a_thread_changes_no_mode_of_the_process() -> None:
    """torch notes the default device for the process, too, and threads leave in any order."""
    left = threading.Event()

    def source() -> Iterator[str]:
        assert left.wait(60)
        yield torch.zeros(1).device.type

    with torch.device("meta"):
        run = Pipeline.from_iterable(source).prefetch(1).run()
    left.set()
    assert list(run) == ["meta"]
    assert torch.zeros(1).device.type == "cpu"
    assert torch.utils._device.CURRENT_DEVICE is None
