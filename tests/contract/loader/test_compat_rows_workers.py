"""Behavior that frameworks rely on, R25 to R34: what code finds inside workers.

No framework is imported. A test does with our loader what the framework does with any loader.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import FrozenInstanceError, is_dataclass
from typing import Any

import numpy as np
import pytest
import torch
import torch.utils.data
from support.compat import (
    Numbers,
    Randomized,
    do_nothing,
    flat,
    keep,
    often,
    set_state,
)
from support.installed_torch import thread_safe_generator
from torch.utils.data import IterableDataset, get_worker_info
from torch.utils.data._utils import worker as torchs
from torch.utils.data._utils.worker import WorkerInfo

import hybridloader
from hybridloader import DataLoader, Inline

FROZEN = FrozenInstanceError if is_dataclass(WorkerInfo) else RuntimeError  # before torch 2.12


def describe(index: int) -> Any:
    info = get_worker_info()
    assert info is hybridloader.get_worker_info() is torch.utils.data.get_worker_info()
    assert (info is torchs._worker_info) is (info.worker_method == "multiprocessing")
    assert type(info) is WorkerInfo
    with pytest.raises(FROZEN):
        info.id = 7  # type: ignore[misc]
    return info.id, info.num_workers, info.seed, info.worker_method, info.rng is not None


class Described(Numbers):
    def __getitem__(self, index: int) -> Any:
        info = get_worker_info()
        assert info is not None
        assert info.dataset is self
        return describe(index)


@often
def test_r26_worker_info_is_torchs_and_frozen_and_tells_all(backend: str) -> None:
    loader = DataLoader(
        Described(4),
        num_workers=2,
        backend=backend,
        collate_fn=keep,
        generator=torch.Generator().manual_seed(9),
    )
    base = int(
        torch.empty((), dtype=torch.int64).random_(generator=torch.Generator().manual_seed(9))
    )
    method = {"inline": "inline", "threads": "thread"}.get(backend, "multiprocessing")
    told = [(worker, 2, base + worker, method, backend == "threads") for worker in (0, 1)]
    assert [batch[0] for batch in loader] == told * 2


class Augmented(Numbers):
    """Draws from the generator that torch recommends for threads, and from those in `rng`."""

    def __getitem__(self, index: int) -> Any:
        generator = thread_safe_generator()
        info = get_worker_info()
        assert info is not None
        assert (generator is None) == (info.rng is None)
        if info.rng is None:
            return None
        rng: Any = info.rng
        assert generator is rng.torch_generator
        return (
            torch.rand(2, generator=generator).tolist(),
            rng.random_generator.random(),
            rng.numpy_generator.random(),
        )


def test_r26_threads_draw_from_generators_of_their_own() -> None:
    def run(seeding: Any = "worker") -> list[Any]:
        loader = DataLoader(
            Augmented(6),
            num_workers=2,
            backend="threads",
            collate_fn=keep,
            generator=torch.Generator().manual_seed(9),
            seeding=seeding,
        )
        return [batch[0] for batch in loader]

    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    first = run()
    assert run() == first
    by_sample = run(None)
    assert run(None) == by_sample
    assert len({str(sample) for sample in [*first, *by_sample]}) == 12
    base = int(
        torch.empty((), dtype=torch.int64).random_(generator=torch.Generator().manual_seed(9))
    )
    for worker in (0, 1):
        mine = torch.Generator().manual_seed(base + worker)
        python = random.Random(base + worker)
        for sample in first[worker::2]:
            assert sample[:2] == (torch.rand(2, generator=mine).tolist(), python.random())
    after = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    assert torch.equal(before[0], after[0])
    assert before[1:] == after[1:]
    assert thread_safe_generator() is None


@pytest.mark.parametrize("backend", ["inline", "threads"])
def test_r27_workers_of_this_process_do_not_reseed_the_devices(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`torch.manual_seed` seeds the generators of all devices, which the training code draws from."""
    seeded: list[Any] = []
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeded.append)
    loader = DataLoader(Numbers(2), num_workers=1, backend=backend, worker_init_fn=do_nothing)
    assert flat(loader) == [0, 1]
    assert seeded == []
    torch.manual_seed(0)
    assert seeded == [0]  # the test would see it


class Shard(IterableDataset[Any]):
    """Dataset that keeps its place on itself, so that two workers must not share it."""

    def __init__(self) -> None:
        self.place = 0

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        assert info is not None
        assert info.dataset is self
        for _ in range(3):
            self.place += 1
            yield info.id, self.place, id(self)


@pytest.mark.parametrize("backend", ["threads", Inline(copy_dataset=False)])
def test_r29_each_worker_iterates_a_copy_of_an_iterable_dataset(backend: Any) -> None:
    dataset = Shard()
    loader = DataLoader(dataset, num_workers=2, backend=backend, collate_fn=keep)
    iterator = iter(loader)  # held, so that the copies live and their ids differ
    found = [batch[0] for batch in iterator]
    assert [item[:2] for item in found] == [(0, 1), (1, 1), (0, 2), (1, 2), (0, 3), (1, 3)]
    assert len({item[2] for item in found} | {id(dataset)}) == 3
    assert dataset.place == 0


@pytest.mark.parametrize("backend", ["threads", Inline(copy_dataset=False)])
def test_r31_workers_share_a_map_style_dataset_unless_told_to_copy_it(backend: Any) -> None:
    dataset = Randomized(4)
    loader = DataLoader(dataset, num_workers=1, backend=backend, worker_init_fn=set_state)
    assert flat(loader) == [0] * 4
    assert dataset.state == 0
