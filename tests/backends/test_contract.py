"""The contract suite over every backend, and over the ways that other platforms would take."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support import bare_platform
from support.backend_without_defaults import WithoutDefaults

import hybridloader
from hybridloader import Fork, Inline, Memory, SharedMemory, Spawn, Threads
from hybridloader.backends.process import socket_transport
from hybridloader.engine import Backend, Crew, Done, Message, Task, WorkerHandle, WorkerSpec
from hybridloader.testing import BackendContract

KINDS: tuple[Any, ...] = (Backend, Crew, WorkerHandle)
ROOT = Path(__file__).parents[2]
BACKENDS = Path(socket_transport.__file__).parents[1]


class TestInline(BackendContract):
    backend = Inline()


class TestThreads(BackendContract):
    backend = Threads()


class TestThreadsWithCopies(BackendContract):
    backend = Threads(copy_dataset=True)


class TestSevenMethods(BackendContract):
    """Backend of a package that wrote all methods, when none of a crew's had a default."""

    backend = WithoutDefaults()


def test_what_they_give_is_handed_out_and_weighed() -> None:
    assert list(hybridloader.DataLoader(range(6), 2, num_workers=2, backend=WithoutDefaults()))
    pipe = hybridloader.Pipeline.from_iterable(range(9)).map(abs, backend=WithoutDefaults())
    with pipe.map(abs, backend="fork", buffer_bytes=10**6).run() as run:
        assert list(run) == [*range(9)]


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


class TestSpawn(BackendContract):
    backend = Spawn()


@pytest.mark.full  # in its transport it is `TestSpawn`, in how it starts `TestSpawnWithNothingOfPosix`
class TestSpawnWithoutZygote(BackendContract):
    backend = Spawn(preload=False)


class TestSharedMemory(BackendContract):
    backend = SharedMemory()


@pytest.mark.full  # but for its name and its start method it is both `TestSpawn` and `TestSharedMemory`
class TestSharedMemoryUnderLoky(BackendContract):
    backend = SharedMemory(start_method="loky")


class TestForkWithoutPidfd(BackendContract):
    """As on macOS: the end of a process is seen through multiprocessing's sentinel."""

    backend = Fork()

    @pytest.fixture(autouse=True)
    def _no_pidfd(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delattr("os.pidfd_open", raising=False)


class TestSharedMemoryWithoutMemfd(BackendContract):
    """As on macOS: slots are POSIX shared memory that loses its name at once."""

    backend = SharedMemory(start_method="fork")

    @pytest.fixture(autouse=True)
    def _no_memfd(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delattr("os.memfd_create")


@pytest.fixture
def _nothing_of_posix(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As on Windows: connections instead of polled sockets, no descriptors, slots with names."""

    def put(owner: Any, name: str, value: Any) -> None:
        (monkeypatch.setitem if isinstance(owner, dict) else monkeypatch.setattr)(
            owner, name, value
        )

    monkeypatch.setenv("PYTHONPATH", bare_platform.child_environment(tmp_path))
    monkeypatch.setattr(socket_transport, "available", lambda: False)
    bare_platform.switch_off(monkeypatch.delattr, put)


@pytest.mark.usefixtures("_nothing_of_posix")
class TestSpawnWithNothingOfPosix(BackendContract):
    backend = Spawn()

    def test_it_is_all_gone_in_workers_too(self) -> None:
        assert bare_platform.there() == []
        with self.crew(self.spec(_what_is_there)) as crew:
            crew.send(0, Task(0, None))
            (payload,) = [event.payload for event in crew.collect(1) if isinstance(event, Done)]
            assert payload.open() == []


@pytest.mark.usefixtures("_nothing_of_posix")
class TestThreadsWithNothingOfPosix(BackendContract):
    backend = Threads()


def _what_is_there(index: None) -> list[str]:
    return bare_platform.there()


class TestNamedSlots(BackendContract):
    """Slots that are `multiprocessing.shared_memory`, where descriptors could be sent."""

    backend = Fork(memory=Memory(kind="named"))


class TestStream(BackendContract):
    """No slots at all."""

    backend = Fork(memory=Memory(kind="stream"))


def test_every_module_can_be_imported_with_nothing_of_posix(tmp_path: Path) -> None:
    """Also what only an ``if`` or a class body at the top of a module would touch."""
    core = Path(hybridloader.__file__).parent
    names = [
        ".".join(("hybridloader", *path.relative_to(core).with_suffix("").parts))
        for path in sorted(core.rglob("*.py"))
        if path.stem not in ("__main__", "__init__") and "demo" not in path.parts
    ]
    names += [
        ".".join(("hybridloader.backends", *path.relative_to(BACKENDS).with_suffix("").parts))
        for path in sorted(BACKENDS.rglob("*.py"))
        if path.stem != "__init__"
    ]
    code = "import importlib, sys\nfor name in sys.argv[1:]: importlib.import_module(name)"
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            f"from support import bare_platform; assert not bare_platform.there()\n{code}",
            *names,
        ],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": _path(tmp_path)},
    )
    assert (done.stderr, done.returncode) == ("", 0)


def _path(folder: Path) -> str:
    return os.pathsep.join(
        [bare_platform.child_environment(folder), str(ROOT), str(ROOT / "tests")]
    )
