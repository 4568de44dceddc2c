"""Stores that fail, hang, redirect, or have changed: the same errors for files, archives and tables."""

from __future__ import annotations

import io
import random
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest
from support.archives import tar_bytes
from support.http_store import HttpStore

from hybridloader import DataLoader, Retry, Skip
from hybridloader.errors import SourceError, StoreError
from hybridloader.sampling import BlockShuffleSampler
from hybridloader.sources import Files, Parquet, Shards, Tar

ROWS = 6


def parquet_bytes(first: int) -> bytes:
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    packed = io.BytesIO()
    noise = [f"{first + n}".encode() * 5000 for n in range(ROWS)]
    pq.write_table(
        pa.table({"x": noise}), packed, row_group_size=2, compression="none", use_dictionary=False
    )
    return packed.getvalue()


def files_of(store: HttpStore, **options: Any) -> Shards[Any]:
    for number in range(ROWS):
        store.files[f"/{number}.txt"] = f"{number}".encode() * 5000
    return Files(f"{store.url}/{{0..{ROWS - 1}}}.txt", **options)


def tar_of(store: HttpStore, **options: Any) -> Shards[Any]:
    store.files["/a.tar"] = tar_bytes([(f"{n}.txt", f"{n}".encode() * 5000) for n in range(ROWS)])
    return Tar(f"{store.url}/a.tar", fields=("txt",), **options)


def parquet_of(store: HttpStore, **options: Any) -> Shards[Any]:
    store.files["/a.parquet"] = parquet_bytes(0)
    rows = Parquet(f"{store.url}/a.parquet", memory_cache_bytes=0, **options)
    rows[ROWS - 1]  # opens it; a test of its own fails here
    return rows


KINDS: dict[str, tuple[Callable[..., Shards[Any]], str]] = {
    "files": (files_of, r"/[01]\.txt"),
    "tar": (tar_of, r"/a\.tar, member [01]\.txt"),
    "parquet": (parquet_of, r"/a\.parquet, row group 0"),
}


def contents(sample: Any) -> bytes:
    """Return the bytes of a sample of any kind."""
    if isinstance(sample, bytes):
        return sample
    value: bytes = sample["x"] if isinstance(sample, dict) else sample[0]
    return value


def expected(number: int) -> bytes:
    return f"{number}".encode() * 5000


@pytest.fixture(params=[*KINDS])
def kind(request: Any) -> str:
    return str(request.param)


@pytest.fixture
def opened() -> Iterator[Callable[[Shards[Any]], Shards[Any]]]:
    sources: list[Shards[Any]] = []

    def keep(source: Shards[Any]) -> Shards[Any]:
        sources.append(source)
        return source

    yield keep
    for source in sources:
        with suppress(Exception):
            source.close()


