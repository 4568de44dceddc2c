"""`Parquet` with ``tensors=True``: batches gathered from row groups, which threads decode at once."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridloader import DataLoader
from hybridloader.errors import SourceError
from hybridloader.sources import Parquet
from hybridloader.sources.parquet import RowGroups

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")

WIDE = 60
"""Rows in row groups of 16: 5 columns each of two dtypes, and one of arrays."""


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Parquet]:
    numbers = np.arange(WIDE)
    columns: dict[str, Any] = {f"f{k}": (numbers + k).astype(np.float32) for k in range(5)}
    columns |= {f"i{k}": numbers * k for k in range(5)}
    pairs = pa.FixedSizeListArray.from_arrays(pa.array(np.arange(2 * WIDE)), 2)
    path = tmp_path_factory.mktemp("wide") / "wide.parquet"
    pq.write_table(pa.table({**columns, "pair": pairs}), path, row_group_size=16)
    rows = Parquet(path, tensors=True)
    rows.read(0, 0)  # it keeps the file open
    yield rows
    rows.close()


def check_wide(batch: Any, indices: list[int]) -> None:
    wanted = torch.tensor(indices)
    assert list(batch) == [*(f"f{k}" for k in range(5)), *(f"i{k}" for k in range(5)), "pair"]
    for k in range(5):
        assert torch.equal(batch[f"f{k}"], (wanted + k).float())
        assert torch.equal(batch[f"i{k}"], wanted * k)
    assert torch.equal(batch["pair"], torch.stack([2 * wanted, 2 * wanted + 1], 1))


@settings(deadline=None)
@given(
    st.lists(st.integers(0, WIDE - 1), min_size=1)
    | st.tuples(st.integers(0, WIDE - 1), st.integers(1, WIDE)).map(
        lambda at: list(range(at[0], min(sum(at), WIDE)))
    )
)
def test_columns_of_one_dtype_are_gathered_together_in_any_order(
    wide: Parquet, indices: list[int]
) -> None:
    for dtype in (None, "int32", "int64"):  # on Windows, numpy 1.26 makes int32 of a list
        batch = wide.__getitems__(np.array(indices, dtype) if dtype else indices)
        check_wide(batch, indices)
    # Each tensor has memory of its own: one that is kept keeps no other.
    assert len({tensor.untyped_storage().data_ptr() for tensor in batch.values()}) == len(batch)
    assert all(t.untyped_storage().nbytes() == t.nbytes for t in batch.values())


@pytest.mark.parametrize("backend", ["fork", "shared-memory"])
def test_columns_that_lie_in_slots_arrive_each_by_itself(backend: str, tmp_path: Path) -> None:
    count = 40_000
    columns = {name: np.arange(count) + k for k, name in enumerate("abc")}
    pq.write_table(pa.table(columns), tmp_path / "a.parquet")
    rows = Parquet(tmp_path, tensors=True)
    loader: Any = DataLoader(
        rows, count // 2, num_workers=1, backend=backend, collate_fn=Parquet.collate_fn
    )
    first, second = loader
    for k, name in enumerate("abc"):
        assert torch.equal(torch.cat([first[name], second[name]]), torch.arange(count) + k)
    rows.close()


class Decoding:
    """Decoding of row groups by several threads, which the test lets go on one by one."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun: queue.Queue[int] = queue.Queue()
        self.gates = [threading.Event() for _ in range(4)]
        self.broken: set[int] = set()
        read = RowGroups._read

        def gated(groups: Any, file: Any, group: int, *args: Any) -> Any:
            self.begun.put(group)
            assert self.gates[group].wait(60)
            if group in self.broken:
                raise SourceError(f"row group {group} is broken")
            return read(groups, file, group, *args)

        monkeypatch.setattr(RowGroups, "_read", gated)

    def let(self, *groups: int) -> None:
        for group in groups:
            self.gates[group].set()


@pytest.mark.parametrize("broken", [False, True])
def test_a_thread_that_would_wait_in_order_decodes_what_comes_next(
    wide: Parquet, monkeypatch: pytest.MonkeyPatch, broken: bool
) -> None:
    rows, decoding = Parquet(wide.shard_names[0], tensors=True), Decoding(monkeypatch)
    if broken:
        decoding.broken.add(1)
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(rows.__getitems__, range(8))
        assert decoding.begun.get(timeout=60) == 0
        second = threads.submit(rows.__getitems__, range(8, 16))
        assert decoding.begun.get(timeout=60) == 1
        decoding.let(0, 1)
        for found, start in (first, 0), (second, 8):
            check_wide(found.result(60), list(range(start, start + 8)))
        assert decoding.begun.empty()
        if broken:  # it is for the batch that needs it
            with pytest.raises(SourceError, match="row group 1 is broken"):
                rows.__getitems__([17, 18])
        else:
            check_wide(rows.__getitems__([17, 18]), [17, 18])
            assert decoding.begun.empty()
    rows.close()
