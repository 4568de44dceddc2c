"""The contract suite over every backend, and over the ways that other platforms would take."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
from support import bare_platform
from support.platforms import FORK, REPOSITORY
from support.programs import python

import hybridloader
from hybridloader import Fork, Inline, SharedMemory, Spawn, Threads
from hybridloader.engine import (
    Backend,
    Crew,
    Done,
    Message,
    Task,
    WorkerHandle,
    WorkerSpec,
)
from hybridloader.testing import BackendContract

KINDS: tuple[Any, ...] = (Backend, Crew, WorkerHandle)
ROOT = REPOSITORY
BACKENDS = Path(hybridloader.backends.__file__).parent


class TestInline(BackendContract):
    backend = Inline()


class TestThreads(BackendContract):
    backend = Threads()


def test_a_crew_can_be_closed_by_a_finalizer_on_the_thread_of_its_own_worker() -> None:
    joined: list[float | None] = []

    class Own(WorkerHandle):
        def is_alive(self) -> bool:
            return False

        def terminate(self) -> None: ...

        def join(self, timeout: float | None = None) -> None:
            joined.append(timeout)
            raise RuntimeError("cannot join current thread")

    class OfOne(Crew):
        def start(self, worker: int, spec: WorkerSpec) -> None:
            self.place(worker, Own())

        def send(self, worker: int, message: Message) -> None: ...

    crew = OfOne()
    crew.start(0, BackendContract.spec(abs))
    crew.close()
    assert joined


def test_six_methods_are_required() -> None:
    required = [f"{kind.__name__}.{name}" for kind in KINDS for name in kind.__abstractmethods__]
    assert sorted(required) == [
        "Backend.open",
        "Crew.send",
        "Crew.start",
        "WorkerHandle.is_alive",
        "WorkerHandle.join",
        "WorkerHandle.terminate",
    ]


class TestFork(BackendContract):
    backend = Fork()


class TorchInFullRuns(BackendContract):
    """The suite, with the two tests whose workers import torch in full runs: it takes each 2 seconds.

    `test_torch_free` has both for fresh workers.
    """

    @pytest.mark.full
    def test_worker_info_identifies_the_worker_inside_and_is_none_outside(self) -> None:
        super().test_worker_info_identifies_the_worker_inside_and_is_none_outside()

    @pytest.mark.full
    def test_init_fn_runs_once_per_worker_with_its_seed_in_place(self, tmp_path: Path) -> None:
        super().test_init_fn_runs_once_per_worker_with_its_seed_in_place(tmp_path)


class TestSpawn(TorchInFullRuns):
    # Beside `TestFork` and `TestSpawnAsOnWindows`, it shows only how workers start.
    pytestmark: ClassVar[list[Any]] = [pytest.mark.full] if FORK else []
    backend = Spawn()


@pytest.mark.full  # in its transport it is `TestSpawn`, in how it starts `TestSpawnWithNothingOfPosix`
class TestSpawnWithoutZygote(BackendContract):
    backend = Spawn(preload=False)


@pytest.mark.full  # but for its name it is `TestFork`, or `TestSpawn` from Python 3.14 on
class TestSharedMemory(BackendContract):
    backend = SharedMemory()


@pytest.mark.full  # but for its name and its start method it is `TestSpawn`
class TestSharedMemoryUnderLoky(BackendContract):
    backend = SharedMemory(start_method="loky")


@pytest.fixture
def _windows(tmp_path: Path) -> Iterator[None]:
    """As on Windows: connections instead of polled sockets, no descriptors, slots with names."""
    with bare_platform.lacking("windows", tmp_path):
        yield


@pytest.fixture
def _macos(tmp_path: Path) -> Iterator[None]:
    """As on macOS: no pidfd, memfd or /proc, and 256 descriptors at first.

    The end of a process is seen through multiprocessing's sentinel, and slots lose their names at once.
    """
    resource = pytest.importorskip("resource")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with bare_platform.lacking("macos", tmp_path):
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
        yield
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.usefixtures("_windows")
class TestSpawnAsOnWindows(TorchInFullRuns):
    backend = Spawn()

    def test_it_is_all_gone_in_workers_too(self) -> None:
        assert bare_platform.removed() == bare_platform.WINDOWS.removed()
        with self.crew(self.spec(_removed)) as crew:
            crew.send(0, Task(0, None))
            (payload,) = [event.payload for event in crew.collect(1) if isinstance(event, Done)]
            assert payload.open() == bare_platform.WINDOWS.removed()


@pytest.mark.usefixtures("_windows")
class TestThreadsAsOnWindows(BackendContract):
    backend = Threads()


@pytest.mark.full  # in how the end of a process is seen it is `TestForkAsOnMacOS`
@pytest.mark.usefixtures("_macos")
class TestSpawnAsOnMacOS(TorchInFullRuns):
    backend = Spawn()

    def test_names_of_linux_are_gone_in_workers_too(self) -> None:
        with self.crew(self.spec(_removed)) as crew:
            crew.send(0, Task(0, None))
            (payload,) = [event.payload for event in crew.collect(1) if isinstance(event, Done)]
            assert {*bare_platform.MACOS.removed()} <= {*payload.open()}


@pytest.mark.usefixtures("_macos")
class TestForkAsOnMacOS(BackendContract):
    backend = Fork()


def _removed(index: None) -> list[str]:
    return bare_platform.removed()


@pytest.mark.skipif(not FORK, reason="there, the contract of spawn does it")
def test_every_module_but_those_of_zygotes_can_be_imported_as_on_windows(tmp_path: Path) -> None:
    """Also modules of the standard library that fail to import there."""
    core = Path(hybridloader.__file__).parent
    names = [
        ".".join((package, *path.relative_to(folder).with_suffix("").parts))
        for package, folder in (("hybridloader", core), ("hybridloader.backends", BACKENDS))
        for path in sorted(folder.rglob("*.py"))
        if path.stem not in ("__main__", "__init__", "demo")
    ]
    zygotes = [name for name in names if ".zygote" in name]
    # Modules of others first: they do as on Linux.
    code = """import asyncio, importlib, multiprocessing.connection, subprocess, sys
import loky.backend, torch.utils.data
from support import bare_platform
assert bare_platform.removed() == bare_platform.WINDOWS.removed()
sys.modules.update(dict.fromkeys(bare_platform.UNIMPORTABLE))
def imports(name):
    try:
        importlib.import_module(name)
    except ImportError:
        return False
    return True
print([name for name in sys.argv[1:] if not imports(name)])
"""
    paths = [bare_platform.child_environment("windows", tmp_path), str(ROOT), str(ROOT / "tests")]
    done = python("-c", code, *names, PYTHONPATH=os.pathsep.join(paths))
    assert (done.stderr, done.stdout.strip()) == ("", str(zygotes))
