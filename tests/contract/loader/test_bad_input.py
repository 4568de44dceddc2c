"""Arguments of a loader that nobody can mean are refused at once, with words that help."""

from __future__ import annotations

import multiprocessing.context
import os
import re
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from support.once import forget_warnings
from support.platforms import needs_fork
from support.programs import output
from torch.utils.data import Dataset, IterableDataset

from hybridloader import DataLoader, Fork, Inline, Pipeline, SharedMemory, Spawn, Threads
from hybridloader.engine import Backend, backend_names, get_backend
from hybridloader.errors import BackendUnavailable

nan, inf = float("nan"), float("inf")


class Numbers(Dataset[int]):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        return index


class OnlyBatches:
    def __len__(self) -> int:
        return 4

    def __getitems__(self, indices: list[int]) -> list[int]:
        return indices


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(4))


def endless() -> Iterator[int]:
    yield 0


class Pretending(multiprocessing.context.BaseContext):
    """Context like MONAI's, whose processes are threads; `multiprocessing` does not know it."""

    _name = "processthread"

    def get_start_method(self, allow_none: bool = False) -> str:
        return self._name


# -- options ---------------------------------------------------------------------------------------

WHOLE = "must be a whole number, got"
SECONDS = "timeout is seconds, 0 or more, not"
FLAG = "must be True or False, got"
CONTRADICTS = r"(?s)contradicts.*multiprocessing_context"

REFUSED: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"num_workers": nan}, TypeError, f"num_workers {WHOLE} nan"),
    ({"num_workers": np.float64(2)}, TypeError, f"num_workers {WHOLE}"),
    ({"timeout": nan}, ValueError, f"{SECONDS} nan"),
    ({"timeout": 1e12}, ValueError, "timeout=1000000000000.0 is more seconds than"),
    ({"num_workers": 0, "timeout": 1}, ValueError, "timeout"),
    ({"prefetch_factor": 1.5}, TypeError, f"prefetch_factor {WHOLE} 1.5"),
    ({"prefetch_factor": 0}, ValueError, "prefetch_factor"),
    ({"num_workers": 0, "prefetch_factor": 0}, ValueError, "prefetch_factor"),
    ({"batch_size": -1}, ValueError, "batch_size"),
    ({"threads_per_worker": 2.0}, TypeError, f"threads_per_worker {WHOLE} 2.0"),
    ({"threads_per_worker": 0}, ValueError, "threads_per_worker.*at least 1.*got 0"),
    ({"num_workers": 0, "threads_per_worker": -4}, ValueError, "at least 1.*got -4"),
    ({"threads_per_worker": 2, "batch_size": None}, ValueError, "batch_size=None"),
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
    ({"backend": Threads}, TypeError, r"use an instance: Threads\(\)"),
    ({"backend": Inline(copy_dataset=1)}, TypeError, "copy_dataset must be True or False, got"),  # type: ignore[arg-type]
    ({"backend": "inline", "multiprocessing_context": "fork"}, ValueError, "inline.*contradicts"),
    ({"backend": "threads", "multiprocessing_context": "fork"}, ValueError, "threads.*contradicts"),
]  # fmt: skip


@pytest.mark.filterwarnings("ignore:This DataLoader will create")  # torch's constructor looks first
def test_an_argument_that_can_not_be_meant_is_refused_by_the_constructor() -> None:
    for options, kind, says in REFUSED:
        with pytest.raises(kind, match=says) as caught:
            DataLoader(**{"dataset": Numbers(), "num_workers": 1, **options})
        assert type(caught.value) is kind, options


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
    ("multiprocessing_context", "spawn", ValueError, "contradicts"),
    ("on_error", "ignore", ValueError, 'must be "raise", "skip"'),
    ("seeding", "smaple", ValueError, "seeding must be"),
]


def test_what_is_set_after_the_constructor_is_refused_by_iter() -> None:
    loader = DataLoader(Numbers(), num_workers=1, backend="threads")
    for name, value, kind, says in CHANGED:
        good = getattr(loader, name)
        setattr(loader, name, value)
        with pytest.raises(kind, match=says):
            iter(loader)
        setattr(loader, name, good)
    assert len(list(loader)) == 4


def test_what_torch_takes_for_a_number_or_a_flag_is_taken() -> None:
    taken: list[dict[str, Any]] = [
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
        {"backend": " Threads "},
        {"backend": "SHARED_MEMORY"},
    ]
    for options in taken:
        given = {"dataset": Numbers(), "num_workers": 1, "backend": "threads", **options}
        assert len(list(DataLoader(**given))) == 4, options


