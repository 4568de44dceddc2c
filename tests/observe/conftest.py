"""Machine of these tests: its cores look free, whatever else runs on it.

What depends on free cores is judged by recordings, in `test_verdict`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from hybridloader.observe import cores, plot, stage_measures
from hybridloader.observe.recording import CoreUse, StageRecord


@pytest.fixture(scope="module")
def _fonts_open(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Draw once, as matplotlib keeps the files of fonts open."""
    plot.draw(tmp_path_factory.mktemp("fonts") / "a.png", ["a"], {"b": [1.0]}, [1.0], None, "c")


@pytest.fixture
def free_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cores.CoreUsage, "use", lambda *_: CoreUse(8.0, 1.0, 1.0))
    record: Callable[..., StageRecord] = stage_measures.StageMeasures.record

    def free(*arguments: Any, **keywords: Any) -> StageRecord:
        return replace(record(*arguments, **keywords), wait_for_core=0.0)

    monkeypatch.setattr(stage_measures.StageMeasures, "record", free)
