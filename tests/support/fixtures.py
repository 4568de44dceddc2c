"""Fixtures that tests of several folders use."""

from __future__ import annotations

import asyncio
import gc
import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data._utils import collate as torchs

from hybridloader.fetching.collate import teach_torch
from hybridloader.memory.slots import PrivateSlots, set_slots
from support import once
from support.containers import shared_buffer
from support.http_store import HttpStore
from support.plain_datasets import PLAIN
from support.recordings import free_cores_are_recorded
from support.sampler_loaders import pace


@pytest.fixture
def unwarned() -> Iterator[None]:
    """No warning that comes once per process has come."""
    once.forget_warnings()
    yield
    once.forget_warnings()


@pytest.fixture
def plain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The module of the support file, importable here and in workers."""
    (tmp_path / "plain_datasets.py").write_text(PLAIN)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield importlib.import_module("plain_datasets")
    del sys.modules["plain_datasets"]


@pytest.fixture
def slots() -> Iterator[PrivateSlots]:
    """Slots for the thread of the test, as for a worker."""
    teach_torch()
    mine = PrivateSlots(1 << 30)
    before = set_slots(mine)
    yield mine
    set_slots(before)


@pytest.fixture
def torchs_map() -> Iterator[dict[Any, Any]]:
    """torch's map, put back as it was afterwards."""
    before = dict(torchs.default_collate_fn_map)
    yield torchs.default_collate_fn_map
    torchs.default_collate_fn_map.clear()
    torchs.default_collate_fn_map.update(before)


@pytest.fixture
def slept(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds that retries would have slept."""
    found: list[float] = []
    monkeypatch.setattr("hybridloader.fetching.item_loop.sleep", found.append)
    return found


@pytest.fixture
def warned_anew() -> None:
    """Let warnings that come once per process come in this test."""
    once.forget_warnings()


@pytest.fixture
def every(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    def set_pace(steps: int) -> None:
        pace(monkeypatch, steps)

    return set_pace


@pytest.fixture
def free_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    free_cores_are_recorded(monkeypatch)


@pytest.fixture(params=["nameless", "named"])
def shared_kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The kind of shared memory that containers of this test are made in."""
    kind: str = request.param
    if kind == "nameless" and not shared_buffer.nameless_usable():
        pytest.skip("there is no memfd, or no /proc")
    monkeypatch.setattr(shared_buffer, "nameless_usable", lambda: kind == "nameless")
    return kind


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
