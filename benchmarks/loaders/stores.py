"""Loaders of archives in a store: pairs of files, decoded or not, in batches that are lists.

Each is opened once, and has an iterator of batches for each epoch. Rivals read the format and the
protocol that they are made for, by as many workers as their documents recommend for two cores.
"""

from __future__ import annotations

import io
import os
import tarfile
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.case import Spec
from benchmarks.datasets import stored
from benchmarks.datasets.object_store import ObjectStore

THREADS, MANY_THREADS = 8, 32
"""Threads that read blocks or archives, and that read samples."""

Batches = Callable[[int], Iterator[Any]]
"""The batches of the epoch of that number."""


def folder_of(spec: Spec) -> str:
    """Folder that the server serves: the archives, and what was made of them for rivals."""
    return os.path.dirname(_archives(spec)[0])


def _archives(spec: Spec) -> list[str]:
    return stored.archives(spec["samples"], spec["shards"], spec["width"])


def _urls(spec: Spec, store: ObjectStore) -> list[str]:
    return [f"{store.url}/{os.path.basename(path)}" for path in _archives(spec)]


def _pairs(spec: Spec) -> Iterator[Any]:
    for path in _archives(spec):
        yield from stored.members(path)


def _load(spec: Spec) -> Callable[[Any], Any] | None:
    return stored.decoded if spec["decoded"] else None


# -- hybridloader ------------------------------------------------------------------------------------


def _tar(spec: Spec, store: ObjectStore, scratch: str, *, kind: str) -> Batches:
    """`Tar` with an index that is kept; the epochs do not count what it took to make that."""
    from hybridloader import DataLoader
    from hybridloader.sampling import BlockShuffleSampler, ShuffleSampler
    from hybridloader.sources import Tar

    cache = os.path.join(scratch, "cache") if kind == "cache" else None
    index = os.path.join(scratch, "index")
    tar = Tar(
        _urls(spec, store),
        fields=("jpg", "cls"),
        decode=_load(spec),
        index=index,
        cache_dir=cache,
    )
    sampler: Any = ShuffleSampler(tar, 0) if kind == "samples" else BlockShuffleSampler(tar, seed=0)
    workers = MANY_THREADS if kind == "samples" else THREADS
    loader: Any = DataLoader(
        tar,
        spec["batch"],
        sampler=sampler,
        num_workers=workers,
        backend="threads",
        collate_fn=list,
    )
    return lambda epoch: iter(loader)


def _archive(url: str) -> list[Any]:
    """The pairs of files of a whole archive."""
    import urllib.request

    with urllib.request.urlopen(url) as answer:
        data = answer.read()
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        files = [archive.extractfile(member) for member in archive]
        contents = [file.read() for file in files if file is not None]
    return [*zip(contents[::2], contents[1::2], strict=True)]


def _whole_archives(spec: Spec, store: ObjectStore, scratch: str) -> Batches:
    from hybridloader import Pipeline

    pipe: Any = Pipeline.from_iterable(_urls(spec, store))
    pipe = pipe.flat_map(_archive, backend="threads", num_workers=THREADS)
    pipe = pipe.batch(spec["batch"], collate_fn=list)
    return lambda epoch: pipe.run(epoch=epoch)


# -- rivals ------------------------------------------------------------------------------------------


def _webdataset(spec: Spec, store: ObjectStore, scratch: str, *, cached: bool) -> Batches:
    import webdataset as wds

    options = {"cache_dir": os.path.join(scratch, "cache")} if cached else {}
    if cached:
        os.mkdir(options["cache_dir"])
    dataset = wds.WebDataset(_urls(spec, store), shardshuffle=100, seed=0, **options)
    dataset = dataset.shuffle(1000).to_tuple("jpg", "cls").map(_load(spec) or tuple)
    dataset = dataset.batched(spec["batch"], collation_fn=list)
    loader = wds.WebLoader(dataset, batch_size=None, num_workers=spec["workers"])
    return lambda epoch: iter(loader)


