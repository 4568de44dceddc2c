"""Transports between parent and worker: polled socket pairs on POSIX; pipes and threads elsewhere.

Nothing is shared between workers and there is no lock that a dying worker could take along. Frames that
do not fit into the socket at once wait in a queue and are written by the next `wait`. A worker is known
to be gone when its process ends (a pidfd where there is one, else multiprocessing's sentinel), after
everything that it had written was read.
"""

from __future__ import annotations

import array
import errno
import os
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from multiprocessing import connection as mp_connection
from multiprocessing.connection import Connection
from queue import Empty, SimpleQueue
from typing import Any, ClassVar

from hybridloader._support import system
from hybridloader.backends.process.frames import (
    MOST_BYTES,
    MOST_FDS,
    Buffer,
    Decoder,
    Frame,
    encode,
)
from hybridloader.errors import DamagedMessage
from hybridloader.memory.shared_slots import ours

# -- Portable transport between parent and worker: a `multiprocessing` connection and two threads each.
#
# It is for platforms without socket pairs that can be polled and carry descriptors (Windows). One
# thread per worker reads and watches for its end, one writes, so that sending never blocks. The writer
# also closes the connection, as no thread may be about to use its handle by then: the next connection
# may get the same.


Arrived = tuple[int, "Frame | None"]  # worker, and its frame; None: it is gone


def _read(
    worker: int,
    connection: Any,
    reading: threading.Lock,
    process: Any,
    arrived: SimpleQueue[tuple[Any, Arrived] | None],
    damaged: dict[int, str],
) -> None:
    decoder = Decoder()
    try:
        while True:
            ready = mp_connection.wait([connection, process.sentinel])
            with reading:
                if connection.closed:
                    break
                # It may have ended with frames that were not read.
                if connection not in ready and not connection.poll(0):
                    break
                data = connection.recv_bytes(MOST_BYTES)
            for frame in decoder.feed(data):
                arrived.put((connection, (worker, frame)))
    except (DamagedMessage, MemoryError) as error:  # multiprocessing's frames have no check
        damaged[worker] = str(error) or "there is no memory for one of its messages"
    except (EOFError, OSError):
        pass
    finally:
        arrived.put((connection, (worker, None)))


def _write(connection: Any, reading: threading.Lock, outgoing: SimpleQueue[bytes | None]) -> None:
    """Write until None comes, and hang up then."""
    while (data := outgoing.get()) is not None:
        with suppress(OSError):  # the worker has ended; the reader reports that
            connection.send_bytes(data)
    ours.discard(connection.fileno())
    # One of a pair of sockets, which a waiting thread keeps open after `close`.
    if isinstance(connection, Connection):
        with suppress(OSError), socket.socket(fileno=os.dup(connection.fileno())) as end:
            end.shutdown(socket.SHUT_RDWR)
    with reading:
        connection.close()


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
        self._reading: dict[int, threading.Lock] = {}
        self._threads: list[threading.Thread] = []
        self.damaged: dict[int, str] = {}

    def connect(self, worker: int, connection: Any) -> None:
        self._connections[worker] = connection
        self.damaged.pop(worker, None)
        ours.add(connection.fileno())
        self._outgoing[worker], self._reading[worker] = SimpleQueue(), threading.Lock()
        self._start(worker, _write, connection, self._reading[worker], self._outgoing[worker])

    def watch(self, worker: int, process: Any) -> None:
        connection, reading = self._connections[worker], self._reading[worker]
        args = worker, connection, reading, process, self._arrived, self.damaged
        self._start(worker, _read, *args)

    def _start(self, worker: int, target: Callable[..., None], *args: Any) -> None:
        name = f"hybridloader-pipe-{worker}"
        thread = threading.Thread(target=target, args=args, name=name, daemon=True)
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
        if self._connections.pop(worker, None) is not None:
            self._outgoing[worker].put(None)

    def hang_up(self) -> None:
        for worker in list(self._connections):
            self.drop(worker)

    def close(self) -> None:
        self.hang_up()
        for thread in self._threads:
            thread.join(1.0)


