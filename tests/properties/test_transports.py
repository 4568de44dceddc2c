"""Damage in what carries bytes: connections, shipments, cache files. It ends a worker, or one read."""

from __future__ import annotations

import array
import contextlib
import errno
import multiprocessing
import os
import re
import socket
import stat
from collections.abc import Iterator
from multiprocessing import Pipe
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from support.crew_driver import OWN, CrewDriver, full
from support.failing_datasets import Samples
from support.platforms import DEADLINE, posix

from hybridloader import DataLoader, Fork, WorkerDied
from hybridloader.backends.process import transports
from hybridloader.backends.process.frames import TASK, Frame, encode, encode_fields
from hybridloader.backends.process.transports import (
    PipeEndpoint,
    PipeTransport,
    SocketEndpoint,
    SocketTransport,
)
from hybridloader.engine import Exited
from hybridloader.errors import DamagedMessage, WorkerPicklingError
from hybridloader.memory import shipping
from hybridloader.memory.shipping import receive, ship


def joined(*parts: bytes) -> bytes:
    return b"".join(bytes(piece) for piece in encode(parts))


# -- a worker's connection ------------------------------------------------------------------------


class Wire:
    """A transport with one worker, played by whoever has `theirs`."""

    def __init__(self, kind: type) -> None:
        ours, self.theirs = Pipe()
        self.transport: Any = kind()
        self.transport.connect(0, ours)
        if kind is PipeTransport:
            self._life, self._end = Pipe()  # Windows can wait for these, and for no descriptor
            self.transport.watch(0, SimpleNamespace(sentinel=self._life))

    def write(self, data: bytes) -> None:
        """As what the other side's transport would deliver."""
        if isinstance(self.transport, PipeTransport):
            self.theirs.send_bytes(data)
        else:
            os.write(self.theirs.fileno(), data)

    def until_gone(self) -> list[Any]:
        found: list[Any] = []
        while not found or found[-1][1] is not None:
            found += self.transport.wait(60.0)
        return found

    def close(self) -> None:
        self.theirs.close()
        self.transport.close()
        if isinstance(self.transport, PipeTransport):
            self._life.close()
            self._end.close()


@pytest.fixture(params=[SocketTransport, PipeTransport], ids=["sockets", "portable"])
def wire(request: pytest.FixtureRequest) -> Iterator[Wire]:
    made = Wire(request.param)
    yield made
    made.close()


@posix
def test_damage_is_the_end_of_that_worker_and_the_reason_is_kept(wire: Wire) -> None:
    wire.write(joined(b"good") + b"print() of a program that has our descriptor")
    found = wire.until_gone()
    assert [(worker, frame and bytes(frame.parts[0])) for worker, frame in found] == [
        (0, b"good"),
        (0, None),
    ]
    assert "no message begins with 7072696e" in wire.transport.damaged[0]
    assert "another program or library wrote to this descriptor" in wire.transport.damaged[0]
    wire.transport.send(0, [b"to nobody"])
    wire.transport.flush()


@pytest.mark.parametrize("kind", [pytest.param(SocketEndpoint, marks=posix), PipeEndpoint])
def test_a_worker_ends_with_the_reason_when_its_input_is_damaged(kind: Any) -> None:
    ours, theirs = Pipe()
    endpoint = kind(theirs)
    if kind is SocketEndpoint:
        os.write(ours.fileno(), b"sixteen bytes and more")
    else:
        ours.send_bytes(b"sixteen bytes and more")
    with pytest.raises(DamagedMessage, match="no message begins with"):
        endpoint.get()
    endpoint.close()
    ours.close()


def scribble(index: int) -> int:
    """Write to sockets that this code did not open."""
    for fd in range(3, 64) if index == 3 else ():
        with contextlib.suppress(OSError):
            if stat.S_ISSOCK(os.fstat(fd).st_mode):
                os.write(fd, b"a line of a log that goes astray\n")
    return index


@posix
@pytest.mark.parametrize("backend", ["fork", pytest.param("spawn", marks=pytest.mark.full)])
def test_a_dataset_that_writes_into_the_line_costs_its_worker_and_nothing_else(
    backend: str,
) -> None:
    data: Any = Samples(scribble)
    loader = DataLoader(data, num_workers=1, backend=backend, prefetch_factor=1)
    iterator = iter(loader)
    assert [next(iterator).item() for _ in range(3)] == [0, 1, 2]
    with pytest.raises(WorkerDied, match="worker 0"):
        next(iterator)
    iterator.close()
    good = DataLoader(range(4), num_workers=1, backend=backend)  # type: ignore[arg-type]
    assert [batch.item() for batch in good] == [0, 1, 2, 3]


# -- shipments -------------------------------------------------------------------------------------

