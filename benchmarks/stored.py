"""Loaders of stored samples: archives on disk, archives in an object store, and tables.

Each project reads the format that it is made for. A function returns the batches of one epoch, and
takes the parameters of its case: `samples`, `batch`, `workers`. The files are made once, in a temporary
folder.
"""

from __future__ import annotations

import io
import multiprocessing
import os
import tarfile
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.datasets import jpeg_files

Spec = dict[str, Any]
READERS = 8
"""Threads that read archives in a store."""


def made(name: str, make: Callable[[Path], None]) -> Path:
    """Return a folder that `make` has filled, now or in an earlier run."""
    base = Path(tempfile.gettempdir(), f"hybridloader-benchmarks-{os.getuid()}")
    base.mkdir(exist_ok=True, mode=0o700)
    if not (base / name).exists():  # processes of one run make it one after the other
        beside = Path(tempfile.mkdtemp(dir=base))
        make(beside)
        beside.rename(base / name)
    return base / name


def archives(spec: Spec) -> list[str]:
    """Return paths of tar archives, of webdataset's form: a JPEG file and a number for each sample."""
    samples, shards, width = spec["samples"], spec["shards"], spec["width"]
    each = samples // shards

    def make(folder: Path) -> None:
        pictures = jpeg_files(width, 32)
        for shard in range(shards):
            with tarfile.open(folder / f"{shard:03d}.tar", "w") as archive:
                for number in range(each * shard, each * (shard + 1)):
                    picture = pictures[number % len(pictures)]
                    for kind, data in (("jpg", picture), ("cls", str(number).encode())):
                        member = tarfile.TarInfo(f"{number:06d}.{kind}")
                        member.size = len(data)
                        archive.addfile(member, io.BytesIO(data))

    return sorted(map(str, made(f"tar-{samples}-{shards}-{width}", make).glob("*.tar")))


def pairs_of(archive: tarfile.TarFile) -> Iterator[tuple[bytes, bytes]]:
    """Read the pairs of files of an archive, in order."""
    files = [archive.extractfile(member) for member in archive]
    contents = [file.read() for file in files if file is not None]
    yield from zip(contents[::2], contents[1::2], strict=True)


def decoded(sample: Any) -> tuple[Any, int]:
    """Return pixels and number of a pair of files."""
    import numpy
    import torch
    from PIL import Image

    with Image.open(io.BytesIO(sample[0])) as image:
        return torch.from_numpy(numpy.array(image.convert("RGB"))), int(sample[1])


def _tar(backend: str, spec: Spec) -> Iterator[Any]:
    from hybridloader import DataLoader
    from hybridloader.sources import Tar

    tar = Tar(archives(spec), fields=("jpg", "cls"), decode=decoded, index="beside")
    yield from DataLoader(tar, spec["batch"], num_workers=spec["workers"], backend=backend)
    tar.close()


def _tar_webdataset(spec: Spec) -> Iterator[Any]:
    import webdataset as wds

    dataset = wds.WebDataset(archives(spec), shardshuffle=False)
    dataset = dataset.to_tuple("jpg", "cls").map(decoded).batched(spec["batch"])
    yield from wds.WebLoader(dataset, batch_size=None, num_workers=spec["workers"])


def _urls(spec: Spec) -> list[str]:
    return [f"{spec['url']}/{os.path.basename(path)}" for path in archives(spec)]


def _blocks(spec: Spec) -> Iterator[Any]:
    """`Tar` with an index that is kept beside the archives; blocks of it in random order."""
    from hybridloader import DataLoader
    from hybridloader.sampling import BlockShuffleSampler
    from hybridloader.sources import Tar

    index = os.path.join(os.path.dirname(archives(spec)[0]), "index")
    try:
        tar = Tar(_urls(spec), fields=("jpg", "cls"), index=index)
    except TypeError:  # a version before 0.2.0
        tar = Tar(_urls(spec), members=("jpg", "cls"), index=index)
    loader: Any = DataLoader(
        tar,
        spec["batch"],
        sampler=BlockShuffleSampler(tar, seed=0),
        num_workers=READERS,
        backend="threads",
        collate_fn=list,
    )
    yield from loader
    tar.close()


def _archive(url: str) -> list[Any]:
    import urllib.request

    with urllib.request.urlopen(url) as answer:
        data = answer.read()
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        return list(pairs_of(archive))


def _store_spdl(spec: Spec) -> Iterator[Any]:
    from spdl.pipeline import PipelineBuilder

    builder: Any = PipelineBuilder().add_source(_urls(spec))
    builder.pipe(_archive, concurrency=READERS).disaggregate().aggregate(spec["batch"])
    pipeline = builder.add_sink(8).build(num_threads=READERS + spec["workers"])
    with pipeline.auto_stop():
        yield from pipeline.get_iterator(timeout=60)


