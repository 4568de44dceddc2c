"""Locks, queues, pipes and shared tensors, in each object that workers are given.

Light to import: a fresh worker that needs no torch imports none.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
from multiprocessing import reduction
from typing import Any


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
