"""The contract of all sources: shards of known sizes, one behind the other."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.programs import output

import hybridloader.sources as sources
from hybridloader import DataLoader, Pipeline
from hybridloader.sampling import BlockShuffleSampler, ShuffleSampler
from hybridloader.sources import Shards


class Counted(Shards[tuple[int, int]]):
    def __init__(self, sizes: Any) -> None:
        super().__init__([f"shard {i}" for i in range(len(sizes))], sizes)

    def read(self, shard: int, number: int) -> tuple[int, int]:
        return shard, number


@given(st.lists(st.integers(0, 5), max_size=8))
def test_samples_are_those_of_the_shards_in_turn(sizes: list[int]) -> None:
    shards = Counted(sizes)
    wanted = [(shard, number) for shard, size in enumerate(sizes) for number in range(size)]
    assert len(shards) == len(wanted)
    assert list(shards) == wanted
    assert [shards[i] for i in range(-len(wanted), 0)] == wanted
    assert shards.block_sizes.tolist() == sizes
    for index in (len(wanted), -len(wanted) - 1):
        with pytest.raises(IndexError, match=f"no sample {index} in a Counted of {len(wanted)}"):
            shards[index]


def test_a_loader_and_a_pipeline_read_them_by_any_sampler() -> None:
    shards = Counted([3, 0, 4])
    for sampler in (ShuffleSampler(shards, 0), BlockShuffleSampler(shards, 0, window_blocks=1)):
        loader: Any = DataLoader(shards, 2, sampler=sampler, collate_fn=list)
        first = [sample for batch in loader for sample in batch]
        assert sorted(first) == list(shards)
        sampler.set_epoch(0)
        assert list(Pipeline.from_dataset(shards, sampler=sampler)) == first
    assert repr(shards) == "Counted(7 samples in 3 shards)"
    assert list(pickle.loads(pickle.dumps(shards))) == list(shards)


def test_what_a_subclass_lacks_or_has_wrong_is_told() -> None:
    for sizes, message in [
        ([[1], [2]], r"there are 2 shards, and shard_sizes of the shape \(2, 1\)"),
        ([3, -2], "shard 1 has -2 samples; pass 0 or more"),
    ]:
        with pytest.raises(ValueError, match=message):
            Counted(sizes)
    shards = Counted([2])
    assert shards.fetched(0, 1) is None  # nobody has read ahead
    with pytest.raises(NotImplementedError, match=r"Counted has no fetch\(\); define it, or read"):
        shards.fetch(0, 0, 1)


def test_every_public_name_loads_and_nothing_heavy_with_them() -> None:
    for name in sources.__all__:
        assert getattr(sources, name).__name__ == name
    code = (
        "import sys, hybridloader.sources as s; [getattr(s, name) for name in s.__all__];"
        "print(sorted({'torch', 'fsspec', 'aiohttp', 'pyarrow'} & set(sys.modules)))"
    )
    assert output("-c", code) == "[]\n"
