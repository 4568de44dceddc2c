"""The `finally` and `with` of a source run in workers too, however a pass ends."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from support.logging_source import Noting, note
from support.platforms import REPOSITORY, needs_fork
from support.programs import python
from torch.utils.data import IterableDataset

from hybridloader import DataLoader, Pipeline

DEADLINE = 60.0
"""Seconds that a process may take to end."""

ATEXIT_IN_FORKS = sys.version_info >= (3, 13)
"""True if multiprocessing runs functions of `atexit` in what it forks."""


def notes(folder: Path) -> list[list[str]]:
    """Return the notes of each reader, without the numbers of processes."""
    return [
        [line.split()[0] for line in file.read_text().splitlines()]
        for file in sorted(folder.iterdir())
    ]


@pytest.mark.parametrize(
    "backend", ["inline", "threads", "fork", pytest.param("spawn", marks=pytest.mark.full)]
)
def test_a_generator_is_closed_when_its_pass_is_left_and_before_its_worker_ends(
    backend: str, tmp_path: Path
) -> None:
    workers = 1 if backend == "inline" else 2
    pipe = Pipeline.from_iterable(Noting(tmp_path), backend=backend, num_workers=workers)
    with pipe.epochs(2) as epochs:
        for epoch in epochs:
            assert [next(epoch) for _ in range(2 * workers)][-1] == 1
    expected = ["began", "ended", "began", "ended"]
    if backend == "spawn" or (backend == "fork" and ATEXIT_IN_FORKS):
        expected += ["exit", "exit"]
    assert notes(tmp_path) == [expected] * workers


class Rows(IterableDataset[Any]):
    """Three samples, the second of which may raise."""

    def __init__(self, folder: Path, policy: str) -> None:
        self.path, self.policy = folder / "log", policy

    def __iter__(self) -> Iterator[int]:
        try:
            yield 0
            if self.policy == "fails":
                raise ValueError("second")
            yield 1
            yield 2
        finally:
            note(self.path, "ended")


@pytest.mark.parametrize(
    ("backend", "workers", "on_error"),
    [("inline", 0, "raise"), ("inline", 1, "skip"), ("threads", 1, "raise"), ("fork", 1, "skip")],
)
def test_the_generator_of_a_dataset_ends_once_however_its_pass_does(
    backend: str, workers: int, on_error: str, tmp_path: Path
) -> None:
    for number, (policy, taken) in enumerate([("goes on", 1), ("goes on", 9), ("fails", 9)], 1):
        rows = Rows(tmp_path, policy)
        loader = DataLoader(rows, num_workers=workers, backend=backend, on_error=on_error)
        with iter(loader) as iterator, suppress(StopIteration, ValueError, RuntimeError):
            for _ in range(taken):
                next(iterator)
        assert notes(tmp_path) == [["ended"] * number]


def test_a_generator_that_is_stuck_does_not_hold_up_close(tmp_path: Path) -> None:
    pipe = Pipeline.from_iterable(Noting(tmp_path, stuck=True), backend="fork", num_workers=1)
    run = iter(pipe)
    next(run)
    worker = int((tmp_path / "0").read_text().split()[1])
    run.close()
    assert not psutil.pid_exists(worker)
    assert notes(tmp_path) == [["began"]]


def test_an_error_while_a_generator_ends_is_shown_by_python_and_no_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shown: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda found: shown.append(str(found.exc_value)))

    def rows() -> Iterator[int]:
        try:
            yield from range(9)
        finally:
            raise ValueError("while it was closed")

    with iter(Pipeline.from_iterable(rows, backend="threads", num_workers=1)) as run:
        assert next(run) == 0
    assert shown == ["while it was closed"]


@needs_fork  # its worker
def test_a_generator_is_closed_when_the_parent_is_killed(tmp_path: Path) -> None:
    script = """
        import os, signal, sys
        from pathlib import Path
        from support.logging_source import Noting
        from hybridloader import Pipeline

        pipe = Pipeline.from_iterable(Noting(Path(sys.argv[1])), backend="fork", num_workers=1)
        run = iter(pipe)
        next(run)
        print((Path(sys.argv[1]) / "0").read_text().split()[1], flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    """
    done = python("-c", textwrap.dedent(script), tmp_path, cwd=REPOSITORY / "tests")
    assert done.stdout, done.stderr
    with suppress(psutil.NoSuchProcess):
        psutil.Process(int(done.stdout)).wait(DEADLINE)
    assert notes(tmp_path) == [["began", "ended"] + ["exit"] * ATEXIT_IN_FORKS]
