"""Iterators that are closed, dropped or used inside others' workers and forks."""

from __future__ import annotations

import contextlib
import gc
import os
import subprocess
import sys
import textwrap
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from support.failing_datasets import (
    ALL,
    PROCESSES,
    WAITING,
    Samples,
    at_gate,
    every_backend,
    fail_on_third,
    load,
    start,
)
from support.forking import in_a_fork
from support.platforms import needs_fork
from support.references import merge_references
from support.short_waits import shorten_waits

from hybridloader.backends.process import transports
from hybridloader.engine import contract
from hybridloader.errors import IteratorClosed
from hybridloader.testing import DEADLINE, Gate

# -- closing -------------------------------------------------------------------------------------


@every_backend
def test_a_closed_iterator_is_over(backend: str) -> None:
    iterator = start(load(Samples(int), backend))
    assert next(iterator) == [0]
    workers = list(iterator._workers)
    assert all(worker.is_alive() for worker in workers)
    iterator.close()
    assert not any(worker.is_alive() for worker in workers)
    for _ in range(2):
        with pytest.raises(IteratorClosed):
            next(iterator)
        iterator.close()
    with pytest.raises(IteratorClosed), iterator:
        pass


@every_backend
def test_leaving_a_with_block_closes_the_iterator(backend: str) -> None:
    with start(load(Samples(int), backend)) as iterator:
        assert next(iterator) == [0]
        workers = list(iterator._workers)
    assert not any(worker.is_alive() for worker in workers)
    with pytest.raises(IteratorClosed):
        next(iterator)


@every_backend
def test_a_persistent_iterator_that_was_closed_starts_again_with_the_next_epoch(
    backend: str,
) -> None:
    loader = load(Samples(int, 3), backend, persistent_workers=True)
    iterator = start(loader)
    assert next(iterator) == [0]
    iterator.close()
    assert list(loader) == [[0], [1], [2]]
    assert list(loader) == [[0], [1], [2]]


@every_backend
def test_an_exhausted_iterator_stays_exhausted_also_after_a_close(backend: str) -> None:
    iterator = start(load(Samples(int, 1), backend))
    assert list(iterator) == [[0]]
    iterator.close()
    assert list(iterator) == []


