"""`worker_init_fn` on threads: side by side, each with its worker's seeds; nothing is left behind."""

from __future__ import annotations

import random
import threading
from typing import Any

import numpy as np
import pytest
import torch
from support.compat import Numbers
from torch.random import initial_seed as initial_seed_by_name
from torch.random import manual_seed as manual_seed_by_name
from torch.utils.data import Dataset, get_worker_info

from hybridloader import DataLoader

WORKERS = 2
LONG = 30.0


def load(dataset: Any, backend: str, init: Any = None, **options: Any) -> Any:
    return DataLoader(
        dataset,
        None,
        num_workers=WORKERS,
        backend=backend,
        worker_init_fn=init,
        generator=torch.Generator().manual_seed(2),
        **options,
    )


class Noted(Dataset[Any]):
    """Draws of the worker's init function."""

    def __init__(self) -> None:
        self.found: dict[int, Any] = {}

    def __len__(self) -> int:
        return WORKERS

    def __getitem__(self, index: int) -> Any:
        info: Any = get_worker_info()
        return self.found[info.id]


def drawn() -> list[float]:
    draws = (
        random.random(),
        random.gauss(0, 1),
        np.random.rand(),
        torch.rand(1),
        torch.randperm(9)[0],
    )
    return [float(number) for number in draws]


class Meeting:
    """An init function: what it draws, reseeds and draws again, with all the others at each step."""

    def __init__(self, *, together: bool) -> None:
        self.barrier = threading.Barrier(WORKERS) if together else None

    def meet(self) -> None:
        if self.barrier is not None:
            self.barrier.wait(LONG)

    def __call__(self, worker: int) -> None:
        info: Any = get_worker_info()
        self.meet()
        found: list[Any] = [torch.initial_seed() - info.seed, initial_seed_by_name() - info.seed]
        found += [info.id == worker, *drawn()]
        self.meet()
        torch.manual_seed(worker)
        random.seed(worker)
        np.random.seed(worker)
        self.meet()
        found += [torch.initial_seed(), *drawn()]
        manual_seed_by_name(worker + 7)
        self.meet()
        found += [torch.initial_seed(), float(torch.rand(1))]
        info.dataset.found[worker] = found


def states() -> list[Any]:
    array: Any = np.random.get_state()
    return [torch.get_rng_state().tolist(), random.getstate(), array[1].tolist(), array[2:]]


def test_they_run_side_by_side_and_find_what_they_would_in_processes_of_their_own() -> None:
    wanted = list(load(Noted(), "fork", Meeting(together=False)))
    assert [found[:3] for found in wanted] == [[0, 0, True]] * WORKERS
    before = states()
    assert list(load(Noted(), "threads", Meeting(together=True))) == wanted
    assert states() == before


class Nested(Dataset[Any]):
    """Each sample is what another loader gives."""

    def __init__(self, backend: str, init: Any = None) -> None:
        self.backend, self.init = backend, init

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> Any:
        return list(load(Numbers(3), self.backend, self.init))


def seeds_all(worker: int) -> None:
    torch.manual_seed(worker)
    random.seed(worker)


@pytest.mark.parametrize(("outer", "inner"), [("inline", "threads"), ("threads", "inline")])
def test_a_worker_of_one_kind_may_have_workers_of_the_other(outer: str, inner: str) -> None:
    """The inner ones begin while the outer one has borrowed the generators, and waits for them."""
    before = states()
    assert list(load(Nested(inner, seeds_all), outer, seeding="sample")) == [[0, 1, 2]] * 2

    def init(_: int) -> None:
        assert list(load(Numbers(3), inner, seeds_all)) == [0, 1, 2]
        info: Any = get_worker_info()
        assert torch.initial_seed() == info.seed

    assert list(load(Numbers(3), outer, init)) == [0, 1, 2]
    assert states() == before


def test_a_child_of_a_fork_forgets_who_has_borrowed_them_in_its_parent() -> None:
    inside, done = threading.Event(), threading.Event()

    def init(_: int) -> None:
        inside.set()
        done.wait(LONG)

    thread = threading.Thread(target=lambda: list(load(Numbers(1), "threads", init)))
    thread.start()
    try:
        inside.wait(LONG)
        assert list(load(Nested("inline"), "fork", timeout=LONG)) == [[0, 1, 2]] * 2
    finally:
        done.set()
        thread.join()
