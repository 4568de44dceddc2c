"""A cache file is valid for one pipeline: these steps, arguments, attributes and data alone."""

from __future__ import annotations

import functools
import pickle
import re
import subprocess
import sys
import threading
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Subset, TensorDataset

from hybridloader import Pipeline, Replace
from hybridloader.errors import CacheError
from hybridloader.pipeline.operators.fingerprint import drawn, fingerprint
from hybridloader.pipeline.operators.order import ShardByRank
from hybridloader.records import SharedDict, SharedList
from hybridloader.sampling import ShuffleSampler


class Scale:
    """A callable with an attribute."""

    def __init__(self, by: Any) -> None:
        self.by, self.lock = by, threading.Lock()

    def __call__(self, item: int) -> int:
        return item * int(self.by)

    def scaled(self, item: int) -> int:
        return self(item)


class Slotted:
    __slots__ = ("by",)

    def __init__(self, by: Any) -> None:
        self.by = by


class Lazy:
    """A dataset that may not be read while a pipeline is made."""

    def __init__(self, *paths: str) -> None:
        self.paths = paths

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> Any:
        raise AssertionError("read")

    def __getattr__(self, name: str) -> Any:
        raise KeyError(name)


class LazyList(list[Any]):
    __len__ = __getitem__ = __iter__ = None  # type: ignore[assignment]


def power(item: int, by: int = 2) -> int:
    return item**by  # type: ignore[no-any-return]


def times(by: int) -> Any:
    return lambda item: item * by


def changed(array: np.ndarray[Any, Any], place: int) -> np.ndarray[Any, Any]:
    array = array.copy()
    array.reshape(-1)[place] += 1
    return array


LONG = list(range(10_000))
ARRAY = np.arange(4000.0).reshape(50, 80)

