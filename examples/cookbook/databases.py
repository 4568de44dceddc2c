"""Rows from sqlite, HDF5, LMDB, Zarr and a memory-mapped array: one handle for each worker.

    python examples/cookbook/databases.py [--rows N] [--rounds N]

It writes the same rows into each store, in a temporary folder, shows errors of a handle that is
opened too early, and measures each store on three backends.
"""

# needs: h5py lmdb psutil zarr

import argparse
import multiprocessing
import sqlite3
import tempfile
import time
from functools import partial
from pathlib import Path

import numpy as np
import psutil
import torch

from hybridloader import DataLoader
from hybridloader.errors import WorkerPicklingError
from hybridloader.sampling import BlockShuffleSampler
from hybridloader.sources import PerWorker

COLUMNS, BATCH, CHUNK = 64, 256, 128


class Rows:
    """Rows of a store; only `open` is sent to a fresh process."""

    per, on_fork = "thread", "leave"

    def __init__(self, folder, count):
        self.count = count
        self.handle = PerWorker(
            partial(self.open, str(folder)), per=self.per, on_fork=self.on_fork
        )

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        return self.__getitems__([index])[0]

    def __getitems__(self, indices):
        return self.read(np.asarray(indices))


class Sqlite(Rows):
    @staticmethod
    def write(folder, rows):
        with sqlite3.connect(f"{folder}/rows.db") as database:
            database.execute("create table rows (data blob)")
            database.executemany(
                "insert into rows values (?)", ([row.tobytes()] for row in rows)
            )
        database.close()

    @staticmethod
    def open(folder):
        return sqlite3.connect(f"file:{folder}/rows.db?mode=ro", uri=True)

    def read(self, indices):
        marks = ",".join("?" * len(indices))
        found = self.handle().execute(
            f"select rowid, data from rows where rowid in ({marks})",
            (indices + 1).tolist(),
        )
        rows = {rowid - 1: np.frombuffer(data, np.float32) for rowid, data in found}
        return np.stack([rows[index] for index in indices.tolist()])


class Lmdb(Rows):
    # An environment may be open once in a process; one that a fork has copied counts.
    per, on_fork = "process", "close"

    @staticmethod
    def write(folder, rows):
        import lmdb

        environment = lmdb.open(f"{folder}/lmdb", map_size=1 << 30)
        with environment, environment.begin(write=True) as transaction:
            for index, row in enumerate(rows):
                transaction.put(index.to_bytes(8, "big"), row.tobytes())

    @staticmethod
    def open(folder):
        import lmdb

        return lmdb.open(f"{folder}/lmdb", readonly=True, lock=False, readahead=False)

    def read(self, indices):
        with self.handle().begin(buffers=True) as transaction:
            keys = [index.to_bytes(8, "big") for index in indices.tolist()]
            rows = [np.frombuffer(transaction.get(key), np.float32) for key in keys]
            return np.stack(rows)  # a copy: buffers end with the transaction


class Chunked(Rows):
    """A store of chunks: each is read and decompressed once for each batch."""

    def read(self, indices):
        rows = np.empty((len(indices), COLUMNS), np.float32)
        chunks = indices // CHUNK
        for chunk in np.unique(chunks).tolist():
            here = chunks == chunk
            block = self.handle()[chunk * CHUNK : (chunk + 1) * CHUNK]
            rows[here] = block[indices[here] - chunk * CHUNK]
        return rows


class Hdf5(Chunked):
    @staticmethod
    def write(folder, rows):
        import h5py

        with h5py.File(f"{folder}/rows.h5", "w") as file:
            file.create_dataset(
                "rows", data=rows, chunks=(CHUNK, COLUMNS), compression="gzip"
            )

    @staticmethod
    def open(folder):
        import h5py

        return h5py.File(f"{folder}/rows.h5", "r")["rows"]


