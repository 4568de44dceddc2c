"""Forks beside libraries that do not survive them: fresh workers, or an error that names the library."""

from __future__ import annotations

import multiprocessing
import os
import sys
import threading
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from support.failing_datasets import Samples
from torch.utils.data import DataLoader as TorchLoader

import hybridloader
from hybridloader import DataLoader, Pipeline, SharedMemory
from hybridloader.errors import BackendUnavailable

pytestmark = [
    pytest.mark.skipif(
        multiprocessing.get_start_method() != "fork", reason="nothing forks here unless asked to"
    ),
    pytest.mark.usefixtures("unwarned"),
]
THREADS = {
    "polars": "polars-",
    "lance": "lance",
    "av": "av:",
    "fsspec": "fsspecIO",
}
"""Libraries, with how the names of their threads begin."""

PIDS: Any = Samples(lambda index: (index, os.getpid()), 4)


class Running:
    """A library that is imported, with a thread of its name."""

    def __init__(self, library: str, monkeypatch: pytest.MonkeyPatch) -> None:
        self.library = library
        self.module: Any = ModuleType(library)
        monkeypatch.setitem(sys.modules, library, self.module)
        self.ended = threading.Event()
        self.thread = threading.Thread(target=self.ended.wait, name=f"{THREADS[library]}0")
        self.thread.start()


@pytest.fixture
def running(request: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Running]:
    for library in THREADS:  # what other tests have imported does not count
        monkeypatch.delitem(sys.modules, library, raising=False)
    found = Running(request.param, monkeypatch)
    yield found
    found.ended.set()
    found.thread.join()


polars = pytest.mark.parametrize("running", ["polars"], indirect=True)


@polars
def test_the_default_and_shared_memory_start_fresh_workers_and_say_so(running: Running) -> None:
    for backend, who in [(None, "this loader"), ("shared-memory", "backend 'shared-memory'")]:
        loader: Any = DataLoader(PIDS, 2, num_workers=1, backend=backend, collate_fn=list)
        with pytest.warns(UserWarning, match=rf"{who} starts fresh.*polars is in use"):
            found = [one for batch in loader for one in batch]
        assert [index for index, _ in found] == [0, 1, 2, 3]
        assert os.getpid() not in {pid for _, pid in found}


@pytest.mark.parametrize("running", THREADS, indirect=True)
def test_fork_by_name_is_refused_and_names_the_library(running: Running) -> None:
    for options in (
        {"backend": "fork"},
        {"backend": SharedMemory(start_method="fork")},
        {"multiprocessing_context": "fork"},
    ):
        with pytest.raises(BackendUnavailable, match=rf"but {running.library} .*https://"):
            iter(DataLoader(PIDS, 2, num_workers=1, **options))  # type: ignore[arg-type]


@polars
def test_pipelines_and_installed_loaders_too(running: Running) -> None:
    with pytest.raises(BackendUnavailable, match="polars"):
        list(Pipeline.from_iterable(range(3)).map(str, num_workers=1, backend="fork"))
    with hybridloader.install():
        loader: Any = TorchLoader(PIDS, 2, num_workers=1, collate_fn=list)
        with pytest.warns(UserWarning, match="polars is in use"):
            assert [index for batch in loader for index, _ in batch] == [0, 1, 2, 3]
    with (
        hybridloader.install("fork"),
        pytest.raises(BackendUnavailable, match="polars"),
    ):
        list(TorchLoader(PIDS, 2, num_workers=1))


class Engine:
    """Autograd engine of torch that notes who uses it."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self.uses: list[tuple[int, list[str]]] = []  # process, and its threads that make samples

    def is_checkpoint_valid(self) -> Any:
        names = [thread.name for thread in threading.enumerate()]
        self.uses.append((os.getpid(), [name for name in names if "fanout" in name]))
        return self._engine.is_checkpoint_valid()


def test_a_forked_worker_uses_torchs_engine_before_it_has_threads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """torch makes it anew at its first use after a fork, and crashes if two threads are the first."""
    engine = Engine(torch.autograd.Variable._execution_engine)
    monkeypatch.setattr(torch.autograd.Variable, "_execution_engine", engine)

    def uses(index: int) -> Any:
        names = [thread.name for thread in threading.enumerate()]
        return os.getpid(), engine.uses, any("fanout" in name for name in names)

    dataset: Any = Samples(uses, 4)
    loader = DataLoader(
        dataset, 2, num_workers=1, backend="fork", threads_per_worker=2, collate_fn=list
    )
    for batch in loader:
        for pid, uses, threads in batch:
            assert threads
            assert uses[0] == (pid, [])
