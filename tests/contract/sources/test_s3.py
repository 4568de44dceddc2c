"""Files, archives and tables in S3, as moto plays it."""

from __future__ import annotations

import asyncio
import gc
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.archives import sample_members, tar_bytes

from hybridloader import DataLoader
from hybridloader.sampling import BlockShuffleSampler
from hybridloader.sources import Files, Tar, write_shards

pytest.importorskip("s3fs")
moto = pytest.importorskip("moto.server")
pytestmark = pytest.mark.filterwarnings("ignore:datetime.datetime.utcnow:DeprecationWarning")


@pytest.fixture(scope="module")
def server() -> Iterator[Any]:
    found = moto.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    found.start()
    yield found
    found.stop()


@pytest.fixture
def s3(server: Any) -> Iterator[dict[str, Any]]:
    """Options of a bucket ``photos`` with a few objects; fsspec's loop ends with it."""
    import fsspec.asyn
    import s3fs

    loop = fsspec.asyn.get_loop()
    host, port = server.get_host_and_port()
    options = {"key": "a", "secret": "b", "endpoint_url": f"http://{host}:{port}"}
    fs = s3fs.S3FileSystem(**options)
    fs.mkdir("photos")
    for number in range(6):
        fs.pipe_file(f"photos/class{number % 2}/{number}.txt", f"text {number}".encode())
    fs.pipe_file("photos/a.tar", tar_bytes(sample_members(0, 5)))
    yield options
    fs.rm("photos", recursive=True)
    del fs
    s3fs.S3FileSystem.clear_instance_cache()
    gc.collect()
    asyncio.run_coroutine_threadsafe(loop.shutdown_default_executor(), loop).result()
    loop.call_soon_threadsafe(loop.stop)
    fsspec.asyn.iothread[0].join()
    loop.close()
    fsspec.asyn.iothread[0] = fsspec.asyn.loop[0] = None


@pytest.mark.parametrize("backend", ["inline", "threads", "spawn"])
def test_files_are_listed_and_read(s3: Any, backend: str) -> None:
    files = Files(
        "s3://photos/class*/*.txt", decode=bytes.decode, class_from_folder=True, storage_options=s3
    )
    assert files.classes == ["class0", "class1"]
    loader: Any = DataLoader(files, 2, collate_fn=list, num_workers=2, backend=backend)
    found = [one for batch in loader for one in batch]
    assert found == [(f"text {number}", number % 2) for number in (0, 2, 4, 1, 3, 5)]
    files.close()


class Storm:
    """Has a quarter of the answers to requests for objects fail: 503, cut short, or without an end."""

    def __init__(self, app: Any, seed: int) -> None:
        self.app, self._random = app, random.Random(seed)
        self.faults: Counter[str] = Counter()

    def __call__(self, environ: Any, start: Any) -> Any:
        kinds = ["503", "less", "drop", *["ok"] * 9]
        kind = self._random.choice(kinds) if "HTTP_RANGE" in environ else "ok"
        self.faults[kind] += 1
        if kind == "503":
            start("503 Slow Down", [("Content-Length", "0")])
            return [b""]
        if kind == "ok":
            return self.app(environ, start)
        answer: list[Any] = []
        data = b"".join(self.app(environ, lambda *told: answer.extend(told[:2])))
        half = data[: len(data) // 2]
        size = len(data) if kind == "drop" else len(half)
        headers = [pair for pair in answer[1] if pair[0].lower() != "content-length"]
        start(answer[0], [*headers, ("Content-Length", str(size))])
        return [half]


def test_a_storm_loses_doubles_and_corrupts_nothing(
    server: Any, s3: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import s3fs

    monkeypatch.setattr("hybridloader.sources.store._FIRST", 0.0)
    fs = s3fs.S3FileSystem(**s3)
    for shard in range(8):
        fs.pipe_file(f"photos/storm/{shard}.tar", tar_bytes(sample_members(8 * shard, 8)))
    options = {**s3, "config_kwargs": {"retries": {"max_attempts": 0}}}
    tar = Tar(
        "s3://photos/storm/{0..7}.tar",
        fields=("txt",),
        index=str(tmp_path / "index"),
        cache_dir=str(tmp_path / "cache"),
        storage_options=options,
    )
    storm = Storm(server._server.app, 1)
    monkeypatch.setattr(server._server, "app", storm)
    sampler = BlockShuffleSampler(tar, seed=0, block_size=2, window_blocks=3)
    loader: Any = DataLoader(
        tar, 4, sampler=sampler, collate_fn=list, num_workers=2, backend="threads"
    )
    wanted = sorted((text,) for _, text in sample_members(0, 64)[::2])
    for _ in range(2):
        assert sorted(sample for batch in loader for sample in batch) == wanted
    assert all(storm.faults[kind] for kind in ("503", "less", "drop"))
    tar.close()


def test_shards_are_written_resumed_and_read_with_their_index(
    s3: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def samples(bad: int) -> Iterator[dict[str, Any]]:
        for number in range(10):
            if number == bad:
                raise KeyError(number)
            yield {"txt": f"text {number}"}

    options: Any = {"samples_per_shard": 4, "storage_options": s3}
    with pytest.raises(KeyError):
        write_shards(samples(9), "s3://photos/packed", **options)
    assert write_shards(samples(-1), "s3://photos/packed", **options) == [4, 4, 2]
    with pytest.raises(FileExistsError, match="has a complete pack"):
        write_shards(samples(-1), "s3://photos/packed", **options)
    monkeypatch.setattr("hybridloader.sources.tar.make_index", None)  # none is made
    tar = Tar("s3://photos/packed/", fields=("txt",), index="beside", storage_options=s3)
    assert [text for (text,) in tar] == [b"text %d" % number for number in range(10)]
    tar.close()


@pytest.fixture
def requests(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Requests of s3fs by their kind."""
    import s3fs

    made: Counter[str] = Counter()
    call = s3fs.S3FileSystem._call_s3

    async def counted(self: Any, method: str, *args: Any, **kwargs: Any) -> Any:
        made[method] += 1
        return await call(self, method, *args, **kwargs)

    monkeypatch.setattr(s3fs.S3FileSystem, "_call_s3", counted)
    return made


@pytest.mark.parametrize("url", ["s3://photos/a.tar", "simplecache::s3://photos/a.tar"])
def test_there_are_more_connections_than_s3fs_has_by_default(s3: Any, url: str) -> None:
    options = s3 if url.startswith("s3") else {"s3": s3}
    own = {**s3, "config_kwargs": {"max_pool_connections": 7}}
    for given, connections in ((options, 100), (own if options is s3 else {"s3": own}, 7)):
        tar = Tar(url, fields=("txt",), storage_options=given)
        (place, _) = tar._places[0]
        fs = place.fs.fs if "::" in url else place.fs
        assert len(tar[0]) == 1
        assert fs.config_kwargs["max_pool_connections"] == connections
        tar.close()
