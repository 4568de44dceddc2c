"""An object store on this machine: a folder behind HTTP, as slow and as narrow as one far away.

Each answer waits, each connection has a bandwidth, and only so many requests are answered at a time. It
speaks as much of S3 as reading takes (HEAD, GET, ranges, lists), without checking signatures. The
server runs in a process of its own, by `benchmarks.datasets.remote.Server`.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import socket
import sys
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

from benchmarks.datasets.remote import Server, lives

DELAY = 0.025
"""Seconds to the first byte."""

BANDWIDTH = 50e6
"""Bytes a second of a connection."""

AT_ONCE = 64
"""Requests that are answered at a time."""

_PORTION = 1 << 18
"""Bytes that are sent at a time."""

_MODIFIED = "Mon, 01 Jun 2026 00:00:00 GMT"


class ObjectStore:
    """The server of a folder; `port` is its port on this machine."""

    def __init__(self, folder: str) -> None:
        self._server = Server("benchmarks.datasets.object_store", folder)
        self.port = self._server.port
        self.url = f"http://127.0.0.1:{self.port}"

    def counts(self) -> dict[str, int]:
        """Requests and bytes of data since the last call."""
        with urllib.request.urlopen(f"{self.url}/_counts") as answer:
            found: dict[str, int] = json.load(answer)
            return found

    def close(self) -> None:
        self._server.close()


class _Serving:
    def __init__(self, folder: str) -> None:
        self._folder = Path(folder).resolve()
        self._slots = threading.BoundedSemaphore(AT_ONCE)
        self._lock = threading.Lock()
        self._requests = self._bytes = 0

    def connection(self, peer: socket.socket) -> None:
        """Answer the requests of a connection until it ends."""
        with peer:
            peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            try:
                for method, target, headers in _requests(peer):
                    self._answer(peer, method, target, headers)
            except OSError:
                pass

    def _answer(
        self, peer: socket.socket, method: str, target: str, headers: dict[str, str]
    ) -> None:
        if target == "/_counts":
            with self._lock:
                found = {"requests": self._requests, "bytes": self._bytes}
                self._requests = self._bytes = 0
            _send(peer, 200, {}, json.dumps(found).encode())
            return
        with self._lock:  # before the answer, after which somebody may ask for the counts
            self._requests += method == "GET"
        with self._slots:
            time.sleep(DELAY)
            parts = urllib.parse.urlsplit(target)
            query = dict(urllib.parse.parse_qsl(parts.query, keep_blank_values=True))
            path = (self._folder / urllib.parse.unquote(parts.path).lstrip("/")).resolve()
            if "list-type" in query or (path.is_dir() and method == "GET"):
                _send(peer, 200, {"Content-Type": "application/xml"}, self._list(path, query))
            elif path.is_file():
                self._send_file(peer, method, path, headers)
            else:
                _send(peer, 404, {}, b"")

    def _send_file(
        self, peer: socket.socket, method: str, path: Path, headers: dict[str, str]
    ) -> None:
        size = path.stat().st_size
        start, stop, status = 0, size, 200
        found = re.fullmatch(r"bytes=(\d*)-(\d*)", headers.get("range", ""))
        if found and found[1]:
            start, status = int(found[1]), 206
            stop = min(size, int(found[2]) + 1) if found[2] else size
        elif found:
            start, status = max(0, size - int(found[2])), 206
        told = {
            "Content-Length": str(stop - start),
            "Accept-Ranges": "bytes",
            "Last-Modified": _MODIFIED,
            "ETag": f'"{hashlib.md5(f"{path.name} {size}".encode()).hexdigest()}"',
            "Content-Type": "application/octet-stream",
        }
        if status == 206:
            told["Content-Range"] = f"bytes {start}-{stop - 1}/{size}"
        if method == "GET":
            with self._lock:
                self._bytes += stop - start
        _send(peer, status, told, None)
        if method != "GET":
            return
        began, sent = time.monotonic(), 0
        with open(path, "rb") as file:
            while start + sent < stop:
                count = min(_PORTION, stop - start - sent)
                sent += os.sendfile(peer.fileno(), file.fileno(), start + sent, count)
                early = began + sent / BANDWIDTH - time.monotonic()
                if early > 0:
                    time.sleep(early)

    def _list(self, bucket: Path, query: dict[str, str]) -> bytes:
        names = sorted(
            str(path.relative_to(bucket)) for path in bucket.rglob("*") if path.is_file()
        )
        names = [name for name in names if name.startswith(query.get("prefix", ""))]
        contents = "".join(
            f"<Contents><Key>{escape(name)}</Key><Size>{(bucket / name).stat().st_size}</Size>"
            f'<ETag>"{hashlib.md5(name.encode()).hexdigest()}"</ETag>'
            "<LastModified>2026-06-01T00:00:00.000Z</LastModified></Contents>"
            for name in names
        )
        return (
            '<?xml version="1.0" encoding="UTF-8"?><ListBucketResult '
            f'xmlns="http://s3.amazonaws.com/doc/2006-03-01/"><Name>{escape(bucket.name)}</Name>'
            f"<KeyCount>{len(names)}</KeyCount><IsTruncated>false</IsTruncated>{contents}"
            "</ListBucketResult>"
        ).encode()


def _requests(peer: socket.socket) -> Iterator[tuple[str, str, dict[str, str]]]:
    heard = b""
    while True:
        while b"\r\n\r\n" not in heard:
            data = peer.recv(1 << 16)
            if not data:
                return
            heard += data
        head, _, heard = heard.partition(b"\r\n\r\n")
        first, *lines = head.decode("latin-1").split("\r\n")
        method, target, _ = first.split(" ", 2)
        pairs = (line.partition(":") for line in lines)
        yield method, target, {name.lower(): value.strip() for name, _, value in pairs}


def _send(peer: socket.socket, status: int, headers: dict[str, str], body: bytes | None) -> None:
    lines = [f"HTTP/1.1 {status} -", *(f"{name}: {value}" for name, value in headers.items())]
    if body is not None:
        lines.append(f"Content-Length: {len(body)}")
    peer.sendall("\r\n".join([*lines, "", ""]).encode() + (body or b""))


def _serve(folder: str, owner: int) -> None:
    serving: Any = _Serving(folder)
    server = socket.create_server(("127.0.0.1", 0), backlog=256)
    print(server.getsockname()[1], flush=True)
    os.dup2(2, 1)  # the process that started it may close the pipe now
    server.settimeout(0.25)
    while lives(owner):
        try:
            peer, _ = server.accept()
        except TimeoutError:
            continue
        peer.settimeout(None)
        threading.Thread(target=serving.connection, args=(peer,), daemon=True).start()


if __name__ == "__main__":
    _serve(sys.argv[1], int(sys.argv[2]))
