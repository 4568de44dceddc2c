"""States of datasets that workers read: when they are taken, and that the resumed stream is right."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.sampler_loaders import listed, pace
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from hybridloader import DataLoader, StatefulDataLoader, Threads

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


class Curriculum(Dataset[int]):
    """Dataset whose samples depend on how many it has given."""

    def __init__(self) -> None:
        self.level = 0

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> int:
        self.level += 1
        if index == 7:
            raise LookupError("sample 7")
        return self.level * 100 + index

    def state_dict(self) -> dict[str, Any]:
        return {"level": self.level}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.level = state["level"]


class Growing(IterableDataset[int]):
    """Dataset whose samples depend on all before them."""

    def __init__(self) -> None:
        self.sum, self.at = 0, 0

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        first = 0 if info is None else 100 * info.id
        while self.at < 11:
            self.at += 1
            self.sum += first + self.at
            yield self.sum
        self.at = 0

    def state_dict(self) -> dict[str, Any]:
        return {"sum": self.sum, "at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.sum, self.at = state["sum"], state["at"]


def ahead_of(iterator: Any, count: int) -> list[Any]:
    """Return `count` results, with errors in their places."""
    found: list[Any] = []
    for _ in range(count):
        try:
            found += listed([next(iterator)])
        except StopIteration:
            break
        except LookupError as error:
            found.append(str(error))
    return found


@pytest.mark.parametrize(
    ("kind", "policy", "where"),
    [
        (Growing, "skip", (2, "inline")),
        (Curriculum, "raise", (2, "fork")),
        (Growing, "raise", (2, "fork")),
    ],
    ids=str,
)
def test_a_dataset_is_where_it_was_also_between_two_of_its_states(
    kind: type[Any], policy: str, where: tuple[int, str], every: Callable[[int], None]
) -> None:
    every(3)
    workers, backend = where

    def loader() -> DataLoader:
        dataset = kind()
        return DataLoader(dataset, 2, num_workers=workers, backend=backend, on_error=policy)

    whole = ahead_of(iter(loader()), 20)
    counts = range(1, len(whole)) if backend == "inline" else (2, 7)
    for count in counts:
        one = loader()
        taken = ahead_of(iter(one), count)
        state = one.state_dict()
        between = loader()
        between.load_state_dict(state)
        iterator = iter(between)
        taken += ahead_of(iterator, 1)
        last = loader()
        last.load_state_dict(between.state_dict())
        assert taken + ahead_of(iter(last), 20) == whole, count


class Dying(Curriculum):
    """Dataset whose worker dies once."""

    def __init__(self, flag: Path) -> None:
        super().__init__()
        self.flag = flag

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> int:
        if index == 2 and not self.flag.exists():
            self.flag.touch()
            os._exit(3)
        return super().__getitem__(index)


def test_how_a_worker_began_that_took_the_place_of_another_is_not_told_of_the_next_pass(
    tmp_path: Path,
) -> None:
    dataset = Dying(tmp_path / "died")
    loader = StatefulDataLoader(
        dataset,
        1,
        num_workers=1,
        persistent_workers=True,
        on_worker_death="restart",
        backend="fork",
    )
    assert len(list(loader)) == 6
    iterator = iter(loader)
    told = loader.state_dict()["_snapshot"]["_worker_snapshots"]["worker_0"]
    following = next(iterator).item()
    assert told["dataset_state"]["level"] == following // 100 - 1 > 0
    iterator.close()  # type: ignore[attr-defined]


parts = st.lists(
    st.tuples(st.integers(0, 6), st.booleans(), st.integers(1, 4)), min_size=1, max_size=4
)


@given(st.sampled_from([Curriculum, Growing]), st.integers(0, 3), st.integers(1, 5), parts)
@settings(max_examples=60, deadline=None)
def test_a_dataset_stopped_anywhere_on_any_backend_gives_one_stream(
    kind: type[Any], workers: int, steps: int, legs: list[tuple[int, bool, int]]
) -> None:
    def loader(threads: bool, ahead: int) -> DataLoader:
        backend: Any = Threads(copy_dataset=True) if threads and workers else "inline"
        more: dict[str, Any] = {"prefetch_factor": ahead} if workers else {}
        return DataLoader(kind(), 2, num_workers=workers, backend=backend, **more)

    with pytest.MonkeyPatch.context() as patch:
        pace(patch, steps)
        whole = ahead_of(iter(loader(False, 2)), 99)
        taken: list[Any] = []
        state: dict[str, Any] = {}
        for count, threads, ahead in legs:
            one = loader(threads, ahead)
            one.load_state_dict(state)
            taken += ahead_of(iter(one), min(count, len(whole) - len(taken)))
            state = one.state_dict()
        last = loader(False, 2)
        last.load_state_dict(state)
        assert taken + ahead_of(iter(last), 99) == whole


class Module(torch.nn.Module):
    """Dataset that is a module: its state is its parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.arange(300_000.0))

    def __len__(self) -> int:
        return 400

    def __getitem__(self, index: int) -> float:
        return self.weight[index].item()


def test_a_module_is_resumed_from_a_copy_of_its_parameters() -> None:
    loader = DataLoader(Module(), 20, num_workers=2, backend="threads")  # type: ignore[arg-type]
    iterator = iter(loader)
    taken = [next(iterator) for _ in range(7)]
    one = loader.state_dict()
    assert one["dataset_state"]["weight"].data_ptr() != loader.dataset.weight.data_ptr()
    other = DataLoader(Module(), 20, num_workers=2, backend="threads")  # type: ignore[arg-type]
    other.load_state_dict(one)
    assert torch.cat([*taken, *other]).tolist() == list(range(400))
