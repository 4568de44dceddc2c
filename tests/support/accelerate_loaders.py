"""Accelerators, and loaders to prepare, for the tests of accelerate."""

from __future__ import annotations

from typing import Any

import pytest

from hybridloader import DataLoader
from support.seeded_training import WORKERS

pytest.importorskip("accelerate")
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration

BATCH = 4
BATCHES = 5


def accelerator(**options: Any) -> Any:
    return Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(**options))


def flat(loader: Any) -> list[Any]:
    return [item for batch in loader for item in batch.tolist()]


def numbers(batch_size: int | None = BATCH, **options: Any) -> DataLoader:
    data: Any = range(BATCH * BATCHES)
    return DataLoader(data, batch_size, **{"num_workers": WORKERS, "backend": "threads", **options})
