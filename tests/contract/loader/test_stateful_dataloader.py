"""`StatefulDataLoader` without torchdata: its form, states that torchdata saved, and what is our own.

tests/frameworks/test_torchdata.py holds it against torchdata itself.
"""

from __future__ import annotations

import functools
import json
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support.sampler_loaders import time_states
from support.state_cases import LENGTH, Ordered, Plain
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from hybridloader import StateError, StatefulDataLoader, Threads

COPIES = Threads(copy_dataset=True)
BACKENDS = pytest.mark.parametrize("backend", ["fork", COPIES], ids=["fork", "threads"])


class Counted(Dataset[Any]):
    """Map-style dataset that counts its samples, which is its state, and calls of `state_dict`."""

    def __init__(self) -> None:
        self.given = self.asked = 0

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> list[int]:
        self.given += 1
        return [index, self.given, self.asked]

    def state_dict(self) -> dict[str, Any]:
        self.asked += 1
        return {"given": self.given}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.given = state["given"]


class Stream(IterableDataset[Any]):
    """Samples of one worker, with the number of the epoch, which it counts itself."""

    at = epoch = begin = loads = 0

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        number, self.at, self.begin = 0 if info is None else info.id, self.begin, 0
        while self.at < 3 + number:
            self.at += 1
            yield [number, self.at, self.epoch]
        self.at = 0
        self.epoch += 1

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at, "epoch": self.epoch}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.begin, self.epoch, self.loads = state["at"], state["epoch"], self.loads + 1


def same(batch: list[Any]) -> list[Any]:
    return batch


def loader_of(dataset: Any, *args: Any, **options: Any) -> StatefulDataLoader:
    return StatefulDataLoader(dataset, *args, collate_fn=same, **options)


# -- states that torchdata 0.11 saved ----------------------------------------------------------------

MAIN: dict[str, Any] = {
    "_sampler_iter_state": {"samples_yielded": 6},
    "_index_sampler_state": None,
    "_sampler_iter_yielded": 2,
    "_IterableDataset_len_called": None,
    "_shared_seed": None,
}
ALONE: dict[str, Any] = {
    **MAIN,
    "_num_yielded": 2,
    "fetcher_state": None,
    "dataset_state": {"given": 6},
    "_iterator_finished": False,
}


def of_workers(
    main: dict[str, Any], workers: list[Any], *, step: int, last: int, since: int = 0
) -> dict[str, Any]:
    return {
        "_snapshot": {
            "_snapshot_step": step,
            "_last_yielded_worker_id": last,
            "_main_snapshot": {"_num_workers": len(workers), **main, "_base_seed": 5},
            "_worker_snapshots": {
                f"worker_{number}": {"worker_id": number, **worker}
                for number, worker in enumerate(workers)
            },
        },
        "_steps_since_snapshot": since,
        "_iterator_finished": False,
    }


def test_a_state_that_torchdata_saved_without_workers_is_gone_on_from() -> None:
    loader = loader_of(Counted(), 3)
    loader.load_state_dict(ALONE)
    assert loader.state_dict() == ALONE
    assert [[n for n, *_ in batch] for batch in loader] == [[6, 7, 8], [9, 10, 11]]
    assert loader.dataset.given == 12  # type: ignore[attr-defined]


@BACKENDS
def test_a_state_that_torchdata_saved_with_workers_is_gone_on_from(backend: Any) -> None:
    workers = [{"dataset_state": {"given": n}, "fetcher_state": None} for n in (30, 50)]
    state = of_workers(MAIN, workers, step=2, last=1, since=1)
    loader = loader_of(Counted(), 3, num_workers=2, backend=backend)
    loader.load_state_dict(state)
    assert loader.state_dict() == state
    assert [[sample[:2] for sample in batch] for batch in loader] == [[[9, 51], [10, 52], [11, 53]]]


@BACKENDS
def test_a_stream_that_torchdata_broke_off_is_gone_on_from(backend: Any) -> None:
    states = [({"at": 0, "epoch": 1}, True), ({"at": 2, "epoch": 7}, False)]
    workers = [
        {
            "dataset_state": own,
            "fetcher_state": {"dataset_iter_state": None, "fetcher_ended": ended},
        }
        for own, ended in states
    ]
    loader = loader_of(Stream(), 1, num_workers=2, backend=backend)
    loader.load_state_dict(of_workers(MAIN, workers, step=2, last=0))
    # torchdata itself would read all of the part that had ended once more.
    assert list(loader) == [[[1, 3, 7]], [[1, 4, 7]]]


