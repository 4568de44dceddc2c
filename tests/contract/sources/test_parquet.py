"""Parquet: rows found by row group, batches of tensors, and a bounded cache."""

from __future__ import annotations

import io
import os
import pickle
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.http_store import HttpStore

from hybridloader import DataLoader, Skip
from hybridloader.errors import SourceError, StoreError
from hybridloader.sources import Parquet

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")
ds = pytest.importorskip("pyarrow.dataset")


def table(first: int, count: int) -> Any:
    """Rows of all kinds of columns, made of their numbers."""
    x = range(first, first + count)
    pairs = pa.array([[i, i + 1] for i in x], pa.list_(pa.int32(), 2))
    return pa.table(
        {
            "int": pa.array(x, pa.int64()),
            "half": pa.array(np.arange(first, first + count), pa.float32()),
            "flag": [i % 2 == 0 for i in x],
            "pair": pairs,
            "name": [f"n{i}" for i in x],
            "some": [[0] * (i % 3) for i in x],
        }
    )


def row(i: int) -> dict[str, Any]:
    return {
        "int": i,
        "half": float(i),
        "flag": i % 2 == 0,
        "pair": [i, i + 1],
        "name": f"n{i}",
        "some": [0] * (i % 3),
    }


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two files, of 10 and of 7 rows, in row groups of 4."""
    root = tmp_path / "data"
    root.mkdir()
    pq.write_table(table(0, 10), root / "a.parquet", row_group_size=4)
    pq.write_table(table(10, 7), root / "b.parquet", row_group_size=4)
    return root


def test_rows_are_those_of_the_files_in_turn(folder: Path) -> None:
    rows = Parquet(folder)
    assert list(rows) == [row(i) for i in range(17)]
    assert rows.shard_sizes.tolist() == [10, 7]
    assert rows.block_sizes.tolist() == [4, 4, 2, 4, 3]
    assert rows.__getitems__([16, 3, 3, 0, 9]) == [row(i) for i in (16, 3, 3, 0, 9)]
    assert rows.__getitems__([-1, 0]) == [row(16), row(0)]
    assert rows.__getitems__([]) == []
    with pytest.raises(IndexError, match="no sample 17 in a Parquet of 17"):
        rows.__getitems__([3, 17])
    assert rows.columns == ("int", "half", "flag", "pair", "name", "some")
    some = Parquet(folder, columns=["name", "int"])
    assert some[12] == {"name": "n12", "int": 12}
    rows.close()
    some.close()


def test_a_batch_of_tensors_has_the_types_of_the_columns(folder: Path) -> None:
    rows = Parquet(folder, tensors=True)
    for indices in ([2, 0, 3], [16, 3, 3, 0, 9]):
        batch = rows.__getitems__(indices)
        wanted = torch.tensor(indices)
        assert torch.equal(batch["int"], wanted)
        assert torch.equal(batch["half"], wanted.float())
        assert torch.equal(batch["flag"], wanted % 2 == 0)
        assert torch.equal(batch["pair"], torch.stack([wanted, wanted + 1], 1).int())
        assert batch["name"] == [f"n{i}" for i in indices]
        assert batch["some"] == [[0] * (i % 3) for i in indices]
        batch["int"].add_(1)  # nobody else's
    assert torch.equal(rows.__getitems__([2])["int"], torch.tensor([2]))
    numbers = Parquet(folder, columns=["int", "pair"], tensors=True)
    alone = Parquet.collate_fn([numbers[i] for i in (5, 16)])
    together = numbers.__getitems__([5, 16])
    for name in numbers.columns:
        assert torch.equal(alone[name], together[name])
        assert alone[name].dtype == together[name].dtype
    rows.close()
    numbers.close()


def test_large_batches_of_tensors_are_those_of_the_files(tmp_path: Path) -> None:
    x = np.arange(600_000)
    columns = {"x": x, "y": -x, "half": x.astype(np.float32)}  # larger than the smallest slot
    pq.write_table(pa.table(columns), tmp_path / "a.parquet", row_group_size=150_000)
    rows = Parquet(tmp_path, tensors=True)
    options: Any = {"collate_fn": Parquet.collate_fn, "num_workers": 1, "backend": "threads"}
    batches = [*DataLoader(rows, 200_000, **options)]
    for name, column in columns.items():
        found = torch.cat([batch[name] for batch in batches])
        assert found.dtype == torch.from_numpy(column).dtype
        assert torch.equal(found, torch.from_numpy(column))
    rows.close()


def test_a_filter_counts_rows_and_leaves_out_row_groups(folder: Path) -> None:
    rows = Parquet(folder, columns=["int"], filter=ds.field("int") > 5)
    assert [one["int"] for one in rows] == list(range(6, 17))
    assert rows.block_sizes.tolist() == [2, 2, 4, 3]  # the first row group is left out
    assert [one["name"] for one in Parquet(folder, filter=ds.field("flag"))][:2] == ["n0", "n2"]
    assert len(Parquet(folder, filter=ds.field("int") > 99)) == 0
    other = pickle.loads(pickle.dumps(rows))
    assert list(other) == list(rows)
    rows.close()
    other.close()


def test_a_cache_too_small_for_the_window_is_told(folder: Path) -> None:
    rows = Parquet(folder, memory_cache_bytes=0)
    for _ in range(8):
        assert [rows[i]["int"] for i in (0, 5)] == [0, 5]
    with pytest.warns(
        UserWarning,
        match=r"memory_cache_bytes=0 holds only 1 of .* MB each; raise memory_cache_bytes=",
    ):
        assert [rows[i]["int"] for i in (0, 5)] == [0, 5]
    rows.close()


def test_remote_files_are_read_by_ranges_and_named_in_errors(
    store: HttpStore, folder: Path
) -> None:
    data = (folder / "a.parquet").read_bytes()
    urls = [f"{store.url}/{number}.parquet" for number in range(4)]
    for number in range(4):
        store.files[f"/{number}.parquet"] = data
    rows = Parquet(urls, columns=["int"])
    assert rows.shard_names == urls
    loader: Any = DataLoader(rows, 2, num_workers=2, backend="threads", collate_fn=list)
    assert [one["int"] for batch in loader for one in batch] == list(range(10)) * 4
    assert all(asked for _, asked in store.requests)
    rows.close()
    store.files["/1.parquet"] = store.files["/3.parquet"] = b"nonsense"
    with pytest.raises(SourceError, match=r"1\.parquet is not a Parquet file"):
        Parquet(urls)  # the first that has one, though several are opened at a time


# Bad input.


def test_batches_that_are_whole_say_which_collate_fn_they_need(folder: Path) -> None:
    rows = Parquet(folder, columns=["int"], tensors=True)
    with pytest.raises(TypeError, match=r"pass collate_fn=Parquet\.collate_fn"):
        next(iter(DataLoader(rows, 2)))
    (batch,) = DataLoader(rows, 17, collate_fn=Parquet.collate_fn)
    assert type(batch) is dict
    with pytest.raises(KeyError, match="'other'"):
        rows.__getitems__([0])["other"]
    rows.close()


def test_columns_and_libraries_that_are_not_there_are_told(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValueError, match=r"a\.parquet has no column 'nome'; it has int, half"):
        Parquet(folder, columns=["nome"])
    with pytest.raises(ValueError, match="columns has a name twice: int, half, int"):
        Parquet(folder, columns=["int", "half", "int"])
    with pytest.raises(TypeError, match=r"columns must be a sequence of names, such as \['int'\]"):
        Parquet(folder, columns="int")
    with pytest.raises(SourceError, match=r"a\.parquet, filter"):
        Parquet(folder, filter=ds.field("nome") > 1)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ImportError, match="pip install pyarrow"):
        Parquet(folder)


def test_a_file_with_another_schema_is_told(folder: Path) -> None:
    for other, said in [
        ({"int": ["a"], "half": [1.0]}, "column int is string, and int64 there"),
        ({"half": [1.0]}, "column int is missing"),
    ]:
        pq.write_table(pa.table(other), folder / "c.parquet")
        with pytest.raises(SourceError, match=rf"c\.parquet has another schema than .*{said}"):
            Parquet(folder, columns=["int"])
    more = table(0, 3).append_column("more", [[1, 2, 3]])
    pq.write_table(more, folder / "c.parquet")
    with pytest.raises(SourceError, match=r"which has no column more; name the columns"):
        Parquet(folder)
    assert len(Parquet(folder, columns=["int"])) == 20


def test_damaged_files_are_told(folder: Path) -> None:
    path = folder / "a.parquet"
    whole = path.read_bytes()
    for data in (b"", b"no parquet", whole[:-10], whole[: len(whole) // 2]):
        path.write_bytes(data)
        with pytest.raises(
            SourceError, match=r"a\.parquet is not a Parquet file, or it is damaged"
        ):
            Parquet(folder)
    damaged = bytearray(whole)
    damaged[4:200] = bytes(196)
    path.write_bytes(damaged)
    rows = Parquet(folder, columns=["int"])
    with pytest.raises(
        SourceError, match=r"a\.parquet, row group 0 is not a Parquet file, or it is damaged"
    ):
        rows[0]
    loader: Any = DataLoader(rows, 4, collate_fn=list, on_error=Skip(max_failures=4))
    assert [one["int"] for batch in loader for one in batch] == list(range(4, 17))
    assert [bad.index for bad in loader.skipped] == [0, 1, 2, 3]
    rows.close()


def test_a_file_that_changed_since_it_was_indexed_is_told(folder: Path) -> None:
    rows, opened = Parquet(folder), Parquet(folder / "b.parquet")
    first, *others = opened.block_sizes.tolist()
    assert others, "several row groups"
    assert opened[0]  # kept open
    os.utime(folder / "b.parquet", (1, 1))
    assert rows[0] == row(0)
    assert opened[first - 1], "which is decoded"
    for source, index in ((rows, 10), (opened, first)):
        with pytest.raises(SourceError, match=r"b\.parquet has changed since it was indexed"):
            source[index]
    (folder / "b.parquet").unlink()
    with pytest.raises(FileNotFoundError):
        rows[10]
    rows.close()
    opened.close()


def test_columns_come_in_the_order_that_was_asked_for_and_no_others(tmp_path: Path) -> None:
    table = pa.table({"a": [1], "b": [2], "a.b": [3], "c": [{"a": 4, "b": 5}]})
    pq.write_table(table, tmp_path / "x.parquet")
    for columns in (["c", "a"], ["a.b", "b"], ["a"]):
        rows = Parquet(tmp_path / "x.parquet", columns=columns)
        assert [*rows[0].items()] == [*table.select(columns).to_pylist()[0].items()]
        rows.close()


def test_nulls_among_numbers_are_told(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"x": [1, None], "y": [1.0, None]}), path)
    rows = Parquet(path, tensors=True)
    with pytest.raises(SourceError, match=r"row group 0, column x has 1 nulls"):
        rows[0]
    assert Parquet(path)[1] == {"x": None, "y": None}
    assert Parquet(path, columns=["y"], tensors=True)[1]["y"].isnan()
    rows.close()


def test_names_of_folders_are_no_columns(tmp_path: Path) -> None:
    for year in (2023, 2024):
        folder = tmp_path / f"year={year}"
        folder.mkdir()
        pq.write_table(pa.table({"x": [year]}), folder / "a.parquet")
    rows = Parquet(tmp_path)
    assert [*rows] == [{"x": 2023}, {"x": 2024}]
    rows.close()
    assert len(Parquet(f"{tmp_path}/year=2024/*")) == 1
    with pytest.raises(ValueError, match="has no column 'year'"):
        Parquet(tmp_path, columns=["year"])


def test_notes_that_others_leave_in_a_folder_are_no_parquet(folder: Path) -> None:
    (folder / "_SUCCESS").touch()
    (folder / ".a.parquet.crc").write_bytes(b"crc")
    (folder / "_temporary").mkdir()
    (folder / "_temporary" / "half.parquet").write_bytes(b"PAR1")
    assert len(Parquet(folder)) == 17


def test_an_error_of_a_store_is_not_taken_for_damage(
    store: HttpStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed = io.BytesIO()
    pq.write_table(table(0, 10), packed)
    store.files["/a.parquet"] = packed.getvalue()
    rows = Parquet(f"{store.url}/a.parquet", columns=["int"], retry_seconds=0)

    def forbidden(*_: Any) -> bytes:
        raise OSError("Forbidden")  # as gcsfs does: without a number

    monkeypatch.setattr("hybridloader.sources.store.Store.remote_range", forbidden)
    with pytest.raises(StoreError, match=r"a\.parquet.* was not served: .*Forbidden"):
        rows[0]
    rows.close()
