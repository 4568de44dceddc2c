"""The default of `seeding`: samples on threads are seeded each, as nobody would think to ask."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from support.failing_datasets import Samples
from support.platforms import needs_fork
from support.ways_to_draw import WAYS
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import Dataset, IterableDataset, Subset

from hybridloader import DataLoader, Pipeline

LENGTH = 12


class Ways(Dataset[Any]):
    """Each sample draws in every way, twice."""

    def __init__(self, ways: dict[str, Callable[[], Any]] = WAYS) -> None:
        self.ways = ways

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> Any:
        return index, {name: (way(), way()) for name, way in self.ways.items()}


def seed_all(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


def loop_draws() -> list[Any]:
    return [random.gauss(0, 1), float(np.random.randn()), torch.randn(3).tolist()]


def samples_of(batches: Any) -> tuple[list[Any], list[Any]]:
    """Return the samples, and the numbers that a loop over `batches` draws for itself."""
    samples, own = [], []
    for batch in batches:
        samples += batch
        own.append(loop_draws())
    return samples, own


def loader(workers: int, **options: Any) -> Any:
    options = {"backend": "threads", **options}
    return DataLoader(Ways(), 2, num_workers=workers, collate_fn=list, **options)


def draw_all(item: int) -> Any:
    return Ways()[item]


def step(workers: int) -> Any:
    pipeline = Pipeline.from_iterable(range(LENGTH))
    return pipeline.map(draw_all, backend="threads", num_workers=workers).batch(2, collate_fn=list)


PLACES: dict[str, Callable[[int], Any]] = {
    "threads": loader,
    "threads in a worker": lambda workers: loader(1, threads_per_worker=workers + 1),
    "threads in a process": lambda n: loader(n, threads_per_worker=3, backend="fork"),
    "a step of a pipeline": step,
}


@pytest.mark.filterwarnings("ignore:This DataLoader will create")  # more processes than cores
@pytest.mark.parametrize("place", PLACES)
def test_each_run_draws_the_same_and_leaves_the_loop_alone(place: str) -> None:
    found: list[Any] = []
    for workers in (1, 5, 5):
        seed_all(3)
        found.append(samples_of(PLACES[place](workers)))
    samples, own = found[0]
    assert [index for index, _ in samples] == list(range(LENGTH))
    for other_samples, other_own in found:
        for (_, one), (_, other) in zip(samples, other_samples, strict=True):
            assert {name for name in one if one[name] != other[name]} == set()
        assert other_own == own
    for name in WAYS:  # no two samples draw the same numbers
        numbers = [repr(draws[name]) for _, draws in samples]
        assert len({*numbers}) == LENGTH, name
    # The loop draws what it would draw if no sample drew; the loader draws one seed from torch.
    seed_all(3)
    if place == "a step of a pipeline":
        torch.empty((), dtype=torch.int64).random_()
    else:
        iter(TorchDataLoader(range(2)))  # type: ignore[arg-type]
    assert own == [loop_draws() for _ in own]


# -- the words of `seeding` --------------------------------------------------------------------------


def test_shared_draws_from_the_generators_of_the_loop() -> None:
    seed_all(6)
    iterator = iter(loader(1, seeding="shared"))
    before = random.getstate()
    list(iterator)
    assert random.getstate() != before


def per_worker(batches: Any) -> list[Any]:
    seed_all(7)
    return [sample for batch in batches for sample in batch]


@needs_fork  # torch's fresh workers do not get lambdas
@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("init", [None, lambda worker: random.seed(worker)])
def test_worker_on_threads_is_torch_bit_for_bit(workers: int, init: Any) -> None:
    options: dict[str, Any] = {"collate_fn": list, "num_workers": workers, "worker_init_fn": init}
    wanted = per_worker(TorchDataLoader(Ways(), 2, **options))
    assert per_worker(loader(seeding="worker", workers=workers, worker_init_fn=init)) == wanted


# -- worker_init_fn ----------------------------------------------------------------------------------


def seed_worker(worker: int) -> None:
    """Seed as PyTorch's notes on reproducibility show."""
    seed = torch.initial_seed() % 2**32
    np.random.seed(seed)
    random.seed(seed)


def seed_torch(worker: int) -> None:
    torch.manual_seed(worker)


@needs_fork  # torch's fresh workers do not get lambdas
@pytest.mark.parametrize(
    ("init", "libraries"), [(seed_worker, ("random", "numpy")), (seed_torch, "torch")]
)
def test_worker_init_fn_that_seeds_wins_bit_for_bit_as_in_torch(init: Any, libraries: Any) -> None:
    def run(make: Any, **options: Any) -> list[Any]:
        generator = torch.Generator().manual_seed(0)
        batches = make(
            Ways(),
            2,
            num_workers=2,
            collate_fn=list,
            worker_init_fn=init,
            generator=generator,
            **options,
        )
        return [sample for batch in batches for sample in batch]

    def of_seeded(samples: list[Any]) -> list[Any]:
        names = [name for name in WAYS if name.startswith(libraries)]
        return [[draws[name] for name in names] for _, draws in samples]

    wanted = run(TorchDataLoader)
    found = [run(DataLoader, backend="threads") for _ in range(3)]
    assert of_seeded(found[0]) == of_seeded(wanted)
    assert found[0] == found[1] == found[2]  # those that were not seeded, by sample, too