OTHERS: dict[str, tuple[Any, Any]] = {
    "first item": ([1, 2, 3], [9, 2, 3]),
    "a middle one": ([1, 2, 3], [1, 9, 3]),
    "first of many": (LONG, [9, *LONG[1:]]),
    "last of many": (LONG, [*LONG[:-1], 9]),
    "length": (LONG, LONG[:-1]),
    "kind": ([1], [1.0]),
    "bool": ([1], [True]),
    "container": ([1], (1,)),
    "within": ([[1, [2]]], [[1, [3]]]),
    "large numbers": (10**5000, 10**5000 + 1),
    "dict": ({"a": 1}, {"a": 2}),
    "key": ({"a": 1}, {"b": 1}),
    "set": ({"a", "b"}, {"a", "c"}),
    "deque": (deque([1]), deque([2])),
    "path": (Path("a"), Path("b")),
    "pattern": (re.compile("a" * 300), re.compile("a" * 300, re.I)),
    "bytes": (b"a" * 10**6, b"a" * (10**6 - 1) + b"b"),
    "partial": (functools.partial(power, by=2), functools.partial(power, by=3)),
    "partial, function": (functools.partial(power), functools.partial(pow)),
    "attribute": (Scale(2), Scale(3)),
    "method": (Scale(2).scaled, Scale(3).scaled),
    "slot": (Slotted(2), Slotted(3)),
    "closure": (times(2), times(3)),
    "paths": (Lazy("a", "b"), Lazy("a", "c")),
    "array": (ARRAY, changed(ARRAY, 0)),
    "end of an array": (ARRAY, changed(ARRAY, -1)),
    "dtype": (ARRAY, ARRAY.astype("f4")),
    "shape": (ARRAY, ARRAY.reshape(80, 50)),
    "objects": (np.array([{}, 1], dtype=object), np.array([{}, 2], dtype=object)),
    "tensor": (torch.from_numpy(ARRAY), torch.from_numpy(changed(ARRAY, -1))),
    "view": (torch.from_numpy(ARRAY).T, torch.from_numpy(changed(ARRAY, 0)).T),
    "subset": (Subset(Lazy(), [0, 1]), Subset(Lazy(), [0, 2])),  # type: ignore[arg-type]
    "tensors": (TensorDataset(torch.arange(3)), TensorDataset(torch.arange(1, 4))),
    "shared": (SharedList(["a", "b"]), SharedList(["a", "c"])),
    "shared dict": (SharedDict({"a": 1}), SharedDict({"a": 2})),
    "sampler": (ShuffleSampler(9, seed=1), ShuffleSampler(9, seed=2)),
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_differs_has_another_fingerprint(name: str) -> None:
    one, other = OTHERS[name]
    assert fingerprint(one) != fingerprint(other)
    assert fingerprint(one) == fingerprint(one)


def test_it_is_the_same_in_every_process_and_bounded_whatever_there_is() -> None:
    endless: list[Any] = []
    endless.append(endless)
    deep: list[Any] = []
    for _ in range(5000):
        deep = [deep]
    for value in (endless, deep, LazyList([1]), [[[0] * 100] * 100] * 100, threading.Lock(), sys):
        assert re.fullmatch("[0-9a-f]{10}", fingerprint(value))
    assert fingerprint(LazyList([1])) != fingerprint(LazyList([2]))
    assert len(drawn(10**9)) == 64
    assert drawn(10**9) == drawn(10**9)
    script = """
        from hybridloader.pipeline.operators.fingerprint import fingerprint
        print(fingerprint([{"b", "a", "c"}, {"k": object()}, len, 0.1, b"x", 1j, None, dict]))
    """
    told = {
        subprocess.run(
            [sys.executable, "-c", "\n".join(map(str.strip, script.splitlines()))],
            env={"PYTHONHASHSEED": str(seed)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in (1, 2)
    }
    assert told == {
        fingerprint([{"b", "a", "c"}, {"k": object()}, len, 0.1, b"x", 1j, None, dict]) + "\n"
    }


# -- in a cache --------------------------------------------------------------------------------------


def squares(data: Any, function: Any = power, **policy: Any) -> Pipeline:
    return Pipeline.from_dataset(data).map(function, **policy)


@pytest.mark.parametrize(
    "other",
    [
        squares([1, 2, 4]),
        squares([1, 2, 3], functools.partial(power, by=3)),
        squares([1, 2, 3], Scale(3)),
        squares([1, 2, 3], on_error=Replace(Scale(1))),  # type: ignore[arg-type]
        squares([1, 2, 3]).concat(squares([4])),
    ],
    ids=["data", "arguments", "attributes", "policy", "steps"],
)
def test_a_cache_of_something_else_is_refused_and_that_of_the_same_is_read(
    other: Pipeline, tmp_path: Path
) -> None:
    file = tmp_path / "cache"
    assert list(squares([1, 2, 3]).cache(file)) == [1, 4, 9]
    with pytest.raises(CacheError, match="was written by another pipeline"):
        iter(other.cache(file))
    # Where the work is done and how fast does not matter.
    again = squares([1, 2, 3], backend="threads", num_workers=2, prefetch=9).cache(file)
    assert list(again) == [1, 4, 9]


def test_a_cache_says_why_it_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "cache"
    list(squares([1, 2, 3]).cache(file))
    with pytest.raises(
        CacheError, match="Digests after # stand for arguments, attributes and a sample"
    ):
        iter(squares([1, 2, 4]).cache(file))
    file.unlink()
    assert list(squares([1, 2, 3]).cache(file, fingerprint="mine")) == [1, 4, 9]
    assert list(squares([1, 2, 4]).cache(file, fingerprint="mine")) == [1, 4, 9]
    with pytest.raises(CacheError, match="another pipeline, 'mine'"):
        iter(squares([1, 2, 3]).cache(file))


def test_a_dataset_is_not_read_to_tell_it_from_others(tmp_path: Path) -> None:
    Pipeline.from_dataset(Lazy("a")).cache(tmp_path / "cache")


def test_a_file_of_one_rank_is_refused_on_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "kept"
    pipe = Pipeline.from_dataset(range(10)).shard().map(str).cache(path)
    ranks = [2, 0]
    monkeypatch.setattr(ShardByRank, "share", property(lambda _: tuple(ranks)))
    assert list(pipe) == list("02468")
    assert list(pipe) == list("02468")
    ranks[1] = 1
    for pipeline in (pipe, pickle.loads(pickle.dumps(pipe))):
        with pytest.raises(CacheError, match=r"another pipeline, .* rank 0 of 2.* rank 1 of 2"):
            list(pipeline)
    ranks[:] = 1, 0
    alone = tmp_path / "alone"
    assert len(list(Pipeline.from_dataset(range(4)).shard().cache(alone))) == 4
    assert len(list(Pipeline.from_dataset(range(4)).shard().cache(alone))) == 4


class Shards:
    """An iterable whose shards the ranks of `torch.distributed` divide."""

    shard_names = ("a", "b", "c", "d")

    def read_shard(self, name: str, start: int) -> Any:
        return iter([name][start:])

    def __iter__(self) -> Any:
        raise AssertionError("read through its shards")


def test_a_file_of_the_named_shards_of_one_rank_is_refused_on_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank = [0]
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: rank[0])
    pipe = Pipeline.from_iterable(Shards()).cache(tmp_path / "kept")
    had = list(pipe)
    assert list(pipe) == had
    assert 0 < len(had) < 4
    rank[0] = 1
    with pytest.raises(CacheError, match=r"another pipeline, .* rank 0 of 2.* rank 1 of 2"):
        list(pipe)
