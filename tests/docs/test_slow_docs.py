"""The page on slow training: its example has the bottlenecks that it is made to have."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hybridloader.demo import prepare
from hybridloader.observe import measures
from hybridloader.observe.figures import CoreUse

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "why-is-it-slow.md").read_text()

WANTED = {
    "far away": ("stage", "DataLoader", "waits"),
    "in Python": ("stage", "DataLoader", "holds-gil"),
    "sampler": ("source", "sampler", None),
    "loop": ("loop", None, None),
}


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The example, on a machine whose cores look free."""
    monkeypatch.syspath_prepend(ROOT / "examples")
    monkeypatch.setattr(measures.CoreUsage, "use", lambda *_: CoreUse(8.0, 1.0, 1.0))
    return importlib.import_module("why_slow")


@pytest.mark.full  # 32 s: each cause is a shorter test of tests/observe
def test_the_example_is_slow_for_the_reasons_that_the_page_gives(
    example: Any, tmp_path: Path
) -> None:
    folder = prepare(tmp_path, crops=30)
    for name, slow, cured in example.cases(folder):
        verdict = slow.verdict
        if verdict.cause != "cores":  # its workers waited for one: the machine is busy
            assert (verdict.cause, verdict.stage, verdict.kind) == WANTED[name], str(slow)
        assert slow.items == cured.items


def test_the_page_shows_what_the_example_prints() -> None:
    for name in WANTED:
        assert f"\n{name}: " in PAGE
    assert "examples/why_slow.py" in PAGE
