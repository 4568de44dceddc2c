"""Accelerators, and loaders to prepare, for the tests of accelerate."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from hybridloader import DataLoader
from support.seeded_training import WORKERS

pytest.importorskip("accelerate")
from accelerate import Accelerator, data_loader
from accelerate.utils import DataLoaderConfiguration

from hybridloader.integrations.accelerate import keep_loaders

BATCH = 4
BATCHES = 5


def accelerator(**options: Any) -> Any:
    return Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(**options))


def flat(loader: Any) -> list[Any]:
    return [item for batch in loader for item in batch.tolist()]


def numbers(batch_size: int | None = BATCH, **options: Any) -> DataLoader:
    data: Any = range(BATCH * BATCHES)
    return DataLoader(data, batch_size, **{"num_workers": WORKERS, "backend": "threads", **options})


@contextmanager
def kept_loaders() -> Iterator[None]:
    """Keep hybridloader's loaders within the block."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DataLoader, "_hybridloader_source", None, raising=False)
        for home, name in (
            *((data_loader, name) for name in ("_PYTORCH_DATALOADER_KWARGS", "DataLoader")),
            (data_loader.DataLoaderAdapter, "__init__"),
            (data_loader.DataLoaderShard, "set_epoch"),
            (data_loader.DataLoaderDispatcher, "set_epoch"),
        ):
            patch.setattr(home, name, getattr(home, name))
        keep_loaders()
        yield
