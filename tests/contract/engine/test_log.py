"""Log of rare events: it is silent unless the program configures `logging`."""

from __future__ import annotations

import logging
import sys
from typing import Any

import pytest
from support.failing_datasets import Samples

from hybridloader import DataLoader


@pytest.fixture
def messages(caplog: pytest.LogCaptureFixture) -> Any:
    caplog.set_level(logging.DEBUG, logger="hybridloader")

    def found() -> list[tuple[int, str]]:
        return [(record.levelno, record.getMessage()) for record in caplog.records]

    return found


def test_starts_and_ends_of_workers(messages: Any) -> None:
    loader: Any = DataLoader(range(4), 2, num_workers=2, backend="threads", collate_fn=list)
    assert list(loader) == [[0, 1], [2, 3]]
    assert (logging.DEBUG, "stage 'DataLoader': started 2 workers, Threads") in messages()


def test_deaths_and_restarts_below_the_level_that_logging_prints_by_default(
    messages: Any, tmp_path: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    def deadly(index: int) -> int:
        if index == 2 and not (tmp_path / "died").exists():
            (tmp_path / "died").touch()
            sys.exit(3)
        return index

    loader: Any = DataLoader(
        Samples(deadly),  # type: ignore[arg-type]
        1,
        sampler=range(6),
        num_workers=1,
        backend="threads",
        collate_fn=list,
        on_worker_death="restart",
    )
    assert [index for [index] in loader] == list(range(6))
    told = [text for level, text in messages() if level == logging.INFO]
    assert len(told) == 2
    assert told[0].startswith("stage 'DataLoader': worker 0 ")
    assert told[1] == "stage 'DataLoader': worker 0 was restarted"
    assert max(level for level, _ in messages()) < logging.WARNING
    assert capfd.readouterr() == ("", "")
