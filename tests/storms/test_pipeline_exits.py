"""Ends from outside: workers that are killed, forks of the loop, Ctrl-C, the end of the interpreter."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from support.forking import in_a_fork

import hybridloader
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


# -- scripts ---------------------------------------------------------------------------------------

SCRIPT = """
    import itertools, multiprocessing, os, signal, sys, threading, time, warnings
    from hybridloader import Pipeline
    from hybridloader.errors import IteratorClosed

    multiprocessing.set_start_method("fork")  # workers inherit the pipe; no default from 3.14 on
    backend, state, ending = sys.argv[1:]
    reading, writing = os.pipe()

    def work(item):
        if item == 20:
            os.write(writing, b"!")
            while state == "stuck":
                time.sleep(1000)
        return item, os.getpid()

    where = dict(backend=backend, num_workers=2, fuse=False)
    if state == "stuck" and ending != "interrupt":
        where["prefetch"] = 16  # item 20 is sent though the loop asks for five, however slow they are
    pipe = Pipeline.from_dataset(range(10**9)).map(work, **where)  # the loop pulls the stage itself
    if ending != "interrupt":
        pipe = pipe.batch(1, collate_fn=list)
        pipe = pipe.map(lambda batch: (batch[0][0], batch[0][1], os.getpid()), **where).shuffle(1)
    run = iter(pipe)
    pids = {pid for item in itertools.islice(run, 5) for pid in item[1:]}
    print(*pids - {os.getpid()}, flush=True)
    if state == "stuck" and ending != "interrupt":
        os.read(reading, 1)

    if ending == "interrupt":

        def interrupt():
            os.read(reading, 1)
            while not waits():
                time.sleep(0.001)
            os.kill(os.getpid(), signal.SIGINT)

        def waits():
            frame = sys._current_frames()[threading.main_thread().ident]
            while frame is not None and frame.f_code.co_name != "_listen":
                frame = frame.f_back
            return frame is not None

        # Kept: on Python 3.13t the main thread frees what it made, and the interrupt would be raised in
        # the callback of a weak reference to the thread, where Python ignores it.
        interrupting = threading.Thread(target=interrupt)
        interrupting.start()
        try:
            for item in run:
                pass
        except KeyboardInterrupt:
            print("interrupted", flush=True)
        run.close()
        try:
            next(run)
        except IteratorClosed:
            print("closed", flush=True)
    elif ending == "raise":
        raise LookupError("the end of the script")
    elif ending == "fork":
        warnings.simplefilter("ignore", DeprecationWarning)  # from 3.12: the run has threads
        child = os.fork()
        if not child:
            sys.exit(5)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), next(run) is not None)
"""


def run_script(tmp_path: Path, *words: str) -> tuple[int, list[str], str]:
    """Its exit code, what it printed behind its workers' pids, and what it complained of."""
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(SCRIPT))
    root = str(Path(hybridloader.__file__).parents[1])
    done = subprocess.run(
        [sys.executable, script, *words],
        capture_output=True,
        text=True,
        timeout=60,
        env=dict(os.environ, PYTHONPATH=root),
    )
    pids, *printed = done.stdout.splitlines() or [""]
    workers = [psutil.Process(int(pid)) for pid in pids.split() if psutil.pid_exists(int(pid))]
    assert not psutil.wait_procs(workers, 60)[1]
    return done.returncode, printed, done.stderr


# None has threads: these import torch first, which takes seconds on a busy computer.


@needs_fork
@pytest.mark.parametrize(
    ("trial", "code", "printed", "last"),
    [
        (("fork", "stuck", "interrupt"), 0, ["interrupted", "closed"], []),
        (("shared-memory", "going", "fork"), 0, ["5 True"], []),
        (("shared-memory", "stuck", "raise"), 1, [], ["LookupError: the end of the script"]),
    ],
    ids=["interrupt", "fork", "raise"],
)
def test_a_script_may_be_left_or_interrupted_with_a_live_iterator(
    trial: tuple[str, ...], code: int, printed: list[str], last: list[str], tmp_path: Path
) -> None:
    found, lines, errors = run_script(tmp_path, *trial)
    assert (found, lines, errors.splitlines()[-1:]) == (code, printed, last)
    assert errors.count("Traceback") == code