_READ = 64 * 1024
ROOM = socket.CMSG_SPACE(MOST_FDS * 4) if system.UNIX_SOCKETS else 0
CLOSE_ON_EXEC: int = getattr(socket, "MSG_CMSG_CLOEXEC", 0)
"""Flag without which a program that the user starts would inherit descriptors that have just arrived;
Python handles all others (PEP 446). macOS has no such flag."""
_SEND_BUFFER = 1 << 20
_LONGEST = (1 << 31) - 1  # most milliseconds of a `poll` (an int of C): 25 days
_PAUSE = 0.01
"""Seconds after which a worker retries to send descriptors, if as many are in flight as the system
allows."""
_IOV = 512  # below IOV_MAX, which is 1024 on Linux and macOS


def as_socket(connection: Any) -> socket.socket:
    """Take over the descriptor of a `multiprocessing.Connection`."""
    taken = socket.socket(fileno=os.dup(connection.fileno()))
    connection.close()
    return taken


def send_some(sock: socket.socket, pieces: deque[Buffer], fds: Sequence[int]) -> None:
    """Write once, and remove the written bytes from `pieces`."""
    head = [pieces[i] for i in range(min(_IOV, len(pieces)))]
    extra = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
    sent = sock.sendmsg(head, extra)
    while pieces and sent >= (size := memoryview(pieces[0]).nbytes):
        sent -= size
        pieces.popleft()
    if sent:
        pieces[0] = memoryview(pieces[0]).cast("B")[sent:]


def read_some(sock: socket.socket, decoder: Decoder) -> Iterable[Frame]:
    """Read once, and give the frames that became whole. Raises `EOFError` at the end."""
    room = None if decoder.body is None else decoder.room()
    if room is not None:
        count = sock.recv_into(room)
        room.release()
        if count == 0:
            raise EOFError
        return decoder.advance(count)
    data, extra, _, _ = sock.recvmsg(_READ, ROOM, CLOSE_ON_EXEC)
    for level, kind, body in extra:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds = array.array("i")
            fds.frombytes(body[: len(body) - len(body) % 4])
            if not CLOSE_ON_EXEC:
                for fd in fds:
                    os.set_inheritable(fd, False)
            decoder.fds.extend(fds)
    if not data:
        raise EOFError
    return decoder.feed(data)


class SocketEndpoint:
    """The worker's end of its connection: reads and writes block."""

    def __init__(self, connection: Any) -> None:
        self._sock = as_socket(connection)
        self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER)
        self._decoder = Decoder()
        self._frames: deque[Frame] = deque()

    def get(self) -> Frame:
        """Wait for the next frame. Raises `EOFError` (the parent has hung up) or `DamagedMessage`."""
        while not self._frames:
            try:
                self._frames.extend(read_some(self._sock, self._decoder))
            except ConnectionError:  # the parent hung up with unread results
                raise EOFError from None
        return self._frames.popleft()

    @property
    def ready(self) -> bool:  # True if `get` will not wait
        return bool(self._frames)

    def send(self, parts: Sequence[Buffer], fds: Sequence[int] = ()) -> None:
        """Write a frame. Raises `EOFError` when the parent has hung up, or this end has."""
        try:
            if len(parts) == 1 and not fds:
                self._sock.sendall(b"".join(encode(parts)))
                return
            pieces = deque(encode(parts, fds))
            while pieces:
                try:
                    send_some(self._sock, pieces, fds)
                except OSError as error:
                    if error.errno != errno.ETOOMANYREFS:
                        raise
                    time.sleep(_PAUSE)  # until the parent has read some
                    continue
                fds = ()
        except ConnectionError:
            raise EOFError from None
        except OSError as error:
            if error.errno != errno.EBADF:
                raise
            raise EOFError from None  # the worker has ended during the write

    def fileno(self) -> int:
        """Descriptor that polls as hung up once the parent's end is closed."""
        return self._sock.fileno()

    def close(self) -> None:
        self._sock.close()
        _close_all(self._decoder.fds)
        self._decoder.fds.clear()