def _spdl(spec: Spec, store: ObjectStore, scratch: str) -> Batches:
    """Its pipeline: archives by several threads, then batches of their samples."""
    from spdl.pipeline import PipelineBuilder

    def epoch(number: int) -> Iterator[Any]:
        builder: Any = PipelineBuilder().add_source(_urls(spec, store))
        builder = builder.pipe(_archive, concurrency=THREADS).disaggregate()
        if load := _load(spec):
            builder = builder.pipe(load, concurrency=spec["workers"])
        pipeline = (
            builder.aggregate(spec["batch"])
            .add_sink(8)
            .build(num_threads=THREADS + spec["workers"])
        )
        with pipeline.auto_stop():
            yield from pipeline.get_iterator(timeout=60)

    return epoch


def _s3(store: ObjectStore) -> dict[str, Any]:
    """Let boto3 ask this server, for a bucket that is a folder of it."""
    os.environ |= {
        "S3_ENDPOINT_URL": store.url,
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    return {"endpoint_url": store.url}


def _optimize(spec: Spec, folder: Path) -> None:
    import litdata

    litdata.optimize(
        partial(_dict_of, [*_pairs(spec)]),
        list(range(spec["samples"])),
        str(folder / "litdata"),
        chunk_bytes="8MB",
        num_workers=1,
        verbose=False,
    )


def _dict_of(pairs: list[Any], number: int) -> dict[str, Any]:
    return {"jpg": pairs[number][0], "cls": pairs[number][1]}


def _litdata(spec: Spec, store: ObjectStore, scratch: str) -> Batches:
    import litdata
    from litdata.streaming import downloader

    downloader._OBSTORE_CLIENT_OPTIONS["allow_http"] = True  # else it asks for https alone
    dataset = litdata.StreamingDataset(
        f"s3://{_bucket(spec, 'litdata', _optimize)}/litdata",
        cache_dir=os.path.join(scratch, "cache"),
        shuffle=True,
        storage_options=_s3(store),
    )
    loader: Any = litdata.StreamingDataLoader(
        dataset, batch_size=spec["batch"], num_workers=spec["workers"], collate_fn=list
    )
    return lambda epoch: iter(loader)


def _write_mds(spec: Spec, folder: Path) -> None:
    from streaming import MDSWriter

    columns = {"jpg": "bytes", "cls": "bytes"}
    with MDSWriter(out=str(folder / "mds"), columns=columns, size_limit="8mb") as writer:
        for picture, number in _pairs(spec):
            writer.write({"jpg": picture, "cls": number})


def _mosaicml(spec: Spec, store: ObjectStore, scratch: str) -> Batches:
    import torch.utils.data
    from streaming import StreamingDataset

    bucket = _bucket(spec, "mds", _write_mds)
    _s3(store)
    dataset = StreamingDataset(
        remote=f"s3://{bucket}/mds",
        local=os.path.join(scratch, "cache"),
        batch_size=spec["batch"],
        shuffle=True,
    )
    loader: Any = torch.utils.data.DataLoader(
        dataset, spec["batch"], num_workers=spec["workers"], collate_fn=list
    )
    return lambda epoch: iter(loader)


def _bucket(spec: Spec, name: str, write: Callable[[Spec, Path], None]) -> str:
    """Name of the folder, in that of the server, that `write` fills once."""
    bucket = Path(folder_of(spec), f"{name}-bucket")
    if not bucket.exists():
        with tempfile.TemporaryDirectory(dir=bucket.parent) as beside:
            write(spec, Path(beside, "made"))
            Path(beside, "made").rename(bucket)
    return bucket.name


LOADERS: dict[str, Callable[[Spec, ObjectStore, str], Batches]] = {
    "blocks": partial(_tar, kind="blocks"),
    "blocks, cache": partial(_tar, kind="cache"),
    "by sample": partial(_tar, kind="samples"),
    "whole archives": _whole_archives,
    "SPDL": _spdl,
    "webdataset": partial(_webdataset, cached=False),
    "webdataset cache": partial(_webdataset, cached=True),
    "litdata": _litdata,
    "MosaicML": _mosaicml,
}
