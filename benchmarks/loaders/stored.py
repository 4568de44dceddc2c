"""Loaders of objects behind a server, of archives and of tables: iterators of one epoch's batches.

Each project is used in its own best form for the work, with as many workers as the others.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

from benchmarks.case import Spec, check_installed
from benchmarks.datasets import stored
from benchmarks.datasets.remote import server_of

Epoch = Callable[[Spec], Iterator[Any]]

WINDOW = 8
"""Row groups, or parts of archives, within which samples are shuffled."""

BLOCK = 250
"""Samples of a part of an archive."""


# -- objects behind a server -------------------------------------------------------------------------


def _urls(spec: Spec) -> list[str]:
    port = server_of(stored.SIDE).port
    return [f"http://127.0.0.1:{port}/{spec['delay_ms']}/{at}" for at in range(spec["samples"])]


def _length_of(data: bytes) -> int:
    return len(data)


def _objects_on_threads(spec: Spec) -> Iterator[Any]:
    from hybridloader import Pipeline
    from hybridloader.sources import Files

    files = Files(_urls(spec), decode=_length_of)
    pipe = Pipeline.from_dataset(files, backend="threads", num_workers=spec["at_once"])
    yield from pipe.batch(spec["batch"])


class Get:
    """A request, over connections of this worker's loop."""

    session: Any = None

    def setup(self) -> None:
        self.session = None

    async def __call__(self, url: str) -> int:
        import aiohttp

        if self.session is None:
            self.session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
        async with self.session.get(url) as answer:
            return len(await answer.read())

    def __del__(self) -> None:
        if self.session is not None:
            with suppress(Exception):
                self.session.connector.close()


def _objects_by_coroutines(spec: Spec) -> Iterator[Any]:
    from hybridloader import Pipeline

    pipe = Pipeline.from_iterable(_urls(spec)).map(
        Get(), concurrency=spec["at_once"], backend="threads", num_workers=1
    )
    yield from pipe.batch(spec["batch"])


class Objects:
    """A dataset of objects for torch's loader: `http.client`, over a connection of each worker."""

    def __init__(self, spec: Spec) -> None:
        from benchmarks.datasets.remote import Remote

        port = server_of(stored.SIDE).port
        self._remote = Remote(port, spec["delay_ms"], 0, spec["samples"])

    def __len__(self) -> int:
        return len(self._remote)

    def __getitem__(self, index: int) -> int:
        return len(self._remote.read(index))


def _objects_by_torch(spec: Spec) -> Iterator[Any]:
    import torch.utils.data

    yield from torch.utils.data.DataLoader(
        Objects(spec),  # type: ignore[arg-type]
        spec["batch"],
        num_workers=spec["torch_workers"],
    )


# -- archives ----------------------------------------------------------------------------------------


def _tar(backend: str) -> Epoch:
    def epoch(spec: Spec) -> Iterator[Any]:
        from hybridloader import DataLoader
        from hybridloader.sampling import BlockShuffleSampler
        from hybridloader.sources import Tar

        samples = Tar(
            stored.archives(spec["samples"]),
            fields=("jpg", "cls"),
            decode=stored.decoded,
            index="beside",
        )
        sampler = BlockShuffleSampler(
            samples, seed=0, block_size=BLOCK, window_blocks=WINDOW, shuffle=spec["shuffled"]
        )
        yield from DataLoader(
            samples,
            spec["batch"],
            sampler=sampler,
            num_workers=spec["workers"],
            backend=backend,
        )
        samples.close()

    return epoch


def _tar_by_webdataset(spec: Spec) -> Iterator[Any]:
    check_installed("webdataset")
    import webdataset as wds

    shuffled = spec["shuffled"]
    dataset = wds.WebDataset(
        stored.archives(spec["samples"]), shardshuffle=100 if shuffled else False, seed=0
    )
    if shuffled:
        dataset = dataset.shuffle(WINDOW * BLOCK)
    dataset = dataset.to_tuple("jpg", "cls").map(stored.decoded).batched(spec["batch"])
    yield from wds.WebLoader(dataset, batch_size=None, num_workers=spec["workers"])


def _pairs(paths: list[str], shuffled: bool) -> Iterator[Any]:
    generator = random.Random(0)
    if shuffled:
        generator.shuffle(paths)
    found = itertools.chain.from_iterable(map(stored.members, paths))
    if not shuffled:
        yield from found
        return
    buffer: list[Any] = []
    for pair in found:
        if len(buffer) < WINDOW * BLOCK:
            buffer.append(pair)
            continue
        at = generator.randrange(len(buffer))
        buffer[at], pair = pair, buffer[at]
        yield pair
    generator.shuffle(buffer)
    yield from buffer


def _tar_by_torchdata(method: str) -> Epoch:
    def epoch(spec: Spec) -> Iterator[Any]:
        check_installed("torchdata")
        import torch
        import torchdata.nodes as nodes

        source = nodes.IterableWrapper(_pairs(stored.archives(spec["samples"]), spec["shuffled"]))
        mapped = nodes.ParallelMapper(
            source,
            stored.decoded,
            num_workers=spec["workers"],
            in_order=True,
            method=method,  # type: ignore[arg-type]
            multiprocessing_context="fork" if method == "process" else None,
        )
        batches = nodes.Batcher(mapped, spec["batch"], drop_last=False)
        yield from nodes.Loader(nodes.Mapper(batches, torch.utils.data.default_collate))

    return epoch


