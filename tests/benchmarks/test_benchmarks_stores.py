"""The case `stores`: ours deliver all samples; the store counts requests; rivals may be missing."""

from __future__ import annotations

import urllib.request
from pathlib import Path

import pytest

pytest.importorskip("psutil")
pytest.importorskip("rich")
pytest.importorskip("PIL")
pytest.importorskip("aiohttp")

from benchmarks.case import CannotDo, Options
from benchmarks.cases import stores as cases
from benchmarks.datasets.object_store import ObjectStore
from benchmarks.loaders import stores as loaders
from benchmarks.names import FROM_STORES
from benchmarks.runner import Runner

SPEC = {"samples": 96, "shards": 4, "width": 16, "batch": 8, "workers": 2, "decoded": False}


def test_every_loader_of_ours_delivers_all_samples(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    variant, _ = cases.stores(Options()).variants
    assert set(variant.loaders) == set(loaders.LOADERS)
    requests = {"blocks": 4, "blocks, cache": 4, "by sample": 96, "whole archives": 4}
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    runner = Runner()  # fsspec's event loop ends with it
    for loader in FROM_STORES:
        answer = runner.ask(cases.two_epochs, loader, SPEC)
        assert answer["details"]["requests"] == requests[loader]
        assert answer["value"] >= answer["details"]["first_batch"] > 0
        if loader == "blocks, cache":
            assert answer["details"]["second_MB"] == 0
    assert runner.ask(cases.two_epochs, "blocks", {**SPEC, "decoded": True})["value"] > 0
    runner.close()


def test_a_rival_that_is_missing_takes_no_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(cases.VENVS, raising=False)
    with pytest.raises(CannotDo, match="pip install mosaicml-streaming"):
        cases.two_epochs("MosaicML", SPEC)


def test_the_server_serves_ranges_and_lists(tmp_path: Path) -> None:
    (tmp_path / "bucket").mkdir()
    (tmp_path / "bucket" / "a").write_bytes(b"0123456789")
    store = ObjectStore(str(tmp_path))
    try:
        for asked, found in {"bytes=2-4": b"234", "bytes=7-": b"789", "bytes=-2": b"89"}.items():
            request = urllib.request.Request(f"{store.url}/bucket/a", headers={"Range": asked})
            with urllib.request.urlopen(request) as answer:
                assert (answer.status, answer.read()) == (206, found)
        with urllib.request.urlopen(f"{store.url}/bucket?list-type=2") as answer:
            assert b"<Key>a</Key><Size>10</Size>" in answer.read()
        assert store.counts() == {"requests": 4, "bytes": 8}
        assert store.counts() == {"requests": 0, "bytes": 0}
    finally:
        store.close()
