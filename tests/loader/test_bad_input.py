"""Bad input is refused at once, with words that help."""

from __future__ import annotations

import importlib.metadata
import multiprocessing.context
import os
import re
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from support.once import forget_warnings
from support.platforms import needs_fork
from torch.utils.data import Dataset, IterableDataset

import hybridloader
from hybridloader import DataLoader, Fork, Inline, SharedMemory, Threads
from hybridloader.engine import Backend, contract
from hybridloader.errors import BackendUnavailable


class Numbers(Dataset[int]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        return index


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(8))


@pytest.fixture(autouse=True)
def _fresh_registry() -> Iterator[None]:
    contract.known.cache_clear()
    yield
    contract.known.cache_clear()


# -- the name of a backend -----------------------------------------------------------------------


@pytest.mark.parametrize("name", ["treads", "", "x" * 99])
def test_an_unknown_backend_is_refused_with_a_list_of_those_there_are(name: str) -> None:
    with pytest.raises(BackendUnavailable) as caught:
        DataLoader(Numbers(), backend=name)
    text = str(caught.value)
    assert repr(name) in text
    for known in hybridloader.engine.backend_names():
        assert known in text
    assert "pip install" in text
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize("name", [" Threads ", "SHARED_MEMORY"])
def test_case_and_underscores_of_a_name_do_not_matter(name: str) -> None:
    assert DataLoader(Numbers(), num_workers=1, backend=name).backend == name


def test_processes_are_another_name_of_shared_memory() -> None:
    assert type(hybridloader.engine.get_backend("processes")) is SharedMemory
    assert "processes" not in hybridloader.engine.backend_names()


def test_a_backend_set_after_the_constructor_is_checked_at_once() -> None:
    loader = DataLoader(Numbers(), num_workers=1, backend="threads")
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


@pytest.mark.parametrize("method", ["Fork", b"fork"])
def test_an_unknown_start_method_is_refused_with_a_list(method: Any) -> None:
    with pytest.raises(BackendUnavailable) as caught:
        SharedMemory(start_method=method)
    text = str(caught.value)
    assert repr(method) in text
    for known in ("fork", "spawn", "forkserver", "loky"):
        assert known in text


# -- backends of other packages ------------------------------------------------------------------


def _install(monkeypatch: pytest.MonkeyPatch, name: str, target: str, package: str | None) -> None:
    """Pretend that a package that registers a backend is installed."""
    point: Any = types.SimpleNamespace(name=name, value=target, dist=None)
    if package is not None:
        point.dist = types.SimpleNamespace(name=package)

    def entry_points(*, group: str) -> list[Any]:
        assert group == "hybridloader.backends"
        return [point]

    monkeypatch.setattr(importlib.metadata, "entry_points", entry_points)


def test_a_backend_of_another_package_can_be_named(monkeypatch: pytest.MonkeyPatch) -> None:
    _install(monkeypatch, "My_Threads", "hybridloader.backends.threads:Threads", "my-package")
    assert "my-threads" in hybridloader.engine.backend_names()
    loader = DataLoader(Numbers(), 4, num_workers=1, backend="my-threads")
    assert [batch.tolist() for batch in loader] == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_another_package_can_not_take_the_name_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    _install(monkeypatch, "threads", "no_such_module:Nothing", "evil")
    assert isinstance(hybridloader.engine.get_backend("threads"), Threads)


@pytest.mark.parametrize(
    ("package", "hint"), [("hybridloader-mpi", "hybridloader-mpi"), (None, "no_such_module")]
)
def test_a_backend_that_can_not_be_imported_is_refused_with_an_install_hint(
    monkeypatch: pytest.MonkeyPatch, package: str | None, hint: str
) -> None:
    _install(monkeypatch, "mpi", "no_such_module:MPI", package)
    with pytest.raises(BackendUnavailable, match="mpi") as caught:
        DataLoader(Numbers(), backend="mpi")
    assert f"pip install {hint}" in str(caught.value)
    assert "no_such_module" in str(caught.value)
    assert isinstance(caught.value.__cause__, ImportError)
    with pytest.raises(BackendUnavailable, match=f"treads.*mpi.*pip install {hint}"):
        DataLoader(Numbers(), backend="treads")


def test_a_backend_whose_module_lacks_it_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _install(monkeypatch, "mpi", "hybridloader.backends.threads:NoSuchClass", "hybridloader-mpi")
    with pytest.raises(BackendUnavailable, match="mpi") as caught:
        DataLoader(Numbers(), backend="mpi")
    assert "NoSuchClass" in str(caught.value)


def test_what_another_package_registers_must_be_a_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    _install(monkeypatch, "mpi", "builtins:dict", "hybridloader-mpi")
    with pytest.raises(TypeError, match="mpi"):
        DataLoader(Numbers(), backend="mpi")


# -- options that contradict each other ----------------------------------------------------------


@needs_fork
@pytest.mark.parametrize(
    ("backend", "context"),
    [
        ("inline", "fork"),
        ("threads", "fork"),
        ("fork", "spawn"),
        (Fork(), "forkserver"),
        (SharedMemory("loky"), "spawn"),
    ],
)
def test_a_backend_that_contradicts_the_context_is_refused(
    backend: str | Backend, context: str
) -> None:
    with pytest.raises(ValueError, match="contradicts") as caught:
        DataLoader(Numbers(), num_workers=1, backend=backend, multiprocessing_context=context)
    assert repr(context) in str(caught.value)
    name = backend if isinstance(backend, str) else backend.name
    assert name.replace("-", "") in str(caught.value).lower().replace("-", "")


