"""Forks beside libraries that do not survive them: fresh workers, or an error that names the library."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from support.forking import in_a_fork
from torch.utils.data import DataLoader as TorchLoader

import hybridloader
from hybridloader import DataLoader, Pipeline, SharedMemory
from hybridloader._support.text import warn_once
from hybridloader.backends.process.fork_safety import HAZARDS, Hazard, fork_hazard
from hybridloader.errors import BackendUnavailable

pytestmark = pytest.mark.skipif(
    multiprocessing.get_start_method() != "fork", reason="nothing forks here unless asked to"
)
NAMES = [hazard.library for hazard in HAZARDS]

# Two loaders that start fresh workers take seconds, and one library stands for the others.
ONE_OF_THEM = [NAMES[0], *(pytest.param(name, marks=pytest.mark.full) for name in NAMES[1:])]


class Pids:
    """A dataset of process numbers."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> tuple[int, int]:
        return index, os.getpid()


class Running:
    """A library that is imported, with a thread of its name."""

    def __init__(self, hazard: Hazard, monkeypatch: pytest.MonkeyPatch, version: str) -> None:
        module = ModuleType(hazard.library)
        module.__version__ = version  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, hazard.library, module)
        self.ended = threading.Event()
        self.thread = threading.Thread(target=self.ended.wait, name=f"{hazard.threads}0")
        self.thread.start()


@pytest.fixture
def running(request: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Running]:
    for hazard in HAZARDS:  # what other tests have imported does not count
        monkeypatch.delitem(sys.modules, hazard.library, raising=False)
    (hazard,) = [one for one in HAZARDS if one.library == request.param]
    warn_once.cache_clear()
    found = Running(hazard, monkeypatch, "3.0.2")
    yield found
    found.ended.set()
    found.thread.join()


@pytest.mark.parametrize("running", ONE_OF_THEM, indirect=True)
def test_the_default_and_shared_memory_start_fresh_workers_and_say_so(running: Running) -> None:
    hazard = fork_hazard()
    assert hazard is not None
    for backend, who in [(None, "this loader"), ("shared-memory", "backend 'shared-memory'")]:
        loader: Any = DataLoader(Pids(), 2, num_workers=1, backend=backend, collate_fn=list)
        with pytest.warns(UserWarning, match=rf"{who} starts fresh.*{hazard.library} is in use"):
            found = [one for batch in loader for one in batch]
        assert [index for index, _ in found] == [0, 1, 2, 3]
        assert os.getpid() not in {pid for _, pid in found}


@pytest.mark.parametrize("running", NAMES, indirect=True)
@pytest.mark.parametrize(
    "options",
    [
        {"backend": "fork"},
        {"backend": SharedMemory(start_method="fork")},
        {"multiprocessing_context": "fork"},
    ],
    ids=["fork", "shared memory that forks", "multiprocessing_context"],
)
def test_fork_by_name_is_refused_and_names_the_library(running: Running, options: Any) -> None:
    hazard = fork_hazard()
    assert hazard is not None
    with pytest.raises(BackendUnavailable, match=rf"but {hazard.library} .*{hazard.source}"):
        iter(DataLoader(Pids(), 2, num_workers=1, **options))


@pytest.mark.parametrize("running", ["polars"], indirect=True)
def test_pipelines_and_installed_loaders_too(running: Running) -> None:
    with pytest.raises(BackendUnavailable, match="polars"):
        list(Pipeline.from_iterable(range(3)).map(str, num_workers=1, backend="fork"))
    with hybridloader.install():
        loader: Any = TorchLoader(Pids(), 2, num_workers=1, collate_fn=list)  # type: ignore[arg-type]
        with pytest.warns(UserWarning, match="polars is in use"):
            assert [index for batch in loader for index, _ in batch] == [0, 1, 2, 3]
    with (
        hybridloader.install("fork"),
        pytest.raises(BackendUnavailable, match="polars"),
    ):
        list(TorchLoader(Pids(), 2, num_workers=1))  # type: ignore[arg-type]


def test_run_starts_fresh_workers_too(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import multiprocessing, sys, threading, types\n"
        "multiprocessing.set_start_method('fork')  # no default from Python 3.14 on\n"
        "from torch.utils.data import DataLoader\n"
        "sys.modules['polars'] = types.ModuleType('polars')\n"
        "threading.Thread(target=threading.Event().wait, name='polars-0', daemon=True).start()\n"
        "if __name__ == '__main__':\n"
        "    print(list(DataLoader([1, 2], num_workers=1)))\n"
    )
    told = subprocess.run(
        [sys.executable, "-m", "hybridloader", "run", str(script)],
        check=True,
        capture_output=True,
        text=True,
    )
    assert "[tensor([1]), tensor([2])]" in told.stdout
    assert "starts fresh workers instead of forking: polars is in use" in told.stderr


@pytest.mark.parametrize("running", NAMES, indirect=True)
def test_what_is_imported_and_has_no_threads_is_no_hazard(running: Running) -> None:
    running.ended.set()
    running.thread.join()
    assert fork_hazard() is None
    loader: Any = DataLoader(Pids(), 2, num_workers=1, backend="fork", collate_fn=list)
    assert [index for batch in loader for index, _ in batch] == [0, 1, 2, 3]


@pytest.mark.parametrize("running", ["zarr"], indirect=True)
def test_a_version_that_survives_forks_is_no_hazard(running: Running) -> None:
    sys.modules["zarr"].__version__ = "3.0.3"  # type: ignore[attr-defined]
    assert fork_hazard() is None
    sys.modules["zarr"].__version__ = "3.0.2.dev1"  # type: ignore[attr-defined]
    assert fork_hazard() is not None


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

    class Uses(Pids):
        def __getitem__(self, index: int) -> Any:
            names = [thread.name for thread in threading.enumerate()]
            return os.getpid(), engine.uses, any("fanout" in name for name in names)

    loader = DataLoader(
        Uses(), 2, num_workers=1, backend="fork", threads_per_worker=2, collate_fn=list
    )
    for batch in loader:
        for pid, uses, threads in batch:
            assert threads
            assert uses[0] == (pid, [])


@pytest.mark.parametrize("options", [{"backend": "threads"}, {"threads_per_worker": 2}], ids=str)
def test_threads_in_a_fork_of_the_users_find_torchs_engine_used(
    options: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(torch.autograd.Variable._execution_engine)
    monkeypatch.setattr(torch.autograd.Variable, "_execution_engine", engine)

    def act() -> None:
        workers = 2 if "backend" in options else 0
        loader = DataLoader(Pids(), 2, num_workers=workers, collate_fn=list, **options)
        assert [index for batch in loader for index, _ in batch] == [0, 1, 2, 3]
        assert (os.getpid(), []) in engine.uses

    assert in_a_fork(act) == 0