def _store_webdataset(spec: Spec) -> Iterator[Any]:
    import webdataset as wds

    dataset = wds.WebDataset(_urls(spec), shardshuffle=100, seed=0).shuffle(1000)
    dataset = dataset.to_tuple("jpg", "cls").batched(spec["batch"], collation_fn=list)
    yield from wds.WebLoader(dataset, batch_size=None, num_workers=spec["workers"])


def _pair(spec: Spec, number: int) -> dict[str, Any]:
    return {"jpg": jpeg_files(spec["width"], 32)[number % 32], "cls": str(number).encode()}


def _optimize(spec: Spec, folder: Path) -> None:
    import litdata

    pair, numbers = partial(_pair, spec), list(range(spec["samples"]))
    options: Any = {"chunk_bytes": "8MB", "num_workers": 1, "verbose": False}
    litdata.optimize(pair, numbers, str(folder / "litdata"), **options)


def _store_litdata(spec: Spec) -> Iterator[Any]:
    import litdata
    from litdata.streaming import downloader

    downloader._OBSTORE_CLIENT_OPTIONS["allow_http"] = True  # else it asks for https alone
    bucket = Path(os.path.dirname(archives(spec)[0]), "bucket")
    if not bucket.exists():  # in another process: reading fails in one that has optimized
        folder = Path(tempfile.mkdtemp(dir=bucket.parent))
        context = multiprocessing.get_context("spawn")
        optimizing = context.Process(target=_optimize, args=(spec, folder))
        optimizing.start()
        optimizing.join()
        assert optimizing.exitcode == 0, "litdata.optimize failed"
        folder.rename(bucket)
    os.environ |= {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret"}
    os.environ |= {"S3_ENDPOINT_URL": spec["url"], "AWS_DEFAULT_REGION": "us-east-1"}
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as cache:
        dataset = litdata.StreamingDataset(
            "s3://bucket/litdata",
            cache_dir=cache,
            shuffle=True,
            storage_options={"endpoint_url": spec["url"]},
        )
        loader: Any = litdata.StreamingDataLoader(
            dataset, batch_size=spec["batch"], num_workers=spec["workers"], collate_fn=list
        )
        yield from loader


def _tables(spec: Spec) -> list[str]:
    """Return paths of 4 Parquet files of 20 columns: the first counts the rows, others are random."""

    def make(folder: Path) -> None:
        import numpy as np
        import pyarrow
        import pyarrow.parquet

        generator, each = np.random.default_rng(0), spec["samples"] // 4
        for file in range(4):
            columns: dict[str, Any] = {"c00": np.arange(each * file, each * (file + 1))}
            for column in range(1, 20):
                columns[f"c{column:02d}"] = generator.random(each, np.float32)
            table = pyarrow.table(columns)
            pyarrow.parquet.write_table(table, folder / f"{file}.parquet", row_group_size=50_000)

    return sorted(map(str, made(f"parquet-{spec['samples']}", make).glob("*.parquet")))


def _parquet(spec: Spec) -> Iterator[Any]:
    from hybridloader import DataLoader
    from hybridloader.sources import Parquet

    rows = Parquet(_tables(spec), tensors=True)
    yield from DataLoader(
        rows,
        spec["batch"],
        num_workers=spec["workers"],
        backend="threads",
        collate_fn=Parquet.collate_fn,
    )
    rows.close()


def _parquet_pyarrow(spec: Spec) -> Iterator[Any]:
    import pyarrow
    import pyarrow.dataset
    import torch

    for batch in pyarrow.dataset.dataset(_tables(spec)).to_batches(batch_size=spec["batch"]):
        table = pyarrow.table(batch)
        yield {name: torch.from_numpy(table.column(name).to_numpy()) for name in table.column_names}


EPOCHS: dict[str, dict[str, Callable[[Spec], Iterator[Any]]]] = {
    "disk": {
        "threads": partial(_tar, "threads"),
        "fork": partial(_tar, "fork"),
        "webdataset": _tar_webdataset,
    },
    "store": {
        "threads": _blocks,
        "SPDL threads": _store_spdl,
        "webdataset": _store_webdataset,
        "litdata": _store_litdata,
    },
    "tables": {"threads": _parquet, "pyarrow": _parquet_pyarrow},
}
"""Kind of storage -> loader -> its epoch."""


def numbers(batch: Any) -> list[int]:
    """Return the numbers of the samples of a batch of any of these loaders."""
    if isinstance(batch, dict):
        return [int(number) for number in batch["c00"].tolist()]
    if hasattr(batch[-1], "tolist"):
        return [int(number) for number in batch[-1].tolist()]
    return [int(pair["cls"] if isinstance(pair, dict) else pair[1]) for pair in batch]