class Pretending(multiprocessing.context.BaseContext):
    """Context like MONAI's, whose processes are threads; `multiprocessing` does not know it."""

    _name = "processthread"

    def get_start_method(self, allow_none: bool = False) -> str:
        return self._name


@pytest.mark.parametrize(("context", "offered"), [("spawn", True), (Pretending(), False)])
def test_shared_memory_is_offered_only_where_it_knows_the_context(
    context: Any, offered: bool
) -> None:
    with pytest.raises(ValueError, match="contradicts") as caught:
        DataLoader(Numbers(), num_workers=1, backend="fork", multiprocessing_context=context)
    assert ("SharedMemory(start_method=" in str(caught.value)) is offered


@pytest.mark.parametrize(
    ("backend", "context"),
    [("fork", "fork"), (SharedMemory("fork"), "fork"), (None, "fork")],
)
def test_a_context_that_agrees_with_the_backend_is_taken(backend: Any, context: str) -> None:
    loader = DataLoader(
        Numbers(), 4, num_workers=1, backend=backend, multiprocessing_context=context
    )
    assert [batch.tolist() for batch in loader] == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_a_contradiction_made_after_the_constructor_is_found_by_the_iterator() -> None:
    loader = DataLoader(Numbers(), num_workers=1, backend="fork")
    loader.multiprocessing_context = "spawn"
    with pytest.raises(ValueError, match="contradicts"):
        iter(loader)
    loader.multiprocessing_context = None
    loader.num_workers = -1
    with pytest.raises(ValueError, match="num_workers"):
        iter(loader)


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"num_workers": -1}, "num_workers"),
        ({"num_workers": 1, "timeout": -1}, "timeout"),
        ({"num_workers": 1, "prefetch_factor": -1}, "prefetch_factor"),
        ({"num_workers": 1, "prefetch_factor": 0}, "prefetch_factor"),
        ({"num_workers": 0, "prefetch_factor": 0}, "prefetch_factor"),
        ({"num_workers": 0, "prefetch_factor": 2}, "prefetch_factor"),
        ({"num_workers": 0, "timeout": 1}, "timeout"),
        ({"num_workers": 0, "persistent_workers": True}, "persistent_workers"),
        ({"num_workers": 1, "batch_size": -1}, "batch_size"),
        ({"num_workers": 1, "batch_size": 0}, "batch_size"),
        ({"num_workers": 1, "threads_per_worker": 0}, "threads_per_worker.*at least 1.*got 0"),
        ({"num_workers": 0, "threads_per_worker": -4}, "threads_per_worker.*at least 1.*got -4"),
        ({"num_workers": 1, "threads_per_worker": 2, "batch_size": None}, "batch_size=None"),
    ],
)
def test_numbers_out_of_range_are_refused(options: dict[str, Any], word: str) -> None:
    with pytest.raises(ValueError, match=word):
        DataLoader(Numbers(), **options)


# -- torch's own checks --------------------------------------------------------------------------

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


@pytest.mark.parametrize(("dataset", "options"), BAD_FOR_TORCH)
def test_what_torch_refuses_is_refused_with_the_same_exception(
    dataset: Callable[[], Any], options: dict[str, Any]
) -> None:
    with pytest.raises(Exception) as theirs:
        torch.utils.data.DataLoader(dataset(), **options)
    with pytest.raises(Exception) as ours:
        DataLoader(dataset(), **options)
    assert type(ours.value) is type(theirs.value)
    assert str(ours.value) == str(theirs.value)


# -- where a backend can't serve -----------------------------------------------------------------


@needs_fork
@pytest.mark.parametrize("backend", ["fork", SharedMemory("fork")])
def test_no_fork_after_cuda_was_initialized(
    monkeypatch: pytest.MonkeyPatch, backend: str | Backend
) -> None:
    loader = DataLoader(Numbers(), num_workers=1, backend=backend)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with pytest.raises(BackendUnavailable, match="CUDA") as caught:
        iter(loader)
    for way_out in ("threads", "spawn"):
        assert way_out in str(caught.value)


@pytest.mark.parametrize(
    "backend", [None, pytest.param("shared-memory", marks=pytest.mark.full)]
)  # the last starts fresh workers
def test_other_backends_serve_after_cuda_was_initialized(
    monkeypatch: pytest.MonkeyPatch, backend: str | None
) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    loader = DataLoader(Numbers(), 8, num_workers=1, backend=backend)
    assert [batch.tolist() for batch in loader] == [list(range(8))]


@pytest.mark.parametrize("backend", ["fork", pytest.param("shared-memory", marks=needs_fork)])
def test_where_there_is_no_fork_the_message_says_what_to_use(
    monkeypatch: pytest.MonkeyPatch, backend: str
) -> None:
    monkeypatch.setattr("multiprocessing.get_all_start_methods", lambda: ["spawn"])
    with pytest.raises(BackendUnavailable, match="fork") as caught:
        iter(DataLoader(Numbers(), num_workers=1, backend=backend))
    assert "threads" in str(caught.value)
    assert "spawn" in str(caught.value)


# -- a backend that has nothing to do -------------------------------------------------------------


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
    assert first == again == [list(range(8))]


@pytest.mark.parametrize("backend", [None, Inline()])
def test_a_backend_that_needs_no_workers_does_not_warn(backend: str | Backend | None) -> None:
    forget_warnings()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(list(DataLoader(Numbers(), 4, backend=backend))) == 2