def test_an_order_that_torchdata_drew_is_drawn_on() -> None:
    generator = torch.Generator().manual_seed(8)
    before = generator.get_state()
    order = torch.randperm(12, generator=generator).tolist()
    following = torch.randperm(12, generator=generator).tolist()
    sampler = {"samples_yielded": 8, "sampler_iter_state": {"yielded": 8, "generator": before}}
    loader = loader_of(range(12), 4, shuffle=True)
    loader.load_state_dict({**ALONE, "dataset_state": None, "_sampler_iter_state": sampler})
    assert [*loader] == [order[8:]]
    batches = iter(loader)
    assert next(batches) == following[:4]
    state = loader.state_dict()["_sampler_iter_state"]
    assert state["samples_yielded"] == state["sampler_iter_state"]["yielded"]
    assert [index for batch in batches for index in batch] == following[4:]


def test_single_samples_and_their_order_are_those_of_torchdata() -> None:
    loader = loader_of(range(LENGTH), None, sampler=Ordered())
    state = {**ALONE, "_num_yielded": 20, "_sampler_iter_yielded": 20}
    state |= {"dataset_state": None, "_sampler_iter_state": None}
    state["_index_sampler_state"] = {"order": [*range(LENGTH)], "at": 20}
    loader.load_state_dict(state)
    assert [*loader] == [20, 21, 22]
    # Without a state of the sampler, and of its iterator, the items are counted.
    loader = loader_of(range(12), 3)
    loader.load_state_dict({**ALONE, "dataset_state": None, "_sampler_iter_state": None})
    assert [*loader] == [[6, 7, 8], [9, 10, 11]]
    loader = loader_of(range(12), 3, shuffle=True)
    generator = {"yielded": 13, "generator": torch.Generator().get_state()}
    order = {"samples_yielded": 6, "sampler_iter_state": generator}
    loader.load_state_dict({**ALONE, "dataset_state": None, "_sampler_iter_state": order})
    with pytest.raises(StateError, match="yielded is 13 in the state, and the sampler has 12 ind"):
        iter(loader)


def test_a_stream_without_workers_is_gone_on_from_by_its_state_or_read_again() -> None:
    state = {**ALONE, "dataset_state": {"at": 1, "epoch": 4}}
    loader = loader_of(Stream(), 1)
    loader.load_state_dict(state)
    assert [*loader] == [[[0, 2, 4]], [[0, 3, 4]]]
    assert loader.dataset.loads == 1  # type: ignore[attr-defined]
    assert [*loader] == [[[0, n, 5]] for n in (1, 2, 3)]
    state["dataset_state"] = None
    state["fetcher_state"] = {"dataset_iter_state": None, "fetcher_ended": False}
    loader = loader_of(Plain(), 2)
    loader.load_state_dict(state)
    batches = iter(loader)
    assert next(batches) == [4, 5]
    assert loader.state_dict()["_num_yielded"] == 3
    assert [*batches] == [[6, 7], [8]]


