"""Statistics of stores: counted where a loader is observed, by this process and by its workers."""

from __future__ import annotations

import gc
import threading
from pathlib import Path
from typing import Any

import pytest
from support.archives import sample_members, tar_bytes
from support.http_store import HttpStore

from hybridloader import DataLoader, Pipeline, Retry
from hybridloader._support import store_use
from hybridloader._support.store_use import StoreUse, store_of
from hybridloader.sampling import BlockShuffleSampler
from hybridloader.sources import Files, Tar, shards
from hybridloader.sources.shards import BlockCache

SHARDS, EACH = 4, 4


def tar_of(store: HttpStore, **options: Any) -> Tar:
    for shard in range(SHARDS):
        store.files[f"/{shard}.tar"] = tar_bytes(sample_members(shard * EACH, EACH))
    tar = Tar(f"{store.url}/{{0..{SHARDS - 1}}}.tar", fields=("txt",), **options)
    store.requests.clear()
    return tar


def epoch(tar: Any, **options: Any) -> StoreUse:
    options = {"num_workers": 2, "backend": "threads", "collate_fn": list, **options}
    loader = DataLoader(tar, 4, observe=True, **options)
    assert len([sample for batch in loader for sample in batch]) == len(tar)
    stats = loader.stats()
    (use,) = stats.stores
    assert stats.to_dict()["stores"] == [vars(use)]
    assert use.store in str(stats)
    assert use.store in stats._repr_html_()
    return use


def test_blocks_are_counted_with_their_retries_and_those_from_the_cache(
    store: HttpStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hybridloader.sources.store._FIRST", 0.0)
    tar = tar_of(store, cache_dir=str(tmp_path))
    store.faults.extend(["503", "ok", "503"])
    use = epoch(tar, sampler=BlockShuffleSampler(tar, seed=0))
    assert use.store == store.url
    assert (use.requests, use.retries) == (len(store.requests), 2) == (SHARDS + 2, 2)
    assert (use.hits, use.misses, use.alone) == (0, SHARDS, 0)
    assert use.seconds > 0
    fetched = use.bytes
    use = epoch(tar, sampler=BlockShuffleSampler(tar, seed=1))
    assert (use.requests, use.bytes, use.hits, use.misses) == (0, 0, SHARDS, 0)
    tar.close()  # waits for the blocks that are being written
    assert fetched == sum(path.stat().st_size - 12 for path in tmp_path.glob("*.block"))


def test_a_block_is_counted_before_it_is_written(
    store: HttpStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A loader may end, and its statistics be read, while a slow disk takes the last blocks."""
    tar = tar_of(store, cache_dir=str(tmp_path))
    gate, write = threading.Event(), BlockCache._write

    def slowly(*arguments: Any) -> bool:
        gate.wait()
        return write(*arguments)

    monkeypatch.setattr(BlockCache, "_write", slowly)
    monkeypatch.setattr(shards, "_LOCKS", 1 << 32)  # no two blocks share one
    try:
        use = epoch(tar, sampler=BlockShuffleSampler(tar, seed=0))
    finally:
        gate.set()
    assert (use.hits, use.misses) == (0, SHARDS)
    tar.close()


def test_a_block_that_was_not_served_is_no_miss(store: HttpStore, tmp_path: Path) -> None:
    tar = tar_of(store, cache_dir=str(tmp_path), retry_seconds=0)
    store.once["/0.tar"] = "404"
    use = epoch(tar, sampler=BlockShuffleSampler(tar, seed=0), on_error=Retry(1))
    assert (use.hits, use.misses) == (0, SHARDS - 1)
    tar.close()


def test_samples_that_are_read_alone_are_counted_and_waited_for(store: HttpStore) -> None:
    tar = tar_of(store)
    use = epoch(tar)
    assert (use.requests, use.alone) == (len(store.requests), SHARDS * EACH)
    assert use.requests == use.alone
    assert use.waited == pytest.approx(use.seconds)
    tar.close()


def test_workers_that_are_processes_report_their_use(store: HttpStore) -> None:
    store.files.update({f"/{number}.txt": b"x" * number for number in range(1, 4)})
    files = Files([f"{store.url}/{number}.txt" for number in range(1, 4)])
    store.requests.clear()
    use = epoch(files, num_workers=1, backend="spawn")
    assert 1 <= use.requests <= len(store.requests)
    files.close()


@pytest.fixture
def unobserved(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out observations of other tests, which count until they are collected."""
    monkeypatch.setattr(store_use, "_observers", set())


def test_nothing_is_counted_if_nothing_is_observed(store: HttpStore, unobserved: None) -> None:
    tar = tar_of(store)
    before = store_use.uses().get(store.url)  # other stores may still answer threads of other tests
    pipe = Pipeline.from_dataset(tar, sampler=BlockShuffleSampler(tar, seed=0))
    assert len(list(pipe)) == len(tar)
    assert store_use.uses().get(store.url) == before
    run = pipe.run(observe=True)
    assert len(list(run)) == len(tar)
    assert [use.requests for use in run.stats().stores] == [SHARDS]
    tar.close()


def test_a_local_name_with_colons_is_no_chain_where_stores_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path(tmp_path, "zip::b").mkdir()
    Path(tmp_path, "zip::b", "a.txt").write_bytes(b"one")
    monkeypatch.chdir(tmp_path)
    before = store_use.uses()
    stop = store_use.start_counting()
    try:
        for url in ("zip::b/a.txt", "zip::b", "zip::b/*.txt"):
            assert [*Files(url)] == [b"one"]
    finally:
        stop()
    assert store_use.uses_since(before) == ()


def test_a_finalizer_may_stop_counting_on_a_thread_that_counts(unobserved: None) -> None:
    run = Pipeline.from_dataset([1, 2]).run(observe=True)
    assert [*run] == [1, 2]
    assert store_use.counting()
    cycle: list[Any] = [run]
    cycle.append(cycle)
    del run, cycle
    with store_use._adding:  # the collector may run while a count is added
        gc.collect()
    assert not store_use.counting()


def test_counts_are_read_while_another_thread_adds() -> None:
    found: list[object] = []
    reader = threading.Thread(target=lambda: found.append(store_use.uses()), daemon=True)
    with store_use._adding:
        reader.start()
        reader.join(10)
    assert found == [store_use.uses()]


def test_a_store_is_a_host_or_a_bucket() -> None:
    assert store_of("s3://bucket/a/b.tar") == "s3://bucket"
    assert store_of("https://me:secret@host:80/a") == "https://host:80"
    assert store_of("simplecache::https://host/a") == "https://host"
    assert store_of("/data/a.tar") == "local files"
