"""Iterable datasets that name their shards: resuming on other workers and ranks."""

from __future__ import annotations

import copy
import itertools
import random
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import IterableDataset

from hybridloader import DataLoader, StatefulDataLoader
from hybridloader.errors import ShardLost, StateError

SIZES = {"a": 5, "b": 0, "c": 3, "d": 7, "e": 1, "f": 4, "g": 2}


class Shards(IterableDataset[str]):
    """Samples ``"a0"``, ``"a1"``, ... of the shards of `SIZES`."""

    def __init__(self, rank: int = 0, ranks: int = 1, names: Any = None) -> None:
        self.rank, self.num_replicas = rank, ranks
        self.names = list(SIZES) if names is None else names
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    @property
    def shard_names(self) -> Any:
        return self.names[self.epoch :] + self.names[: self.epoch]

    def read_shard(self, name: str, start: int) -> Iterator[str]:
        return iter([f"{name}{number}" for number in range(start, SIZES[name])])

    def __iter__(self) -> Iterator[str]:
        raise AssertionError("a loader reads by shards")


ALL = Counter(f"{name}{number}" for name, size in SIZES.items() for number in range(size))


def make(
    dataset: Any, workers: int, backend: str = "threads", size: int = 2, **options: Any
) -> Any:
    return DataLoader(
        dataset,
        size,
        num_workers=workers,
        collate_fn=list,
        backend=backend if workers else None,
        **options,
    )


def taken(batches: Any, count: int | None = None) -> list[str]:
    return [sample for batch in itertools.islice(batches, count) for sample in batch]


def run(ranks: int, workers: int, stops: list[int], state: Any) -> tuple[list[str], list[Any]]:
    """Resume all ranks from `state`; return their samples, and their states after so many batches."""
    samples, states = list[str](), []
    for rank in range(ranks):
        loader = make(Shards(rank, ranks), workers)
        if state is not None:
            loader.load_state_dict(state)
        batches = iter(loader)
        samples += taken(batches, stops[rank])
        states.append(loader.state_dict())
    return samples, states


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_any_ranks_and_workers_share_what_is_left(data: Any) -> None:
    samples, state = list[str](), None
    for _ in range(2):  # the second begins where the first one had come to
        ranks, workers = data.draw(st.integers(1, 3)), data.draw(st.integers(0, 3))
        # At least one rank must stay in the epoch: else the state is the beginning of the next one.
        stops = [0, *data.draw(st.lists(st.integers(0, 4), min_size=2, max_size=2))]
        given_now, states = run(ranks, workers, stops, state)
        samples += given_now
        state = DataLoader.merge_states(states)
    rest, _ = run(data.draw(st.integers(1, 3)), data.draw(st.integers(0, 3)), [1000] * 3, state)
    assert Counter(samples + rest) == ALL


def test_states_that_all_ranks_took_at_the_end_begin_the_next_epoch() -> None:
    _, states = run(2, 2, [1000] * 2, None)
    state = DataLoader.merge_states(states)
    samples, _ = run(3, 1, [1000] * 3, state)
    assert Counter(samples) == ALL


class Skipped(Shards):
    def read_shard(self, name: str, start: int) -> Iterator[str]:
        for sample in super().read_shard(name, start):
            if sample in ("a0", "d3"):
                raise ValueError(sample)
            yield sample


class Random(Shards):
    def read_shard(self, name: str, start: int) -> Iterator[Any]:
        return ((sample, random.random()) for sample in super().read_shard(name, start))


