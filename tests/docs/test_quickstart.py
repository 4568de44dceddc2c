"""The page Quickstart: all blocks run in turn, and 16 batches come once each: 6, and 10 resumed."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import hybridloader

PAGE = Path(__file__).parents[2] / "docs" / "quickstart.md"
BLOCKS = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)


@pytest.mark.classes
def test_every_block_of_the_page_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(hybridloader, "tune", functools.partial(hybridloader.tune, seconds=3))
    names: dict[str, Any] = {"__name__": "__main__"}
    steps: list[int] = []

    def counted(step: Callable[[Any], None]) -> Callable[[Any], None]:
        def train(batch: Any) -> None:
            steps.append(len(batch[0]))
            step(batch)

        return train

    try:
        for block in BLOCKS:
            exec(compile(block, PAGE.name, "exec"), names)
            if "def step" in block:
                names["step"] = counted(names["step"])
            if "torch.save" in block:
                assert steps[-6:] == [32] * 6
                steps.clear()
        assert steps == [32] * 10
    finally:
        names.clear()  # a kept iterator keeps its workers
    printed = capsys.readouterr().out
    for text in (
        "times as fast if loading cost nothing",
        "The bottleneck is ",
        "as it was",
        "hybridloader.DataLoader(..., num_workers=",
    ):
        assert text in printed
