"""One late batch: what a loader goes on with meanwhile, and that nobody can tell but by the time."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support.fake_accelerator import FakeAccelerator
from torch.utils.data import DataLoader as TorchLoader
from torch.utils.data import (
    Sampler,
)
from torch.utils.data.distributed import DistributedSampler

from hybridloader import DataLoader, StatefulDataLoader, get_worker_info
from hybridloader.testing import Gate

LENGTH, WORKERS, WINDOW = 60, 2, 4


@pytest.fixture(autouse=True)
def slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every task takes a second, for the engine."""
    monkeypatch.setattr("hybridloader.engine.worker.perf_counter", itertools.count().__next__)


class Late(torch.utils.data.Dataset[int]):
    """The first sample of worker 0 is late: it comes once `wanted` others are there."""

    def __init__(self, wanted: int) -> None:
        self.wanted, self._first = wanted, itertools.count()
        self.fetched: list[int] = []

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> int:
        info = get_worker_info()
        if info is not None and info.id == 0 and next(self._first) == 0:
            Gate._until(
                lambda: len(self.fetched) >= self.wanted, "workers rest beside a late batch"
            )
        self.fetched.append(index)
        return index


class Told(Sampler[int]):
    """Notes how many batches had been taken whenever it was asked."""

    def __init__(self) -> None:
        self.taken, self.asked = 0, list[int]()

    def __len__(self) -> int:
        return LENGTH

    def __iter__(self) -> Iterator[int]:
        for index in range(LENGTH + 1):
            self.asked.append(self.taken)
            if index < LENGTH:
                yield index


def loader(dataset: Any, kind: Any = DataLoader, **options: Any) -> Any:
    options = {"batch_size": 1, "num_workers": WORKERS, "backend": "threads", **options}
    return kind(dataset, **options)


def numbers(batches: Any) -> list[int]:
    return [int(batch) for batch in batches]


def test_workers_go_on_beside_a_late_batch_each_with_its_own() -> None:
    # Worker 1 has batches 1, 3 and, behind the late one, 5: then all in work are worker 0's.
    dataset = Late(3)
    assert numbers(loader(dataset)) == list(range(LENGTH))
    assert dataset.fetched[:3] == [1, 3, 5]


def test_seeded_by_sample_batches_go_to_whoever_has_nothing_to_do() -> None:
    dataset = Late(50)
    assert numbers(loader(dataset, seeding="sample")) == list(range(LENGTH))
    assert dataset.fetched[:50] == [1, *range(3, 52)]


@pytest.mark.parametrize(("prefetch_factor", "seeding"), [(1, "sample"), (3, "worker")])
def test_a_factor_that_was_given_is_kept_to(prefetch_factor: int, seeding: str) -> None:
    dataset, window = Late(1), prefetch_factor * WORKERS
    found = iter(loader(dataset, prefetch_factor=prefetch_factor, seeding=seeding))
    for taken in range(1, LENGTH - window):
        next(found)
        assert len(dataset.fetched) <= taken + window
    found.close()


@pytest.mark.parametrize("seeding", ["worker", "sample"])
@pytest.mark.parametrize("prefetch_factor", [None, 3])
def test_a_sampler_of_ones_own_is_asked_when_torch_asks_it(
    seeding: str, prefetch_factor: int | None
) -> None:
    def asked(kind: Any, dataset: Any, **options: Any) -> list[int]:
        sampler = Told()
        options = {"sampler": sampler, "prefetch_factor": prefetch_factor, **options}
        for _ in kind(dataset, num_workers=WORKERS, **options):
            sampler.taken += 1
        return sampler.asked

    late = Late(prefetch_factor or 2)  # all that worker 1 can have
    wanted = asked(TorchLoader, range(LENGTH))
    assert asked(DataLoader, late, backend="threads", seeding=seeding) == wanted


OPTIONS: dict[str, Any] = {
    "in order": dict,
    "shuffled": lambda: {"shuffle": True},
    "for ranks": lambda: {"sampler": DistributedSampler(range(LENGTH), 1, 0)},  # type: ignore[arg-type]
    "ours": lambda: {"shuffle": True, "kind": StatefulDataLoader},
    "skipping": lambda: {"shuffle": True, "on_error": "skip"},
    "to a device": lambda: {"shuffle": True, "device": FakeAccelerator(manual=False)},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_a_state_is_that_of_the_batches_taken_however_many_wait(name: str) -> None:
    def make(wanted: int) -> Any:
        torch.manual_seed(0)
        return loader(Late(wanted), seeding="sample", **OPTIONS[name]())

    whole = numbers(make(0))
    running = make(50)
    batches = iter(running)
    got = numbers(itertools.islice(batches, 5))
    state = running.state_dict()
    running.dataset.wanted = 0
    batches.close()
    resumed = make(0)
    torch.manual_seed(9)
    resumed.load_state_dict(state)
    assert got + numbers(resumed) == whole
