"""torchdata: `StatefulDataLoader` beside theirs, each loading the other's states, and `DataLoader`."""

from __future__ import annotations

import functools
import inspect
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from support.seeded_training import WORKERS, Augmented, torch_loader
from torch.utils.data import BatchSampler, Dataset, IterableDataset, RandomSampler, get_worker_info

from hybridloader import DataLoader, StatefulDataLoader, Threads

pytest.importorskip("torchdata")
from torchdata.stateful_dataloader import StatefulDataLoader as Theirs
from torchdata.stateful_dataloader import stateful_dataloader
from torchdata.stateful_dataloader.sampler import BatchSampler as TheirBatchSampler
from torchdata.stateful_dataloader.sampler import RandomSampler as TheirRandomSampler
from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

BATCH = 4

BACKENDS: dict[str, Any] = {
    "fork": "fork",
    "threads": Threads(copy_dataset=True),
    "inline": "inline",
}


class Squares(Dataset[int]):
    """Map-style dataset without a state."""

    def __len__(self) -> int:
        return 13

    def __getitem__(self, index: int) -> int:
        return index * index


class Counted(Squares):
    """Map-style dataset; its state is the number of samples that this copy has given."""

    given = 0

    def __getitem__(self, index: int) -> Any:
        self.given += 1
        return index, self.given

    def state_dict(self) -> dict[str, Any]:
        return {"nest": {"given": self.given}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.given = state["nest"]["given"]


def shard() -> range:
    info = get_worker_info()
    # Of three workers, the first has nothing.
    return range(17) if info is None else [range(0), range(11), range(20, 26)][info.id]


class Plain(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(shard())


class Placed(Plain):
    """Sampler with a state, which is reset at the end of an epoch."""

    at = epoch = 0
    begin = 0

    def __iter__(self) -> Iterator[Any]:
        self.at, self.begin = self.begin, 0
        for value in shard()[self.at :]:
            self.at += 1
            yield value, self.epoch
        self.at = 0
        self.epoch += 1

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at, "epoch": self.epoch}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.begin, self.epoch = state["at"], state["epoch"]


class Steps:
    """An iterator with a state, of which the generator is a part."""

    def __init__(self, values: range, drawing: bool = True) -> None:
        self.values, self.at, self.drawing = values, 0, drawing

    def __iter__(self) -> Steps:
        return self

    def __next__(self) -> Any:
        if self.at == len(self.values):
            raise StopIteration
        self.at += 1
        value = self.values[self.at - 1]
        return (value, int(torch.randint(1000, ()))) if self.drawing else value

    def state_dict(self) -> dict[str, Any]:
        return {"nest": {"at": self.at, "drawn": torch.get_rng_state() if self.drawing else None}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["nest"]["at"]
        if self.drawing:
            torch.set_rng_state(state["nest"]["drawn"])


class Stepped(Plain):
    def __init__(self, drawing: bool = True) -> None:
        self.drawing = drawing

    def __iter__(self) -> Any:
        return Steps(shard(), self.drawing)


class Itself(Plain):
    """Sampler that is its own iterator."""

    at = 0

    def __iter__(self) -> Any:
        self.values, self.at = shard(), 0
        return self

    def __next__(self) -> Any:
        if self.at == len(self.values):
            raise StopIteration
        self.at += 1
        return self.values[self.at - 1]

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


class Places:
    """A sampler whose iterator has a state."""

    def __len__(self) -> int:
        return 13

    def __iter__(self) -> Any:
        return Steps(range(13), drawing=False)


class Turns:
    """A sampler with a state of its own, which is another order in each epoch."""

    at = epoch = 0
    begin: int | None = None

    def __len__(self) -> int:
        return 13

    def __iter__(self) -> Iterator[int]:
        if self.begin is not None:
            self.at, self.begin = self.begin, None
        for place in range(self.at, 13):
            self.at += 1
            yield (place + self.epoch) % 13
        self.at = 0
        self.epoch += 1

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at, "epoch": self.epoch}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.begin, self.epoch = state["at"], state["epoch"]


def seeded(seed: int = 3) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


Made = Callable[[], tuple[Dataset[Any], dict[str, Any]]]

BY_INDEX: dict[str, Made] = {
    "in order": lambda: (Squares(), {"batch_size": 3}),
    "shuffled": lambda: (Squares(), {"batch_size": 3, "shuffle": True}),
    "by a generator": lambda: (
        Squares(),
        {"batch_size": 3, "shuffle": True, "generator": seeded(), "drop_last": True},
    ),
    "torch's sampler": lambda: (
        Squares(),
        {"batch_size": 3, "sampler": RandomSampler(Squares(), generator=seeded())},  # type: ignore[arg-type]
    ),
    "their sampler": lambda: (
        Squares(),
        {"batch_size": 2, "sampler": StatefulDistributedSampler(Squares(), 2, 1)},
    ),
    "an iterator's state": lambda: (Squares(), {"batch_size": 3, "sampler": Places()}),
    "a sampler's state": lambda: (Squares(), {"batch_size": 3, "sampler": Turns()}),
    "no batches": lambda: (Squares(), {"batch_size": None, "sampler": Turns()}),
    "no batches, shuffled": lambda: (Squares(), {"batch_size": None, "shuffle": True}),
    "batches of their own": lambda: (
        Squares(),
        {"batch_sampler": BatchSampler(range(13), 4, False)},
    ),
    "a counter": lambda: (Counted(), {"batch_size": 3}),
}
ITERABLE: dict[str, Made] = {
    "plain": lambda: (Plain(), {"batch_size": 3}),
    "placed": lambda: (Placed(), {"batch_size": 3}),
    "stepped": lambda: (Stepped(), {"batch_size": 3}),
    "steps": lambda: (Stepped(drawing=False), {"batch_size": 3}),
    "itself": lambda: (Itself(), {"batch_size": 3}),
    "placed, no batches": lambda: (Placed(), {"batch_size": None}),
}
MADE = BY_INDEX | ITERABLE


def values(batches: Any) -> list[Any]:
    return [
        [torch.as_tensor(part).tolist() for part in batch]
        if isinstance(batch, (list, tuple))
        else torch.as_tensor(batch).tolist()
        for batch in batches
    ]


def loader_of(kind: Any, made: str, workers: int, **more: Any) -> Any:
    torch.manual_seed(11)
    dataset, options = MADE[made]()
    return kind(dataset, num_workers=workers, **{**options, **more})


def epochs(loader: Any, count: int) -> list[list[Any]]:
    return [values(loader) for _ in range(count)]


@functools.cache
def whole(made: str, workers: int, stays: bool) -> list[list[Any]]:
    """Three epochs of torchdata's loader."""
    return epochs(loader_of(Theirs, made, workers, persistent_workers=stays), 3)


def saved(kind: Any, made: str, workers: int, after: int | None, **more: Any) -> Any:
    """The state behind so many batches of the second epoch, or behind its end, as from a file."""
    loader = loader_of(kind, made, workers, **more)
    values(loader)
    iterator = iter(loader)
    taken = values(iterator if after is None else (next(iterator) for _ in range(after)))
    state = pickle.loads(pickle.dumps(loader.state_dict()))
    assert taken == whole(made, workers, more["persistent_workers"])[1][: len(taken)]
    return state


def expected(made: str, workers: int, after: int | None, stays: bool) -> list[list[Any]]:
    """The rest of the second epoch and the third one; only the third behind the end of the second."""
    _, second, third = whole(made, workers, stays)
    return [third] if after is None else [second[after:], third]


def shape(state: Any) -> Any:
    """The keys of a state, without what our own samplers and datasets put in, nor our own key."""
    if not isinstance(state, dict):
        return None
    return {key: shape(value) for key, value in state.items() if key != "_hybridloader"}


ALONE = [(made, 0) for made in MADE]
WITH_WORKERS = [
    ("shuffled", 2),
    ("a sampler's state", 2),
    ("a counter", 2),
    ("placed", 3),
    ("itself", 3),
]

LOST = {"torch's sampler", "by a generator"}
"""Samplers whose order torchdata's own loader does not restore: its states hold no generator."""


def test_the_signature_is_theirs_and_our_own_behind_it() -> None:
    theirs, ours = (inspect.signature(kind).parameters for kind in (Theirs, StatefulDataLoader))
    assert list(ours)[: len(theirs)] == list(theirs)
    for name, parameter in theirs.items():
        assert (ours[name].default, ours[name].kind) == (parameter.default, parameter.kind)
    assert all(p.kind is p.KEYWORD_ONLY for p in list(ours.values())[len(theirs) :])


@pytest.mark.parametrize(
    ("made", "workers", "backend"),
    [(made, 0, "inline") for made in MADE]
    + [(made, workers, backend) for made, workers in WITH_WORKERS for backend in BACKENDS],
)
def test_three_epochs_are_theirs(made: str, workers: int, backend: str) -> None:
    loader = loader_of(StatefulDataLoader, made, workers, backend=BACKENDS[backend])
    assert epochs(loader, 3) == whole(made, workers, False)


@pytest.fixture
def cheap(monkeypatch: pytest.MonkeyPatch) -> None:
    """States are taken each time, however busy the machine is: torchdata knows no others."""
    monkeypatch.setattr("hybridloader._support.states.SHARE", 1)


@pytest.mark.usefixtures("cheap")
@pytest.mark.filterwarnings("ignore:Plain has no state_dict:UserWarning")
@pytest.mark.parametrize("after", [0, 2, None])
@pytest.mark.parametrize(("made", "workers"), ALONE)
def test_without_workers_each_goes_on_from_the_others_state(
    made: str, workers: int, after: int | None
) -> None:
    theirs = saved(Theirs, made, 0, after, persistent_workers=False)
    ours = saved(StatefulDataLoader, made, 0, after, persistent_workers=False)
    assert shape(ours) == shape(theirs)
    found = []
    for kind, state in ((StatefulDataLoader, theirs), (StatefulDataLoader, ours), (Theirs, ours)):
        loader = loader_of(kind, made, 0)
        loader.load_state_dict(state)
        found.append(epochs(loader, 1 if after is None else 2))
    from_theirs, from_ours, by_them = found
    # There torch's own generator is part of the state, from which the next epoch's seed is drawn first.
    if not (made == "stepped" and after is None):
        assert from_ours == expected(made, 0, after, False)
        assert from_theirs == from_ours or made == "torch's sampler"
    if after and made not in LOST:
        assert by_them == from_ours


@pytest.mark.parametrize("stays", [False, True], ids=["go", "stay"])
@pytest.mark.parametrize(("after", "steps"), [(0, 1), (3, 1), (3, 2), (None, 1)])
@pytest.mark.parametrize(("made", "workers"), WITH_WORKERS)
def test_with_workers_their_state_is_gone_on_from(
    made: str, workers: int, after: int | None, steps: int, stays: bool
) -> None:
    if stays and (steps > 1 or made == "shuffled"):
        pytest.skip("covered by workers that end")
    options = {"persistent_workers": stays, "snapshot_every_n_steps": steps}
    theirs = saved(Theirs, made, workers, after, **options)
    backends = BACKENDS if (after, steps, stays) == (3, 1, False) else ["inline"]
    for backend in backends:
        loader = loader_of(StatefulDataLoader, made, workers, backend=BACKENDS[backend], **options)
        loader.load_state_dict(theirs)
        assert loader.state_dict().keys() == theirs.keys()
        found = epochs(loader, 1 if after is None else 2)
        assert found == expected(made, workers, after, stays), backend


@pytest.mark.usefixtures("cheap")
@pytest.mark.parametrize(("made", "workers"), WITH_WORKERS)
def test_with_workers_they_go_on_from_our_state(made: str, workers: int) -> None:
    state = saved(StatefulDataLoader, made, workers, 3, persistent_workers=False)
    assert shape(state) == shape(saved(Theirs, made, workers, 3, persistent_workers=False))
    loader = loader_of(Theirs, made, workers)
    loader.load_state_dict(state)
    assert epochs(loader, 2) == expected(made, workers, 3, False)


# -- datasets and samplers with a state under `DataLoader` --------------------------------------------

STATEFUL = ("placed", "steps", "a counter")


def broken_off(loader: Any, batches: int) -> tuple[list[Any], Any]:
    """Return the first batches and the state after them, pickled and unpickled."""
    iterator = iter(loader)
    taken = values(next(iterator) for _ in range(batches))
    state = pickle.loads(pickle.dumps(loader.state_dict()))
    del iterator
    return taken, state


@pytest.mark.parametrize("made", STATEFUL)
@pytest.mark.parametrize("after", [1, 3])
def test_a_stateful_dataset_goes_on_as_with_torchdatas_loader(after: int, made: str) -> None:
    """Without workers the caller's own dataset goes on, with workers their copies."""
    for workers, backend in (
        (0, None),
        (2, "fork"),
        (2, Threads(copy_dataset=True)),
        (2, "inline"),
    ):
        found = []
        for kind, options in ((Theirs, {}), (DataLoader, {"backend": backend})):
            taken, state = broken_off(loader_of(kind, made, workers, **options), after)
            for _ in range(2):  # the state stays the caller's own
                loader = loader_of(kind, made, workers, **options)
                loader.load_state_dict(state)
                found.append((taken, values(loader)))
        assert found[0] == found[2] == found[3], (workers, backend)
        whole = values(loader_of(DataLoader, made, workers, backend=backend))
        assert [*found[2][0], *found[2][1]] == whole


@pytest.mark.parametrize("workers", [0, WORKERS])
@pytest.mark.parametrize("sampler", ["random", "random batches", "distributed"])
def test_torchdatas_samplers_go_on(sampler: str, workers: int) -> None:
    data = Augmented(noise=0)
    backend = "threads" if workers else None

    def options() -> dict[str, Any]:
        if sampler == "distributed":
            return {"batch_size": 3, "sampler": StatefulDistributedSampler(data, 2, 1, seed=4)}
        random = TheirRandomSampler(data, generator=torch.Generator().manual_seed(4))
        if sampler == "random":
            return {"batch_size": BATCH, "sampler": random}
        return {"batch_sampler": TheirBatchSampler(random, BATCH, drop_last=False)}

    def ours() -> DataLoader:
        return DataLoader(data, num_workers=workers, backend=backend, **options())

    whole = values(torch_loader(data, num_workers=workers, **options()))
    assert values(ours()) == whole
    for after in (1, 3):
        taken, state = broken_off(ours(), after)
        loader = ours()
        loader.load_state_dict(state)
        assert taken + values(loader) == whole


def sampled() -> dict[str, Any]:
    sampler = TheirRandomSampler(Augmented(), generator=torch.Generator().manual_seed(4))
    return {"batch_size": BATCH, "sampler": sampler, "num_workers": WORKERS}


def test_a_sampler_that_draws_in_iter_gives_torchs_order_and_not_that_of_torchdatas_loader() -> (
    None
):
    """With workers torchdata's loader begins it once more; ours is a drop-in for torch's."""
    dataset = Augmented(noise=0)
    ours = values(DataLoader(dataset, backend="threads", **sampled()))
    assert ours == values(torch_loader(dataset, **sampled()))
    assert ours != values(Theirs(dataset, **sampled()))


# -- keys ------------------------------------------------------------------------------------------

THEIR_KEYS = {
    value
    for module in (stateful_dataloader, stateful_dataloader._StatefulSingleProcessDataLoaderIter)
    for name, value in vars(module).items()
    if name.startswith("_") and name.isupper() and isinstance(value, str)
} | {
    value
    for name, value in vars(stateful_dataloader._StatefulMultiProcessingDataLoaderIter).items()
    if name.startswith("_") and name.isupper() and isinstance(value, str)
}


@pytest.mark.parametrize("made", ["shuffled", *STATEFUL])
@pytest.mark.parametrize("workers", [0, WORKERS])
def test_r37_the_keys_of_a_state_are_torchdatas(made: str, workers: int) -> None:
    _, theirs = broken_off(loader_of(Theirs, made, 0), 2)
    _, ours = broken_off(loader_of(DataLoader, made, workers, backend="inline"), 2)
    assert set(theirs) <= set(ours)
    assert set(ours) - {"_hybridloader"} <= THEIR_KEYS
    for name in ("_num_yielded", "_sampler_iter_yielded", "_iterator_finished"):
        assert ours[name] == theirs[name], name
    if made == "shuffled":  # accelerate edits it, wherever torchdata has it
        assert ours["_index_sampler_state"]["samples_yielded"] == 2 * 3
        assert theirs["_sampler_iter_state"]["samples_yielded"] == 2 * 3


def test_a_state_of_torchdatas_loader_is_refused_and_named() -> None:
    for workers in (0, 1):
        loader = Theirs(Augmented(noise=0), BATCH, num_workers=workers)
        _, state = broken_off(loader, 2)
        with pytest.raises(ValueError, match="that of a StatefulDataLoader"):
            DataLoader(Augmented(noise=0), BATCH).load_state_dict(state)
