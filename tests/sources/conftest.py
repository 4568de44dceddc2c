"""Places to read from: a local HTTP server, and files in memory."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import fsspec
import fsspec.asyn
import pytest
from support.http_store import HttpStore


@pytest.fixture(scope="session", autouse=True)
def _loop_running() -> None:
    """Start fsspec's thread, which lives as long as the process."""
    fsspec.asyn.get_loop()


@pytest.fixture
def store() -> Iterator[HttpStore]:
    pytest.importorskip("aiohttp")
    from fsspec.implementations.http import HTTPFileSystem

    server = HttpStore()
    yield server
    server.close()
    HTTPFileSystem.clear_instance_cache()  # it keeps connections open
    gc.collect()


@pytest.fixture
def memory() -> Iterator[Any]:
    """fsspec's files in memory, none at first."""
    fs = fsspec.filesystem("memory")
    fs.store.clear()
    fs.pseudo_dirs[:] = [""]
    yield fs
    fs.store.clear()
