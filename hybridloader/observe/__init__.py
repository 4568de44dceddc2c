"""Statistics and traces of loaders and pipelines: where the time goes, and what to change."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hybridloader._support.lazily import lazily

if TYPE_CHECKING:
    from hybridloader.observe.plot import plot_trace as plot_trace
    from hybridloader.observe.trace_files import merge as merge

__getattr__, __dir__, __all__ = lazily(__name__, {"trace_files": "merge", "plot": "plot_trace"})
