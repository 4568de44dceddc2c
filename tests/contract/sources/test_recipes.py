"""Recipes of docs/sources.md for what each worker must open: databases, HDF5, Zarr."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.programs import output

from hybridloader import DataLoader
from hybridloader.sources import PerWorker

ROWS = np.arange(40.0).reshape(10, 4)


class Opened:
    """Rows of a file that each worker opens."""

    def __init__(self, handle: PerWorker[Any], row: Callable[[Any, int], Any]) -> None:
        self.handle, self.row = handle, row

    def __len__(self) -> int:
        return len(ROWS)

    def __getitem__(self, index: int) -> Any:
        return np.asarray(self.row(self.handle(), index))


def of_sqlite(path: str) -> Opened:
    with closing(sqlite3.connect(path)) as database, database:
        database.execute("create table rows (a, b, c, d)")
        database.executemany("insert into rows values (?, ?, ?, ?)", ROWS.tolist())
    select = "select * from rows where rowid = ?"
    return Opened(
        PerWorker(partial(sqlite3.connect, f"file:{path}?mode=ro", uri=True)),
        lambda database, index: database.execute(select, [index + 1]).fetchone(),
    )


def of_hdf5(path: str) -> Opened:
    h5py = pytest.importorskip("h5py")
    with h5py.File(path, "w") as file:
        file["rows"] = ROWS
    return Opened(PerWorker(partial(h5py.File, path, "r")), lambda file, index: file["rows"][index])


def of_lmdb(path: str) -> Opened:
    lmdb = pytest.importorskip("lmdb")
    with lmdb.open(path) as environment, environment.begin(write=True) as writing:
        for index, row in enumerate(ROWS):
            writing.put(b"%d" % index, row.tobytes())

    def read(environment: Any, index: int) -> Any:
        with environment.begin() as transaction:
            return np.frombuffer(transaction.get(b"%d" % index))

    # An environment must not be open twice in a process, nor beside one that a fork has copied.
    opened = partial(lmdb.open, path, readonly=True, lock=False, readahead=False)
    return Opened(PerWorker(opened, per="process", on_fork="close"), read)


def of_zarr(path: str) -> Opened:
    import zarr

    zarr.create_array(path, data=ROWS, chunks=(2, 4))
    handle = PerWorker(partial(zarr.open_array, path, mode="r"), per="process")
    return Opened(handle, lambda array, index: array[index])


def check(dataset: Any, backend: str) -> None:
    """Read here first, so that a fork finds an open handle; then in workers, twice."""
    assert np.array_equal(dataset[3], ROWS[3])
    loader: Any = DataLoader(dataset, 3, num_workers=2, backend=backend, collate_fn=np.stack)
    for _ in range(2):
        assert np.array_equal(np.concatenate([*loader]), ROWS)


# Fresh workers import the library anew, which takes seconds.
FRESH = pytest.param("spawn", marks=pytest.mark.full)


@pytest.mark.parametrize("backend", ["threads", "fork", FRESH])
@pytest.mark.parametrize("of", [of_sqlite, of_hdf5, of_lmdb])
def test_each_worker_opens_its_own(
    of: Callable[[str], Opened], backend: str, tmp_path: Path
) -> None:
    dataset = of(str(tmp_path / "rows"))
    check(dataset, backend)
    dataset.handle.close()


@pytest.mark.parametrize("backend", ["fork", FRESH])
def test_zarr(backend: str, tmp_path: Path) -> None:
    """In a process of its own, since zarr's threads live as long as the process."""
    pytest.importorskip("zarr")
    here, path = Path(__file__).parent, str(tmp_path / "rows.zarr")
    code = f"import test_recipes as t; t.check(t.of_zarr({path!r}), {backend!r})"
    folders = [here, *(here.parents[number] for number in (1, 2))]
    output("-c", code, PYTHONPATH=os.pathsep.join(map(str, folders)))