# -- kinds of datasets -------------------------------------------------------------------------------


class Odd:
    """An index that has no key by its type."""

    def __init__(self, number: int) -> None:
        self.number = number


class ByOdd(Dataset[Any]):
    def __getitem__(self, index: Any) -> Any:
        return index.number, random.random()


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        for number in range(7):
            yield number, random.random(), torch.rand(1).item()


class Whole(Ways):
    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [(index, random.random()) for index in indices]


CHEAP: Any = Samples(lambda index: (index, random.random()), 800)
"""Enough of them for tasks that are not shared."""


def collate(samples: list[Any]) -> Any:
    """Draws by the first sample of its batch."""
    return [(samples, random.random(), torch.rand(1).item())]


@pytest.mark.parametrize(
    ("dataset", "options"),
    [
        (Stream(), {}),
        (Whole(), {}),
        (Subset(Ways(), range(7)), {"persistent_workers": True}),
        (Subset(CHEAP, range(800)), {}),  # its `__getitems__` only passes the call on
        (range(8), {"collate_fn": collate}),
        (ByOdd(), {"batch_size": 1, "batch_sampler": [[Odd(n), Odd(n + 1)] for n in (0, 2, 4, 6)]}),
    ],
)
def test_every_kind_of_dataset_draws_the_same_in_each_run_and_leaves_the_loop_alone(
    dataset: Any, options: dict[str, Any]
) -> None:
    def run(workers: int) -> Any:
        given = {"batch_size": 3, "collate_fn": list, **options}
        loaded = DataLoader(dataset, num_workers=workers, backend="threads", **given)
        seed_all(10)
        return [[s for batch in loaded for s in batch], loop_draws(), [*loaded], loop_draws()]

    first = run(2)
    assert run(2) == first
    if not isinstance(dataset, Stream):  # of which each worker has its own
        assert run(3) == first
    assert len({repr(drawn) for _, *drawn in first[0]}) >= len(first[0]) // 2, "by sample"
    assert first[0] != first[2]  # the next epoch draws other numbers
    seed_all(10)
    torch.empty((), dtype=torch.int64).random_()
    assert first[1] == loop_draws()


# -- pipelines ---------------------------------------------------------------------------------------


def noisy(item: Any) -> Any:
    return item, random.random(), torch.rand(1).item()


def often(_: Any) -> bool:
    return random.random() < 0.7


def several(item: Any) -> Iterator[Any]:
    for number in range(1 + random.randrange(3)):
        yield number, item, random.random()


def late(item: Any) -> Any:
    """A step that is slow enough to be pulled by a relay."""
    return noisy(item)


def numbers() -> Iterator[Any]:
    opened = random.random()
    for number in range(9):
        yield number, opened, random.random()


CHAINS: dict[str, Callable[[int], Any]] = {
    "functions in one stage": lambda workers: (
        Pipeline.from_iterable(range(40))
        .map(noisy, backend="threads", num_workers=workers)
        .filter(often, backend="threads", num_workers=workers)
        .flat_map(several, backend="threads", num_workers=workers)
        .map(noisy, backend="threads", num_workers=workers)
    ),
    "threads in a worker": lambda workers: (
        Pipeline.from_iterable(range(40))
        .map(noisy, backend="threads", num_workers=1, threads_per_worker=workers)
        .map(noisy, backend="threads", num_workers=1, threads_per_worker=workers)
    ),
    "threads in a process": lambda workers: Pipeline.from_iterable(range(40)).map(
        noisy, backend="fork", num_workers=2, threads_per_worker=workers + 1
    ),
    "samples of a dataset": lambda workers: Pipeline.from_dataset(
        Ways(), shuffle=True, seed=3, backend="threads", num_workers=workers
    ),
    "a step without a backend, on a relay's thread": lambda workers: (
        Pipeline.from_iterable(range(40))
        .map(noisy, backend="threads", num_workers=workers)
        .map(late)
        .filter(often)
        .prefetch(3)
    ),
    "readers": lambda _: Pipeline.from_iterable(numbers, backend="threads", num_workers=3),
}


@pytest.mark.parametrize("chain", CHAINS)
def test_a_pipeline_draws_the_same_in_each_run_and_leaves_the_loop_alone(chain: str) -> None:
    found, epochs = [], []
    for workers in (1, 3, 3):
        seed_all(13)
        pipeline = CHAINS[chain](workers)
        run = iter(pipeline)
        items = list(run)
        found.append((items, loop_draws()))
        seed_all(13)
        epochs.append([list(epoch) for epoch in CHAINS[chain](workers).epochs(2)])
    assert found[0] == found[1] == found[2]
    assert epochs[0] == epochs[1] == epochs[2]
    assert epochs[0][0] == found[0][0]
    assert epochs[0][0] != epochs[0][1]
    seed_all(13)
    torch.empty((), dtype=torch.int64).random_()
    assert found[0][1] == loop_draws()


def test_a_step_that_your_loop_calls_draws_from_its_generators_as_without_workers_in_torch() -> (
    None
):
    seed_all(15)
    torch.empty((), dtype=torch.int64).random_()
    wanted = [noisy(item) for item in range(5)]
    seed_all(15)
    assert list(Pipeline.from_iterable(range(5)).map(noisy)) == wanted
