"""A local HTTP server of files in memory, that serves ranges and fails on demand."""

from __future__ import annotations

import re
import threading
from collections import deque
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class HttpStore:
    """Files by path, such as ``/a.tar``; `url` is the address.

    Attributes
    ----------
    files
        Contents by path.
    faults
        What to do with the next requests for data, one each: ``"503"``, ``"short"`` (half of the bytes
        that it announces), ``"less"`` (half of them, announced as such), ``"whole"`` (no range),
        ``"drop"`` (the connection ends without an answer), ``"hang"`` (until the test ends), a status
        such as ``"403"``, or ``"ok"``.
    answers
        Statuses with which the next requests for sizes are answered, one each; 0 ends the connection.
    broken
        Status with which all requests for the data of a path are answered.
    once
        Fault of the next request for the data of a path, as in `faults`.
    moved
        Path or URL to which a path redirects.
    requests
        Pairs of a path and the range that was asked for.
    """

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.faults: deque[str] = deque()
        self.answers: deque[int] = deque()
        self.broken: dict[str, str] = {}
        self.once: dict[str, str] = {}
        self.moved: dict[str, str] = {}
        self.requests: list[tuple[str, str]] = []
        self.released = threading.Event()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self._server.daemon_threads = False
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def close(self) -> None:
        self.released.set()
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


def _handler(store: HttpStore) -> Any:
    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: Any) -> None:
            pass

        def do_HEAD(self) -> None:
            self._answer(False)

        def do_GET(self) -> None:
            self._answer(True)

        def _answer(self, sends: bool) -> None:
            asked = self.headers.get("Range", "")
            fault = "ok"
            if sends:
                store.requests.append((self.path, asked))
                fault = store.faults.popleft() if store.faults else "ok"
                fault = store.broken.get(self.path, fault)
                if self.path in store.once:
                    fault = store.once.pop(self.path)
            if self.path in store.moved:
                self.send_response(302)
                self.send_header("Location", store.moved[self.path])
                self.send_header("Content-Length", "0")
                self.end_headers()
                return
            data = store.files.get(self.path)
            if fault == "hang":
                store.released.wait()
            failed = int(fault) if fault.isdigit() else 200
            if store.answers and not sends:
                failed = store.answers.popleft()
            if fault == "drop" or not failed:
                self.close_connection = True
                return
            if data is None or failed != 200:
                self.send_response(404 if data is None else failed)
                self.send_header("Content-Length", "0")
                self.end_headers()
                return
            status = 200
            found = re.fullmatch(r"bytes=(\d+)-(\d*)", asked)
            if found and fault != "whole":
                status = 206
                data = data[int(found[1]) : int(found[2]) + 1 if found[2] else None]
            half = data[: len(data) // 2]
            self.send_response(status)
            self.send_header("Content-Length", str(len(half if fault == "less" else data)))
            if self.path.endswith("/"):
                self.send_header("Content-Type", "text/html")
            self.end_headers()
            if sends:
                self.wfile.write(half if fault in ("less", "short") else data)

    return Handler
