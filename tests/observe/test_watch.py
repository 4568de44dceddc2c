"""Watch: a line for each loader of a program while it runs."""

from __future__ import annotations

import contextlib
import io
import threading
from dataclasses import replace
from typing import Any

import pytest
from support.recordings import SHOWN, Watch, recording, stage, stats_of

from hybridloader import DataLoader, Pipeline
from hybridloader.observe import Stats

THREADS: dict[str, Any] = {"backend": "threads", "num_workers": 2}


class Lines(io.StringIO):
    """Stream that notes when it is written to."""

    def __init__(self) -> None:
        super().__init__()
        self.came = threading.Event()

    def flush(self) -> None:
        self.came.set()


class Gone(Lines):
    """Terminal that is gone."""

    writes = 0

    def write(self, text: str) -> int:
        self.writes += 1
        self.came.set()
        raise BrokenPipeError


def counts(stream: io.StringIO) -> dict[str, str]:
    """Return the latest number of batches of each loader."""
    parts = [line.split(": ", 2) for line in stream.getvalue().splitlines()]
    assert all(first == "hybridloader" for first, *_ in parts)
    return {name: text.partition(" batches, ")[0] for _, name, text in parts}


def test_all_loaders_and_pipelines_are_seen() -> None:
    stream = io.StringIO()
    first = DataLoader(range(8), 2, **THREADS)  # type: ignore[arg-type]
    with Watch(stream) as running:
        assert Watch.running() is running
        for _ in range(2):
            list(first)
        list(DataLoader(range(6), 2))  # type: ignore[arg-type]
        list(Pipeline.from_iterable(range(5)).map(abs, **THREADS))
        with Pipeline.from_iterable(range(9)).epochs(2) as epochs:
            for run in epochs:
                list(run)
    assert Watch.running() is None
    assert counts(stream) == {
        "DataLoader": "4",
        "DataLoader 2": "3",
        "Pipeline": "5",
        "Pipeline 2": "18",
    }
    line = stream.getvalue().splitlines()[0]
    assert "DataLoader" in line.partition("(")[2]
    assert "your loop" not in line
    assert "/s, stall " in line
    assert first.stats().items == 4, "it observes, so stats() can be asked for"
    list(first)
    with pytest.raises(RuntimeError, match="observe=True"):
        first.stats()


def test_a_line_for_each_loader_with_new_batches() -> None:
    whole = stats_of(recording(stage()))
    seconds, items = 10.0, 100

    def stats() -> Stats:
        loop = replace(whole.stages[-1], items=items)
        return replace(whole, seconds=seconds, stages=(*whole.stages[:-1], loop))

    with Watch(Lines()) as running:
        running.see("DataLoader", 0, stats)
        (line,) = running.lines()
        assert line.startswith("hybridloader: DataLoader: 100 batches, 10.0/s, stall ")
        assert line.endswith(str(stats().verdict))
        assert running.lines() == []
        seconds, items = 20.0, 150
        (line,) = running.lines()
        assert line.startswith("hybridloader: DataLoader: 150 batches, 5.0/s, stall ")
        running.see("DataLoader", 1, stats)
        (line,) = running.lines()
        assert line.startswith("hybridloader: DataLoader 2: 150 batches, 7.5/s, stall ")


def test_nobody_is_held_and_only_the_latest_are_shown() -> None:
    stream = io.StringIO()
    with Watch(stream) as running:
        for number in range(SHOWN + 3):
            running.see("it", ("it", number), lambda: None)  # a loader has a number, too
        assert not running.lines(), "gone before they were looked at"
        for _ in DataLoader(range(8), 2, **THREADS):  # type: ignore[arg-type]
            break
    assert counts(stream) == {"DataLoader": "1"}


def test_a_loader_that_is_used_again_stays() -> None:
    """Each epoch has a validation loader of its own."""
    with Watch(Lines()) as running:
        for epoch in range(2 * SHOWN):
            running.see("train", 0, lambda: stats_of(recording(stage())))
            running.see("validation", 1 + epoch, lambda: None)
            (line,) = running.lines()
            assert line.startswith("hybridloader: train: ")


def test_statistics_that_can_not_be_had_at_a_moment_are_asked_for_again() -> None:
    answers = [stats_of(recording(stage())), RuntimeError("it changed during iteration")]

    def stats() -> Stats:
        found = answers.pop()
        if isinstance(found, Exception):
            raise found
        return found

    with Watch(Lines()) as running:
        running.see("it", 0, stats)
        assert running.lines() == []
        assert len(running.lines()) == 1
        answers.append(stats_of(recording(stage())))


def test_a_terminal_that_is_gone_at_the_end_does_not_hide_an_error() -> None:
    with pytest.raises(KeyError), Watch(Gone()):
        raise KeyError
    with pytest.raises(BrokenPipeError), Watch(Gone()):
        pass


def test_a_terminal_that_is_gone_ends_the_writing_alone() -> None:
    stream = Gone()
    with contextlib.suppress(BrokenPipeError), Watch(stream, every=0.001):
        assert stream.came.wait(60), "a thread writes meanwhile"
        assert list(DataLoader(range(3))) != []  # type: ignore[arg-type]
    assert stream.writes == 2, "once while it ran, and at the end"
