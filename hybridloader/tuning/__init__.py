"""Tuning: measured choice of workers for a loader or a pipeline, from its public attributes alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hybridloader._support.lazily import lazily

if TYPE_CHECKING:
    from hybridloader.tuning.tune import Tuning as Tuning

__getattr__, __dir__, __all__ = lazily(__name__, {"tune": "Tuning"})
