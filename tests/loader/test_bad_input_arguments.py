"""Arguments that torch lets through and nobody can mean are refused, by the constructor or by `iter`."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from hybridloader import DataLoader, Fork, Inline, Pipeline, SharedMemory, Spawn, Threads
from hybridloader.engine import Backend, get_backend

nan, inf = float("nan"), float("inf")


class Numbers:
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        return index


class OnlyBatches:
    def __len__(self) -> int:
        return 4

    def __getitems__(self, indices: list[int]) -> list[int]:
        return indices


def endless() -> Iterator[int]:
    yield 0


WHOLE = "must be a whole number, got"
SECONDS = "timeout is seconds, 0 or more, not"
FLAG = "must be True or False, got"

REFUSED: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"num_workers": nan}, TypeError, f"num_workers {WHOLE} nan"),
    ({"num_workers": np.float64(2)}, TypeError, f"num_workers {WHOLE}"),
    ({"timeout": nan}, ValueError, f"{SECONDS} nan"),
    ({"timeout": 1e12}, ValueError, "timeout=1000000000000.0 is more seconds than"),
    ({"prefetch_factor": 1.5}, TypeError, f"prefetch_factor {WHOLE} 1.5"),
    ({"threads_per_worker": 2.0}, TypeError, f"threads_per_worker {WHOLE} 2.0"),
    ({"collate_fn": 3}, TypeError, "collate_fn must be a function .*got 3"),
    ({"worker_init_fn": 3}, TypeError, "worker_init_fn must be a function .*got 3"),
    ({"generator": 3}, TypeError, r"generator must be a torch.Generator, got 3; use torch\.Gen"),
    ({"sampler": 3}, TypeError, "sampler must be an iterable of indices, got 3"),
    ({"sampler": endless}, TypeError, "sampler must be an iterable .*function endless"),
    ({"batch_sampler": 3}, TypeError, "batch_sampler must be an iterable of indices, got 3"),
    ({"pin_memory": "yes"}, TypeError, f"pin_memory {FLAG} 'yes'"),
    ({"persistent_workers": "no"}, TypeError, f"persistent_workers {FLAG} 'no'"),
    ({"in_order": "no"}, TypeError, f"in_order {FLAG} 'no'"),
    ({"dataset": None}, TypeError, "dataset must have __getitem__ .*got None"),
    ({"dataset": endless}, TypeError, "dataset must have __getitem__ .*function endless"),
    ({"dataset": endless()}, TypeError, r"dataset must .*generator.*Pipeline\.from_iterable"),
    ({"dataset": {1, 2}}, TypeError, r"dataset must .*\{1, 2\}; .*Pipeline\.from_iterable"),
    ({"dataset": Numbers}, TypeError, r"got the class Numbers; make one: Numbers\(\.\.\.\)"),
]


def _named(value: Any) -> str:
    """Return a name of `value` that is the same in every process that collects the tests."""
    return re.sub(" at 0x[0-9a-fA-F]+", "", repr(value))[:60]


@pytest.mark.filterwarnings("ignore:This DataLoader will create")  # torch's constructor looks first
@pytest.mark.parametrize(("options", "kind", "says"), REFUSED, ids=_named)
def test_an_argument_that_can_not_be_meant_is_refused_by_the_constructor(
    options: dict[str, Any], kind: type[Exception], says: str
) -> None:
    given = {"dataset": Numbers(), "num_workers": 1, **options}
    with pytest.raises(kind, match=says) as caught:
        DataLoader(**given)
    assert type(caught.value) is kind


CHANGED: list[tuple[str, Any, type[Exception], str]] = [
    ("num_workers", -1, ValueError, "num_workers must not be negative, got -1"),
    ("num_workers", "2", TypeError, f"num_workers {WHOLE} '2'"),
    ("timeout", "3", ValueError, f"{SECONDS} '3'"),
    ("timeout", np.ones(2), ValueError, SECONDS),
    ("timeout", -1, ValueError, f"{SECONDS} -1"),
    ("prefetch_factor", 0, ValueError, "prefetch_factor must be at least 1, got 0"),
    ("prefetch_factor", "2", TypeError, f"prefetch_factor {WHOLE} '2'"),
    ("collate_fn", None, TypeError, "collate_fn must be a function .*got None"),
    ("worker_init_fn", "x", TypeError, "worker_init_fn must be a function .*got 'x'"),
    ("generator", 3, TypeError, "generator must be a torch.Generator, got 3"),
    ("in_order", "no", TypeError, f"in_order {FLAG} 'no'"),
    ("threads_per_worker", True, TypeError, f"threads_per_worker {WHOLE} True"),
    ("pin_memory", "x", TypeError, f"pin_memory {FLAG} 'x'"),
]


@pytest.mark.parametrize(("name", "value", "kind", "says"), CHANGED)
def test_what_is_set_after_the_constructor_is_refused_by_iter(
    name: str, value: Any, kind: type[Exception], says: str
) -> None:
    loader = DataLoader(Numbers(), num_workers=1, backend="threads")  # type: ignore[arg-type]
    good = getattr(loader, name)
    setattr(loader, name, value)
    with pytest.raises(kind, match=says):
        iter(loader)
    setattr(loader, name, good)
    assert len(list(loader)) == 4


@pytest.mark.parametrize("kind", [Inline, Threads, Fork, Spawn, SharedMemory])
def test_memory_must_be_a_memory(kind: Callable[..., Backend]) -> None:
    backend = kind(memory=3)
    says = rf"{kind.__name__}: memory must be a hybridloader.Memory, not .*memory=Memory\(limit="  # type: ignore[attr-defined]
    with pytest.raises(TypeError, match=says):
        DataLoader(Numbers(), backend=backend)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=says):
        Pipeline.from_dataset(range(3)).map(str, backend=backend)
    with pytest.raises(TypeError, match=says):
        get_backend(backend)


@pytest.mark.parametrize("kind", [Inline, Threads])
def test_whether_to_copy_is_yes_or_no(kind: Callable[..., Backend]) -> None:
    with pytest.raises(TypeError, match="copy_dataset must be True or False, got"):
        get_backend(kind(copy_dataset=1))


@pytest.mark.parametrize(
    "options",
    [
        {"num_workers": np.int64(1)},
        {"num_workers": True},
        {"num_workers": torch.tensor(1)},
        {"timeout": np.float64(60)},
        {"timeout": True},
        {"timeout": 3e6},  # more milliseconds than poll takes
        {"prefetch_factor": np.int32(2)},
        {"in_order": 1},
        {"in_order": np.True_},
        {"persistent_workers": None},
        {"pin_memory": 0},
        {"sampler": np.arange(4)},
        {"sampler": torch.arange(4)},
        {"dataset": OnlyBatches()},
        {"dataset": "abcd"},
        {"dataset": torch.arange(4)},
        {"generator": torch.Generator()},
    ],
    ids=_named,
)
def test_what_torch_takes_for_a_number_or_a_flag_is_taken(
    options: dict[str, Any],
) -> None:
    given = {"dataset": Numbers(), "num_workers": 1, "backend": "threads", **options}
    assert len(list(DataLoader(**given))) == 4