PERSISTENT = {"backend": "fork", "persistent_workers": True}
ROWS: dict[str, tuple[Any, list[Any], list[tuple[int, dict[str, Any]]]]] = {
    "the same workers": (Shards, [0, 4], [(3, {}), (3, {})]),
    "out of order": (Shards, [4], [(3, {"in_order": False}), (3, {})]),
    "processes": (Shards, [4], [(3, PERSISTENT), (2, PERSISTENT), (0, {})]),
    "skipped samples": (
        Skipped,
        [0, 2, 4, 6],
        [(2, {"on_error": "skip"}), (3, {"on_error": "skip"})],
    ),
    "seeds of samples": (Random, [3], [(2, {"seeding": "sample"}), (3, {"seeding": "sample"})]),
}


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
@pytest.mark.parametrize("name", ROWS)
def test_resumed_by_others_all_samples_come_once(name: str) -> None:
    kind, stops, legs = ROWS[name]
    for stop in stops:
        found, skipped, state, loader = list[Any](), 0, None, None
        for number, (workers, options) in enumerate(legs):
            loader = make(kind(), workers, **options)
            if state is not None:
                loader.load_state_dict(state)
            batches = iter(loader)
            found += taken(batches, stop if number + 1 < len(legs) else None)
            state = loader.state_dict()
            skipped += len(loader.skipped)
            rest = taken(batches) if number == 0 and name != "processes" else None
            if rest is not None and name == "the same workers":
                same = make(kind(), workers, **options)
                same.load_state_dict(state)
                assert taken(same) == rest, "the same workers resume exactly"
                del (alone := copy.deepcopy(state))["_hybridloader"]["shards"]
                same.load_state_dict(alone)
                assert taken(same) == rest, "also from a state without a division"
        if kind is Random:
            assert len({number for _, number in found}) == sum(ALL.values())
            found = [sample for sample, _ in found]
        lost = {"a0", "d3"} if kind is Skipped else set[str]()
        assert Counter(found) == Counter(ALL.keys() - lost)
        assert skipped == len(lost)
        if not lost and kind is Shards:
            assert Counter(taken(loader)) == ALL, "the next epoch is a whole one"


class Broken(Shards):
    def read_shard(self, name: str, start: int) -> Iterator[str]:
        if name == "a":
            raise OSError("gone")
        for sample in super().read_shard(name, start):
            if sample == "d3":
                raise ValueError(sample)
            yield sample


def test_errors_of_a_shard_leave_the_other_shards_as_they_are() -> None:
    loader = make(Broken(), 2, size=1)
    batches, samples, errors, refused = iter(loader), list[str](), list[str](), 0
    while True:
        try:
            samples += next(batches)
        except StopIteration:
            break
        except (OSError, ValueError, ShardLost) as error:
            errors.append(type(error).__name__)
            try:
                make(Broken(), 3, size=1).load_state_dict(loader.state_dict())
            except StateError as refusal:
                refused += "raised an error" in str(refusal)
                with pytest.raises(
                    StateError, match=r"of rank 0 can't be merged: .*raised an error"
                ):
                    DataLoader.merge_states([loader.state_dict()])
    lost = {f"a{n}" for n in range(5)} | {"d3"}
    assert Counter(samples) == Counter(ALL.keys() - lost)
    assert sorted(errors) == [*["OSError"] * 7, "ShardLost", "ValueError"]
    assert refused


def test_stateful_dataloader_resumes_with_the_same_workers() -> None:
    def stateful() -> Any:
        return StatefulDataLoader(
            Shards(), 2, num_workers=2, collate_fn=list, backend="threads", snapshot_every_n_steps=3
        )

    loader = stateful()
    batches = iter(loader)
    taken(batches, 5)
    state = loader.state_dict()
    again, other = stateful(), StatefulDataLoader(Shards(), 2, collate_fn=list)
    again.load_state_dict(state)
    assert taken(again) == taken(batches)
    other.load_state_dict(state)
    with pytest.raises(StateError, match="_num_workers is 2 in the state and 0"):
        iter(other)