THING = {"name": "dataset", "rows": np.arange(20_000), "tensor": torch.ones(20_000)}


def shipped(share: bool) -> tuple[list[bytearray], list[int]]:
    shipment = ship(THING, "the thing", share=share)
    parts, fds = [bytearray(part) for part in shipment.parts], [os.dup(fd) for fd in shipment.fds]
    shipment.close()
    return parts, fds


def test_descriptors_that_did_not_arrive_are_told_with_the_limit() -> None:
    parts, fds = shipped(True)
    for fd in fds:
        os.close(fd)
    with pytest.raises(WorkerPicklingError, match=r"0 of 1 descriptors have arrived; .*ulimit -n"):
        receive([memoryview(part) for part in parts], [])


@posix
def test_a_shipment_that_is_cut_off_is_told_as_that() -> None:
    parts, fds = shipped(True)
    os.ftruncate(fds[0], 1000)
    with pytest.raises(WorkerPicklingError, match="it is truncated, at 1,000 bytes"):
        receive([memoryview(part) for part in parts], fds)


class Unloadable:
    """Object whose parts are not there in the worker."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def __reduce__(self) -> Any:
        return _fail, (self.error,)


def _fail(error: Exception) -> None:
    raise error


@pytest.mark.parametrize("share", [pytest.param(True, marks=posix), False])
@pytest.mark.parametrize("error", [LookupError("no GPU"), StopIteration()])
def test_what_can_not_be_loaded_in_the_worker_is_told_and_is_no_end_of_input(
    error: Exception, share: bool
) -> None:
    shipment = ship(Unloadable(error), "it", share=share)
    fds = [os.dup(fd) for fd in shipment.fds]
    with pytest.raises(
        WorkerPicklingError, match="can't be loaded in this worker process"
    ) as caught:
        receive([memoryview(part) for part in shipment.parts], fds)
    assert type(caught.value.__cause__) is type(error)
    assert repr(error) in str(caught.value)
    shipment.close()


memfd = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="there is no memfd")


class Raises:
    def __init__(self, error: BaseException) -> None:
        self.error = error

    def __reduce__(self) -> Any:
        raise self.error


@memfd
@pytest.mark.parametrize(
    ("error", "told"),
    [(KeyboardInterrupt(), KeyboardInterrupt), (OSError(28, "of its own"), WorkerPicklingError)],
    ids=["interrupt", "its own"],
)
def test_whatever_ends_it_no_descriptor_stays(
    error: BaseException, told: type[BaseException]
) -> None:
    before = psutil.Process().num_fds()
    with pytest.raises(told):
        ship([bytes(100_000), Raises(error)], "the list", share=True)
    assert psutil.Process().num_fds() == before


@memfd
@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="there is no /dev/full")
@pytest.mark.parametrize("nbytes", [10, 1_000_000], ids=["at the end", "at once"])
def test_a_lack_of_room_is_told_as_that(monkeypatch: pytest.MonkeyPatch, nbytes: int) -> None:
    monkeypatch.setattr(shipping, "nameless_file", lambda: os.open("/dev/full", os.O_WRONLY))
    with pytest.raises(OSError, match="no room to send it to workers: No space left"):
        ship(bytes(nbytes), "the bytes", share=True)


# -- connections that end, and descriptors ---------------------------------------------------------


def test_the_end_of_a_connection_that_was_dropped_is_not_that_of_the_next_worker() -> None:
    """On platforms without polled sockets, threads report the ends, and one may be late."""
    transport = PipeTransport()
    ended, sentinel = Pipe()
    pairs = [Pipe() for _ in range(2)]
    transport.connect(0, pairs[0][0])
    transport.watch(0, SimpleNamespace(sentinel=sentinel.fileno()))
    transport.drop(0)
    for thread in transport._threads:
        thread.join(DEADLINE)
    transport.connect(0, pairs[1][0])  # that of the worker that takes its place
    assert transport.wait(0) == []
    assert not pairs[1][0].closed
    transport.close()
    for end in (ended, sentinel, pairs[0][1], pairs[1][1]):
        end.close()


@pytest.mark.parametrize("kind", [pytest.param(SocketEndpoint, marks=posix), PipeEndpoint])
def test_a_worker_whose_parent_hangs_up_without_reading_sees_the_end_of_its_input(
    kind: Any,
) -> None:
    """Unread bytes in a socket that is closed make the other side's next read an error."""
    ours, theirs = multiprocessing.Pipe(duplex=True)
    endpoint = kind(theirs)
    try:
        endpoint.send([b"a result that nobody reads"])
        ours.close()
        with pytest.raises(EOFError):
            endpoint.get()
    finally:
        endpoint.close()


