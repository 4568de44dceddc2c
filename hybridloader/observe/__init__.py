"""Statistics and traces of loaders and pipelines: where the time goes, and which change helps."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hybridloader._support.lazily import lazily

if TYPE_CHECKING:
    from hybridloader.fetching.on_error import Skipped as Skipped
    from hybridloader.observe.figures import StageStats as StageStats
    from hybridloader.observe.headroom_trials import Headroom as Headroom
    from hybridloader.observe.headroom_trials import headroom as headroom
    from hybridloader.observe.stats import Stats as Stats
    from hybridloader.observe.tracing import trace as trace
    from hybridloader.observe.verdict import Verdict as Verdict

__getattr__, __dir__, __all__ = lazily(
    __name__,
    {
        "headroom_trials": "Headroom headroom",
        ".fetching.on_error": "Skipped",
        "figures": "StageStats",
        "stats": "Stats",
        "tracing": "trace",
        "verdict": "Verdict",
    },
)
