"""Seeds by sample: distinct, unrelated, and the same tomorrow."""

from __future__ import annotations

import dataclasses
import enum
import pathlib
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from support.programs import output

from hybridloader.seeding.sample_rng import (
    COLLATE,
    SAMPLE,
    Origin,
    SampleRng,
    key_of,
    own_seeds,
    seeds,
)


class Pair(NamedTuple):
    left: int
    right: str


class Color(enum.Enum):
    RED = 1


class Name(str, enum.Enum):
    RED = "red"


@dataclasses.dataclass(frozen=True)
class Place:
    file: str
    line: int


KEYS: list[Any] = [
    3, -3, 1 << 70, "3", "ä", b"3", 3.0, 3.5, True, None, 2j, (3,), [3], (3, "a"), ("3", "a"),
    ((3,), "a"),    (3, ("a",)), Pair(1, "x"), {"a": 3}, {3}, slice(1, 2), Color.RED, Name.RED,
    Place("f", 3),    pathlib.PurePosixPath("a/b"), np.arange(3), "", (), [],
]  # fmt: skip


def test_keys_of_different_indices_differ() -> None:
    assert len({key_of(key) for key in KEYS}) == len(KEYS)
    for same in (np.int64(7), np.int8(7), np.uint16(7), torch.tensor(7), torch.tensor([7])[0]):
        assert key_of(same) == key_of(7)
    for none in (object(), lambda: 1, {"a": object()}, (1, object()), type):
        with pytest.raises(TypeError, match="Give ints, str"):
            key_of(none)


def test_keys_are_the_same_in_a_process_with_another_salt() -> None:
    code = (
        "from hybridloader.seeding.sample_rng import key_of\n"
        "print(key_of(({'a', 'b', 'cd'}, 'x', 3, frozenset([('q', 1), ('r', 2)]))).hex())"
    )
    assert len({output("-c", code, PYTHONHASHSEED=salt) for salt in ("1", "2", "3")}) == 1


def digests(count: int, **origin: Any) -> list[bytes]:
    rng = SampleRng(Origin(**{"seed": 0, **origin}), 0)
    return [rng.digest(SAMPLE, key_of(index)) for index in range(count)]


def test_the_seeds_of_every_seed_epoch_stage_kind_and_sample_are_distinct() -> None:
    found = []
    for seed in (0, 1, -1):
        for epoch in range(4):
            for stage in ("", "()/0", "()/1"):
                found += digests(200, seed=seed, epoch=epoch, stages=(stage,))
    rng = SampleRng(Origin(0), 0)
    found += [rng.digest(COLLATE, key_of(index)) for index in range(200)]
    for seed in (seeds, own_seeds):
        of = [seed(digest) for digest in found]
        assert len({s.python for s in of}) == len(found)
        assert len({s.torch for s in of}) == len(found)
    assert not {seeds(d).python for d in found} & {own_seeds(d).python for d in found}


def test_they_are_pinned() -> None:
    """Seeds never change: a run that is repeated next year gets the same data."""
    assert digests(1, seed=7, epoch=2)[0].hex() == PINNED


PINNED = "789af5e82ad08d5b54511b0551aff807c2fc3cb4a84f9b9b4c9f18d965a181b6"


@pytest.mark.parametrize("before", [False, True])
def test_a_function_of_a_later_epoch_has_the_seeds_of_that_epoch(before: bool) -> None:
    """Whether it, and the worker, have drawn in an earlier epoch or not."""
    stages = ("", "()/1")
    rng = SampleRng(Origin(7, stages=stages), 0)
    if before:
        rng.digest(SAMPLE, b"key")
        rng.for_function(1).digest(SAMPLE, b"key")
    rng.begin(3)
    for number in (0, 1):
        fresh = SampleRng(Origin(7, 3, stages), 0, number)
        found = rng if number == 0 else rng.for_function(number)
        assert found.digest(SAMPLE, b"key") == fresh.digest(SAMPLE, b"key")