class _Connection:
    """The parent's end of one worker's connection."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.sentinel = -1  # descriptor that becomes readable at the worker's end
        self.end_reported: Callable[[], bool] = bool  # called when `sentinel` is readable
        self.decoder = Decoder()
        self.pending: list[Buffer] = []  # written at the next flush
        # Pieces that did not fit yet, with the descriptors to close once they are sent.
        self.unsent: deque[tuple[deque[Buffer], Sequence[int]]] = deque()
        self.damage: str | None = None

    def flush(self) -> bool:
        """Write the waiting frames, as far as the socket takes them. True if none is left."""
        while self.unsent:
            pieces, fds = self.unsent[0]
            try:
                send_some(self.sock, pieces, fds)
            except BlockingIOError:
                return False
            except OSError as error:
                # As many descriptors in flight as the system allows.
                if error.errno == errno.ETOOMANYREFS:
                    return False
                self.drop_unsent()  # the worker has ended; its sentinel reports that
                return True
            _close_all(fds)
            self.unsent[0] = (pieces, ())
            if not pieces:
                self.unsent.popleft()
        return True

    def drop_unsent(self) -> None:
        while self.unsent:
            _close_all(self.unsent.popleft()[1])

    def read(self, *, all_of_it: bool = False) -> tuple[list[Frame], bool]:
        """Read the frames that have arrived, or at least one of them if not `all_of_it`.

        True as the second value: that was the end; damage is the end, too.
        """
        frames: list[Frame] = []
        try:
            while True:
                frames.extend(read_some(self.sock, self.decoder))
                if self.decoder.body is None and not all_of_it:
                    return frames, False  # poll reports if there is more
        except BlockingIOError:
            return frames, False
        except DamagedMessage as error:
            self.damage = str(error)
            return frames, True
        except (EOFError, OSError):
            return frames, True


def _close_all(fds: Sequence[int]) -> None:
    for fd in fds:
        os.close(fd)


class SocketTransport:
    """Connections of one crew, and the poll that waits for any of them."""

    endpoint: ClassVar[type[SocketEndpoint]] = SocketEndpoint
    carries_descriptors: ClassVar[bool] = True

    def __init__(self) -> None:
        self._poll = select.poll()
        self._connections: dict[int, _Connection] = {}
        self._worker_of: dict[int, int] = {}  # descriptor -> worker
        self._alarm_r, self._alarm_w = os.pipe()
        os.set_blocking(self._alarm_r, False)
        os.set_blocking(self._alarm_w, False)
        ours.update((self._alarm_r, self._alarm_w))
        self._poll.register(self._alarm_r, select.POLLIN)
        self._dirty: list[int] = []
        self.damaged: dict[int, str] = {}  # why a worker, which may be alive, is no longer read
        self._open = True
        # A `wake` of a closed crew must not write to a file that has reused its descriptor. Reentrant,
        # because a finalizer may call `wake` at any point of another `wake`.
        self._alarm = threading.RLock()

    def connect(self, worker: int, connection: Any) -> None:
        """Take over the parent's end, before the worker is started."""
        sock = as_socket(connection)
        sock.setblocking(False)
        ours.add(sock.fileno())
        self._connections[worker] = _Connection(sock)
        self.damaged.pop(worker, None)
        self._worker_of[sock.fileno()] = worker
        self._poll.register(sock, select.POLLIN)

    def watch(self, worker: int, handle: Any) -> None:
        """Watch for the end of the worker's process, by its pidfd or multiprocessing's sentinel."""
        connection = self._connections[worker]
        # It was started in another way now.
        if self._worker_of.pop(connection.sentinel, None) is not None:
            self._poll.unregister(connection.sentinel)
        fd = handle.sentinel if handle.pidfd is None else handle.pidfd.fileno()
        connection.sentinel, connection.end_reported = fd, handle.end_reported
        self._worker_of[fd] = worker
        self._poll.register(fd, select.POLLIN)

    def send(self, worker: int, parts: Sequence[Buffer], fds: Sequence[int] = ()) -> None:
        """Queue a frame. Takes over `fds`, and closes them."""
        connection = self._connections.get(worker)
        if connection is None:
            _close_all(fds)
        elif not fds:
            if not connection.pending:
                self._dirty.append(worker)
            connection.pending += encode(parts)
        else:
            self.flush()
            connection.unsent.append((deque(encode(parts, fds)), fds))
            if not connection.flush():
                self._poll.modify(connection.sock, select.POLLIN | select.POLLOUT)

    def flush(self) -> None:
        """Write the queued messages of each worker together: it need not wake for every message."""
        for worker in self._dirty:
            connection = self._connections.get(worker)
            if connection is None:
                continue
            data = b"".join(connection.pending)
            connection.pending.clear()
            sent = 0
            if not connection.unsent:
                try:
                    sent = connection.sock.send(data)
                except BlockingIOError:
                    pass
                except OSError:  # the worker has ended; its sentinel reports that
                    continue
                if sent == len(data):
                    continue
            connection.unsent.append((deque([memoryview(data)[sent:]]), ()))
            self._poll.modify(connection.sock, select.POLLIN | select.POLLOUT)
        self._dirty.clear()

    def wait(self, timeout: float | None) -> list[tuple[int, Frame | None]]:
        """Give ``(worker, frame)`` for each arrival, ``(worker, None)`` for a worker that is gone."""
        if self._dirty:
            self.flush()
        found: list[tuple[int, Frame | None]] = []
        gone: list[int] = []
        most = None if timeout is None else min(max(0.0, timeout) * 1000, _LONGEST)
        for fd, event in self._poll.poll(most):
            if fd == self._alarm_r:
                with suppress(BlockingIOError):
                    os.read(self._alarm_r, 4096)
                continue
            worker = self._worker_of.get(fd)
            if worker is None:
                continue
            connection = self._connections[worker]
            if fd != connection.sock.fileno():
                if connection.end_reported():
                    gone.append(worker)
                continue
            if event & select.POLLOUT and connection.flush():
                self._poll.modify(fd, select.POLLIN)
            if event & (select.POLLIN | select.POLLHUP | select.POLLERR):
                frames, ended = connection.read()
                for frame in frames:
                    found.append((worker, frame))
                if ended:
                    gone.append(worker)
        for worker in dict.fromkeys(gone):
            connection = self._connections[worker]
            frames, _ = connection.read(all_of_it=True)
            found += [(worker, frame) for frame in frames]
            if connection.damage is not None:
                self.damaged[worker] = connection.damage
            self.drop(worker)
            found.append((worker, None))
        return found

    def wake(self) -> None:
        with self._alarm:
            if self._open:
                with suppress(BlockingIOError):  # a full pipe wakes as well
                    os.write(self._alarm_w, b"!")

    def drop(self, worker: int) -> None:
        """Hang up: the worker sees the end of its input, and its writes fail."""
        connection = self._connections.pop(worker, None)
        if connection is None:
            return
        for fd in (connection.sock.fileno(), connection.sentinel):
            if self._worker_of.pop(fd, None) is not None:
                self._poll.unregister(fd)
        ours.discard(connection.sock.fileno())
        connection.sock.close()
        connection.drop_unsent()
        _close_all(connection.decoder.fds)

    def hang_up(self) -> None:  # all workers leave then
        for worker in list(self._connections):
            self.drop(worker)

    def close(self) -> None:
        self.hang_up()
        with self._alarm:
            if self._open:
                self._open = False
                ours.difference_update((self._alarm_r, self._alarm_w))
                _close_all((self._alarm_r, self._alarm_w))
