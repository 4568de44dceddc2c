"""Handles that each worker opens for itself: opened once, closed with it, never taken through a fork."""

from __future__ import annotations

import copy
import gc
import os
import pickle
import sqlite3
import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from support.forking import in_a_fork

from hybridloader import DataLoader, Pipeline
from hybridloader.sources import PerWorker

backends = pytest.mark.parametrize("backend", ["inline", "threads", "fork", "spawn"])


class Handle:
    """Notes in a file, by process and thread, when it is opened and closed."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.where = f"{os.getpid()}-{threading.get_ident()}"
        self.note("open")

    def note(self, what: str) -> None:
        with open(self.path, "a") as file:
            file.write(f"{what} {self.where}\n")

    def close(self) -> None:
        assert self.where == f"{os.getpid()}-{threading.get_ident()}"
        self.note("close")


class Asking:
    """A dataset whose samples tell where their handle was opened."""

    def __init__(self, path: Path, **options: Any) -> None:
        self.handle = PerWorker(partial(Handle, str(path)), **options)

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> str:
        return self.handle().where


def notes(path: Path) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {"open": [], "close": []}
    for line in path.read_text().splitlines():
        what, where = line.split()
        found[what].append(where)
    return found


@backends
def test_each_worker_opens_one_and_closes_it_when_it_ends(backend: str, tmp_path: Path) -> None:
    data = Asking(tmp_path / "notes")
    loader: Any = DataLoader(data, 2, num_workers=2, backend=backend, collate_fn=list)
    used = {where for batch in loader for where in batch}
    found = notes(tmp_path / "notes")
    assert len(used) == (1 if backend == "inline" else 2)
    assert {*found["open"]} == used
    # Two workers on one thread share its handle; the first to end closes it.
    assert sorted(found["close"]) == sorted(found["open"])
    if backend == "threads":
        data = Asking(tmp_path / "of a step")
        used = {
            *Pipeline.from_dataset(range(8)).map(data.__getitem__, backend=backend, num_workers=2)
        }
        found = notes(tmp_path / "of a step")
        assert {*found["open"]} == used == {*found["close"]}


def test_threads_of_a_process_may_share_one_until_it_is_closed(tmp_path: Path) -> None:
    path = tmp_path / "notes"
    closed: list[str] = []
    data = Asking(path, per="process", close=lambda handle: closed.append(handle.where))
    loader: Any = DataLoader(data, 2, num_workers=3, backend="threads", collate_fn=list)
    with iter(loader) as batches:
        used = {*next(batches), *next(batches), *next(batches)}
        assert len(used) == 1
    assert not closed
    data.handle.close()
    assert closed == [*used] == notes(path)["open"]


def test_the_threads_of_a_worker_have_one_each(tmp_path: Path) -> None:
    path = tmp_path / "notes"
    data = Asking(path)  # kept: else the handles of threads that are ending would go with it
    loader: Any = DataLoader(
        data, 12, num_workers=1, backend="threads", threads_per_worker=3, collate_fn=list
    )
    with iter(loader) as batches:
        batch = next(batches)
        helpers = [thread for thread in threading.enumerate() if "fanout" in thread.name]
    assert {*notes(path)["open"]} == {*batch}
    del loader, batches
    gc.collect()
    for thread in helpers:
        thread.join()
    assert sorted(notes(path)["close"]) == sorted(notes(path)["open"])


def test_outside_of_workers_it_stays_open_until_it_is_closed_or_gone(tmp_path: Path) -> None:
    path = tmp_path / "notes"
    handle = PerWorker(partial(Handle, str(path)))
    first = handle()
    assert handle() is first
    handle.close()
    handle.close()
    assert handle() is not first
    assert [len(notes(path)[what]) for what in ("open", "close")] == [2, 1]
    del handle
    gc.collect()
    assert len(notes(path)["close"]) == 2


@pytest.mark.parametrize("per", ["thread", "process"])
def test_a_fork_opens_another_and_closes_the_one_it_inherited_only_if_asked(
    per: Any, tmp_path: Path
) -> None:
    path, closed = tmp_path / "notes", tmp_path / "closed"
    handle: Any = PerWorker(partial(Handle, str(path)), per=per)
    mine = handle().where

    def child() -> None:
        nonlocal handle
        assert handle().where != mine
        handle.close()
        handle = None
        gc.collect()

    assert in_a_fork(child) == 0
    _, theirs = notes(path)["open"]
    assert notes(path)["close"] == [theirs]
    assert handle().where == mine
    handle.close()
    handle = PerWorker(
        partial(Handle, str(path)),
        per=per,
        on_fork="close",
        close=lambda handle: closed.write_text(handle.where),
    )
    mine = handle().where
    assert in_a_fork(handle) == 0
    assert closed.read_text() == mine  # the copy of it: the fork has left without closing its own
    assert handle().where == mine
    handle.close()


@pytest.mark.parametrize("per", ["thread", "process"])
def test_copies_have_the_same_handle_and_only_the_function_is_sent(
    per: Any, tmp_path: Path
) -> None:
    handle: Any = PerWorker(partial(Handle, str(tmp_path / "notes")), per=per)
    opened = handle()
    packed = pickle.dumps(handle)
    assert pickle.loads(packed) is copy.deepcopy(handle) is handle
    assert handle() is opened
    del handle
    other = pickle.loads(packed)  # as in another process
    assert other() is not opened
    assert pickle.loads(packed) is other
    assert repr(other).startswith("PerWorker(functools.partial(")
    other.close()


def test_an_error_in_opening_is_raised_each_time_and_one_in_closing_is_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(sqlite3.OperationalError):
        PerWorker(partial(sqlite3.connect, str(tmp_path / "no" / "such.db")))()

    def refuse(_: Any) -> None:
        raise OSError("the disk is full")

    data = Asking(tmp_path / "notes", close=refuse)
    loader: Any = DataLoader(data, 4, num_workers=1, backend="threads", collate_fn=list)
    assert len(list(loader)) == 3
    assert "the disk is full" in capsys.readouterr().err


def test_bad_arguments_are_told() -> None:
    for arguments, options, kind, told in [
        (("a.db",), {}, TypeError, "open must be a function without parameters"),
        ((dict,), {"close": 3}, TypeError, "close must be a function that takes the handle"),
        (
            (dict,),
            {"on_fork": "keep"},
            ValueError,
            "on_fork must be 'leave' or 'close', got 'keep'",
        ),
        ((dict,), {"per": "worker"}, ValueError, "per must be 'thread' or 'process', got 'worker'"),
    ]:
        with pytest.raises(kind, match=told):
            PerWorker(*arguments, **options)  # type: ignore[arg-type]
