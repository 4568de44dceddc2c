"""Batches of rows, from tensors, numpy files and Parquet.

    python examples/cookbook/tabular.py [--rows N] [--rounds N] [--cold]

It writes a table in a temporary folder, trains on it, and compares ways to read it.
"""

# needs: pyarrow fsspec

import argparse
import os
import resource
import tempfile
import time
import warnings
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import torch
from torch.utils.data import BatchSampler, RandomSampler, TensorDataset

from hybridloader import DataLoader
from hybridloader.sampling import BlockShuffleSampler, ShuffleSampler
from hybridloader.sources import Parquet, PerWorker

COLUMNS, BATCH, BLOCK = 16, 1024, 8192
WORKERS = {"num_workers": 2, "backend": "threads"}


def write(folder, rows):
    """Write the same table as two files of numpy and as four files of Parquet."""
    draw = np.random.default_rng(0)
    x = draw.normal(size=(rows, COLUMNS)).astype(np.float32)
    y = (x @ np.linspace(-1, 1, COLUMNS)).astype(np.float32)
    np.save(folder / "x.npy", x)
    np.save(folder / "y.npy", y)
    (folder / "parquet").mkdir()
    for number, part in enumerate(np.array_split(np.arange(rows), 4)):
        columns = {f"x{i}": x[part, i] for i in range(COLUMNS)} | {"y": y[part]}
        path = folder / "parquet" / f"part-{number}.parquet"
        pyarrow.parquet.write_table(pyarrow.table(columns), path, row_group_size=BLOCK)


class ByRow:
    """Rows of two numpy files, one by one: the slow way."""

    def __init__(self, folder):
        self.x = PerWorker(
            partial(np.load, folder / "x.npy", mmap_mode="r"), per="process"
        )
        self.y = PerWorker(
            partial(np.load, folder / "y.npy", mmap_mode="r"), per="process"
        )

    def __len__(self):
        return len(self.y())

    def __getitem__(self, index):
        # A copy: the file is read-only
        return np.array(self.x()[index]), self.y()[index]


class Table(ByRow):
    """Rows of two numpy files; one call makes a batch."""

    def __getitems__(self, indices):
        indices = np.asarray(indices)
        return torch.from_numpy(self.x()[indices]), torch.from_numpy(self.y()[indices])


class Blocks(Table):
    """Blocks of consecutive rows: an index is the number of a block."""

    def __len__(self):
        return -(-super().__len__() // BATCH)

    def __getitem__(self, block):
        rows = slice(block * BATCH, (block + 1) * BATCH)
        return torch.tensor(self.x()[rows]), torch.tensor(self.y()[rows])


def whole(batch):
    """Collate nothing: `__getitems__` has made the batch."""
    return batch


def from_memory(folder):
    x, y = (torch.from_numpy(np.load(folder / name)) for name in ("x.npy", "y.npy"))
    return DataLoader(TensorDataset(x, y), BATCH, shuffle=True, **WORKERS)


def from_numpy(folder):
    table = Table(folder)
    sampler = BlockShuffleSampler(
        [len(table)], seed=0, block_size=BLOCK, window_blocks=8
    )
    return DataLoader(table, BATCH, sampler=sampler, collate_fn=whole, **WORKERS)


def from_parquet(folder):
    # columns=[...] reads a part of them
    rows = Parquet(folder / "parquet", tensors=True)
    sampler = BlockShuffleSampler(rows, seed=0, window_blocks=8)
    return DataLoader(
        rows, BATCH, sampler=sampler, collate_fn=Parquet.collate_fn, **WORKERS
    )


def train(name, loader):
    model = torch.nn.Linear(COLUMNS, 1)
    optimizer = torch.optim.Adam(model.parameters(), 0.05)
    for batch in loader:
        if isinstance(batch, dict):
            x, y = torch.stack([batch[f"x{i}"] for i in range(COLUMNS)], 1), batch["y"]
        else:
            x, y = batch
        loss = torch.nn.functional.mse_loss(model(x).squeeze(1), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"{name}: {len(loader)} batches, last loss {loss.item():.4f}")


def variants(folder):
    """Yield name, loader and number of rows of each way to read the table."""
    slow, table, blocks = ByRow(folder), Table(folder), Blocks(folder)
    rows = len(table)
    theirs = partial(torch.utils.data.DataLoader, num_workers=2)
    yield "torch, row by row", theirs(slow, BATCH, shuffle=True), rows
    yield (
        "torch, __getitems__",
        theirs(table, BATCH, shuffle=True, collate_fn=whole),
        rows,
    )
    yield "threads, row by row", DataLoader(slow, BATCH, shuffle=True, **WORKERS), rows
    processes = {"num_workers": 2, "backend": "shared-memory"}
    loader = DataLoader(table, BATCH, shuffle=True, collate_fn=whole, **processes)
    yield "processes, __getitems__", loader, rows
    loader = DataLoader(table, BATCH, shuffle=True, collate_fn=whole, **WORKERS)
    yield "threads, __getitems__", loader, rows
    yield "threads, __getitems__ and shuffled blocks", from_numpy(folder), rows
    sampler = BatchSampler(RandomSampler(range(rows)), BATCH, drop_last=False)
    loader = DataLoader(slow, batch_size=None, sampler=sampler, **WORKERS)
    yield "threads, BatchSampler as sampler", loader, rows
    loader = DataLoader(
        blocks, batch_size=None, sampler=ShuffleSampler(blocks, seed=0), **WORKERS
    )
    yield "threads, whole blocks", loader, rows
    yield "threads, TensorDataset", from_memory(folder), rows
    yield "threads, Parquet and shuffled blocks", from_parquet(folder), rows
    # hybridloader warns of this one, so the warning is expected here.
    warnings.filterwarnings("ignore", "Parquet: row groups are decoded repeatedly")
    small = Parquet(folder / "parquet", tensors=True, memory_cache_bytes=1 << 20)
    few = np.random.default_rng(0).integers(rows, size=4 * 64).tolist()
    loader = DataLoader(
        small, 64, sampler=few, collate_fn=Parquet.collate_fn, **WORKERS
    )
    yield "threads, Parquet larger than its cache, shuffled rows", loader, len(few)


def drop(folder):
    """Remove the files from the page cache, so that the next reader waits for the disk."""
    for path in folder.rglob("*.*"):
        with path.open("rb+") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def cpu():
    """Return the seconds of CPU of this process and of its ended children."""
    used = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(each.ru_utime + each.ru_stime for each in used)


def compare(folder, rounds, cold):
    best = {}
    for _ in range(rounds):
        for name, loader, rows in variants(folder):
            if cold:
                drop(folder)
            start, busy = time.perf_counter(), cpu()
            for _ in loader:
                pass
            times = (time.perf_counter() - start) / rows, (cpu() - busy) / rows
            best[name] = [*map(min, times, best.get(name, times))]
    print(f"{'us/row':>8}  {'CPU us':>8}")
    for name, (elapsed, busy) in best.items():
        print(f"{elapsed * 1e6:8.2f}  {busy * 1e6:8.2f}  {name}")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, default=50_000)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument(
        "--cold", action="store_true", help="read each time from the disk"
    )
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write(folder, arguments.rows)
        torch.manual_seed(0)
        train("tensors in memory", from_memory(folder))
        train("numpy files", from_numpy(folder))
        train("Parquet files", from_parquet(folder))
        compare(folder, arguments.rounds, arguments.cold)


if __name__ == "__main__":
    main()
