"""A cache file is valid for one pipeline: these steps, arguments, attributes and data alone."""

from __future__ import annotations

import functools
import pickle
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.cached_crops import Crop, cached
from support.platforms import POSIX, REPOSITORY
from support.programs import output

from hybridloader import Pipeline, Replace
from hybridloader.errors import CacheError
from hybridloader.records import SharedList


@dataclass
class Scale:
    """A callable with an attribute."""

    by: Any

    def __call__(self, item: int) -> int:
        return item * int(self.by)

    def scaled(self, item: int) -> int:
        return self(item)


class Lazy:
    """A dataset that may not be read while a pipeline is made."""

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> Any:
        raise AssertionError("read")

    def __getattr__(self, name: str) -> Any:
        raise KeyError(name)


class Unprintable:
    def __repr__(self) -> str:
        raise KeyError("no")


def power(item: int, by: int = 2) -> int:
    return item**by  # type: ignore[no-any-return]


LONG = list(range(10_000))

OTHERS: dict[str, tuple[Any, Any]] = {
    "a middle one": ([1, 2, 3], [1, 9, 3]),
    "first of many": (LONG, [9, *LONG[1:]]),
    "length": (LONG, LONG[:-1]),
    "kind": ([1], [1.0]),
    "container": ([1], (1,)),
    "dict": ({"a": 1}, {"a": 2}),
    "set": ({"a", "b"}, {"a", "c"}),
    "length of an argument": (
        functools.partial(power, by=LONG[:100]),
        functools.partial(power, by=LONG[:101]),
    ),
    "partial": (functools.partial(power, by=2), functools.partial(power, by=3)),
    "attribute": (Scale(2), Scale(3)),
    "attribute beside a function": (Crop(frozenset(), 3, power), Crop(frozenset(), 4, power)),
    "method": (Scale(2).scaled, Scale(3).scaled),
    "array": (np.arange(3), np.arange(1, 4)),
    "shared": (SharedList(["a", "b"]), SharedList(["a", "c"])),
}


def holding(value: Any, file: Path) -> Pipeline:
    """Return a cached pipeline that has the value, and gives nothing."""
    if callable(value):
        return Pipeline.from_dataset(range(3), sampler=[]).map(value).cache(file)
    if hasattr(value, "__getitem__"):
        return Pipeline.from_dataset(value, sampler=[]).cache(file)
    return Pipeline.from_dataset(range(3), sampler=[]).map(Scale(value)).cache(file)


def test_a_file_is_of_one_value(tmp_path: Path) -> None:
    for name, (one, other) in OTHERS.items():
        for _ in range(2):
            assert list(holding(one, tmp_path / name)) == []
        with pytest.raises(CacheError, match="another pipeline"):
            iter(holding(other, tmp_path / name))


@pytest.mark.skipif(not POSIX, reason="the process finds no installed package")
def test_a_cache_that_another_process_wrote_is_read(tmp_path: Path) -> None:
    """The order of sets, and addresses in reprs, differ between them."""
    code = "import sys; from support.cached_crops import cached; list(cached(sys.argv[1]))"
    output("-c", code, tmp_path / "cache", cwd=REPOSITORY / "tests", PYTHONHASHSEED="1")
    before = (tmp_path / "cache").read_bytes()
    assert len(list(cached(tmp_path / "cache"))) == 3
    assert (tmp_path / "cache").read_bytes() == before


def test_a_value_without_a_usable_repr_is_described_by_its_class(tmp_path: Path) -> None:
    endless: list[Any] = []
    endless.append(endless)
    for value in (endless, "x" * 10**6, [LONG] * 100):
        file = tmp_path / f"{id(value)}"
        assert list(holding(value, file)) == list(holding(value, file)) == []
        assert file.stat().st_size < 10**6
    for kind in (threading.Lock, Unprintable, Lazy):
        file = tmp_path / kind.__name__
        assert list(holding(kind(), file)) == list(holding(kind(), file)) == []


# -- in a cache --------------------------------------------------------------------------------------


def squares(data: Any, function: Any = power, **policy: Any) -> Pipeline:
    return Pipeline.from_dataset(data).map(function, **policy)


def test_a_cache_of_something_else_is_refused_with_the_reason_and_that_of_the_same_is_read(
    tmp_path: Path,
) -> None:
    file = tmp_path / "cache"
    assert list(squares([1, 2, 3]).cache(file)) == [1, 4, 9]
    for other in (
        squares([1, 2, 4]),
        squares([1, 2, 3], functools.partial(power, by=3)),
        squares([1, 2, 3], Scale(3)),
        squares([1, 2, 3], on_error=Replace(Scale(1))),  # type: ignore[arg-type]
        squares([1, 2, 3]).concat(squares([4])),
        squares([1, 2, 3], name="a name that is cut where it is shown, as it takes so much space"),
    ):
        with pytest.raises(CacheError, match="was written by another pipeline"):
            iter(other.cache(file))
    with pytest.raises(CacheError, match="Digests after # stand for the reprs of arguments"):
        iter(squares([1, 2, 4]).cache(file))
    # Where the work is done and how fast does not matter.
    again = squares([1, 2, 3], backend="threads", num_workers=2, prefetch=9).cache(file)
    assert list(again) == [1, 4, 9]
    file.unlink()
    assert list(squares([1, 2, 3]).cache(file, fingerprint="mine")) == [1, 4, 9]
    assert list(squares([1, 2, 4]).cache(file, fingerprint="mine")) == [1, 4, 9]
    with pytest.raises(CacheError, match="another pipeline, 'mine'"):
        iter(squares([1, 2, 3]).cache(file))


class Shards:
    """An iterable whose shards the ranks of `torch.distributed` divide."""

    shard_names = ("a", "b", "c", "d")

    def read_shard(self, name: str, start: int) -> Any:
        return iter([name][start:])

    def __iter__(self) -> Any:
        raise AssertionError("read through its shards")


@pytest.mark.parametrize(
    "pipe", [Pipeline.from_dataset("abcd").shard().map(str), Pipeline.from_iterable(Shards())]
)
def test_a_file_of_one_rank_is_refused_on_another(
    pipe: Pipeline, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cached, ranks = pipe.cache(tmp_path / "kept"), [2, 0]
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: ranks[0])
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: ranks[1])
    assert len(list(cached)) == len(list(cached)) == 2
    ranks[1] = 1
    for again in (cached, pickle.loads(pickle.dumps(cached))):
        with pytest.raises(CacheError, match=r"another pipeline, .* rank 0 of 2.* rank 1 of 2"):
            list(again)
    ranks[:] = 1, 0
    alone = pipe.cache(tmp_path / "alone")
    assert len(list(alone)) == len(list(alone)) == 4
