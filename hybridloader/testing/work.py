"""Work for the workers of a test: a function, or a shard; and the functions of the contract suite.

They are sent to workers of every kind, and import torch and numpy where they run.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hybridloader.engine.messages import EndOfShard, Fetch, Fetcher, FunctionFetcher, TaskContext
from hybridloader.engine.worker import get_worker_info
from hybridloader.fetching.collate import WithoutTorch
from hybridloader.testing.tools import Gate


@dataclass(frozen=True)
class Call(Fetch):
    """A `Fetch` that calls a function: the simplest work for a worker."""

    function: Callable[[Any], Any]
    dataset: Any = None
    private: bool = False

    def open(self, shared_seed: int | None, context: TaskContext) -> Fetcher:
        return FunctionFetcher(self.function)


@dataclass(frozen=True)
class Count(Fetch):
    """A `Fetch` whose shard has `length` items in each epoch."""

    length: int
    dataset: Any = None
    private: bool = True

    def open(self, shared_seed: int | None, context: TaskContext) -> Fetcher:
        items = iter(range(self.length))

        def fetch(index: Any) -> int:
            for item in items:
                return item
            raise EndOfShard

        return FunctionFetcher(fetch)


def echo(index: Any) -> Any:
    return index


def filled(index: int) -> Any:
    import numpy as np

    return np.full(1 << 20, index, dtype=np.int16)


def collated(index: int) -> Any:
    """Return a batch from the default collation that works without torch."""
    import numpy as np

    return WithoutTorch("default_collate")([np.full(1 << 19, index, dtype=np.uint8)])


def fail_on_odd(index: int) -> int:
    if index % 2:
        raise ArithmeticError("odd", index)
    return index


def leave(index: Any) -> None:
    raise SystemExit(3)


def unpicklable(index: int) -> Any:
    return "fine" if index else (x for x in "abc")


def broken_init(worker: int) -> None:
    raise LookupError(f"no luck in worker {worker}")


def who(index: Any) -> tuple[int, int, int]:
    from torch.utils.data import get_worker_info as torchs

    ours, theirs = get_worker_info(), torchs()
    assert ours is theirs
    assert ours is not None
    return ours.id, ours.num_workers, ours.seed


def at_gate(gate: Gate) -> Callable[[bytes], int]:
    def wait_then_measure(data: bytes) -> int:
        gate.arrive()
        return len(data)

    return wait_then_measure


def init_into(folder: Path) -> Callable[[int], None]:
    def init(worker: int) -> None:
        import torch

        descriptor, name = tempfile.mkstemp(prefix="init-", dir=folder)
        os.close(descriptor)
        Path(name).write_text(f"{worker} {torch.initial_seed()}")
        torch.manual_seed(0)

    return init
