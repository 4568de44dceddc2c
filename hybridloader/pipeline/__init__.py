"""Runs of a `hybridloader.Pipeline`, placements of its steps, and the base class of steps."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hybridloader._support.lazily import lazily

if TYPE_CHECKING:
    from hybridloader.pipeline.batches import Pad as Pad
    from hybridloader.running.operator import Operator as Operator
    from hybridloader.running.operator import Placement as Placement
    from hybridloader.running.run import Epochs as Epochs
    from hybridloader.running.run import Run as Run

__getattr__, __dir__, __all__ = lazily(
    __name__,
    {
        ".running.operator": "Operator Placement",
        "batches": "Pad",
        ".running.run": "Epochs Run",
    },
)
