"""Recipes of docs/sources.md for what each worker must open: databases, HDF5, Zarr."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hybridloader import DataLoader
from hybridloader.sources import PerWorker

ROWS = np.arange(40.0).reshape(10, 4)

# Fresh workers import the library anew, which takes seconds.
backends = pytest.mark.parametrize(
    "backend", ["threads", "fork", pytest.param("spawn", marks=pytest.mark.full)]
)


def check(dataset: Any, backend: str) -> None:
    """Read here first, so that a fork finds an open handle; then in workers, twice."""
    assert np.array_equal(dataset[3], ROWS[3])
    loader: Any = DataLoader(dataset, 3, num_workers=2, backend=backend, collate_fn=np.stack)
    for _ in range(2):
        assert np.array_equal(np.concatenate([*loader]), ROWS)


class Sqlite:
    def __init__(self, path: str) -> None:
        self.database = PerWorker(partial(sqlite3.connect, f"file:{path}?mode=ro", uri=True))

    def __len__(self) -> int:
        found: int = self.database().execute("select count(*) from rows").fetchone()[0]
        return found

    def __getitem__(self, index: int) -> Any:
        row = self.database().execute("select * from rows where rowid = ?", [index + 1])
        return np.array(row.fetchone())


@backends
def test_sqlite(backend: str, tmp_path: Path) -> None:
    path = tmp_path / "rows.db"
    with sqlite3.connect(path) as database:
        database.execute("create table rows (a, b, c, d)")
        database.executemany("insert into rows values (?, ?, ?, ?)", ROWS.tolist())
    database.close()
    dataset = Sqlite(str(path))
    check(dataset, backend)
    dataset.database.close()


class Hdf5:
    def __init__(self, path: str) -> None:
        import h5py

        self.file = PerWorker(partial(h5py.File, path, "r"))

    def __len__(self) -> int:
        return len(self.file()["rows"])

    def __getitem__(self, index: int) -> Any:
        return self.file()["rows"][index]


@backends
def test_hdf5(backend: str, tmp_path: Path) -> None:
    h5py = pytest.importorskip("h5py")
    with h5py.File(tmp_path / "rows.h5", "w") as file:
        file["rows"] = ROWS
    dataset = Hdf5(str(tmp_path / "rows.h5"))
    check(dataset, backend)
    dataset.file.close()


def open_lmdb(path: str) -> Any:
    import lmdb

    return lmdb.open(path, readonly=True, lock=False, readahead=False)


class Lmdb:
    def __init__(self, path: str) -> None:
        # An environment must not be open twice in a process, nor beside one that a fork has copied.
        self.environment = PerWorker(partial(open_lmdb, path), per="process", on_fork="close")

    def __len__(self) -> int:
        count: int = self.environment().stat()["entries"]
        return count

    def __getitem__(self, index: int) -> Any:
        with self.environment().begin() as transaction:
            return np.frombuffer(transaction.get(b"%d" % index))


@backends
def test_lmdb(backend: str, tmp_path: Path) -> None:
    lmdb = pytest.importorskip("lmdb")
    with lmdb.open(str(tmp_path / "db")) as environment, environment.begin(write=True) as writing:
        for index, row in enumerate(ROWS):
            writing.put(b"%d" % index, row.tobytes())
    dataset = Lmdb(str(tmp_path / "db"))
    check(dataset, backend)
    dataset.environment.close()


class Zarr:
    def __init__(self, path: str) -> None:
        import zarr

        self.array = PerWorker(partial(zarr.open_array, path, mode="r"), per="process")

    def __len__(self) -> int:
        return int(self.array().shape[0])

    def __getitem__(self, index: int) -> Any:
        return np.asarray(self.array()[index])


@pytest.mark.parametrize("backend", ["fork", pytest.param("spawn", marks=pytest.mark.full)])
def test_zarr(backend: str, tmp_path: Path) -> None:
    """In a process of its own, since zarr's threads live as long as the process."""
    zarr = pytest.importorskip("zarr")
    del zarr
    here = Path(__file__).parent
    code = (
        "import test_recipes as t, zarr;"
        f"path = {str(tmp_path / 'rows.zarr')!r};"
        "zarr.create_array(path, data=t.ROWS, chunks=(2, 4));"
        f"t.check(t.Zarr(path), {backend!r})"
    )
    path = os.pathsep.join([str(here), str(here.parent)])
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, "PYTHONPATH": path})
