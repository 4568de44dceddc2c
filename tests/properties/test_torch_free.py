"""Workers without torch, torch that comes late, and the dataset's one way to all workers."""

from __future__ import annotations

import os
import random
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.utils.data
from hypothesis import given
from hypothesis import strategies as st
from support.comparison import same
from support.installed_torch import takes_numpy_bools
from support.plain_datasets import as_is, as_is_everywhere, samples_of
from support.platforms import needs_fork, posix
from torch.utils.data import default_collate, default_convert

from hybridloader import DataLoader, Spawn
from hybridloader.fetching.collate import (
    WithoutTorch,
    _collate,
    _convert,
    _NeedsTorch,
    without_torch,
)
from hybridloader.memory.packing import pack, unpack

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")

# -- workers without torch -------------------------------------------------------------------------


def test_a_worker_that_needs_no_torch_has_none_nor_numpy(plain: Any) -> None:
    loader = DataLoader(plain.Said("has_torch"), 4, num_workers=2, backend="spawn")
    with iter(loader) as batches:
        found = list(batches)
    assert [torch_there.any() for torch_there, _ in found] == [False, False]
    assert not any(numpy_there.any() for _, numpy_there in found)


FLAGS = pytest.param(
    "flags", 3, marks=pytest.mark.skipif(not takes_numpy_bools, reason="torch's loader fails")
)


@pytest.mark.parametrize(("name", "batch_size"), [("numbers", None), ("arrays", 3), FLAGS])
def test_plain_samples_arrive_as_what_torch_makes_of_them(
    plain: Any, name: str, batch_size: int | None
) -> None:
    dataset = plain.Said(name)
    with iter(DataLoader(dataset, batch_size, num_workers=1, backend="spawn")) as batches:
        found = list(batches)
    expected = list(torch.utils.data.DataLoader(dataset, batch_size))
    for ours, torchs in zip(found, expected, strict=True):
        same(ours, torchs)


def plain_values() -> st.SearchStrategy[Any]:
    kinds = "f8 f4 f2 i8 i4 i2 i1 u1 ? u2 u4 u8 c8 >f4 M8[s] U3 S2 O"
    dtypes = st.sampled_from(kinds.split())
    shapes = st.sampled_from([(), (0,), (1,), (3,), (2, 2)])
    small = st.integers(0, 1)
    arrays = st.builds(lambda d, s, n: np.full(s, n).astype(d), dtypes, shapes, small)
    scalars = st.builds(lambda d, n: np.full((), n).astype(d)[()], dtypes, small)
    return (
        st.integers(-3, 3)
        | st.sampled_from([2**63 - 1, 2**63, -(2**63), -(2**63) - 1, 2**80])
        | st.floats(width=32)
        | st.floats()
        | st.booleans()
        | st.text(max_size=2)
        | st.binary(max_size=2)
        | st.none()
        | st.complex_numbers(max_magnitude=9)
        | arrays
        | scalars
    )


def plain_samples() -> st.SearchStrategy[Any]:
    return st.recursive(
        plain_values(),
        lambda inner: (
            st.lists(inner, max_size=2)
            | st.tuples(inner)
            | st.tuples(inner, inner)
            | st.dictionaries(st.sampled_from("abc"), inner, max_size=2)
            | st.dictionaries(st.sampled_from("ab"), inner, max_size=2).map(OrderedDict)
        ),
        max_leaves=4,
    )


def batches_of_likes() -> st.SearchStrategy[Any]:
    """Mostly batches of one sample several times: of one kind; sometimes with another in it."""
    return st.tuples(plain_samples(), st.integers(1, 3), st.none() | plain_samples()).map(
        lambda parts: [parts[0]] * parts[1] + ([] if parts[2] is None else [parts[2]])
    )


def outcome(function: Callable[[Any], Any], value: Any) -> tuple[Any, Any]:
    try:
        return function(value), None
    except _NeedsTorch:
        raise
    except Exception as error:
        return None, type(error)


def assert_equal_outcomes(ours: tuple[Any, Any], torchs: tuple[Any, Any]) -> None:
    assert ours[1] is torchs[1]
    if ours[1] is None:
        header, buffers = pack(ours[0])
        same_or_nan(unpack(header, [memoryview(bytearray(b)) for b in buffers]), torchs[0])


def same_or_nan(a: Any, b: Any) -> None:
    assert repr(a) == repr(b)
    assert type(a) is type(b)
    if isinstance(a, torch.Tensor):
        assert a.dtype == b.dtype


