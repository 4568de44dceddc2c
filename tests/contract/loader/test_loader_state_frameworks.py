"""The state of a loader as frameworks use it, with workers that stay, epochs and ranks."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.sampler_loaders import BATCH, BATCHES, NUMBERS, epochs_of, flat, left_after, make
from torch.utils.data import TensorDataset
from torch.utils.data.distributed import DistributedSampler

from hybridloader import DataLoader, StateError
from hybridloader.sampling import DistributedShuffleSampler

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")

# -- frameworks ------------------------------------------------------------------------------------


def edited(sampler: str, count: int, edit: Callable[[dict[str, Any]], None]) -> DataLoader:
    """A loader with the state of another, which has given `count` batches, as somebody edited it."""
    torch.manual_seed(0)
    loader = make(sampler, 2, "threads")
    iterator = iter(loader)
    for _ in range(count):
        next(iterator, None)
    state = loader.state_dict()
    edit(state)
    other = make(sampler)
    other.load_state_dict(state)
    return other


@pytest.mark.parametrize("sampler", ["generator", "ours", "own generator", "our batches"])
def test_what_accelerate_edits_is_honoured(sampler: str) -> None:
    def one_less(state: dict[str, Any]) -> None:
        state["_sampler_iter_yielded"] -= 1
        state["_num_yielded"] -= 1
        size = make(sampler).batch_size
        # After a batch sampler there is none for accelerate to multiply with.
        assert ("samples_yielded" in state["_index_sampler_state"]) is (size is not None)
        if size is not None:
            state["_index_sampler_state"]["samples_yielded"] -= size
        state["_iterator_finished"] = False

    whole = epochs_of(make(sampler), 3)
    assert flat(edited(sampler, 4, one_less)) == whole[0][3:]
    # An iterator that was declared finished is followed by the next.
    for told in (False, True):
        other = edited(sampler, 3, lambda state: state.update(_iterator_finished=True))
        if told:
            other.set_epoch(1)
        assert [flat(other), flat(other)] == whole[1:]
    # An end that was declared none leaves an empty rest.
    other = edited(sampler, 99, lambda state: state.update(_iterator_finished=False))
    assert flat(other) == []
    assert other.state_dict()["_hybridloader"]["epoch"] == 1
    assert flat(other) == whole[1]


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
        with pytest.raises((TypeError, ValueError), match="epoch must be"):
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
            with pytest.warns(UserWarning, match=r"set_epoch\(5\) drops the position.*epoch 1"):
                other.set_epoch(epoch)
            assert len(flat(other)) == BATCHES


# -- ranks -----------------------------------------------------------------------------------------


def ranks(replicas: int, length: int, batch: int, uneven: str) -> list[DataLoader]:
    return [
        DataLoader(
            range(length),  # type: ignore[arg-type]
            batch,
            sampler=DistributedShuffleSampler(
                length, 2, num_replicas=replicas, rank=rank, uneven=uneven
            ),
        )
        for rank in range(replicas)
    ]


def test_the_state_of_one_rank_serves_all_with_torchs_sampler_and_no_other_number_of_them() -> None:
    """Lightning and accelerate save one state for all ranks."""

    def ranked(rank: int, replicas: int) -> DataLoader:
        sampler = DistributedSampler(NUMBERS, replicas, rank, seed=3)
        return DataLoader(NUMBERS, BATCH, sampler=sampler)

    _, state = left_after(ranked(0, 2), 1)
    for rank in range(2):
        whole, other = flat(ranked(rank, 2)), ranked(rank, 2)
        other.load_state_dict(state)
        assert flat(other) == whole[1:]
    with pytest.raises(StateError, match="of rank 0 of 2, and this is rank 0 of 3"):
        ranked(0, 3).load_state_dict(state)
