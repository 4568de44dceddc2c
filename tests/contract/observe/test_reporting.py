"""Statistics while a loop runs."""

from __future__ import annotations

from typing import Any

import pytest
from support.platforms import REPOSITORY

from hybridloader import DataLoader, Pipeline

THREADS: dict[str, Any] = {"backend": "threads", "num_workers": 2}


def loader(observe: Any) -> Any:
    return iter(DataLoader(range(12), 2, observe=observe, **THREADS))  # type: ignore[arg-type]


def pipeline(observe: Any) -> Any:
    return Pipeline.from_iterable(range(6)).map(abs, **THREADS).run(observe=observe)


@pytest.mark.parametrize("make", [loader, pipeline])
def test_statistics_are_of_the_items_until_now(make: Any) -> None:
    with make(True) as items:
        for number, _ in enumerate(items, 1):
            assert items.stats().items == number
    with pytest.raises(TypeError, match="observe must be True or False"):
        make(print)


class Writer:
    """Stands for torch's SummaryWriter."""

    def __init__(self) -> None:
        self.values: dict[str, float] = {}

    def add_scalar(self, tag: str, value: float, step: int) -> None:
        self.values[tag] = value


def test_the_recipe_for_tensorboard_runs() -> None:
    """It is in docs/why-is-it-slow.md."""
    page = (REPOSITORY / "docs" / "why-is-it-slow.md").read_text()
    blocks = [part.split("```", 1)[0] for part in page.split("```python\n")[1:]]
    (block,) = (block for block in blocks if block.startswith("# TensorBoard"))
    writer = Writer()
    exec(block, {"writer": writer, "dataset": range(12)})
    assert any(tag.startswith("loader/stall") for tag in writer.values)
    assert any(tag.startswith("loader/rate") for tag in writer.values)