class Zarr(Chunked):
    per = "process"

    @staticmethod
    def write(folder, rows):
        import zarr

        zarr.create_array(f"{folder}/rows.zarr", data=rows, chunks=(CHUNK, COLUMNS))

    @staticmethod
    def open(folder):
        import zarr

        return zarr.open_array(f"{folder}/rows.zarr", mode="r")


class Memmap(Rows):
    per = "process"

    @staticmethod
    def write(folder, rows):
        np.save(f"{folder}/rows.npy", rows)

    @staticmethod
    def open(folder):
        return np.load(f"{folder}/rows.npy", mmap_mode="r")

    def read(self, indices):
        return self.handle()[indices]  # indexing by an array copies


# Zarr last: after its use, its threads stay
STORES = [Memmap, Sqlite, Lmdb, Hdf5, Zarr]


class Early(Sqlite):
    """The mistake: the constructor opens the handle."""

    def __init__(self, folder, count):
        connection = self.open(folder)
        self.count, self.handle = count, lambda: connection


def write(folder, data):
    for kind in STORES:
        kind.write(folder, data)


def show_mistakes(folder, count):
    for backend in ("threads", "spawn"):
        try:
            next(
                iter(
                    DataLoader(
                        Early(folder, count), BATCH, num_workers=1, backend=backend
                    )
                )
            )
        except (sqlite3.ProgrammingError, WorkerPicklingError) as error:
            print(f"an early handle of sqlite on {backend}: {type(error).__name__}")


def whole(batch):
    return batch


class OneByOne:
    """A dataset without `__getitems__`."""

    def __init__(self, rows):
        self.rows = rows

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return self.rows[index]


def variants(dataset):
    options = {"batch_size": BATCH, "num_workers": 2, "persistent_workers": True}
    theirs = partial(torch.utils.data.DataLoader, **options)
    yield "torch, rows", theirs(OneByOne(dataset), shuffle=True)
    options["sampler"] = BlockShuffleSampler(
        [len(dataset)], seed=0, block_size=CHUNK, window_blocks=16
    )
    yield (
        "torch",
        theirs(dataset, sampler=options["sampler"], collate_fn=torch.from_numpy),
    )
    for backend in ("fork", "spawn", "threads"):
        yield backend, DataLoader(dataset, backend=backend, collate_fn=whole, **options)


def cpu():
    """Return the seconds of CPU of this process and of its workers."""
    here = psutil.Process()
    used = [each.cpu_times() for each in (here, *here.children(recursive=True))]
    return sum(each.user + each.system for each in used)


def measure(folder, data, rounds):
    """Print microseconds for each row of each store, for each way to read it."""
    elapsed, busy = {}, {}
    for kind in STORES:
        for name, loader in variants(kind(folder, len(data))):
            times = []
            for _ in range(rounds + 1):  # the first epoch starts the workers
                start, used = time.perf_counter(), cpu()
                total = sum(
                    float(batch.sum()) for batch in map(torch.as_tensor, loader)
                )
                times.append((time.perf_counter() - start, cpu() - used))
                assert abs(total - data.sum()) < 1, "every row once"
            for table, values in zip(
                (elapsed, busy), zip(*times[1:], strict=True), strict=True
            ):
                table.setdefault(kind.__name__, {})[name] = (
                    min(values) / len(data) * 1e6
                )
    for title, table in (("us/row", elapsed), ("CPU us", busy)):
        print(title.ljust(8), *(name.rjust(12) for name in table["Memmap"]))
        for name, row in table.items():
            print(name.ljust(8), *(f"{value:12.2f}" for value in row.values()))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=1)
    arguments = parser.parse_args()
    data = (
        np.random.default_rng(0)
        .normal(size=(arguments.rows, COLUMNS))
        .astype(np.float32)
    )
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        # Another process writes: zarr's threads would live on in this one, and forks would be unsafe.
        writer = multiprocessing.get_context("fork").Process(
            target=write, args=(folder, data)
        )
        writer.start()
        writer.join()
        show_mistakes(folder, len(data))
        measure(folder, data, arguments.rounds)


if __name__ == "__main__":
    main()
