"""Object store on this machine: a folder over HTTP, as slow and as narrow as one far away.

Each answer waits 25 ms, and each connection has 50 MB/s. It speaks as much of S3 as reading takes (HEAD,
GET, ranges, lists) and checks no signature. ``python -m benchmarks.store FOLDER`` prints its port and
serves until its standard input ends.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import time
import urllib.parse
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

DELAY = 0.025
"""Seconds to the first byte."""

BANDWIDTH = 50e6
"""Bytes a second of a connection."""

_PORTION = 1 << 18
"""Bytes that are sent at a time."""


class ObjectStore:
    """The server of a folder, in a separate process that ends with this one."""

    def __init__(self, folder: str) -> None:
        command = [sys.executable, "-m", "benchmarks.store", folder]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self._process.stdout is not None
        self.url = f"http://127.0.0.1:{int(self._process.stdout.readline())}"

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    folder = Path()

    def log_message(self, *arguments: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        time.sleep(DELAY)
        parts = urllib.parse.urlsplit(self.path)
        path = (self.folder / urllib.parse.unquote(parts.path).lstrip("/")).resolve()
        try:
            if path.is_file():
                self._file(path)
            elif path.is_dir():
                query = dict(urllib.parse.parse_qsl(parts.query))
                self._send(200, self._names(path, query.get("prefix", "")))
            else:
                self._send(404, b"")
        except OSError:  # the client closed the connection
            self.close_connection = True

    def _send(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _file(self, path: Path) -> None:
        size = path.stat().st_size
        start, stop, status = 0, size, 200
        found = re.fullmatch(r"bytes=(\d*)-(\d*)", self.headers.get("Range", ""))
        if found:
            status = 206
            start = int(found[1]) if found[1] else max(0, size - int(found[2]))
            stop = min(size, int(found[2]) + 1) if found[1] and found[2] else size
        self.send_response(status)
        self.send_header("Content-Length", str(stop - start))
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("Last-Modified", "Mon, 01 Jun 2026 00:00:00 GMT")
        self.send_header("ETag", f'"{path.name}-{size}"')
        if status == 206:
            self.send_header("Content-Range", f"bytes {start}-{stop - 1}/{size}")
        self.end_headers()
        if self.command == "HEAD":
            return
        self.wfile.flush()
        began, at = time.monotonic(), start
        with path.open("rb") as file:
            while at < stop:
                at += os.sendfile(
                    self.connection.fileno(), file.fileno(), at, min(_PORTION, stop - at)
                )
                time.sleep(max(0.0, began + (at - start) / BANDWIDTH - time.monotonic()))

    def _names(self, bucket: Path, prefix: str) -> bytes:
        files = {
            str(path.relative_to(bucket)): path for path in bucket.rglob("*") if path.is_file()
        }
        contents = "".join(
            f"<Contents><Key>{name}</Key><Size>{files[name].stat().st_size}</Size>"
            "<LastModified>2026-06-01T00:00:00.000Z</LastModified></Contents>"
            for name in sorted(files)
            if name.startswith(prefix)
        )
        space = 'xmlns="http://s3.amazonaws.com/doc/2006-03-01/"'
        head = f"<ListBucketResult {space}><Name>{bucket.name}</Name>"
        return f"{head}{contents}<IsTruncated>false</IsTruncated></ListBucketResult>".encode()


def _serve(folder: str) -> None:
    _Handler.folder = Path(folder).resolve()
    ThreadingHTTPServer.request_queue_size = 256
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    print(server.server_address[1], flush=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    sys.stdin.read()


if __name__ == "__main__":
    _serve(sys.argv[1])