BAD_FOR_TORCH: list[tuple[Callable[[], Any], dict[str, Any]]] = [
    (Numbers, {"num_workers": -1}),
    (Numbers, {"num_workers": "two"}),
    (Numbers, {"num_workers": 1, "timeout": -1}),
    (Numbers, {"prefetch_factor": 2}),
    (Numbers, {"num_workers": 1, "prefetch_factor": -1}),
    (Numbers, {"persistent_workers": True}),
    (Numbers, {"sampler": range(8), "shuffle": True}),
    (Numbers, {"batch_sampler": [[0]], "batch_size": 2}),
    (Numbers, {"batch_sampler": [[0]], "shuffle": True}),
    (Numbers, {"batch_sampler": [[0]], "sampler": range(8)}),
    (Numbers, {"batch_sampler": [[0]], "drop_last": True}),
    (Numbers, {"batch_size": None, "drop_last": True}),
    (Numbers, {"batch_size": 0}),
    (Numbers, {"batch_size": 1.5}),
    (Numbers, {"drop_last": "yes"}),
    (Numbers, {"multiprocessing_context": "fork"}),
    (Numbers, {"num_workers": 1, "multiprocessing_context": "no-such-method"}),
    (Numbers, {"num_workers": 1, "multiprocessing_context": 3}),
    (Stream, {"shuffle": True}),
    (Stream, {"sampler": range(8)}),
    (Stream, {"batch_sampler": [[0]]}),
    (list, {"shuffle": True}),
]


def test_what_torch_refuses_is_refused_with_the_same_exception() -> None:
    for dataset, options in BAD_FOR_TORCH:
        with pytest.raises(Exception) as theirs:
            torch.utils.data.DataLoader(dataset(), **options)
        with pytest.raises(Exception) as ours:
            DataLoader(dataset(), **options)
        assert type(ours.value) is type(theirs.value), options
        assert str(ours.value) == str(theirs.value)


# -- backends --------------------------------------------------------------------------------------


def test_a_name_of_no_backend_is_refused_with_a_list_of_those_there_are() -> None:
    loader = DataLoader(Numbers(), num_workers=1, backend="threads")
    for name in ("treads", "", "x" * 99):
        with pytest.raises(BackendUnavailable) as caught:
            DataLoader(Numbers(), backend=name)
        assert all(known in str(caught.value) for known in (repr(name), *backend_names()))
        assert "pip install" in str(caught.value)
        assert isinstance(caught.value, ValueError)
    for backend, kind, words in [
        ("treads", BackendUnavailable, "'treads'; did you mean 'threads'?"),
        ("process", BackendUnavailable, "'process'; did you mean 'processes'?"),
        ("nothing like it", BackendUnavailable, "'nothing like it'; there are: inline"),
        ("atuo", BackendUnavailable, "did you mean 'auto'?"),
        (3, TypeError, "backend must be a name or a Backend, not 3"),
        (True, TypeError, "backend must be a name or a Backend, not True"),
        (Threads, TypeError, "use an instance: Threads()"),
    ]:
        with pytest.raises(kind, match=re.escape(words)):
            loader.backend = backend  # type: ignore[assignment]
    assert loader.backend == "threads"
    assert type(get_backend("processes")) is SharedMemory
    assert "processes" not in backend_names()
    for method in ("Fork", b"fork"):
        with pytest.raises(BackendUnavailable) as caught:
            SharedMemory(start_method=method)  # type: ignore[arg-type]
        for known in (repr(method), "fork", "spawn", "forkserver", "loky"):
            assert known in str(caught.value)


@pytest.mark.parametrize("kind", [Inline, Threads, Fork, Spawn, SharedMemory])
def test_memory_must_be_a_memory(kind: Callable[..., Backend]) -> None:
    backend = kind(memory=3)
    says = rf"{kind.__name__}: memory must be a hybridloader.Memory, not .*memory=Memory\(limit="  # type: ignore[attr-defined]
    with pytest.raises(TypeError, match=says):
        DataLoader(Numbers(), backend=backend)
    with pytest.raises(TypeError, match=says):
        Pipeline.from_dataset(range(3)).map(str, backend=backend)


