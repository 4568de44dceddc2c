"""Iterators that are closed, dropped or used inside others' workers and forks."""

from __future__ import annotations

import contextlib
import gc
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from support.failing_datasets import Samples, at_gate, fail_on_third, load, start
from support.forking import in_a_fork
from support.platforms import needs_fork
from support.references import merge_references
from support.short_waits import shorten_waits

from hybridloader.errors import IteratorClosed
from hybridloader.testing import Gate

WAITING = ["threads", "fork"]
every_backend = pytest.mark.parametrize("backend", ["inline", *WAITING])

# -- closing -------------------------------------------------------------------------------------


@every_backend
def test_a_closed_iterator_is_over(backend: str) -> None:
    iterator = start(load(Samples(int), backend))
    assert next(iterator) == [0]
    workers = list(iterator._workers)
    assert all(worker.is_alive() for worker in workers)
    with iterator:
        pass
    assert not any(worker.is_alive() for worker in workers)
    for _ in range(2):
        with pytest.raises(IteratorClosed):
            next(iterator)
        iterator.close()
    with pytest.raises(IteratorClosed), iterator:
        pass


@every_backend
def test_a_persistent_iterator_starts_again_after_a_close_and_an_exhausted_one_stays_so(
    backend: str,
) -> None:
    loader = load(Samples(int, 3), backend, persistent_workers=True)
    iterator = start(loader)
    assert next(iterator) == [0]
    iterator.close()
    iterator = start(loader)
    for _ in range(2):
        assert list(iterator) == [[0], [1], [2]]
        assert list(iterator) == []
        iterator = start(loader)
    for exhausted in (iterator, start(load(Samples(int, 3), backend))):
        assert list(exhausted) == [[0], [1], [2]]
        exhausted.close()
        assert list(exhausted) == []


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
        ("fork", None),  # a daemonic process: threads take the place of processes
        ("fork", "spawn"),
        ("threads", "threads"),
        pytest.param("threads", "fork", marks=needs_fork),
        ("fork", "inline"),
    ],
)
def test_a_loader_may_be_used_inside_a_worker(backend: str, inner: str | None) -> None:
    assert list(load(Nested(inner), backend)) == [[6], [6]]


@pytest.mark.filterwarnings("ignore:.*can't have child processes")
def test_a_loader_inside_a_worker_of_torchs_own_does_so_too() -> None:
    theirs = torch.utils.data.DataLoader(Nested("fork"), num_workers=1)
    assert [int(total) for total in theirs] == [6, 6]


@needs_fork
@pytest.mark.parametrize("backend", ["threads", "fork"])
def test_a_fork_in_the_middle_does_not_take_or_end_what_is_the_parents(backend: str) -> None:
    loader = load(Samples(int, 20), backend, persistent_workers=True)
    iterator = start(loader)
    found = [next(iterator) for _ in range(3)]

    def use() -> None:
        with pytest.raises(IteratorClosed, match="belongs to the process"):
            next(iterator)
        with iter(loader) as own:  # the workers that stay are the parent's: here are others
            assert list(own) == [[index] for index in range(20)]
        iterator.close()

    assert in_a_fork(use) == 0
    found += list(iterator)
    assert found == [[index] for index in range(20)]
