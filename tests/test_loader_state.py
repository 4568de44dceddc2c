"""The state of a loader: wherever a pass is left, the rest of it comes, on any backend.

The uninterrupted run is the oracle, and torch's loader that of the uninterrupted run.
"""

from __future__ import annotations

import copy
import io
import json
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import (
    BatchSampler,
    Dataset,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)
from torch.utils.data import DataLoader as TorchLoader
from torch.utils.data.distributed import DistributedSampler

from hybridloader import DataLoader
from hybridloader.sampling import BucketBatchSampler, DistributedShuffleSampler, ShuffleSampler

LENGTH, BATCH = 23, 4
BATCHES = 6

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")

NUMBERS = TensorDataset(torch.arange(LENGTH))

Made = Callable[[], dict[str, Any]]


def seeded(seed: int = 3) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


class InIter(Sampler[int]):
    """Draws from torch's default generator as soon as ``iter`` is called."""

    def __len__(self) -> int:
        return LENGTH

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(LENGTH).tolist())


SAMPLERS: dict[str, Made] = {
    "sequential": lambda: {"batch_size": BATCH},
    "shuffle": lambda: {"batch_size": BATCH, "shuffle": True},
    "generator": lambda: {"batch_size": BATCH, "shuffle": True, "generator": seeded()},
    "own generator": lambda: {
        "batch_size": BATCH,
        "sampler": RandomSampler(NUMBERS, generator=seeded()),
    },
    "replacement": lambda: {
        "batch_size": BATCH,
        "sampler": RandomSampler(NUMBERS, replacement=True, generator=seeded()),
    },
    "subset": lambda: {"batch_size": BATCH, "sampler": SubsetRandomSampler(range(LENGTH))},
    "weighted": lambda: {
        "batch_size": BATCH,
        "sampler": WeightedRandomSampler([1.0] * LENGTH, LENGTH),
    },
    "in iter": lambda: {"batch_size": BATCH, "sampler": InIter()},
    "dropping": lambda: {"batch_size": BATCH, "shuffle": True, "drop_last": True},
    "samples": lambda: {"batch_size": None, "sampler": RandomSampler(NUMBERS, num_samples=6)},
    "ours": lambda: {"batch_size": BATCH, "sampler": ShuffleSampler(LENGTH, seed=1)},
    "ours, dropping": lambda: {
        "batch_size": BATCH,
        "sampler": ShuffleSampler(LENGTH, seed=1),
        "drop_last": True,
    },
    "our batches": lambda: {
        "batch_sampler": BucketBatchSampler(
            [n % 7 + 1 for n in range(LENGTH)], BATCH, buckets=3, seed=1
        )
    },
    "batches": lambda: {
        "batch_sampler": BatchSampler(RandomSampler(NUMBERS, generator=seeded()), BATCH, False)
    },
    "distributed": lambda: {
        "batch_size": BATCH,
        "sampler": DistributedSampler(NUMBERS, num_replicas=1, rank=0),
    },
}

PLACES = [(0, "inline"), (1, "threads"), (3, "threads"), (3, "inline"), (3, "fork")]
"""Numbers of workers, and where they are."""

every_sampler = pytest.mark.parametrize("sampler", sorted(SAMPLERS))


def flat(batches: Any) -> list[Any]:
    return [numbers[0].tolist() for numbers in batches]


def make(sampler: str, workers: int = 0, backend: str = "inline", **more: Any) -> DataLoader:
    return DataLoader(NUMBERS, num_workers=workers, backend=backend, **SAMPLERS[sampler](), **more)


def left_after(loader: DataLoader, count: int) -> tuple[list[Any], dict[str, Any]]:
    """Some batches, and the state behind them."""
    iterator = iter(loader)
    taken = [next(iterator)[0].tolist() for _ in range(count)]
    return taken, loader.state_dict()