OF_OTHERS = """
import importlib.metadata, types
def point(name, target, package):
    dist = package and types.SimpleNamespace(name=package)
    return types.SimpleNamespace(name=name, value=target, dist=dist)
points = [
    point("My_Threads", "hybridloader.backends.threads:Threads", "my-package"),
    point("threads", "no_such_module:Nothing", "evil"),
    point("mpi", "no_such_module:MPI", "hybridloader-mpi"),
    point("loose", "other_module.inner:MPI", None),
    point("lacking", "hybridloader.backends.threads:NoSuchClass", "hybridloader-mpi"),
    point("dict", "builtins:dict", "hybridloader-mpi"),
]
importlib.metadata.entry_points = lambda *, group: points if group == "hybridloader.backends" else 1
from hybridloader.engine import backend_names, get_backend
print("my-threads" in backend_names())
for name in ("my-threads", "threads", "mpi", "loose", "lacking", "dict", "treads"):
    try:
        print(type(get_backend(name)).__name__)
    except Exception as error:
        print(type(error).__name__, type(error.__cause__).__name__, error)
"""


def test_backends_of_other_packages_are_had_by_name_or_refused_with_how_to_install_them() -> None:
    told = output("-c", OF_OTHERS).splitlines()
    lines = [line for line in told if not line.startswith("See: ")]
    for line, says in zip(
        lines,
        [
            "True",
            "Threads",
            "Threads",  # nobody takes the name of ours
            "BackendUnavailable ModuleNotFoundError .*'mpi'.*no_such_module.*pip install hybridlo",
            "BackendUnavailable ModuleNotFoundError .*'loose'.*pip install other_module",
            "BackendUnavailable AttributeError .*'lacking'.*NoSuchClass",
            "TypeError NoneType .*'dict' gave {}",
            "BackendUnavailable NoneType .*'treads'.*mpi.*pip install hybridloader-mpi",
        ],
        strict=True,
    ):
        assert re.match(says, line), line


# -- where a backend can't serve, or has nothing to do -----------------------------------------------


@needs_fork
def test_a_backend_that_contradicts_the_context_is_refused_and_one_that_agrees_is_taken() -> None:
    for backend, context, offered in [
        ("fork", "spawn", True),
        (Fork(), "forkserver", True),
        (SharedMemory("loky"), "spawn", True),
        ("fork", Pretending(), False),
    ]:
        with pytest.raises(ValueError, match="contradicts") as caught:
            DataLoader(Numbers(), num_workers=1, backend=backend, multiprocessing_context=context)
        told = str(caught.value).lower().replace("-", "")
        name = backend if isinstance(backend, str) else backend.name
        assert name.replace("-", "") in told
        assert ("sharedmemory(start_method=" in told) is offered
        assert not isinstance(context, str) or repr(context) in told
    for agreeing in ("fork", SharedMemory("fork"), None):
        loader = DataLoader(
            Numbers(), 2, num_workers=1, backend=agreeing, multiprocessing_context="fork"
        )
        assert [batch.tolist() for batch in loader] == [[0, 1], [2, 3]]


@needs_fork
def test_no_fork_after_cuda_was_initialized_nor_where_there_is_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refused(backend: Any, says: str) -> None:
        with pytest.raises(BackendUnavailable, match=says) as caught:
            iter(DataLoader(Numbers(), num_workers=1, backend=backend))
        assert all(way_out in str(caught.value) for way_out in ("threads", "spawn"))

    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "is_initialized", lambda: True)
        for backend in ("fork", SharedMemory("fork")):
            refused(backend, "CUDA")
        assert len(list(DataLoader(Numbers(), num_workers=1))) == 4  # not by fork
    monkeypatch.setattr("multiprocessing.get_all_start_methods", lambda: ["spawn"])
    for name in ("fork", "shared-memory"):
        refused(name, "fork")


@pytest.mark.parametrize("backend", ["fork", Threads()])
def test_a_backend_without_workers_warns_once_where_the_loader_is_used(
    backend: str | Backend,
) -> None:
    forget_warnings()
    loader = DataLoader(Numbers(), 8, backend=backend)
    with pytest.warns(UserWarning, match="num_workers") as caught:
        first = [batch.tolist() for batch in loader]
    (warning,) = caught
    name = backend if isinstance(backend, str) else backend.name
    assert repr(name) in str(warning.message)
    assert os.path.samefile(warning.filename, __file__)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again = [batch.tolist() for batch in loader]
        forget_warnings()
        for quiet in (None, Inline()):
            assert len(list(DataLoader(Numbers(), 4, backend=quiet))) == 1
    assert first == again == [[0, 1, 2, 3]]
