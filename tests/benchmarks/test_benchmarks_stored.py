"""P14, P15, P16: every loader delivers all samples of small forms, and the targets are judged."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("psutil")
pytest.importorskip("rich")
pytest.importorskip("pyarrow")
pytest.importorskip("aiohttp")

from benchmarks.cases import stored as cases
from benchmarks.datasets import stored
from benchmarks.datasets.remote import close_servers
from benchmarks.loaders.stored import EPOCHS
from benchmarks.results import Measurement, Results

pytestmark = [
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
    pytest.mark.filterwarnings("ignore:The given NumPy array is not writable"),
]

OURS = ("pipeline threads", "threads", "fork", "torch", "pyarrow", "limit", "together")


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored.tempfile, "tempdir", str(tmp_path))


def spec(files: str, *, shuffled: bool) -> dict[str, Any]:
    sizes = {"objects": 60, "archives": 400, "tables": 1000}
    return {
        "files": files,
        "samples": sizes[files],
        "batch": 16,
        "workers": 2,
        "torch_workers": 2,
        "at_once": 4,
        "delay_ms": 1,
        "shuffled": shuffled,
    }


@pytest.mark.parametrize("shuffled", [pytest.param(False, marks=pytest.mark.full), True])
@pytest.mark.full
@pytest.mark.parametrize("files", ["archives", "tables"])
def test_every_loader_delivers_all_samples(files: str, shuffled: bool) -> None:
    for loader in EPOCHS[files]:
        if loader in OURS:
            found = cases.whole_epoch(loader, spec(files, shuffled=shuffled))
            assert found["value"] >= found["details"]["first_batch"] > 0
            assert found["details"]["memory_mb"] > 0


def test_objects_come_from_a_server_in_a_process_of_its_own() -> None:
    try:
        for loader in ("pipeline threads", "torch"):
            found = cases.whole_epoch(loader, spec("objects", shuffled=False))
            assert found["value"] > 60 * 0.001 / 4
    finally:
        close_servers()
        end_loop()


def end_loop() -> None:
    """End fsspec's loop, which would outlive the test."""
    import asyncio
    import gc

    import fsspec.asyn
    from fsspec.implementations.http import HTTPFileSystem

    HTTPFileSystem.clear_instance_cache()
    gc.collect()
    loop, thread = fsspec.asyn.loop[0], fsspec.asyn.iothread[0]
    asyncio.run_coroutine_threadsafe(loop.shutdown_default_executor(), loop).result()
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()
    fsspec.asyn.iothread[0] = fsspec.asyn.loop[0] = None


def test_an_epoch_that_lacks_samples_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(EPOCHS["tables"], "threads", lambda _: iter([range(3)]))
    with pytest.raises(cases.WrongCount, match="threads delivered 3 samples of 1000"):
        cases.whole_epoch("threads", spec("tables", shuffled=False))


def test_the_bound_is_what_so_many_requests_at_a_time_can() -> None:
    judge = cases.of_the_bound(0.9, ("ours",))
    assert judge(Results({}, []), "P14") == ("not measured", None)
    bound = 2000 * 0.05 / 32
    for part, met in ((0.95, True), (0.85, False)):
        row = Measurement("P14", "objects", "ours", "s / epoch", [bound / part])
        assert statistics.median(row.values) == row.median
        assert judge(Results({}, [row]), "P14") == (f"{part} (ours)", met)