def through_a_file(state: dict[str, Any]) -> dict[str, Any]:
    """As a checkpoint that is loaded as safely as torch can."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    loaded: dict[str, Any] = torch.load(file, weights_only=True)
    return loaded


def epochs_of(loader: Any, count: int, seed: int = 0) -> list[list[Any]]:
    torch.manual_seed(seed)
    return [flat(loader) for _ in range(count)]


# -- the rest of the epoch comes -------------------------------------------------------------------


@every_sampler
@pytest.mark.parametrize("place", PLACES, ids=str)
def test_left_after_any_batch_the_rest_comes_under_other_settings_and_twice(
    sampler: str, place: tuple[int, str]
) -> None:
    (whole,) = epochs_of(TorchLoader(NUMBERS, **SAMPLERS[sampler]()), 1)
    others = [other for other in PLACES if other != place]
    for count in range(len(whole) + 1):
        torch.manual_seed(0)
        taken, state = left_after(make(sampler, *place), count)
        torch.manual_seed(99)
        between = make(sampler, *others[count % len(others)], prefetch_factor=None)
        between.load_state_dict(through_a_file(state))
        more, again = left_after(between, min(1, len(whole) - count))
        torch.manual_seed(98)
        last = make(sampler, *others[(count + 1) % len(others)])
        last.load_state_dict(again)
        assert taken + more + flat(last) == whole


@pytest.mark.parametrize(
    "sampler", ["generator", "own generator", "replacement", "ours", "our batches", "batches"]
)
@pytest.mark.parametrize("workers", [0, 2])
def test_the_epochs_after_it_are_those_of_the_uninterrupted_run(sampler: str, workers: int) -> None:
    backend = "threads" if workers else "inline"
    # The uninterrupted run is ours: torch's of as many workers is the same, as test_parity.py shows.
    whole = epochs_of(make(sampler, workers, backend), 3)
    loader = make(sampler, workers, backend)
    torch.manual_seed(0)
    first = flat(loader)
    taken, state = left_after(loader, 2)
    other = make(sampler)
    other.load_state_dict(state)
    assert [first, taken + flat(other), flat(other)] == whole


@every_sampler
@pytest.mark.parametrize("workers", [0, 2])
def test_at_the_end_of_an_epoch_the_next_one_comes_once(sampler: str, workers: int) -> None:
    backend = "threads" if workers else "inline"
    whole = epochs_of(make(sampler, workers, backend), 2)
    loader = make(sampler, workers, backend)
    torch.manual_seed(0)
    assert flat(loader) == whole[0]
    state = loader.state_dict()
    assert state["_iterator_finished"] is True
    training = torch.get_rng_state()
    other = make(sampler)
    other.load_state_dict(state)
    assert flat(other) == whole[1], "where the training code has restored torch's generator"
    torch.manual_seed(5)
    other = make(sampler)
    other.load_state_dict(state)
    if sampler != "sequential":
        assert flat(other) == whole[1], "and where it has not"
    assert not torch.equal(training, torch.get_rng_state())


@every_sampler
def test_a_state_before_the_first_batch_is_that_of_the_whole_epoch(sampler: str) -> None:
    torch.manual_seed(0)
    loader = make(sampler)
    state = loader.state_dict()
    iterator = iter(loader)
    begun = loader.state_dict()
    whole = flat(iterator)
    for found in (state, begun):
        torch.manual_seed(7)
        other = make(sampler)
        other.load_state_dict(found)
        assert flat(other) == whole


@given(st.lists(st.integers(0, 3), min_size=1, max_size=6), st.sampled_from(sorted(SAMPLERS)))
@settings(max_examples=60, deadline=None)
def test_left_any_number_of_times_the_stream_is_one(steps: list[int], sampler: str) -> None:
    torch.manual_seed(0)
    loader = make(sampler)
    whole = flat(loader)
    torch.manual_seed(0)
    loader, taken = make(sampler), []
    for step in steps:
        iterator = iter(loader)
        for _ in range(min(step, len(whole) - len(taken))):
            taken.append(next(iterator)[0].tolist())
        state = loader.state_dict()
        torch.manual_seed(len(taken) + 1)
        loader = make(sampler)
        loader.load_state_dict(state)
        assert_alike(loader.state_dict(), state)
    assert taken + flat(loader) == whole


def assert_alike(one: Any, other: Any) -> None:
    if isinstance(one, torch.Tensor):
        assert torch.equal(one, other)
    elif isinstance(one, dict):
        assert set(one) == set(other)
        for key in one:
            assert_alike(one[key], other[key])
    else:
        assert one == other


# -- what it does to generators --------------------------------------------------------------------


def test_the_training_codes_generator_is_put_back() -> None:
    torch.manual_seed(0)
    _, state = left_after(make("shuffle"), 3)
    torch.manual_seed(11)
    before = torch.get_rng_state()
    other = make("shuffle", 2, "threads")
    other.load_state_dict(state)
    iterator = iter(other)
    assert torch.equal(before, torch.get_rng_state())
    next(iterator)
    assert torch.equal(before, torch.get_rng_state())


def test_it_is_put_back_where_nothing_can_be_gone_on_from(monkeypatch: pytest.MonkeyPatch) -> None:
    _, state = left_after(make("in iter"), 3)
    other = make("in iter")
    monkeypatch.setattr(InIter, "__iter__", lambda self: iter(range(LENGTH)))
    other.load_state_dict(state)
    before = torch.get_rng_state()
    with pytest.raises(ValueError, match="item 2 of BatchSampler is not what it was"):
        iter(other)
    assert torch.equal(before, torch.get_rng_state())


def test_workers_have_the_seed_that_they_had() -> None:
    torch.manual_seed(0)
    loader = make("shuffle", 1, "threads")
    first = iter(loader)
    state = loader.state_dict()
    torch.manual_seed(5)
    other = make("shuffle", 1, "threads")
    other.load_state_dict(state)
    second = iter(other)
    assert isinstance(first, Iterator)
    assert first._base_seed == second._base_seed
    for iterator in (first, second):
        iterator.close()


@pytest.mark.parametrize("workers", [0, 2])
@every_sampler
def test_asking_for_a_state_changes_nothing(sampler: str, workers: int) -> None:
    def run(asks: bool) -> list[Any]:
        torch.manual_seed(0)
        loader = make(sampler, workers, "threads" if workers else "inline")
        found: list[Any] = [loader.state_dict() if asks else None]
        for _ in range(2):
            for batch in loader:
                found.append(batch[0].tolist())
                if asks:
                    loader.state_dict()
        return [*found[1:], torch.get_rng_state().tolist()]

    assert run(True) == run(False)


# -- what a state is -------------------------------------------------------------------------------


def test_it_counts_what_was_yielded_and_not_what_was_prefetched() -> None:
    loader = make("sequential", 2, "threads", prefetch_factor=2)
    _, state = left_after(loader, 1)
    assert (state["_num_yielded"], state["_sampler_iter_yielded"]) == (1, 1)
    assert state["_index_sampler_state"]["samples_yielded"] == BATCH


@every_sampler
def test_but_for_generators_it_is_json(sampler: str) -> None:
    torch.manual_seed(0)
    (whole,) = epochs_of(make(sampler), 1)
    torch.manual_seed(0)
    taken, state = left_after(make(sampler), 2)
    generators = state["_hybridloader"].pop("generators")
    state = json.loads(json.dumps(state))
    assert all(isinstance(value, torch.Tensor) for value in generators.values())
    state["_hybridloader"]["generators"] = generators
    other = make(sampler)
    other.load_state_dict(state)
    assert taken + flat(other) == whole
    assert len(pickle.dumps(state)) < 10_000


def test_its_size_does_not_depend_on_the_number_of_samples() -> None:
    sizes = set()
    for length in (100, 100_000):
        loader = DataLoader(range(length), 10, sampler=ShuffleSampler(length, seed=0))  # type: ignore[arg-type]
        iterator = iter(loader)
        next(iterator)
        text = json.dumps({**loader.state_dict(), "_hybridloader": None})
        sizes.add(len(text) - 2 * len(str(length)))
    assert max(sizes) - min(sizes) < 10


def test_a_state_starts_no_worker_and_is_a_dict_of_its_own_each_time() -> None:
    class Silent(Dataset[int]):
        def __len__(self) -> int:
            return 4

        def __getitem__(self, index: int) -> int:
            raise AssertionError("nobody asked for a sample")

    loader = DataLoader(Silent(), num_workers=2, backend="fork")
    one, other = loader.state_dict(), loader.state_dict()
    assert one is not other
    assert one["_hybridloader"] is not other["_hybridloader"]
    one["_hybridloader"]["counts"].append(1)
    assert loader.state_dict()["_hybridloader"]["counts"] == [0, 0]
    assert loader._iterator is None


def test_going_on_in_the_middle_of_many_costs_nothing_by_the_place() -> None:
    asked = 0

    class Counting(ShuffleSampler):
        def _items(self, place: Any) -> list[int]:
            nonlocal asked
            asked += 1
            return super()._items(place)

    length = 100_000_000
    loader = DataLoader(range(length), 256, sampler=Counting(length, seed=0))  # type: ignore[arg-type]
    iterator = iter(loader)
    next(iterator)
    state = loader.state_dict()
    state["_index_sampler_state"]["sampler_state"]["position"] = length // 2
    asked = 0
    other = DataLoader(range(length), 256, sampler=Counting(length, seed=0))  # type: ignore[arg-type]
    other.load_state_dict(state)
    next(iter(other))
    assert asked == 1


# -- frameworks ------------------------------------------------------------------------------------


@pytest.mark.parametrize("sampler", ["shuffle", "generator", "ours", "our batches", "sequential"])
def test_what_accelerate_edits_is_honoured(sampler: str) -> None:
    (whole,) = epochs_of(make(sampler), 1)
    torch.manual_seed(0)
    _, state = left_after(make(sampler, 2, "threads"), 4)
    factor = 1
    state["_sampler_iter_yielded"] -= factor
    state["_num_yielded"] -= factor
    size = BATCH if sampler != "our batches" else 1
    state["_index_sampler_state"]["samples_yielded"] -= size * factor
    state["_iterator_finished"] = False
    other = make(sampler)
    other.load_state_dict(state)
    assert flat(other) == whole[3:]


@pytest.mark.parametrize("sampler", ["generator", "ours", "our batches", "own generator"])
def test_an_iterator_that_was_declared_finished_is_followed_by_the_next(sampler: str) -> None:
    whole = epochs_of(make(sampler), 3)
    torch.manual_seed(0)
    _, state = left_after(make(sampler, 2, "threads"), 3)
    state["_iterator_finished"] = True
    other = make(sampler)
    other.load_state_dict(state)
    assert [flat(other), flat(other)] == whole[1:]


def test_an_end_that_was_declared_none_leaves_an_empty_rest() -> None:
    loader = make("sequential")
    list(loader)
    state = {**loader.state_dict(), "_iterator_finished": False}
    other = make("sequential")
    other.load_state_dict(state)
    assert [len(flat(other)), len(flat(other))] == [0, BATCHES]


def test_an_empty_state_is_none() -> None:
    _, state = left_after(make("sequential"), 3)
    loader = make("sequential")
    loader.load_state_dict(state)
    loader.load_state_dict({})
    assert len(flat(loader)) == BATCHES


# -- several iterators, workers that stay ----------------------------------------------------------


def test_a_state_is_taken_of_the_last_iterator_and_loaded_into_the_next() -> None:
    loader = make("sequential")
    first, second = iter(loader), iter(loader)
    for _ in range(3):
        next(first)
    next(second)
    state = loader.state_dict()
    assert state["_num_yielded"] == 1
    loader.load_state_dict(state)
    assert [len(flat(loader)), len(flat(loader))] == [BATCHES - 1, BATCHES]


def test_what_was_loaded_last_counts() -> None:
    (_, one), (_, two) = left_after(make("sequential"), 1), left_after(make("sequential"), 2)
    loader = make("sequential")
    loader.load_state_dict(one)
    loader.load_state_dict(two)
    assert len(flat(loader)) == BATCHES - 2


@pytest.mark.parametrize("backend", ["threads", "fork"])
@pytest.mark.parametrize("sampler", ["generator", "ours", "replacement"])
def test_workers_that_stay_go_on_from_a_state(sampler: str, backend: str) -> None:
    options: dict[str, Any] = {"persistent_workers": True}
    reference = make(sampler, 2, backend, **options)
    whole = epochs_of(reference, 4)
    loader = make(sampler, 2, backend, **options)
    torch.manual_seed(0)
    first = flat(loader)
    taken, state = left_after(loader, 2)
    flat(loader)
    loader.load_state_dict(state)
    assert [first, taken + flat(loader), flat(loader), flat(loader)] == whole
    for one in (loader, reference):
        assert one._iterator is not None
        one._iterator.close()


def test_a_copy_and_a_pickled_loader_begin_at_the_beginning() -> None:
    loader = make("sequential")
    _, state = left_after(loader, 2)
    loader.load_state_dict(state)
    for other in (copy.copy(loader), pickle.loads(pickle.dumps(loader))):
        assert len(flat(other)) == BATCHES
    assert len(flat(loader)) == BATCHES - 2


# -- epochs ----------------------------------------------------------------------------------------


def test_passes_are_counted_and_set_epoch_names_the_next() -> None:
    loader = make("ours")
    assert loader.state_dict()["_hybridloader"]["epoch"] == 0
    list(loader)
    iter(loader)
    assert loader.state_dict()["_hybridloader"]["epoch"] == 1
    loader.set_epoch(7)
    assert pickle.loads(pickle.dumps(loader))._epoch == 7
    assert loader.sampler.epoch == 7  # type: ignore[union-attr]
    iter(loader)
    assert loader.state_dict()["_hybridloader"]["epoch"] == 7
    assert not [name for name in vars(loader) if "epoch" in name and not name.startswith("_")]


def test_set_epoch_tells_whoever_wants_to_know_once() -> None:
    class Told(TensorDataset):
        epochs: list[int]

        def set_epoch(self, epoch: int) -> None:
            self.epochs.append(epoch)

    data = Told(torch.arange(8))
    data.epochs = []
    sampler = DistributedSampler(data, num_replicas=1, rank=0)
    loader = DataLoader(data, sampler=sampler)
    loader.set_epoch(4)
    assert (sampler.epoch, data.epochs) == (4, [4])
    for wrong in (-1, True, 1.0, "1"):
        with pytest.raises(ValueError, match="epoch must be a whole number"):
            loader.set_epoch(wrong)  # type: ignore[arg-type]


def test_set_epoch_keeps_a_place_in_that_epoch_and_says_that_it_drops_another() -> None:
    loader = make("ours")
    list(loader)
    whole = flat(loader)
    loader = make("ours")
    list(loader)
    taken, state = left_after(loader, 2)
    for epoch, kept in ((1, True), (5, False)):
        other = make("ours")
        other.load_state_dict(state)
        if kept:
            other.set_epoch(epoch)
            assert taken + flat(other) == whole
        else:
            with pytest.warns(UserWarning, match=r"set_epoch\(5\) drops the place.*epoch 1"):
                other.set_epoch(epoch)
            assert len(flat(other)) == BATCHES


# -- ranks -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("before", "after"), [(2, 3), (3, 1), (1, 4)])
@pytest.mark.parametrize("steps", [1, 2])
def test_another_number_of_ranks_loses_and_doubles_nothing(
    before: int, after: int, steps: int
) -> None:
    def ranks(world: int) -> list[DataLoader]:
        return [
            DataLoader(
                range(40),  # type: ignore[arg-type]
                4,
                sampler=DistributedShuffleSampler(40, 2, rank=rank, world=world, uneven="exact"),
            )
            for rank in range(world)
        ]

    seen, states = [], []
    for loader in ranks(before):
        iterator = iter(loader)
        for _ in range(steps):
            seen += next(iterator).tolist()
        states.append(loader.state_dict())
    for loader in ranks(after):
        loader.load_state_dict(states[0])
        seen += [index for batch in loader for index in batch.tolist()]
    assert sorted(seen) == list(range(40))
