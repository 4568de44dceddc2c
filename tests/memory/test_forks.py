"""Forks that the user's code makes: what they keep of a batch stays as it is."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.slot_pairs import segments, slots
from torch.utils.data import Dataset

from hybridloader import DataLoader

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")

SIZE = 64 * 1024
"""Elements of a sample: as bytes, more than travels outside of slots."""


class Filled(Dataset[torch.Tensor]):
    """Samples that are full of their number."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((SIZE,), index, dtype=torch.uint8)


def forked_when_told(act: Callable[[], bool]) -> tuple[int, int]:
    """Fork a process that exits with 0 if `act` is true once the descriptor is closed."""
    reading, writing = os.pipe()
    child = os.fork()
    if child:
        os.close(reading)
        return child, writing
    signal.alarm(30)
    code = 1
    try:
        os.close(writing)
        os.read(reading, 1)
        code = 0 if act() else 2
    finally:
        os._exit(code)


@pytest.mark.parametrize("backend", ["fork", "shared-memory"])
def test_a_batch_that_a_fork_keeps_stays_as_it_is(backend: str) -> None:
    """The slots of a worker are filled again as soon as nobody *here* has a batch."""
    batches = iter(DataLoader(Filled(), num_workers=1, backend=backend))
    batch = next(batches)
    places = {batch.data_ptr()}
    # By numpy, since torch's own threads are not there in a fork.
    child, writing = forked_when_told(lambda: not batch.numpy().any())
    del batch
    again = 0
    for number, batch in enumerate(batches, 1):
        assert (batch == number).all()
        again += batch.data_ptr() in places
        places.add(batch.data_ptr())
    os.close(writing)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert again > 10, "else nothing was shown: no slot was used twice"


def test_forks_of_workers_do_not_count() -> None:
    before = slots.forks.latest
    assert len(list(DataLoader(Filled(), num_workers=2, backend="fork"))) == 64
    assert slots.forks.latest == before


def test_a_segment_of_which_nothing_can_be_filled_again_is_given_back() -> None:
    def make(size: int, number: int) -> Any:
        return segments.make_private(size), None, None

    pool = slots.Pool(make, 1 << 20)
    first = pool.take(4096)
    assert first is not None
    (segment,) = pool.segments.values()
    numbers = [first, *(pool.take(4096) for _ in segment.free[:])]
    assert {pool.segment_of(number) for number in numbers} == {segment}  # type: ignore[arg-type]
    size = pool.size
    for number in numbers:
        assert number is not None
        pool.drop(number | slots.KEPT)
    again = pool.take(4096)
    assert again is not None
    assert pool.segment_of(again) is not segment
    assert segment.number not in pool.segments
    assert pool.size <= size


def test_a_slot_that_is_lost_is_not_taken_and_its_neighbors_are() -> None:
    def make(size: int, number: int) -> Any:
        return segments.make_private(size), None, None

    pool = slots.Pool(make, 1 << 24)
    taken = [pool.take(4096) for _ in range(8)]
    lost, *others = [number for number in taken if number is not None]
    pool.drop(lost | slots.KEPT)
    for number in others:
        pool.drop(number)
    later = [pool.take(4096) for _ in range(64)]
    assert lost not in later
    assert {*others} <= {*later}