def test_ranks_are_those_of_torch_distributed_unless_the_dataset_has_some(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in (("is_initialized", True), ("get_rank", 1), ("get_world_size", 3)):
        monkeypatch.setattr(torch.distributed, name, lambda value=value: value)
    dataset = Shards()
    del dataset.rank, dataset.num_replicas
    assert {sample[0] for sample in taken(make(dataset, 2))} == {"e"}  # "b" is empty
    assert {sample[0] for sample in taken(make(Shards(0, 2), 2))} == {*"aceg"}
    with pytest.raises(ValueError, match="rank=2 and num_replicas=2"):
        iter(make(Shards(2, 2), 2))


def test_what_is_refused() -> None:
    loader = make(Shards(0, 2), 2)
    next(iter(loader))
    state = loader.state_dict()
    with pytest.raises(StateError, match=r"rank 0 of 2, and this is rank 1 of 2.*merge_states"):
        make(Shards(1, 2), 2).load_state_dict(state)
    with pytest.raises(StateError, match="rank 0 of 2, and this is rank 0 of 3"):
        make(Shards(0, 3), 2).load_state_dict(state)
    with pytest.raises(StateError, match="shard_names of the dataset differ from those"):
        make(Shards(0, 2, names=["a"]), 2).load_state_dict(state)
    with pytest.raises(StateError, match=r"ranks 0 of 2; merge one state of each rank"):
        DataLoader.merge_states([state])
    with pytest.raises(StateError, match="no state to merge"):
        DataLoader.merge_states([])
    with pytest.raises(StateError, match="names its shards, and Nameless has no shard_names"):
        make(Nameless(), 2).load_state_dict(state)
    with pytest.raises(StateError, match=r"state 1 is not from a hybridloader\.DataLoader"):
        DataLoader.merge_states([state, {"epoch": 1}])
    others = []
    for number in range(2):
        loader = make(Shards(1, 2, names=[*"bcd"] if number else None), 2)
        loader.set_epoch(1 - number)
        next(iter(loader))
        others.append(loader.state_dict())
    with pytest.raises(StateError, match=r"states are of the epochs \[0, 1\]; merge those of one"):
        DataLoader.merge_states([state, others[0]])
    with pytest.raises(StateError, match="the states have different shard_names"):
        DataLoader.merge_states([state, others[1]])
    with pytest.raises(StateError, match="state 0 has no shards"):
        DataLoader.merge_states([make([1, 2], 0).state_dict()])
    del state["_hybridloader"]["shards"]["left"]
    with pytest.raises(StateError, match="lacks left: was it truncated"):
        DataLoader.merge_states([state])
    with pytest.raises(TypeError, match="must be a list of str"):
        iter(make(Shards(names=[1]), 0))
    with pytest.raises(ValueError, match="'a' twice"):
        iter(make(Shards(names=["a", "a"]), 0))


class Nameless(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(5))


def test_without_names_the_reason_is_given() -> None:
    loader = make(Nameless(), 2)
    next(iter(loader))
    with pytest.raises(StateError, match=r"Nameless does not name its shards; with shard_names"):
        make(Nameless(), 3).load_state_dict(loader.state_dict())


def test_edited_counts_hold_for_the_same_workers() -> None:
    loader = make(Shards(), 2)
    batches = iter(loader)
    taken(batches, 4)
    state = loader.state_dict()
    rest = taken(batches)
    for _ in range(2):
        for name in ("_sampler_iter_yielded", "_num_yielded"):  # as accelerate
            state[name] -= 1
        same = make(Shards(), 2)
        same.load_state_dict(state)
        assert taken(same)[-len(rest) :] == rest
    with pytest.raises(StateError, match="were edited"):
        make(Shards(), 3).load_state_dict(state)
    other = make(Shards(), 3)
    for name in ("_sampler_iter_yielded", "_num_yielded"):
        state[name] += 2
    other.load_state_dict(state)
    batches = iter(other)
    next(batches)
    state = other.state_dict()
    state["_num_yielded"] -= 1
    state["_sampler_iter_yielded"] -= 1
    with pytest.raises(StateError, match="resumed on other workers or ranks before"):
        make(Shards(), 3).load_state_dict(state)


class WithState(Shards):
    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


def test_a_dataset_with_a_state_besides_keeps_its_workers() -> None:
    loader = make(WithState(), 2)
    batches = iter(loader)
    next(batches)
    state = loader.state_dict()
    same = make(WithState(), 2)
    same.load_state_dict(state)
    assert taken(same) == taken(batches)
    with pytest.raises(StateError, match="has a state_dict"):
        make(WithState(), 3).load_state_dict(state)
