"""Tables of all loaders of a program, which `hybridloader run --stats` writes at its end."""

from __future__ import annotations

import io
import re
from typing import Any

import pytest
from support.recordings import SHOWN, Tables, recording, stage, stats_of

from hybridloader import DataLoader, Pipeline

THREADS: dict[str, Any] = {"backend": "threads", "num_workers": 2}


def counts(stream: io.StringIO) -> dict[str, int]:
    """Return the number of batches of each table."""
    found = re.findall(r"^hybridloader: (.*):\n(?:.*\n)*?(\d+) items in ", stream.getvalue(), re.M)
    return {name: int(count) for name, count in found}


def test_all_loaders_and_pipelines_have_one_and_a_loader_that_is_used_again_keeps_its_own() -> None:
    stream = io.StringIO()
    first = DataLoader(range(8), 2, **THREADS)  # type: ignore[arg-type]
    with Tables(stream) as running:
        assert Tables.running is running
        for _ in range(2):
            list(first)
        list(DataLoader(range(6), 2))  # type: ignore[arg-type]
        list(Pipeline.from_iterable(range(5)).map(abs, **THREADS))
        with Pipeline.from_iterable(range(9)).epochs(2) as epochs:
            for run in epochs:
                list(run)
        for _ in DataLoader(range(8), 2, **THREADS):  # type: ignore[arg-type]
            break
    assert Tables.running is None
    wanted = {"DataLoader": 4, "DataLoader 2": 3, "Pipeline": 5, "Pipeline 2": 18}
    assert counts(stream) == wanted | {"DataLoader 3": 1}
    assert first.stats().items == 4, "it observes, so stats() can be asked for"
    list(first)
    with pytest.raises(RuntimeError, match="observe=True"):
        first.stats()


def test_only_the_latest_are_shown_and_one_without_statistics_is_left_out() -> None:
    stream, answers = io.StringIO(), [stats_of(recording(stage()))]
    with Tables(stream) as running:
        for epoch in range(2 * SHOWN):
            running.see("train", lambda: answers[0])
            running.see(f"validation {epoch}", lambda: answers[0])
        running.see("gone", lambda: answers[1])
    numbers = range(2 * SHOWN - SHOWN + 2, 2 * SHOWN)
    assert counts(stream).keys() == {"train", *(f"validation {number}" for number in numbers)}


def test_a_terminal_that_is_gone_does_not_hide_an_error() -> None:
    class Gone(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    with pytest.raises(KeyError), Tables(Gone()):
        raise KeyError
    with pytest.raises(BrokenPipeError), Tables(Gone()):
        pass
