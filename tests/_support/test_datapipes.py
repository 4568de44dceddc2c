"""torch's data pipes: one thread at a time, whatever the others do."""

from __future__ import annotations

import os

import pytest
from torch.utils.data.datapipes.iter import IterableWrapper

from hybridloader import DataLoader
from hybridloader._support import torch_env


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_worker_is_forked_while_another_thread_seeds_a_pipe() -> None:
    """A lock that the fork has copied is held for ever, by a thread that the worker does not have."""
    loader = DataLoader(
        IterableWrapper(range(5)).shuffle(), None, num_workers=1, backend="fork", timeout=60
    )
    with torch_env._walking:
        assert sorted(loader) == [*range(5)]
