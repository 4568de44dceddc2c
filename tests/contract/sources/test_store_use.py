"""Statistics of stores: counted where a loader is observed, by this process and by its workers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.archives import sample_members, tar_bytes
from support.http_store import HttpStore

from hybridloader import DataLoader, Pipeline, Retry
from hybridloader.sampling import BlockShuffleSampler
from hybridloader.sources import Files, Tar

SHARDS, EACH = 4, 4


def tar_of(store: HttpStore, **options: Any) -> Tar:
    for shard in range(SHARDS):
        store.files[f"/{shard}.tar"] = tar_bytes(sample_members(shard * EACH, EACH))
    tar = Tar(f"{store.url}/{{0..{SHARDS - 1}}}.tar", fields=("txt",), **options)
    store.requests.clear()
    return tar


def epoch(tar: Any, **options: Any) -> Any:
    options = {"num_workers": 2, "backend": "threads", "collate_fn": list, **options}
    loader = DataLoader(tar, 4, observe=True, **options)
    assert len([sample for batch in loader for sample in batch]) == len(tar)
    stats = loader.stats()
    (use,) = stats.stores
    assert stats.to_dict()["stores"] == [vars(use)]
    assert use.store in str(stats)
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


def test_nothing_is_counted_if_nothing_is_observed(store: HttpStore) -> None:
    tar = tar_of(store)
    pipe = Pipeline.from_dataset(tar, sampler=BlockShuffleSampler(tar, seed=0))
    for observed in (False, True):
        run = pipe.run(observe=observed)
        assert len(list(run)) == len(tar)
    assert [use.requests for use in run.stats().stores] == [SHARDS]
    tar.close()