@posix
def test_a_worker_whose_parent_hangs_up_within_a_large_message_sees_the_end_of_its_input() -> None:
    ours, theirs = Pipe()
    endpoint = SocketEndpoint(theirs)
    os.write(ours.fileno(), joined(bytes(1 << 20))[:4000])
    ours.close()
    with pytest.raises(EOFError):
        endpoint.get()
    endpoint.close()


@posix
def test_what_a_worker_that_ends_has_not_read_is_dropped_with_its_descriptors() -> None:
    """The fixture in conftest.py counts them."""
    wire = Wire(SocketTransport)
    connection = wire.transport._connections[0]
    with contextlib.suppress(BlockingIOError):
        while True:
            connection.sock.send(bytes(1 << 20))
    wire.transport.send(0, [b"no room for it"])
    for _ in range(2):
        wire.transport.send(0, [b"after it"], [os.dup(0)])
    assert wire.transport.wait(0) == []
    assert len(connection.unsent) == 3
    wire.theirs.close()
    assert wire.until_gone() == [(0, None)]
    assert not connection.unsent
    wire.close()


@posix
def test_what_is_queued_for_a_worker_that_is_dropped_is_not_sent() -> None:
    wire = Wire(SocketTransport)
    wire.transport.send(0, [b"to nobody"])
    wire.transport.drop(0)
    wire.transport.flush()
    with pytest.raises(EOFError):
        wire.theirs.recv_bytes()
    wire.close()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize(
    ("garbage", "words"),
    [
        (b"no event", r"sent an unreadable message \(a message has 8 bytes, fewer than its head"),
        (encode_fields(TASK, 0, b""), r"message \(a worker sent a message that is not an event"),
    ],
    ids=["garbage", "a task"],
)
def test_descriptors_that_come_with_damage_or_behind_it_are_closed(
    garbage: bytes, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fixture in conftest.py counts them."""
    with CrewDriver(Fork(), abs) as driven:
        assert driven.call(-3) == 3
        crew = driven.raw
        wait = crew.transport.wait

        def damaged(timeout: float | None) -> Any:
            monkeypatch.undo()
            return [(0, Frame([memoryview(garbage)], [os.dup(0), os.dup(0)])) for _ in range(2)]

        monkeypatch.setattr(crew.transport, "wait", damaged)
        [event] = crew.wait(0)
        assert isinstance(event, Exited)
        assert re.search(words, str(event.cause))
        assert crew.transport.wait == wait


@posix
@pytest.mark.parametrize("flag", ["the platform's", "none"])
def test_descriptors_that_arrive_close_on_exec(flag: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if flag == "none":
        monkeypatch.setattr(transports, "CLOSE_ON_EXEC", 0)
    ours, theirs = Pipe()
    endpoint = SocketEndpoint(theirs)
    fd = os.dup(1)
    with socket.socket(fileno=os.dup(ours.fileno())) as sender:
        extra = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd]))]
        sender.sendmsg([bytes(piece) for piece in encode([b"one"], [fd])], extra)
    (arrived,) = endpoint.get().fds
    assert not os.get_inheritable(arrived)
    for one in (fd, arrived):
        os.close(one)
    endpoint.close()
    ours.close()


@posix
def test_too_many_descriptors_under_way_are_sent_later(monkeypatch: pytest.MonkeyPatch) -> None:
    refusals = [OSError(109, "Too many references")] * 3
    send_some = transports.send_some

    def refuse(sock: Any, pieces: Any, fds: Any) -> bool:
        if fds and refusals:
            raise refusals.pop()
        return send_some(sock, pieces, fds)

    with CrewDriver(Fork(), np.sum) as crew:
        monkeypatch.setattr(transports, "send_some", refuse)
        assert [crew.call(full(k)) for k in range(4)] == [2 * OWN * k for k in range(4)]
    assert refusals == []


@posix
def test_descriptors_of_which_too_many_are_under_way_are_sent_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ours, theirs = multiprocessing.Pipe(duplex=True)
    endpoint, other = SocketEndpoint(theirs), SocketEndpoint(ours)
    refusals = [errno.ETOOMANYREFS, errno.ETOOMANYREFS]

    def send_some(*args: Any) -> bool:
        if refusals:
            raise OSError(refusals.pop(), "as the kernel says it")
        return send(*args)

    send = transports.send_some
    monkeypatch.setattr(transports, "send_some", send_some)
    monkeypatch.setattr(transports, "_PAUSE", 0)
    endpoint.send([b"a slot"], [0])
    frame = other.get()
    assert bytes(frame.parts[0]) == b"a slot"
    os.close(*frame.fds)
    refusals.append(errno.ENOBUFS)
    with pytest.raises(OSError, match="as the kernel says it"):
        endpoint.send([b"another"], [0])
    endpoint.close()
    other.close()
