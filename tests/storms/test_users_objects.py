"""What users bring along: iterators they keep, wrappers, contexts, attributes of their subclasses."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from itertools import islice
from typing import Any

import pytest
import torch
from support.compat import Numbers, flat
from support.once import forget_warnings
from support.platforms import FORK
from torch.utils.data import DataLoader as TorchLoader
from torch.utils.data import IterableDataset, get_worker_info

from hybridloader import DataLoader, StatefulDataLoader

# -- iterators -------------------------------------------------------------------------------------


class Kept(IterableDataset[int]):
    """Dataset over one generator that it keeps, as over a socket."""

    def __init__(self) -> None:
        self.source = iter(number for number in range(1 << 60))

    def __iter__(self) -> Iterator[int]:
        return self.source


def test_a_look_at_one_batch_does_not_end_what_the_dataset_keeps() -> None:
    data = Kept()
    loader = DataLoader(data, 2)
    assert next(iter(loader)).tolist() == [0, 1]
    assert [batch.tolist() for batch in islice(loader, 2)] == [[2, 3], [4, 5]]
    assert next(data.source) == 6


# -- subclasses and attributes ---------------------------------------------------------------------


class OfAFramework(DataLoader):
    """A user's loader that means something else by `device`."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.device = 3.5  # type: ignore[assignment]


def test_an_attribute_that_is_read_as_an_option_is_named_when_it_can_not_be_one() -> None:
    loader = OfAFramework(Numbers(4), 2)
    with pytest.raises(TypeError, match="device"):
        iter(loader)


class Streamed(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        assert info is not None
        return iter([info.id] * 4)


@pytest.mark.filterwarnings("ignore:Streamed has no state_dict")
@pytest.mark.parametrize("kind", [DataLoader, StatefulDataLoader])
@pytest.mark.parametrize("backend", ["inline", "threads"])
def test_a_state_tells_of_the_workers_that_the_pass_has(backend: str, kind: Any) -> None:
    def loader(**more: Any) -> Any:
        return kind(Streamed(), 2, num_workers=2, backend=backend, **more)

    first = loader(persistent_workers=True)
    list(first)
    first.num_workers = 1
    it = iter(first)
    before = [next(it).tolist()]
    within = first.state_dict()
    before += [batch.tolist() for batch in it]
    again = loader()
    again.load_state_dict(within)
    assert before[:1] + [batch.tolist() for batch in again] == before == [[0, 0], [1, 1]] * 2
    first.load_state_dict(first.state_dict())
    assert flat(first) == [0, 0, 1, 1] * 2
    first._iterator.close()


# -- workers ---------------------------------------------------------------------------------------


METHOD = "fork" if FORK else "spawn"


class Named(multiprocessing.get_context(METHOD).Process):  # type: ignore[name-defined,misc]
    pass


class Context(type(multiprocessing.get_context(METHOD))):  # type: ignore[misc]
    Process = Named


def test_a_context_with_a_process_of_its_own_is_warned_of() -> None:
    forget_warnings()
    context: Any = Context()
    loader = DataLoader(Numbers(2), num_workers=1, multiprocessing_context=context)
    with pytest.warns(UserWarning, match="Context that was passed as multiprocessing_context"):
        assert flat(loader) == [0, 1]
    ordinary: Any = torch.multiprocessing.get_context(METHOD)
    assert flat(DataLoader(Numbers(2), num_workers=1, multiprocessing_context=ordinary)) == [0, 1]


class Wrapped:
    """Wrapper that has `__getitems__` through `__getattr__`, where torch finds it."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __len__(self) -> int:
        return len(self.inner)

    def __getattr__(self, name: str) -> Any:
        if name == "inner":
            raise AttributeError(name)
        return getattr(self.inner, name)


class Declined(Numbers):
    __getitems__ = None


class Together(Numbers):
    def __getitems__(self, indices: list[int]) -> list[int]:
        return [10 * index for index in indices]


def test_getitems_of_a_wrapper_is_found_where_torch_finds_it() -> None:
    data: Any = Wrapped(Together(4))
    assert flat(DataLoader(data, 2)) == flat(TorchLoader(data, 2)) == [0, 10, 20, 30]
    assert flat(DataLoader(Declined(3), 2)) == [0, 1, 2]
