"""Machine of these tests: its cores look free, whatever else runs on it.

A real verdict depends on the clock, and another process can take the cores for a moment: such a test
(the fixture `free_cores` marks it) may fail twice. The exact rules are held by recorded workloads, in
`test_verdict`, which no clock changes.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from support.recordings import recording, stage

from hybridloader.observe import measures
from hybridloader.observe.figures import CoreUse, StageRecord
from hybridloader.observe.stats import stats_of

ATTEMPTS = 3


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Call a test of real workers again if the machine was too busy for its verdict."""
    if "free_cores" not in pyfuncitem.fixturenames:
        return None
    arguments = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}
    for _ in range(ATTEMPTS - 1):
        try:
            pyfuncitem.obj(**arguments)
        except AssertionError:
            gc.collect()
        else:
            return True
    pyfuncitem.obj(**arguments)
    return True


@pytest.fixture(scope="module")
def _fonts_open(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Draw once, as matplotlib keeps the files of fonts open."""
    stats_of(recording(stage())).plot(tmp_path_factory.mktemp("fonts") / "a.png")


@pytest.fixture
def free_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measures.CoreUsage, "use", lambda *_: CoreUse(8.0, 1.0, 1.0))
    record: Callable[..., StageRecord] = measures.StageMeasures.record

    def free(*arguments: Any, **keywords: Any) -> StageRecord:
        return replace(record(*arguments, **keywords), wait_for_core=0.0)

    monkeypatch.setattr(measures.StageMeasures, "record", free)