def _tar_alone(spec: Spec) -> Iterator[Any]:
    """Reading and decoding, in one process."""
    import torch

    pairs = _pairs(stored.archives(spec["samples"]), False)
    while batch := [stored.decoded(pair) for pair in itertools.islice(pairs, spec["batch"])]:
        yield torch.utils.data.default_collate(batch)


def _part_of_archives(spec: Spec, worker: int, workers: int, told: Any) -> None:
    paths = stored.archives(spec["samples"])[worker::workers]
    told.send(sum(len(stored.decoded(pair)) > 0 for pair in _pairs(paths, False)))


def _tar_together(spec: Spec) -> Iterator[Any]:
    """Reading and decoding alone, in as many processes as there are workers; nothing is handed over."""
    import multiprocessing

    context, workers = multiprocessing.get_context("fork"), spec["workers"]
    found = []
    for worker in range(workers):
        ours, theirs = context.Pipe(duplex=False)
        arguments = (spec, worker, workers, theirs)
        process = context.Process(target=_part_of_archives, args=arguments)
        process.start()
        found.append((process, ours))
    for process, told in found:
        yield range(told.recv())
        process.join()


# -- tables ------------------------------------------------------------------------------------------


def _parquet(backend: str) -> Epoch:
    def epoch(spec: Spec) -> Iterator[Any]:
        from hybridloader import DataLoader
        from hybridloader.sampling import BlockShuffleSampler
        from hybridloader.sources import Parquet

        rows = Parquet(stored.tables(spec["samples"]), tensors=True)
        sampler = BlockShuffleSampler(rows, seed=0, window_blocks=WINDOW, shuffle=spec["shuffled"])
        yield from DataLoader(
            rows,
            spec["batch"],
            sampler=sampler,
            num_workers=spec["workers"],
            backend=backend,
            collate_fn=Parquet.collate_fn,
        )
        rows.close()

    return epoch


def _as_tensors(table: Any) -> dict[str, Any]:
    import torch

    return {name: torch.from_numpy(table.column(name).to_numpy()) for name in table.column_names}


def _parquet_by_pyarrow(spec: Spec) -> Iterator[Any]:
    """pyarrow's own loop; at random, row groups in random order, rows within as many as a window has."""
    import numpy as np
    import pyarrow
    import pyarrow.dataset

    dataset = pyarrow.dataset.dataset(stored.tables(spec["samples"]))
    if not spec["shuffled"]:
        for batch in dataset.to_batches(batch_size=spec["batch"]):
            yield _as_tensors(pyarrow.table(batch))
        return
    generator = np.random.default_rng(0)
    groups = [group for file in dataset.get_fragments() for group in file.split_by_row_group()]
    order = generator.permutation(len(groups))
    for first in range(0, len(order), WINDOW):
        parts = [groups[at].to_table() for at in order[first : first + WINDOW]]
        table = pyarrow.concat_tables(parts).combine_chunks()
        rows = generator.permutation(len(table))
        for at in range(0, len(table), spec["batch"]):
            yield _as_tensors(table.take(rows[at : at + spec["batch"]]).combine_chunks())


def _parquet_by_datasets(spec: Spec) -> Iterator[Any]:
    check_installed("datasets")
    import torch.utils.data

    table = stored.hugging_face(spec["samples"]).with_format("torch")
    kind = (
        torch.utils.data.RandomSampler if spec["shuffled"] else torch.utils.data.SequentialSampler
    )
    batches = torch.utils.data.BatchSampler(kind(table), spec["batch"], drop_last=False)
    # As a sampler: a table that is asked for a list gives a dict of columns, else a list of rows.
    yield from torch.utils.data.DataLoader(
        table, batch_size=None, sampler=batches, num_workers=spec["workers"]
    )


EPOCHS: dict[str, dict[str, Epoch]] = {
    "objects": {
        "pipeline threads": _objects_on_threads,
        "pipeline coroutines": _objects_by_coroutines,
        "torch": _objects_by_torch,
    },
    "archives": {
        "threads": _tar("threads"),
        "fork": _tar("fork"),
        "webdataset": _tar_by_webdataset,
        "torchdata threads": _tar_by_torchdata("thread"),
        "torchdata processes": _tar_by_torchdata("process"),
        "limit": _tar_alone,
        "together": _tar_together,
    },
    "tables": {
        "threads": _parquet("threads"),
        "fork": _parquet("fork"),
        "pyarrow": _parquet_by_pyarrow,
        "datasets": _parquet_by_datasets,
    },
}
"""Kind of files -> loader -> its epoch."""


def samples_in(batch: Any) -> int:
    """Number of samples of a batch of any of these loaders."""
    if isinstance(batch, dict):
        batch = next(iter(batch.values()))
    elif isinstance(batch, (list, tuple)):
        batch = batch[-1]
    return len(batch)