@pytest.mark.filterwarnings("ignore::UserWarning")  # torch's own, about what it is given
@pytest.mark.parametrize(
    ("ours", "torchs", "draw"),
    [(_collate, default_collate, batches_of_likes()), (_convert, default_convert, plain_samples())],
    ids=["collation", "conversion"],
)
@given(data=st.data())
def test_without_torch_a_worker_leaves_to_torch_what_it_would_not_do_alike(
    data: st.DataObject, ours: Any, torchs: Any, draw: st.SearchStrategy[Any]
) -> None:
    value = data.draw(draw)
    try:
        found = outcome(ours, value)
    except _NeedsTorch:
        return
    assert_equal_outcomes(found, outcome(torchs, value))


def test_only_torchs_own_functions_are_replaced_on_the_way() -> None:
    for function in (default_collate, default_convert):
        sent = without_torch(function)
        assert isinstance(sent, WithoutTorch)
        assert sent([np.ones(2)] * 2).__class__ is function([np.ones(2)] * 2).__class__
    assert without_torch(as_is) is as_is
    assert without_torch(None) is None


def test_a_worker_without_torch_knows_who_it_is(plain: Any) -> None:
    generator = torch.Generator().manual_seed(3)
    found = samples_of(plain.Said("info", 4), 2, generator=generator)
    seeds = [seed for _, _, _, seed, *_ in found]
    assert seeds == [seeds[0], seeds[0] + 1] * 2
    assert found == [
        ("Description", k % 2, 2, seeds[k], "Said", "multiprocessing", False) for k in range(4)
    ]


# -- threads of native code ------------------------------------------------------------------------

THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


def test_fresh_workers_run_native_code_on_one_thread_and_nothing_changes_here(
    plain: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in THREADS:
        monkeypatch.delenv(name, raising=False)
    environment, threads = dict(os.environ), torch.get_num_threads()
    assert samples_of(plain.Said("variables", 1)) == [(["1", "1", "1"], False)]
    assert dict(os.environ) == environment
    assert torch.get_num_threads() == threads


# -- the dataset's way to the workers --------------------------------------------------------------


@pytest.mark.parametrize(("zygote", "loads"), [pytest.param(True, 1, marks=needs_fork), (False, 3)])
def test_the_dataset_is_pickled_once_for_all_workers(
    plain: Any, tmp_path: Path, zygote: bool, loads: int
) -> None:
    log = tmp_path / "log"
    assert sorted(samples_of(plain.Counted(str(log)), 3, backend=Spawn(preload=zygote))) == list(
        range(12)
    )
    assert sorted(log.read_text().split()) == ["loaded"] * loads + ["pickled"]


@posix  # /proc/self/smaps
@pytest.mark.parametrize("kind", ["array", pytest.param("tensor", marks=pytest.mark.full)])
def test_a_large_array_of_the_dataset_is_mapped_and_writing_to_it_is_each_workers_own_affair(
    plain: Any, kind: str
) -> None:
    array: Any = np.zeros(4_000_000, np.int16)
    array[:10] = 1
    dataset = plain.Holding(array if kind == "array" else torch.from_numpy(array))
    found = samples_of(dataset, 2)
    firsts = found[:2]
    assert len({pid for *_, pid in firsts}) == 2
    for _, before, after, _ in firsts:
        assert before["name"].startswith("/memfd:hybridloader")
        assert before["Size"] >= 8_000_000 / 1024
        assert before["Anonymous"] == 0  # pages of its own
        assert 0 < after["Anonymous"] <= 64  # those that it has written to
        assert after["Rss"] >= 7000  # it has read all of it
    assert [total for total, *_ in found] == [10 + k // 2 for k in range(12)]
    assert int(array.sum()) == 10


# -- what comes late -------------------------------------------------------------------------------


def late(dataset: Any, loader_class: Any, **options: Any) -> list[Any]:
    """From the same seeds, with two workers."""
    random.seed(1)
    np.random.seed(1)
    generator = torch.Generator().manual_seed(11)
    return list(
        loader_class(
            dataset,
            None,
            num_workers=2,
            generator=generator,
            collate_fn=as_is_everywhere,
            **options,
        )
    )


def test_torch_that_comes_late_is_seeded_limited_and_told_as_if_it_had_been_there(
    plain: Any,
) -> None:
    dataset = plain.Said("late_torch", 4)
    found = late(dataset, DataLoader, backend="spawn")
    expected = late(dataset, torch.utils.data.DataLoader, multiprocessing_context="fork")
    assert [one.pop("before") for one in found] == [False, False, True, True]
    for one in expected:
        assert one.pop("before")
    assert found == expected
    assert [one["threads"] for one in found] == [1] * 4
    assert found[1]["seed"] == found[0]["seed"] + 1 == found[1]["info"][3]
