"""Objects that processes share by nature, wherever a worker is given them: each start method and thread
sees the same ones, and so does a worker that replaces a dead one."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import socket
from multiprocessing import reduction
from typing import Any

import pytest
from support.platforms import posix

from hybridloader import DataLoader, Pipeline, SharedMemory, Threads
from hybridloader.engine import Backend
from hybridloader.errors import WorkerPicklingError


class Point(ctypes.Structure):
    _fields_ = [("x", ctypes.c_int), ("y", ctypes.c_double)]


class Common:
    """A dataset with one of each kind.

    Parameters
    ----------
    context
        What makes them; a multiprocessing context.
    proxy
        A manager's, of a list.
    dies
        Whether the first worker that reads item 1 is killed, before it does anything.
    """

    def __init__(self, context: Any, proxy: Any, *, dies: bool) -> None:
        self.deaths = context.Value("i", 0 if dies else 1)
        self.lock = context.Lock()
        self.value = context.Value("i", 0, lock=self.lock)
        self.array = context.Array("d", 4)
        self.raw = context.RawArray(ctypes.c_int, [7, 8, 9])
        self.point = context.Value(Point, 1, 2.5)
        self.plain = ctypes.c_int(3)  # of a type that may lie in shared memory, and does not
        self.rlock, self.semaphore = context.RLock(), context.Semaphore(3)
        self.condition, self.event = context.Condition(), context.Event()
        self.barrier = context.Barrier(1)
        self.queue, self.joinable = context.Queue(), context.JoinableQueue()
        self.simple = context.SimpleQueue()
        self.reader, self.writer = context.Pipe(duplex=False)
        self.ours, self.theirs = socket.socketpair()
        self.proxy = proxy

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> list[str]:
        """Use each of them; what is wrong."""
        if index == 1 and self.deaths.value == 0:
            self.deaths.value += 1
            os.kill(os.getpid(), signal.SIGKILL)
        wrong = []
        with self.lock:
            self.value.get_obj().value += 1
            if self.value.get_lock() is not self.lock:
                wrong.append("one lock has become two")
        with self.array.get_lock():
            self.array[index] += 1.5
        with self.point.get_lock():
            self.point.x += 1
        if [*self.raw] != [7, 8, 9] or self.plain.value != 3:
            wrong.append("another value")
        with self.rlock, self.rlock, self.semaphore, self.condition:
            self.condition.notify_all()
        if not self.event.is_set():
            wrong.append("the event is not set")
        self.barrier.wait(0)
        self.queue.put(index)
        self.joinable.put(index)
        self.simple.put(index)
        with self.rlock:
            self.writer.send(index)
            self.theirs.sendall(bytes([index]))
        self.proxy.append(index)
        return wrong

    def close(self) -> None:
        for thing in (self.queue, self.joinable, self.simple, self.reader, self.writer):
            thing.close()
        self.ours.close()
        self.theirs.close()


class Counting:
    """A function that counts its calls, in whichever process."""

    def __init__(self, context: Any) -> None:
        self.calls = context.Value("i", 0)

    def __call__(self, thing: Any) -> Any:
        with self.calls.get_lock():
            self.calls.value += 1
        return thing


class Box:
    """A function that holds something."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __call__(self, thing: Any) -> Any:
        return thing