def list_loader(source: Any, **options: Any) -> Any:
    return DataLoader(source, 2, collate_fn=list, **options)


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Pauses between two tries, which take no time but on the clock that is looked at."""
    made: list[float] = []
    monkeypatch.setattr("hybridloader.sources.store.sleep", made.append)
    monkeypatch.setattr("hybridloader.sources.store.monotonic", lambda: sum(made))
    return made


@pytest.mark.parametrize("fault", ["503", "short"])
def test_what_may_pass_is_tried_again_by_default(
    kind: str, fault: str, store: HttpStore, opened: Any, pauses: list[float]
) -> None:
    make, _ = KINDS[kind]
    source = opened(make(store))
    store.faults.extend([fault] * 3)
    assert contents(source[0]) == expected(0)
    assert len(pauses) == 3
    store.faults.extend([fault] * 999)
    with pytest.raises(StoreError, match="repeated for up to 60 s"):
        source[ROWS - 1]
    assert 55 < sum(pauses[3:]) <= 60
    assert max(pauses) <= 4


def test_a_source_is_made_of_a_store_that_fails_at_times(
    store: HttpStore, opened: Any, pauses: list[float]
) -> None:
    for make, _ in KINDS.values():
        store.faults.extend(["503", "short", "503"])
        source = opened(make(store))
        assert [contents(sample) for sample in source] == [*map(expected, range(ROWS))]
        assert not store.faults
    for answer in (503, 0):  # to HEAD, by which sizes are asked for
        store.answers.extend([answer] * 3)
        store.faults.extend(["drop"] * 3)  # then by GET
        assert len(opened(tar_of(store))) == ROWS
        assert len(store.answers) < 3
        store.answers.clear()
        store.faults.clear()


@pytest.mark.parametrize("status", [408, 425, 429, 500, 502, 504])
def test_an_answer_that_may_pass_is_asked_for_again(
    status: int, store: HttpStore, opened: Any, pauses: list[float]
) -> None:
    source = opened(tar_of(store))
    store.faults.append(str(status))
    assert contents(source[0]) == expected(0)
    assert len(pauses) == 1


@pytest.mark.parametrize("status", [401, 400])
def test_an_answer_that_stays_is_not_asked_for_again(
    status: int, store: HttpStore, opened: Any, pauses: list[float]
) -> None:
    source = opened(tar_of(store))
    store.faults.append(str(status))
    with pytest.raises(OSError, match="was not served"):
        source[0]
    assert not pauses


@pytest.mark.parametrize("fault", ["503", "short"])
def test_what_may_pass_is_told_by_name_and_tried_again(
    kind: str, fault: str, store: HttpStore, opened: Any
) -> None:
    make, name = KINDS[kind]
    source = opened(make(store, retry_seconds=0))
    store.faults.append(fault)
    with pytest.raises(StoreError, match=rf"{name}.* was not served") as told:
        source[0]
    assert isinstance(told.value, OSError)
    store.faults.extend([fault, fault])
    loader = list_loader(source, on_error=Retry(2, backoff=0.0, retry_on=StoreError))
    assert [contents(one) for batch in loader for one in batch] == [*map(expected, range(ROWS))]
    store.faults.extend([fault] * 9)
    with pytest.raises(StoreError, match="was not served"):
        list(list_loader(source, on_error=Retry(1, backoff=0.0, retry_on=StoreError)))


@pytest.mark.parametrize(("kind", "backend"), [("tar", "threads"), ("parquet", "spawn")])
def test_a_worker_raises_the_same(kind: str, backend: str, store: HttpStore, opened: Any) -> None:
    make, name = KINDS[kind]
    source = opened(make(store, retry_seconds=0))
    store.faults.extend(["503"] * 99)
    loader = list_loader(source, num_workers=1, backend=backend)
    with pytest.raises(StoreError, match=rf"{name}.* was not served"):
        list(loader)


def test_what_vanished_is_not_asked_for_again(kind: str, store: HttpStore, opened: Any) -> None:
    make, _ = KINDS[kind]
    source = opened(make(store, retry_seconds=0))
    gone = next(iter(store.files))
    del store.files[gone]
    asked = len(store.requests)
    with pytest.raises(FileNotFoundError, match=gone.strip("/")):
        list(list_loader(source, on_error=Retry(3, backoff=0.0, retry_on=StoreError)))
    assert len(store.requests) - asked <= 2
    loader = list_loader(source, on_error=Skip(max_failures=ROWS))
    found = [contents(one) for batch in loader for one in batch]
    kept = {"files": range(1, ROWS), "tar": range(0), "parquet": range(4, ROWS)}
    assert sorted(found) == [*map(expected, kept[kind])]  # the last row group is there already


def test_redirects_are_followed_and_a_circle_of_them_is_told(
    kind: str, store: HttpStore, opened: Any
) -> None:
    make, name = KINDS[kind]
    source = opened(make(store, retry_seconds=0))
    for path in [*store.files]:
        store.files[f"/elsewhere{path}"] = store.files.pop(path)
        store.moved[path] = f"/elsewhere{path}"
    found = [contents(one) for batch in list_loader(source) for one in batch]
    assert found == [*map(expected, range(ROWS))]
    for path in [*store.moved]:
        store.moved[path] = path
    with pytest.raises(StoreError, match=rf"{name}.* was not served: TooManyRedirects"):
        source[0]


def test_a_store_that_hangs_is_left_after_its_time(
    kind: str, store: HttpStore, opened: Any
) -> None:
    aiohttp = pytest.importorskip("aiohttp")
    make, name = KINDS[kind]
    options = {"client_kwargs": {"timeout": aiohttp.ClientTimeout(total=0.3)}}
    source = opened(make(store, storage_options=options, retry_seconds=0))
    store.faults.append("hang")
    with pytest.raises(StoreError, match=rf"{name}.* was not served: .*Timeout"):
        source[0]
    assert contents(source[0]) == expected(0)


@pytest.mark.parametrize("fault", ["less", "whole"])
@pytest.mark.parametrize("kind", ["tar", "parquet"])
def test_an_answer_that_is_cut_short_or_whole_is_told(
    fault: str, kind: str, store: HttpStore, opened: Any
) -> None:
    """Its bytes are announced as they come: only who knows what there should be can notice."""
    make, name = KINDS[kind]
    source = opened(make(store, retry_seconds=0))
    store.faults.extend([fault] * (1 if fault == "less" else 9))
    with pytest.raises((StoreError, SourceError), match=name):
        source[0]


def test_a_storm_loses_doubles_and_damages_nothing(
    store: HttpStore, opened: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A third of the answers fails, in one of four ways; blocks and single samples are read."""
    monkeypatch.setattr("hybridloader.sources.store._FIRST", 0.0)
    # By chance, and by the order of three threads, one request may get three short answers.
    monkeypatch.setattr("hybridloader.sources.store._SHORT", 300)
    chosen = random.Random(7)
    kinds = ["503", "short", "less", "drop"]
    store.faults.extend(chosen.choice([*kinds, *["ok"] * 8]) for _ in range(300))
    numbers = range(60)
    for shard in range(6):
        members = [(f"{n}.txt", expected(n)) for n in numbers[shard * 10 : shard * 10 + 10]]
        store.files[f"/{shard}.tar"] = tar_bytes(members)
    tar = opened(Tar(f"{store.url}/{{0..5}}.tar", fields=("txt",)))
    for block in (None, 3):
        sampler = BlockShuffleSampler(tar, seed=0, block_size=block, window_blocks=3)
        loader = list_loader(tar, sampler=sampler, num_workers=3, backend="threads")
        found = [contents(one) for batch in loader for one in batch]
        assert found == [
            expected(index)
            for index in BlockShuffleSampler(tar, 0, block_size=block, window_blocks=3)
        ]
    assert [contents(one) for one in tar] == [*map(expected, numbers)]
