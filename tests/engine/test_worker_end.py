"""Functions that are registered within a worker are called there when it ends."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from hybridloader import DataLoader
from hybridloader.engine import worker
from hybridloader.engine.worker import at_end_of_worker


class Registering:
    """Registers two functions, of which the second may fail, with the first sample of each worker."""

    def __init__(self, fails: bool = False) -> None:
        self.fails, self.registered, self.called = fails, threading.local(), []
        self.answers: set[bool] = set()

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        if not hasattr(self.registered, "done"):
            self.registered.done = True
            self.answers.add(at_end_of_worker(lambda: self.note("first")))
            self.answers.add(at_end_of_worker(self.second))
        return index

    def note(self, name: str) -> None:
        self.called.append((name, threading.get_ident()))

    def second(self) -> None:
        self.note("second")
        if self.fails:
            raise OSError("the disk is full")


def test_they_are_called_on_the_worker_the_last_one_first() -> None:
    data = Registering()
    loader: Any = DataLoader(data, 2, num_workers=2, backend="threads")
    assert len(list(loader)) == 4
    assert data.answers == {True}
    by_thread: dict[int, list[str]] = {}
    for name, thread in data.called:
        by_thread.setdefault(thread, []).append(name)
    assert [*by_thread.values()] == [["second", "first"]] * 2
    assert threading.get_ident() not in by_thread
    assert not worker._at_end


def test_an_error_is_shown_and_the_others_are_called(capsys: pytest.CaptureFixture[str]) -> None:
    data = Registering(fails=True)
    loader: Any = DataLoader(data, 4, num_workers=1, backend="threads")
    assert len(list(loader)) == 2
    assert [name for name, _ in data.called] == ["second", "first"]
    assert "OSError: the disk is full" in capsys.readouterr().err


def test_outside_of_workers_nothing_is_registered() -> None:
    assert not at_end_of_worker(lambda: None)
    assert not worker._at_end
    data = Registering()
    assert len(list(DataLoader(data, 4))) == 2
    assert data.answers == {False}
