"""States of another loader, or of none, are refused before any worker starts, with both values."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.failing_datasets import text_of
from torch.utils.data import IterableDataset, RandomSampler, SequentialSampler

from hybridloader import DataLoader
from hybridloader.errors import StateError
from hybridloader.sampling import ShuffleSampler

LENGTH, BATCH = 20, 4


class Stream(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(8))


def started(worker: int) -> None:
    raise AssertionError("a worker has started")


def make(**options: Any) -> DataLoader:
    options = {"dataset": range(LENGTH), "batch_size": BATCH, **options}
    return DataLoader(**options)


def state(count: int = 2, **options: Any) -> dict[str, Any]:
    loader = make(**options)
    iterator = iter(loader)
    for _ in range(count):
        next(iterator)
    return loader.state_dict()


def edited(path: str, value: Any, **options: Any) -> dict[str, Any]:
    found = state(**options)
    *way, last = path.split("/")
    target = found
    for step in way:
        target = target[step]
    target[last] = value
    return found


def without(path: str) -> dict[str, Any]:
    found = state()
    *way, last = path.split("/")
    target = found
    for step in way:
        target = target[step]
    del target[last]
    return found


OWN = "_hybridloader"

REFUSED: dict[str, tuple[Callable[[], Any], dict[str, Any], str]] = {
    "no dict": (lambda: 3, {}, "a dict, got int"),
    "foreign": (lambda: {"a": 1}, {}, "not the state of a hybridloader.DataLoader"),
    "torchdata's": (lambda: {"_snapshot": {}}, {}, "it is that of a StatefulDataLoader"),
    "version": (lambda: edited(f"{OWN}/version", 1), {}, "version is 1 in the state.* reads 2"),
    "cut off": (lambda: without("_base_seed"), {}, "lacks _base_seed: was it truncated"),
    "cut off within": (lambda: without(f"{OWN}/steps"), {}, "lacks steps: was it truncated"),
    "length": (state, {"dataset": range(21)}, "length is 20 in the state and 21"),
    "batch size": (state, {"batch_size": 5}, "batch_size is 4 in the state and 5"),
    "drop_last": (state, {"drop_last": True}, "drop_last is False in the state and True"),
    "shuffle": (
        state,
        {"shuffle": True},
        r"samplers is \['BatchSampler', 'SequentialSampler'\].*RandomSampler",
    ),
    "kind": (state, {"dataset": Stream()}, "kind is 'map' in the state and 'iterable'"),
    "negative": (lambda: edited("_num_yielded", -1), {}, "_num_yielded is -1"),
    "a float": (lambda: edited("_sampler_iter_yielded", 1.5), {}, "_sampler_iter_yielded is 1.5"),
    "a truth": (lambda: edited("_sampler_iter_yielded", True), {}, "_sampler_iter_yielded is True"),
    "too many": (lambda: edited("_sampler_iter_yielded", 6), {}, "is 6 in the state.*only 5 items"),
    "contradiction": (
        lambda: {**edited("_num_yielded", 1), "_sampler_iter_yielded": 4},
        {},
        "_sampler_iter_yielded is 4, _num_yielded 1.*contradict",
    ),
    "finished": (lambda: edited("_iterator_finished", 1), {}, "_iterator_finished is 1"),
    "steps": (lambda: edited(f"{OWN}/steps", ["dance"]), {}, r"steps is \['dance'\]"),
    "place": (lambda: edited(f"{OWN}/at", "nowhere"), {}, "at is 'nowhere'"),
    "epoch": (lambda: edited(f"{OWN}/epoch", -3), {}, "epoch is -3"),
    "workers": (
        lambda: state(1, dataset=Stream(), num_workers=2, backend="threads"),
        {"dataset": Stream()},
        "_num_workers is 2 in the state and 0",
    ),
    "counts": (lambda: edited(f"{OWN}/counts", [2]), {}, r"damaged \(ValueError: .*load another"),
    "a worker": (
        lambda: edited("_worker_snapshots/worker_0", None, dataset=Stream()),
        {"dataset": Stream()},
        "lacks worker_0",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_it_is_refused_when_it_is_loaded_and_what_was_loaded_before_stays(name: str) -> None:
    given, options, words = REFUSED[name]
    loader = make(**options)
    before = loader.state_dict()
    with pytest.raises(StateError, match=words) as raised:
        loader.load_state_dict(given())
    assert isinstance(raised.value, ValueError)
    after = loader.state_dict()
    assert after["_num_yielded"] == before["_num_yielded"] == 0
    assert len(list(loader)) == len(list(make(**options)))


class Shrinking(SequentialSampler):
    """Sampler that gives fewer items than its length."""

    left = LENGTH

    def __iter__(self) -> Any:
        return iter(range(self.left))


def with_(sampler: Callable[[], Any]) -> dict[str, Any]:
    return {"sampler": sampler(), "num_workers": 2, "backend": "threads"}


def shrunk() -> Shrinking:
    sampler = Shrinking(range(LENGTH))
    sampler.left = 4
    return sampler


LATE: dict[str, tuple[Callable[[], Any], Callable[[], Any], str]] = {
    "a sampler that shrank": (
        lambda: Shrinking(range(LENGTH)),
        shrunk,
        "_sampler_iter_yielded is 2 in the state, and BatchSampler has only 1",
    ),
    "another seed": (
        lambda: ShuffleSampler(LENGTH, seed=1),
        lambda: ShuffleSampler(LENGTH, seed=2),
        "seed is 1 in the state and 2 in this ShuffleSampler",
    ),
    "a generator that is missing": (
        lambda: RandomSampler(range(LENGTH), generator=torch.Generator()),
        lambda: RandomSampler(range(LENGTH)),
        "generator 'sampler', and this loader draws from default",
    ),
}


@pytest.mark.parametrize("name", LATE)
def test_what_shows_only_by_trying_is_raised_before_a_worker_starts(name: str) -> None:
    before, after, words = LATE[name]
    found = state(sampler=before())
    loader = make(**with_(after), worker_init_fn=started)
    loader.load_state_dict(found)
    generator = torch.get_rng_state()
    for _ in range(2):  # it stays loaded: nothing is begun from the beginning instead
        with pytest.raises(StateError, match=words):
            iter(loader)
    assert torch.equal(generator, torch.get_rng_state())


def test_a_generator_of_another_size_is_refused_by_iter() -> None:
    found = edited(f"{OWN}/generators", {"default": torch.zeros(3)}, shuffle=True)
    loader = make(shuffle=True)
    loader.load_state_dict(found)
    before = torch.get_rng_state()
    with pytest.raises(StateError, match="state of the generator 'default' can't be loaded: "):
        iter(loader)
    assert torch.equal(torch.get_rng_state(), before)


def test_more_batches_than_an_iterable_dataset_has_are_refused_by_iter() -> None:
    loader = make(dataset=Stream())
    loader.load_state_dict(edited("_num_yielded", 9, dataset=Stream(), count=1))
    with pytest.raises(StateError, match=r"_num_yielded is 9 in .* the dataset has only 2 batches"):
        iter(loader)


def test_what_was_loaded_is_a_copy() -> None:
    found = state()
    kept = copy.deepcopy(found)
    loader = make()
    loader.load_state_dict(found)
    found["_sampler_iter_yielded"] = 99
    assert loader.state_dict() == kept
    assert len(list(loader)) == 3


class Picky(Stream):
    """Dataset that takes no state."""

    def state_dict(self) -> dict[str, Any]:
        return {"at": 1}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise KeyError("level")


@pytest.mark.parametrize(("workers", "backend"), [(0, "inline"), (1, "threads")])
def test_what_a_dataset_raises_names_it(workers: int, backend: str) -> None:
    options = {"num_workers": workers, "backend": backend}
    loader = make(dataset=Picky(), **options)
    loader.load_state_dict(state(1, dataset=Picky(), **options))
    with pytest.raises(KeyError, match="level") as raised:
        next(iter(loader))
    told = text_of(raised.value)
    assert "In load_state_dict() of" in told
    assert "(Picky)." in told


def test_a_dataset_without_a_state_does_not_take_one() -> None:
    class Stateful(Stream):
        def state_dict(self) -> dict[str, Any]:
            return {"at": 1}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            raise AssertionError(state)

    found = state(1, dataset=Stateful())
    with pytest.raises(StateError, match="Stream has no load_state_dict"):
        make(dataset=Stream()).load_state_dict(found)


class PickySampler(SequentialSampler):
    """Sampler that takes no state."""

    def state_dict(self) -> dict[str, Any]:
        return {"at": 1}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise KeyError("level")


def test_what_a_sampler_raises_names_it() -> None:
    loader = make(sampler=PickySampler(range(LENGTH)))
    loader.load_state_dict(state(1, sampler=PickySampler(range(LENGTH))))
    with pytest.raises(
        StateError, match=r"\(PickySampler\).*KeyError: 'level'; load the state into"
    ):
        iter(loader)
    loader = make(sampler=type("PickySampler", (SequentialSampler,), {})(range(LENGTH)))
    loader.load_state_dict(state(1, sampler=PickySampler(range(LENGTH))))
    with pytest.raises(StateError, match=r"ValueError: PickySampler has no load_state_dict\(\)"):
        iter(loader)
