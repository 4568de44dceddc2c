"""torchdata: `Stateful` datasets and samplers under our loader, and the keys of a loader's state."""

from __future__ import annotations

import copy
import functools
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support.seeded_training import LIKE_TORCHS_PROCESSES, WORKERS, Augmented, losses, torch_loader
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from hybridloader import DataLoader, Threads

pytest.importorskip("torchdata")
from torchdata.stateful_dataloader import Stateful, StatefulDataLoader, stateful_dataloader
from torchdata.stateful_dataloader.sampler import (
    BatchSampler,
    RandomSampler,
    StatefulDistributedSampler,
)

BATCH = 4
BACKENDS: list[Any] = ["fork", "threads", Threads(copy_dataset=True), "inline"]
NAMES = ["fork", "threads", "threads that copy", "inline"]


class Walk(IterableDataset[torch.Tensor]):
    """A random walk of each worker, with its place and its generator as its state."""

    def __init__(self, length: int = 13) -> None:
        self.length = length
        self.begin()

    def begin(self) -> None:
        self.at, self.value, self.drawn = 0, 0, torch.Generator()

    def __iter__(self) -> Iterator[torch.Tensor]:
        info = get_worker_info()
        if self.at == 0:
            self.drawn.manual_seed(0 if info is None else info.id)
        while self.at < self.length:
            self.value += int(torch.randint(-9, 10, (), generator=self.drawn))
            self.at += 1
            yield torch.tensor([self.at, self.value])
        self.begin()

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at, "value": self.value, "drawn": self.drawn.get_state()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.at, self.value = state_dict["at"], state_dict["value"]
        self.drawn.set_state(state_dict["drawn"])


class Stepping:
    """An iterator with the state; its dataset has none."""

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Stepping:
        return self

    def __next__(self) -> int:
        if self.at == 11:
            raise StopIteration
        self.at += 1
        return self.at

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.at = state_dict["at"]


class Steps(IterableDataset[int]):
    def __iter__(self) -> Stepping:
        return Stepping()


class Counted(Dataset[int]):
    """Map-style dataset; its state is the number of samples that this copy has given."""

    def __init__(self) -> None:
        self.given = 0

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> tuple[int, int]:
        self.given += 1
        return index, self.given

    def state_dict(self) -> dict[str, Any]:
        return {"given": self.given}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.given = state_dict["given"]


def values(batches: Any) -> list[Any]:
    return [
        [part.tolist() for part in batch] if isinstance(batch, list) else batch.tolist()
        for batch in batches
    ]


def broken_off(loader: Any, batches: int) -> tuple[list[Any], Any]:
    """Return the first batches and the state after them, pickled and unpickled."""
    iterator = iter(loader)
    taken = values(next(iterator) for _ in range(batches))
    state = pickle.loads(pickle.dumps(loader.state_dict()))
    del iterator
    return taken, state


MADE: dict[str, Any] = {"dataset": Walk, "iterator": Steps, "by index": Counted}


CASES = [
    (made, backend)
    for made in MADE
    for backend in BACKENDS
    if (made, backend) != ("by index", "threads")  # they share one dataset, and so its state
]


@functools.cache
def torchdatas(made: str, after: int) -> tuple[list[Any], list[Any]]:
    """Return the batches of a torchdata loader before and after a state."""

    def loader() -> Any:
        return StatefulDataLoader(MADE[made](), BATCH - 1, num_workers=WORKERS)

    taken, state = broken_off(loader(), after)
    other = loader()
    other.load_state_dict(state)
    return taken, values(other)


@pytest.mark.parametrize(
    ("made", "backend"),
    CASES,
    ids=[f"{made}-{NAMES[BACKENDS.index(backend)]}" for made, backend in CASES],
)
@pytest.mark.parametrize("after", [1, 4])
def test_a_stateful_dataset_goes_on_as_with_torchdatas_loader(
    after: int, made: str, backend: Any
) -> None:
    dataset = MADE[made]

    def ours() -> DataLoader:
        return DataLoader(dataset(), BATCH - 1, num_workers=WORKERS, backend=backend)

    assert isinstance(iter(dataset()) if made == "iterator" else dataset(), Stateful)
    whole = values(ours())
    taken, state = broken_off(ours(), after)
    loader = ours()
    loader.load_state_dict(state)
    assert (taken, values(loader)) == torchdatas(made, after)
    assert [*torchdatas(made, after)[0], *torchdatas(made, after)[1]] == whole
    assert values(loader) == whole