@every_backend
def test_a_close_from_another_thread_ends_the_wait(
    backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shorten_waits(monkeypatch)
    gate = Gate(tmp_path)
    iterator = start(load(Samples(at_gate(gate, 0)), backend))
    waiting = threading.Event()
    crew: Any = iterator._stage._crew
    wait = crew.wait

    def tell_and_wait(timeout: float | None) -> Any:
        waiting.set()
        return wait(timeout)

    crew.wait = tell_and_wait
    found: list[Any] = []

    def pull() -> None:
        try:
            found.append(next(iterator))
        except Exception as error:
            found.append(error)

    thread = threading.Thread(target=pull)
    thread.start()
    assert waiting.wait(60)
    gate.await_arrivals()
    iterator.close()
    if backend == "inline":  # its waiting is the user's own code, which nobody can end
        assert thread.is_alive()
        gate.open()
    thread.join(60)
    gate.open()
    assert [type(item) for item in found] == [IteratorClosed]


@every_backend
def test_iterators_of_one_loader_do_not_disturb_each_other(backend: str) -> None:
    loader = load(Samples(int, 4), backend)
    first, second = start(loader), start(loader)
    assert [next(first), next(second), next(first)] == [[0], [0], [1]]
    first.close()
    assert list(second) == [[1], [2], [3]]
    with pytest.raises(IteratorClosed):
        next(first)


@pytest.mark.parametrize("exhausted", [False, True])
@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("backend", WAITING)
def test_dropping_the_iterator_ends_its_workers(
    backend: str, persistent: bool, exhausted: bool
) -> None:
    loader = load(Samples(int, 3), backend, persistent_workers=persistent)
    iterator = start(loader)
    workers = list(iterator._workers)
    assert next(iterator) == [0]
    if exhausted:
        assert len(list(iterator)) == 2
        assert workers[0].is_alive() is persistent
    gc.disable()  # the last reference must do, not the collector
    try:
        del iterator, loader
        assert not any(worker.is_alive() for worker in workers)
    finally:
        gc.enable()


@pytest.mark.parametrize("backend", WAITING)
def test_an_error_does_not_keep_the_iterator_alive(backend: str) -> None:
    gc.disable()
    try:
        iterator = start(load(Samples(fail_on_third), backend))
        workers = list(iterator._workers)
        with contextlib.suppress(ArithmeticError):
            while True:
                next(iterator)
        del iterator
        merge_references()
        assert not any(worker.is_alive() for worker in workers)
    finally:
        gc.enable()


# -- loaders within workers, forks of the user's own ----------------------------------------------


class Nested(Samples):
    def __init__(self, backend: str | None) -> None:
        super().__init__(self.sum_of_inner, 2)
        self.backend = backend

    def sum_of_inner(self, index: int) -> int:
        loader = load(Samples(int, 4), self.backend)
        return sum(number for (number,) in loader)


@pytest.mark.filterwarnings("ignore:.*can't have child processes")
@pytest.mark.parametrize(
    ("backend", "inner"),
    [
        *(("fork", inner) for inner in (*PROCESSES, None)),
        *(pytest.param("spawn", inner, marks=pytest.mark.full) for inner in ("fork", "spawn")),
    ],
)
def test_a_loader_with_processes_inside_a_worker_takes_threads(
    backend: str, inner: str | None
) -> None:
    assert list(load(Nested(inner), backend)) == [[6], [6]]


@pytest.mark.parametrize("inner", ["inline", "threads"])
@every_backend
def test_a_loader_with_threads_may_be_used_inside_a_worker(backend: str, inner: str) -> None:
    assert list(load(Nested(inner), backend)) == [[6], [6]]


@pytest.mark.parametrize(
    ("backend", "inner"),
    [
        ("inline", "fork"),
        pytest.param("threads", "fork", marks=needs_fork),
        pytest.param("threads", "spawn", marks=pytest.mark.full),
    ],
)
def test_a_loader_with_processes_may_be_used_inside_a_worker_of_this_process(
    backend: str, inner: str
) -> None:
    assert list(load(Nested(inner), backend)) == [[6], [6]]


@pytest.mark.filterwarnings("ignore:.*can't have child processes")
def test_a_loader_inside_a_worker_of_torchs_own_does_so_too() -> None:
    theirs = torch.utils.data.DataLoader(Nested("fork"), num_workers=1)
    assert [int(total) for total in theirs] == [6, 6]


@needs_fork
@pytest.mark.parametrize("persistent", [False, True])
@every_backend
def test_a_fork_in_the_middle_that_drops_the_iterator_does_no_harm(
    backend: str, persistent: bool
) -> None:
    loader = load(Samples(int, 20), backend, persistent_workers=persistent)
    iterator = start(loader)
    found = [next(iterator) for _ in range(3)]

    def drop() -> None:
        nonlocal iterator, loader
        iterator.close()
        del iterator, loader
        gc.collect()

    assert in_a_fork(drop) == 0
    found += list(iterator)
    assert found == [[index] for index in range(20)]


@needs_fork
@pytest.mark.parametrize("backend", ["threads", "fork"])
def test_a_fork_in_the_middle_does_not_take_what_is_the_parents(backend: str) -> None:
    loader = load(Samples(int, 20), backend, persistent_workers=True)
    iterator = start(loader)
    found = [next(iterator) for _ in range(3)]

    def use() -> None:
        with pytest.raises(IteratorClosed, match="belongs to the process"):
            next(iterator)
        with iter(loader) as own:  # the workers that stay are the parent's: here are others
            assert list(own) == [[index] for index in range(20)]

    assert in_a_fork(use) == 0
    found += list(iterator)
    assert found == [[index] for index in range(20)]


FORKING_SCRIPT = """
    import os, sys, warnings
    from hybridloader import DataLoader

    warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
    for backend in sys.argv[1:]:
        found = []
        loader = DataLoader(range(20), num_workers=1, collate_fn=list, backend=backend)
        iterator = iter(loader)
        for batch in iterator:
            found += batch
            if len(found) == 3:
                child = os.fork()
                if child == 0:
                    sys.exit(7)
                _, status = os.waitpid(child, 0)
        print(backend, os.waitstatus_to_exitcode(status), found == list(range(20)))
"""


@needs_fork
def test_a_fork_in_the_middle_of_a_script_that_exits_does_no_harm(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(FORKING_SCRIPT))
    done = subprocess.run(
        [sys.executable, script, *ALL], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.stderr == ""
    assert done.stdout.splitlines() == [f"{backend} 7 True" for backend in ALL]
    assert done.returncode == 0


def test_psutil_sees_no_child_of_ours_at_the_end() -> None:
    """The tools of this module work: what a loader starts is seen, and is gone afterwards."""
    before = set(psutil.Process().children())
    iterator = start(load(Samples(int), "fork", workers=2))
    mine = set(psutil.Process().children()) - before
    assert {child.pid for child in mine} == {worker.pid for worker in iterator._workers}
    iterator.close()
    assert set(psutil.Process().children()) == before


def test_at_exit_one_that_can_not_be_closed_keeps_no_other_from_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Runner:
        def __init__(self, error: Exception | None = None) -> None:
            self.error, self.closed = error, 0

        def close(self) -> None:
            self.closed += 1
            if self.error is not None:
                raise self.error

    class Busy(dict[Any, int]):
        """To which another thread adds, the first time that somebody looks."""

        looks = 0

        def __iter__(self) -> Any:
            self.looks += 1
            if self.looks == 1:
                raise RuntimeError("Set changed size during iteration")
            return super().__iter__()

    errors = LookupError("mine"), LookupError("not the first"), None
    runners = Busy({Runner(error): 0 for error in errors})
    owned = Busy({Runner(): os.getpid(), Runner(): -1})
    monkeypatch.setattr(contract, "exiting", False)
    monkeypatch.setattr(contract, "_runners", runners)
    monkeypatch.setattr(contract, "_crews", owned)
    with pytest.raises(LookupError, match="mine"):
        contract._close_all()
    assert [runner.closed for runner in runners] == [1, 1, 1]
    assert [crew.closed for crew in owned] == [1, 0]


class _Pipe:
    """Connection of Windows: once it is closed, its methods raise TypeError."""

    def __init__(self) -> None:
        self.closed = False
        self.now_closed = threading.Event()

    def fileno(self) -> int:
        return 1_000_000

    def recv_bytes(self, most: int) -> bytes:
        raise TypeError("ReadFile() argument 1 must be int, not None")

    def close(self) -> None:
        self.closed = True
        self.now_closed.set()


def test_no_thread_reads_from_a_connection_that_was_closed_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pipe, waiting = _Pipe(), threading.Event()

    def wait(connections: list[Any]) -> list[Any]:
        waiting.set()
        assert pipe.now_closed.wait(DEADLINE)
        return [pipe]

    monkeypatch.setattr(transports.mp_connection, "wait", wait)
    transport = transports.PipeTransport()
    transport.connect(0, pipe)
    transport.watch(0, SimpleNamespace(sentinel=None))
    assert waiting.wait(DEADLINE)
    transport.close()  # pytest fails the test for an error in a thread
