"""Workers of a pipeline that are killed, and forks of its loop."""

from __future__ import annotations

import itertools
import os
import signal
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from support.forking import in_a_fork

from hybridloader import Pipeline, WorkerDied
from hybridloader.errors import IteratorClosed
from hybridloader.testing import Gate

needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")


def count() -> Iterator[int]:
    return itertools.count()


def endless(backend: str, most: int) -> Pipeline:
    pipe = Pipeline.from_iterable(count).map(abs, backend=backend, num_workers=2)
    pipe = pipe.batch(2, collate_fn=list).map(tuple, backend=backend, num_workers=1)
    return pipe.take(most)


def pids(item: Any) -> Any:
    return (*item, os.getpid()) if isinstance(item, tuple) else (item, os.getpid())


@needs_fork
@pytest.mark.parametrize(("backend", "victim"), [("fork", 1), ("shared-memory", 3)])
def test_a_worker_that_is_killed_is_told_with_its_stage(backend: str, victim: int) -> None:
    pipe = Pipeline.from_iterable(count)
    for name in ("first", "second", "third"):
        pipe = pipe.map(pids, backend=backend, num_workers=1, name=f"the {name}", fuse=False)
    run = iter(pipe)
    found = next(run)
    os.kill(found[victim], signal.SIGKILL)
    name = ("first", "second", "third")[victim - 1]
    with pytest.raises(WorkerDied, match=f"stage 'the {name}', worker 0 .*SIGKILL"):
        for _ in run:
            pass
    assert run.closed
    for _ in range(2):
        with pytest.raises(IteratorClosed, match="ended") as caught:
            next(run)
    assert isinstance(caught.value.__cause__, WorkerDied)


@needs_fork
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
@pytest.mark.parametrize("backend", ["threads", "fork", "asked by another thread"])
def test_a_fork_of_the_loop_neither_disturbs_it_nor_waits_for_its_locks(backend: str) -> None:
    asked, gate = backend not in ("threads", "fork"), Gate()

    def ask() -> None:
        with pytest.raises(IteratorClosed, match="belongs to the process"):
            next(run)
        with pytest.raises(IteratorClosed):
            run.next_nowait()

    def wait_at_2(item: int) -> int:
        if item == 2:
            gate.arrive()
        return item

    if asked:
        run = Pipeline.from_iterable(range(5)).map(wait_at_2).batch(2, collate_fn=tuple).run()
    else:
        run = endless(backend, 50).run()
    assert next(run) == (0, 1)
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(next(run)))
    if asked:
        thread.start()
        gate.await_arrivals()
    assert in_a_fork(ask, seconds=30) == 0
    assert in_a_fork(run.close, seconds=30) == 0
    if asked:
        gate.open()
        thread.join()
    rest = [(2 * k, 2 * k + 1) for k in range(1, 50)]
    assert [*found, *run] == ([(2, 3), (4,)] if asked else rest)