@pytest.mark.parametrize("made", MADE)
def test_without_workers_the_callers_own_dataset_goes_on(made: str) -> None:
    found = []
    for kind in (StatefulDataLoader, DataLoader):
        taken, state = broken_off(kind(MADE[made](), BATCH - 1), 2)
        loader = kind(MADE[made](), BATCH - 1)
        loader.load_state_dict(state)
        found.append((taken, values(loader)))
    assert found[0] == found[1]


@pytest.mark.parametrize("workers", [0, WORKERS])
@pytest.mark.parametrize("sampler", ["random", "random batches", "distributed"])
def test_torchdatas_samplers_go_on(sampler: str, workers: int) -> None:
    data = Augmented(noise=0)
    backend = "threads" if workers else None

    def options() -> dict[str, Any]:
        if sampler == "distributed":
            return {"batch_size": 3, "sampler": StatefulDistributedSampler(data, 2, 1, seed=4)}
        random = RandomSampler(data, generator=torch.Generator().manual_seed(4))
        if sampler == "random":
            return {"batch_size": BATCH, "sampler": random}
        return {"batch_sampler": BatchSampler(random, BATCH, drop_last=False)}

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
    sampler = RandomSampler(Augmented(), generator=torch.Generator().manual_seed(4))
    return {"batch_size": BATCH, "sampler": sampler, "num_workers": WORKERS}


@functools.cache
def torchs_losses() -> list[float]:
    torch.manual_seed(3)
    return losses(torch_loader(Augmented(), **sampled()))


@pytest.mark.parametrize("backend", LIKE_TORCHS_PROCESSES)
def test_losses_are_those_of_torchs_loader(backend: str | None) -> None:
    torch.manual_seed(3)
    assert losses(DataLoader(Augmented(), backend=backend, **sampled())) == torchs_losses()


def test_a_sampler_that_draws_in_iter_gives_torchs_order_and_not_that_of_torchdatas_loader() -> (
    None
):
    """With workers torchdata's loader begins it once more; ours is a drop-in for torch's."""
    dataset = Augmented(noise=0)
    ours = values(DataLoader(dataset, backend="threads", **sampled()))
    assert ours == values(torch_loader(dataset, **sampled()))
    assert ours != values(StatefulDataLoader(dataset, **sampled()))


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


@pytest.mark.parametrize("made", ["shuffled", *MADE])
@pytest.mark.parametrize("workers", [0, WORKERS])
def test_r37_the_keys_of_a_state_are_torchdatas(made: str, workers: int) -> None:
    def loader(kind: Any, **more: Any) -> Any:
        dataset = Augmented(noise=0) if made == "shuffled" else MADE[made]()
        return kind(dataset, 3, shuffle=True if made == "shuffled" else None, **more)

    _, theirs = broken_off(loader(StatefulDataLoader), 2)
    _, ours = broken_off(loader(DataLoader, num_workers=workers, backend="inline"), 2)
    assert set(theirs) <= set(ours)
    assert set(ours) - {"_hybridloader"} <= THEIR_KEYS
    for name in ("_num_yielded", "_sampler_iter_yielded", "_iterator_finished"):
        assert ours[name] == theirs[name], name
    if made == "shuffled":  # accelerate edits it, wherever torchdata has it
        assert ours["_index_sampler_state"]["samples_yielded"] == 2 * 3
        assert theirs["_sampler_iter_state"]["samples_yielded"] == 2 * 3


def test_a_state_of_torchdatas_loader_is_refused_and_named() -> None:
    for workers in (0, 1):
        loader = StatefulDataLoader(Augmented(noise=0), BATCH, num_workers=workers)
        _, state = broken_off(loader, 2)
        with pytest.raises(ValueError, match="that of a StatefulDataLoader"):
            DataLoader(Augmented(noise=0), BATCH).load_state_dict(state)


def test_a_state_is_a_dict_of_the_callers_own() -> None:
    _, state = broken_off(DataLoader(Walk(), 3, num_workers=WORKERS, backend="threads"), 3)
    for _ in range(2):
        loader = DataLoader(Walk(), 3, num_workers=WORKERS, backend="threads")
        given = copy.deepcopy(state)
        loader.load_state_dict(given)
        found = values(loader)
        assert len(found) == 2 * 5 - 3
