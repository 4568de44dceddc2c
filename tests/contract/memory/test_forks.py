"""Forks that the user's code makes: what they keep of a batch stays as it is."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

import pytest
import torch
from support.failing_datasets import Samples

from hybridloader import DataLoader

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")

SIZE = 64 * 1024
"""Elements of a sample: as bytes, more than travels outside of slots."""


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
    filled = Samples(lambda index: torch.full((SIZE,), index, dtype=torch.uint8), 64)
    batches = iter(DataLoader(filled, num_workers=1, backend=backend))  # type: ignore[arg-type]
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
