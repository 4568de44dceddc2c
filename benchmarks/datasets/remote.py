"""Images that come over HTTP: a server that lets every answer wait, and the three parts of the work.

The server runs in a process of its own and answers any number of requests at once, each after the
delay that it asks for. A sample takes waiting (`read`), work that releases the GIL (`decode`) and a loop
in Python (`augment`). Only the standard library is imported before a sample is made, so that a fresh
worker needs no torch.
"""

from __future__ import annotations

import asyncio
import atexit
import http.client
import io
import os
import subprocess
import sys
import threading
from typing import Any

from benchmarks.datasets.pictures import as_jpeg, waves
from benchmarks.datasets.plain import spin

SIDE = 160
"""Pixels of an edge of what `decode` makes."""

POOL = 32
"""Different files."""


class Remote:
    """A dataset of `length` samples behind a server.

    Parameters
    ----------
    port
        Port of the server, on this machine.
    delay_ms
        Milliseconds that an answer waits.
    loops
        Turns of the loop in `augment`.
    """

    def __init__(self, port: int, delay_ms: float, loops: int, length: int) -> None:
        self.port, self.delay_ms, self.loops, self.length = port, delay_ms, loops, length
        self._connections = _ThreadConnection()

    def __getstate__(self) -> tuple[Any, ...]:
        return self.port, self.delay_ms, self.loops, self.length

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.__init__(*state)  # type: ignore[misc]  # connections do not travel

    def without_waiting(self) -> Remote:
        """This dataset with answers at once: the work that takes cores."""
        return Remote(self.port, 0, self.loops, self.length)

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        return self.augment(self.decode(self.read(index)))

    def read(self, index: int) -> bytes:
        """The file of a sample, over a connection that this thread keeps."""
        connection = self._connections.connection(self.port)
        connection.request("GET", f"/{self.delay_ms:g}/{index}")
        answer = connection.getresponse()
        data = answer.read()
        if answer.status != 200:
            raise OSError(f"the server said {answer.status} to sample {index}")
        return data

    def close(self) -> None:
        """End the connection of the calling thread."""
        self._connections.close()

    def decode(self, data: bytes) -> Any:
        """The pixels of a file, resized."""
        import numpy
        from PIL import Image

        with Image.open(io.BytesIO(data)) as image:
            small = image.convert("RGB").resize((SIDE, SIDE), Image.Resampling.BILINEAR)
        return numpy.array(small)

    def augment(self, pixels: Any) -> Any:
        """A mirror image or none, after a loop that holds the GIL."""
        import numpy

        if spin(self.loops, int(pixels[0, 0, 0])) & 1:
            return numpy.ascontiguousarray(pixels[:, ::-1])
        return pixels


class _Connection(http.client.HTTPConnection):
    """A connection that is closed when the thread that has it ends."""

    def __del__(self) -> None:
        self.close()


class _ThreadConnection(threading.local):
    """A thread's connection. One that was made before a fork is the parent's, and not used."""

    def __init__(self) -> None:
        self._known: tuple[int, int, _Connection] | None = None

    def connection(self, port: int) -> _Connection:
        if self._known is None or self._known[:2] != (os.getpid(), port):
            made = _Connection("127.0.0.1", port, timeout=30)
            self._known = (os.getpid(), port, made)
        return self._known[2]

    def close(self) -> None:
        if self._known is not None:
            self._known[2].close()
            self._known = None


def files(width: int, count: int = POOL) -> list[bytes]:
    """JPEG files of that width, made of waves: the same ones every time."""
    return [as_jpeg(waves(width, number)) for number in range(count)]


class Server:
    """The server's process. It is no child of this one, so its memory and CPU time count for no loader.

    It stays in the process group of the process that started it, and ends with `close`, or soon after
    that process.

    Parameters
    ----------
    module, argument
        Module to run, with this argument and the number of the process that starts it. It prints its
        port first.
    """

    def __init__(self, module: str, argument: str) -> None:
        command = f'"$0" -m {module} "$1" {os.getpid()} & echo $! >&2'
        started = subprocess.Popen(
            ["sh", "-c", command, sys.executable, argument],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            stdin=subprocess.DEVNULL,
            text=True,
        )
        assert started.stdout is not None
        assert started.stderr is not None
        with started.stdout, started.stderr:
            self._pid = int(started.stderr.readline())
            self.port = int(started.stdout.readline())
        started.wait()

    def close(self) -> None:
        try:
            os.kill(self._pid, 9)
        except ProcessLookupError:
            pass


_servers: dict[int, Server] = {}


def server_of(width: int) -> Server:
    """This process's server of files of that width; it ends with the process."""
    if width not in _servers:
        if not _servers:
            atexit.register(close_servers, os.getpid())
        _servers[width] = Server("benchmarks.datasets.remote", str(width))
    return _servers[width]


def close_servers(owner: int | None = None) -> None:
    """End all servers, unless this is a fork of their `owner`."""
    if owner in (None, os.getpid()):
        while _servers:
            _servers.popitem()[1].close()


class _Answers(asyncio.Protocol):
    """One connection: as little of HTTP/1.1 as `http.client` asks for."""

    def __init__(self, bodies: list[bytes]) -> None:
        self._bodies = bodies
        self._heard = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._heard += data
        while b"\r\n\r\n" in self._heard:
            request, _, self._heard = self._heard.partition(b"\r\n\r\n")
            _, delay_ms, index = request.split(b" ", 2)[1].split(b"/")
            body = self._bodies[int(index) % len(self._bodies)]
            if float(delay_ms):
                loop = asyncio.get_running_loop()
                loop.call_later(float(delay_ms) / 1e3, self._answer, body)
            else:
                self._answer(body)

    def _answer(self, body: bytes) -> None:
        if not self._transport.is_closing():
            head = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body)
            self._transport.write(head + body)


async def _serve(width: int, owner: int) -> None:
    bodies = files(width)
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: _Answers(bodies), "127.0.0.1", 0, backlog=256)
    print(server.sockets[0].getsockname()[1], flush=True)
    os.dup2(2, 1)  # the process that started it may close the pipe now
    while lives(owner):
        await asyncio.sleep(0.25)


def lives(pid: int) -> bool:
    """True if there is a process of that number."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


if __name__ == "__main__":
    asyncio.run(_serve(int(sys.argv[1]), int(sys.argv[2])))
