"""Portable transport between parent and worker: a `multiprocessing` connection and two threads each.

It is for platforms without socket pairs that can be polled and carry descriptors (Windows). One thread
per worker reads and watches for its end, one writes, so that sending never blocks.
"""

from __future__ import annotations

import os
import socket
import threading
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing import connection as mp_connection
from multiprocessing.connection import Connection
from queue import Empty, SimpleQueue
from typing import Any, ClassVar

from hybridloader.backends.process.frames import MOST_BYTES, Buffer, Decoder, Frame, encode
from hybridloader.errors import DamagedMessage
from hybridloader.memory.shared_slots import ours

Arrived = tuple[int, "Frame | None"]
"""Worker, and its frame; None: it is gone."""


def _read(
    worker: int,
    connection: Any,
    process: Any,
    arrived: SimpleQueue[tuple[Any, Arrived] | None],
    damaged: dict[int, str],
) -> None:
    decoder = Decoder()
    try:
        while True:
            ready = mp_connection.wait([connection, process.sentinel])
            if connection in ready:
                for frame in decoder.feed(connection.recv_bytes(MOST_BYTES)):
                    arrived.put((connection, (worker, frame)))
            elif not connection.poll(0):  # it has ended, and all its frames were read
                break
    except (DamagedMessage, MemoryError) as error:  # multiprocessing's frames have no check
        damaged[worker] = str(error) or "there is no memory for one of its messages"
    except (EOFError, OSError):
        pass
    finally:
        arrived.put((connection, (worker, None)))


def _write(connection: Any, outgoing: SimpleQueue[bytes | None]) -> None:
    while (data := outgoing.get()) is not None:
        try:
            connection.send_bytes(data)
        except OSError:  # the worker has ended; the reader reports that
            return


class PipeEndpoint:
    """The worker's end of its connection, as `SocketEndpoint`; it carries no descriptors."""

    def __init__(self, connection: Any) -> None:
        self._connection = connection
        if isinstance(connection, Connection):  # it was inherited; descendants must not inherit it
            os.set_inheritable(connection.fileno(), False)
        self._decoder = Decoder()
        self._frames: deque[Frame] = deque()

    def get(self) -> Frame:
        while not self._frames:
            try:
                self._frames.extend(self._decoder.feed(self._connection.recv_bytes(MOST_BYTES)))
            except OSError:
                raise EOFError from None
        return self._frames.popleft()

    def send(self, parts: Sequence[Buffer], fds: Sequence[int] = ()) -> None:
        try:
            self._connection.send_bytes(b"".join(map(bytes, encode(parts))))
        except OSError:
            raise EOFError from None

    def fileno(self) -> None:
        return None

    def close(self) -> None:
        self._connection.close()


class PipeTransport:
    """Connections of one crew, with the members of `SocketTransport`."""

    endpoint: ClassVar[type[PipeEndpoint]] = PipeEndpoint
    carries_descriptors: ClassVar[bool] = False

    def __init__(self) -> None:
        # With the connection, as a worker may have a new one by now; None wakes.
        self._arrived: SimpleQueue[tuple[Any, Arrived] | None] = SimpleQueue()
        self._connections: dict[int, Any] = {}
        self._outgoing: dict[int, SimpleQueue[bytes | None]] = {}
        self._threads: list[threading.Thread] = []
        self.damaged: dict[int, str] = {}

    def connect(self, worker: int, connection: Any) -> None:
        self._connections[worker] = connection
        self.damaged.pop(worker, None)
        ours.add(connection.fileno())
        self._outgoing[worker] = SimpleQueue()

    def watch(self, worker: int, process: Any) -> None:
        connection = self._connections[worker]
        for target, args in (
            (_read, (worker, connection, process, self._arrived, self.damaged)),
            (_write, (connection, self._outgoing[worker])),
        ):
            thread = threading.Thread(
                target=target, args=args, name=f"hybridloader-pipe-{worker}", daemon=True
            )
            thread.start()
            self._threads.append(thread)

    def send(self, worker: int, parts: Sequence[Buffer], fds: Sequence[int] = ()) -> None:
        if worker in self._connections:
            self._outgoing[worker].put(b"".join(map(bytes, encode(parts))))

    def flush(self) -> None:
        return None  # a thread has it

    def wait(self, timeout: float | None) -> list[Arrived]:
        found: list[tuple[Any, Arrived]] = []
        # Slices, because on Windows a wait for a lock can't be interrupted by Ctrl-C.
        try:
            item = self._arrived.get(timeout=0.2 if timeout is None else min(0.2, timeout))
            while item is not None:
                found.append(item)
                item = self._arrived.get_nowait()
        except Empty:
            pass
        events = [
            event for connection, event in found if connection is self._connections.get(event[0])
        ]
        for worker, frame in events:
            if frame is None:
                self.drop(worker)
        return events

    def wake(self) -> None:
        self._arrived.put(None)

    def drop(self, worker: int) -> None:
        connection = self._connections.pop(worker, None)
        if connection is None:
            return
        self._outgoing[worker].put(None)
        # Its threads may be in a call of it; they end with the worker.
        ours.discard(connection.fileno())
        # One of a pair of sockets, which a waiting thread keeps open after `close`.
        if isinstance(connection, Connection):
            with suppress(OSError), socket.socket(fileno=os.dup(connection.fileno())) as end:
                end.shutdown(socket.SHUT_RDWR)
        connection.close()

    def hang_up(self) -> None:
        for worker in list(self._connections):
            self.drop(worker)

    def close(self) -> None:
        self.hang_up()
        for thread in self._threads:
            thread.join(1.0)