class Seeds(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        yield get_worker_info().seed  # type: ignore[union-attr]


def test_after_an_end_that_torchdata_saved_workers_get_another_seed() -> None:
    worker = {"dataset_state": None, "fetcher_state": None}
    state = of_workers(MAIN, [worker], step=2, last=0)
    torch.manual_seed(3)
    loader = loader_of(Seeds(), 1, num_workers=1, backend="threads")
    ((first,),) = loader
    torch.manual_seed(3)
    loader.load_state_dict({**state, "_iterator_finished": True})
    assert len({5, first, *(seed for _ in range(2) for ((seed,),) in [loader])}) == 4


def test_after_an_end_that_torchdata_saved_the_sampler_begins_again() -> None:
    order = [*range(LENGTH)][::-1]
    sampler = {"samples_yielded": LENGTH, "sampler_state": {"order": order, "at": 0}}
    state = {**ALONE, "dataset_state": None, "_sampler_iter_state": sampler}
    state |= {"_num_yielded": 2, "_sampler_iter_yielded": 2, "_iterator_finished": True}
    loader = loader_of(range(LENGTH), 12, sampler=Ordered())
    loader.load_state_dict(state)
    for _ in range(2):
        assert [*loader] == [order[:12], order[12:]]


# -- our own states, in that form --------------------------------------------------------------------


plain = functools.partial(json.dumps, default=torch.Tensor.tolist)


@pytest.mark.parametrize(("dataset", "backend"), [(Counted, "fork"), (Stream, COPIES)])
def test_a_state_is_json_but_for_generators_and_a_copy(dataset: type, backend: Any) -> None:
    def made() -> StatefulDataLoader:
        return loader_of(dataset(), 2, num_workers=2, backend=backend)

    loader = made()
    whole = list(made())
    iterator = iter(loader)
    taken = [next(iterator) for _ in range(3)]
    state = loader.state_dict()
    kept = pickle.dumps(state)
    text = plain(state)
    rest = list(iterator)
    assert plain(state) == text
    assert state["_snapshot"]["_snapshot_step"] == 3
    assert state["_snapshot"]["_worker_snapshots"].keys() == {"worker_0", "worker_1"}
    again = made()
    again.load_state_dict(pickle.loads(kept))
    assert plain(again.state_dict()) == text
    assert [[s[:2] for s in b] for b in again] == [[s[:2] for s in b] for b in rest]
    assert [[s[:2] for s in b] for b in taken + rest] == [[s[:2] for s in b] for b in whole]


@pytest.mark.parametrize("stays", [False, True])
def test_before_any_pass_the_first_one_is_begun_and_is_then_given(stays: bool) -> None:
    loader = loader_of(Counted(), 3, num_workers=2, backend=COPIES, persistent_workers=stays)
    state = loader.state_dict()
    begun = loader._iterator
    told = state["_snapshot"]["_worker_snapshots"]
    assert [worker["dataset_state"] for worker in told.values()] == [{"given": 0}] * 2
    iterator = iter(loader)
    assert iterator is begun
    assert len(list(iterator)) == 4
    assert (iter(loader) is begun) is stays


def test_what_workers_tell_and_how_often(monkeypatch: pytest.MonkeyPatch) -> None:
    # A pause of the process within the first state would make states seem to be dear.
    time_states(monkeypatch, lambda: 0.0)

    def asked(steps: int | None) -> int:
        options: dict[str, Any] = {"num_workers": 1, "snapshot_every_n_steps": steps}
        loader = loader_of(Counted(), 1, backend="inline", **options)
        whole = list(loader)
        for broken_off in (5, 6):
            iterator = iter(first := loader_of(Counted(), 1, backend="inline", **options))
            for _ in range(broken_off):
                next(iterator)
            other = loader_of(Counted(), 1, backend="inline", **options)
            other.load_state_dict(first.state_dict())
            numbers = [sample[:2] for (sample,) in other]
            assert numbers == [sample[:2] for (sample,) in whole[broken_off:]]
        count: int = whole[-1][0][2]
        return count

    # When it begins, with the first batch, and with every so many behind that.
    assert [asked(1), asked(4), asked(0), asked(None)] == [12, 4, 2, 2]
    for wrong in (-1, 1.5, True, "1"):
        with pytest.raises((TypeError, ValueError), match="snapshot_every_n_steps must be"):
            loader_of(Counted(), snapshot_every_n_steps=wrong)


def test_another_number_of_workers_is_refused_by_iter_where_workers_have_a_state() -> None:
    first = loader_of(Counted(), 3, num_workers=2, backend=COPIES)
    state = first.state_dict()
    other = loader_of(Counted(), 3)
    other.load_state_dict(state)
    for error in (AssertionError, StateError):
        with pytest.raises(error, match="_num_workers is 2 in the state and 0 in this loader"):
            iter(other)
    other.load_state_dict({})
    assert len(list(other)) == 4

    # Where they have none, any number will do, which torchdata refuses.
    whole = loader_of(range(12), 3, shuffle=True, num_workers=2, backend="threads")
    iterator = iter(whole)
    next(iterator)
    other = loader_of(range(12), 3, shuffle=True)
    other.load_state_dict(whole.state_dict())
    assert list(other) == list(iterator)


def test_a_state_that_is_none_is_refused_by_name_and_what_was_loaded_before_stays() -> None:
    loader, before = loader_of(range(12), 3), {**ALONE, "dataset_state": None}
    loader.load_state_dict(before)
    for wrong, text in [
        ([1], "is a dict, got list"),
        ({"epoch": 1}, "it has epoch"),
        ({**ALONE, "_sampler_iter_yielded": -1}, "_sampler_iter_yielded is -1"),
        ({**ALONE, "_sampler_iter_yielded": 9}, "has only 4 items"),
    ]:
        with pytest.raises(StateError, match=text):
            loader.load_state_dict(wrong)  # type: ignore[arg-type]
        assert loader.state_dict() == before
    assert len(list(loader)) == 2


def failing(worker: int) -> None:
    raise ArithmeticError(f"init of {worker}")


@BACKENDS
def test_what_the_beginning_of_a_worker_raises_is_raised_by_iter(backend: Any) -> None:
    loader = loader_of(Counted(), num_workers=2, backend=backend, worker_init_fn=failing)
    with pytest.raises(ArithmeticError, match="init of"):
        iter(loader)