class WithReducer:
    """Can be pickled only by the reducer that multiprocessing is told of."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock

    def __call__(self, thing: int) -> int:
        self.sock.sendall(bytes([thing]))
        return thing

    def __reduce__(self) -> Any:
        raise TypeError("not so")


def reduce_by_descriptor(thing: WithReducer) -> Any:
    return _from_descriptor, (reduction.DupFd(thing.sock.fileno()),)


def _from_descriptor(descriptor: Any) -> WithReducer:
    return WithReducer(socket.socket(fileno=descriptor.detach()))


FORK = multiprocessing.get_context("fork" if hasattr(os, "fork") else "spawn")
SPAWN = multiprocessing.get_context("spawn")


@pytest.fixture(scope="module", autouse=True)
def _heap() -> None:
    """Open the file that multiprocessing keeps for its shared values, as long as the process lives."""
    multiprocessing.RawValue("i")


@posix
@pytest.mark.parametrize(
    "backend",
    [
        SharedMemory("loky"),
        SharedMemory("fork"),
        pytest.param(SharedMemory("spawn"), marks=pytest.mark.full),
        pytest.param(SharedMemory("forkserver"), marks=[pytest.mark.forkserver, pytest.mark.full]),
        Threads(copy_dataset=True),
        "inline",
    ],
    ids=["loky", "fork", "spawn", "forkserver", "threads", "inline"],
)
def test_all_workers_and_those_that_replace_them_share_one_of_each_kind(
    backend: Backend | str,
) -> None:
    context: Any = FORK if backend == SharedMemory("fork") else SPAWN
    processes = isinstance(backend, SharedMemory)
    with FORK.Manager() as manager:
        dataset = Common(context, manager.list(), dies=processes)
        dataset.event.set()
        collate, opened = Counting(context), Counting(context)
        loader = DataLoader(
            dataset,
            collate_fn=collate,
            num_workers=2,
            backend=backend,
            worker_init_fn=opened,
            on_worker_death="restart",
        )
        try:
            assert list(loader) == [[[]]] * 4
            assert dataset.value.value == 4
            assert dataset.deaths.value == 1
            assert dataset.array[:] == [1.5] * 4
            assert dataset.point.x == 5
            for get in (
                dataset.queue.get,
                dataset.joinable.get,
                dataset.simple.get,
                dataset.reader.recv,
                lambda: dataset.ours.recv(1)[0],
                dataset.proxy.pop,
            ):
                assert sorted(get() for _ in range(4)) == [0, 1, 2, 3]
            assert collate.calls.value == 4
            assert opened.calls.value == 2 + processes
        finally:
            dataset.close()


@pytest.mark.parametrize("backend", ["spawn, portable", "threads"])
def test_a_function_of_a_pipeline_shares_too(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    backend, _, portable = backend.partition(", ")
    if portable:
        monkeypatch.setattr("hybridloader._support.system.UNIX_SOCKETS", False)
    function = Counting(SPAWN)
    pipeline = Pipeline.from_iterable(range(3)).map(function, backend=backend, num_workers=1)
    assert list(pipeline) == [0, 1, 2]
    assert function.calls.value == 3


def _closed() -> Any:
    ours, theirs = SPAWN.Pipe()
    ours.close()
    theirs.close()
    return ours


@pytest.mark.skipif(os.name != "posix", reason="on Windows a lock serves all start methods")
@pytest.mark.parametrize(
    ("make", "kind", "why"),
    [
        (FORK.Event, "Event", "works in forked processes only.*get_context"),
        (lambda: FORK.Value("i"), "Synchronized", "works in forked processes only"),
        (_closed, "Connection", "handle is closed"),  # found out as the process is started
    ],
)
def test_one_that_no_fresh_process_can_have_is_named(make: Any, kind: str, why: str) -> None:
    """Python itself refuses the first two from 3.11.5 and 3.12 on; before, the worker crashed."""
    function = Box([1, Box(make())])
    pipeline = Pipeline.from_iterable(range(3)).map(function, backend="spawn", num_workers=1)
    with pytest.raises(
        WorkerPicklingError, match=rf"\.inner\[1\]\.inner \(a {kind}\) can't .*{why}"
    ):
        iter(pipeline)


@pytest.mark.skipif(os.name != "posix", reason="descriptors go along on POSIX")
def test_a_reducer_that_multiprocessing_was_told_of_is_used() -> None:
    reduction.register(WithReducer, reduce_by_descriptor)
    try:
        ours, theirs = socket.socketpair()
        with ours, theirs:
            pipeline = Pipeline.from_iterable(range(3)).map(
                WithReducer(theirs), backend=SharedMemory("loky"), num_workers=1
            )
            assert list(pipeline) == [0, 1, 2]
            assert sorted(ours.recv(3)) == [0, 1, 2]
    finally:
        del reduction.ForkingPickler._extra_reducers[WithReducer]
