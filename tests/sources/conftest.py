"""Places to read from: a local HTTP server, and files in memory."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Iterator
from typing import Any

import pytest
from support.http_store import HttpStore


@pytest.fixture
def store() -> Iterator[HttpStore]:
    """A server; fsspec's event loop, by which it is read, ends with it, so other tests may fork."""
    pytest.importorskip("aiohttp")
    asyn = pytest.importorskip("fsspec.asyn")
    from fsspec.implementations.http import HTTPFileSystem

    loop = asyn.get_loop()
    server = HttpStore()
    yield server
    server.close()
    HTTPFileSystem.clear_instance_cache()  # it keeps connections open
    gc.collect()
    asyncio.run_coroutine_threadsafe(loop.shutdown_default_executor(), loop).result()
    loop.call_soon_threadsafe(loop.stop)
    asyn.iothread[0].join()
    loop.close()
    asyn.iothread[0] = asyn.loop[0] = None


@pytest.fixture
def memory() -> Iterator[Any]:
    """fsspec's files in memory, none at first."""
    fs = pytest.importorskip("fsspec").filesystem("memory")
    fs.store.clear()
    fs.pseudo_dirs[:] = [""]
    yield fs
    fs.store.clear()
