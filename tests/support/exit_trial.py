"""Script of every trial of `test_exit_matrix`: programs that use a loader and come to an end.

``python exit_trial.py FOLDER`` runs what ``FOLDER/trials.json`` names; see `exit_supervisor`. Each trial
is a fork that runs at the top of this script, so it ends as every program does: exit handlers,
threads, modules taken apart. It waits for nothing by sleeping: fifos tell who has come where.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import warnings
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from support.exit_supervisor import KILL_AFTER, LOADERS, SIGNALS, Trial, next_trial

ENDLESS = 10**9
PROCESSES = ("fork", "spawn", "fresh", "shared-memory")

trial: Trial
folder: Path
kept: list[Any] = []
"""Objects that live until the interpreter takes modules apart: iterators, batches and their slots."""


class Data:
    """Samples large enough to travel in slots; `mark` is where stuck workers tell that they are."""

    def __init__(self, length: int, stuck: str, mark: str) -> None:
        self.length, self.stuck, self.mark = length, stuck, mark

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        if self.stuck:
            self.be_stuck()
        return np.full(40_000, index % 251, np.int64)

    def be_stuck(self) -> None:
        nobody, never = os.pipe()
        if self.stuck == "deaf":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        tell(self.mark)
        if self.stuck == "stopped":
            os.kill(os.getpid(), signal.SIGSTOP)
        os.read(nobody, 1)
        os.close(never)


def tell(path: str) -> None:
    """One byte into the fifo at `path`, which somebody keeps open."""
    line = os.open(path, os.O_RDWR)
    os.write(line, b"!")
    os.close(line)


def say_cause() -> None:
    # What is in cycles then dies last, when Python has emptied the modules that finalizers may want.
    gc.freeze()
    tell(str(folder / "cause"))


def first(batch: Any) -> int:
    return int(batch[0][0])


def as_it_is(batch: Any) -> Any:
    return batch


def backend_of(name: str) -> Any:
    from hybridloader import Spawn

    if name == "fresh":  # each by itself, and not forked from one
        return Spawn(preload=False)
    return name


def begin(length: int = ENDLESS) -> Any:
    """An iterator as the trial wants it; all that it needs lives as long as it does."""
    backend = backend_of(trial.backend)
    data: Any = Data(length, trial.stuck, str(folder / "mark"))
    if trial.mode in LOADERS:
        from hybridloader import DataLoader
        from support.fake_accelerator import FakeAccelerator

        pinned = trial.mode == "pinned"
        # torch looks for an accelerator of its own.
        warnings.filterwarnings("ignore", "'pin_memory' argument is set as true but no accelerator")

        loader = DataLoader(
            data,
            batch_size=2,
            sampler=range(length),
            num_workers=2,
            backend=backend,
            persistent_workers=trial.mode == "persistent",
            pin_memory=pinned,
            device=FakeAccelerator(manual=False) if pinned else None,
        )
        iterator: Any = iter(loader)
        kept.append(loader)
        return iterator
    from hybridloader import Pipeline

    pipe = Pipeline.from_dataset(data, sampler=range(length), backend=backend, num_workers=2)
    pipe = pipe.batch(2, collate_fn=list).map(as_it_is, backend=backend, num_workers=1)
    if trial.mode == "run":
        return pipe.run()
    epochs = pipe.epochs(2)
    kept.append(epochs)
    return next(epochs)


def take(iterator: Iterator[Any], count: int = 5, start: int = 0) -> None:
    """The next batches, which must be those from number `start` on; some of them are kept."""
    batches = list(islice(iterator, count))
    found = [first(batch) for batch in batches]
    assert found == [2 * k % 251 for k in range(start, start + count)], found
    kept.extend(batches[::2])


def begin_and_take() -> Any:
    iterator = begin()
    kept.append(iterator)
    if trial.stuck:
        with (folder / "mark").open("rb", buffering=0) as line:
            marks = 0
            while marks < 2:
                marks += len(line.read(2))
    else:
        take(iterator)
    return iterator


def check_all_gone() -> None:
    """No process and no thread of ours is left, while the program goes on."""
    import psutil

    left = []
    for child in psutil.Process().children(recursive=True):
        try:
            if child.status() != psutil.STATUS_ZOMBIE and "tracker" not in "".join(child.cmdline()):
                left.append(child)
        except psutil.NoSuchProcess:
            continue
    threads = [t.name for t in threading.enumerate() if t is not threading.main_thread()]
    if trial.backend == "threads" and trial.stuck:
        threads = []  # nobody can end a thread
    assert not psutil.wait_procs(left, KILL_AFTER)[1], left
    assert not threads, threads


def exhaust() -> None:
    iterator = begin(10)
    kept.append(iterator)
    take(iterator)
    assert list(iterator) == []
    if trial.mode in ("loader", "pinned", "run"):
        check_all_gone()
    say_cause()


def break_() -> None:
    for number, _ in enumerate(begin_and_take()):
        if number == 3:
            break
    say_cause()


def raise_() -> None:
    begin_and_take()
    say_cause()
    raise LookupError("the end of the script")


def del_() -> None:
    begin_and_take()
    say_cause()
    kept.clear()
    check_all_gone()


def in_a_class() -> None:
    """An attribute of a class, which is in a cycle, as every class is."""

    class Trainer:
        batches = begin_and_take()

        @classmethod
        def train(cls) -> Any:
            return next(cls.batches)

    Trainer.train()
    kept[:] = [Trainer.train]
    say_cause()


def in_a_generator() -> None:
    """The frame of a generator that is never run to its end."""

    def steps() -> Iterator[int]:
        for batch in begin_and_take():
            yield first(batch)

    running = steps()
    next(running)
    kept[:] = [running]
    say_cause()


def sys_exit() -> None:
    begin_and_take()
    say_cause()
    sys.exit(7)


def os__exit() -> None:
    begin_and_take()
    say_cause()
    os._exit(7)


def await_signal() -> None:
    iterator = begin_and_take()
    say_cause()
    for _ in iterator:
        pass


def never_iterated() -> None:
    kept.append(begin())
    say_cause()


def two_iterators() -> None:
    one, other = begin_and_take(), begin()
    kept.append(other)
    take(other)
    take(one, start=5)
    say_cause()


def from_a_thread() -> None:
    thread = threading.Thread(target=begin_and_take)
    thread.start()
    thread.join()
    take(kept[1 if trial.mode != "run" else 0], start=5)
    say_cause()


def from_a_daemon_thread() -> None:
    """The program ends while a thread pulls; nobody waits for a daemon."""
    taken = threading.Event()

    def pull() -> None:
        iterator = begin_and_take()
        taken.set()
        for _ in iterator:
            pass

    threading.Thread(target=pull, daemon=True).start()
    taken.wait()
    say_cause()


def close_from_threads() -> None:
    """Three close it at the same time while the program pulls, and again when it is closed."""
    from hybridloader.errors import IteratorClosed

    iterator = begin_and_take()
    together = threading.Barrier(3)

    def close() -> None:
        together.wait()
        iterator.close()
        iterator.close()

    threads = [threading.Thread(target=close) for _ in range(3)]
    for thread in threads:
        thread.start()
    say_cause()
    try:
        for _ in iterator:
            pass
    except IteratorClosed:
        pass
    else:
        raise AssertionError("the end of an endless iterator")
    for thread in threads:
        thread.join()
    iterator.close()
    if trial.mode == "epochs":
        kept[0].close()
    check_all_gone()


def forks_in_the_loop() -> None:
    """Forks of the loop's body may end in any way; the loop does not notice."""
    iterator = begin_and_take()
    subprocess.run([sys.executable, "-S", "-c", ""], check=True)
    take(iterator, start=5)
    for number, way in enumerate(("os._exit", "sys.exit", "close and end", "end")):
        child = os.fork()
        if child == 0:
            if way == "os._exit":
                os._exit(3)
            if way == "sys.exit":
                sys.exit(3)
            if way == "close and end":
                iterator.close()
                del iterator
                kept.clear()
            return
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        assert code == (3 if "exit" in way else 0), (way, code)
        take(iterator, start=10 + 5 * number)
    say_cause()


def in_a_subprocess(method: str, *, daemon: bool = False) -> None:
    process: Any = multiprocessing.get_context(method).Process(  # type: ignore[attr-defined]
        target=subprocess_main, args=(trial, folder), daemon=daemon
    )
    process.start()
    process.join()
    sys.exit(process.exitcode)


def forget_trackers() -> None:
    for name in ("multiprocessing.resource_tracker", "loky.backend.resource_tracker"):
        if name in sys.modules:
            sys.modules[name]._resource_tracker._pid = None


def subprocess_main(given: Trial, where: Path) -> None:
    global trial, folder
    trial, folder = given, where
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        begin_and_take()
        take(begin())
    wanted = 1 if trial.cause == "in-a-daemonic-process" and trial.backend in PROCESSES else 0
    assert len(caught) == wanted, [str(warning.message) for warning in caught]
    say_cause()


CAUSES: dict[str, Any] = {
    "exhaust": exhaust,
    "break": break_,
    "raise": raise_,
    "del": del_,
    "in-a-class": in_a_class,
    "in-a-generator": in_a_generator,
    "sys.exit": sys_exit,
    "os._exit": os__exit,
    **dict.fromkeys(SIGNALS, await_signal),
    "never-iterated": never_iterated,
    "two-iterators": two_iterators,
    "from-a-thread": from_a_thread,
    "from-a-daemon-thread": from_a_daemon_thread,
    "close-from-threads": close_from_threads,
    "forks-in-the-loop": forks_in_the_loop,
    "in-a-fork": lambda: in_a_subprocess("fork"),
    "in-a-spawned-process": lambda: in_a_subprocess("spawn"),
    "in-a-daemonic-process": lambda: in_a_subprocess("fork", daemon=True),
}


if __name__ == "__main__":
    # Behind this, a trial is alone at the top of its script.
    now = next_trial(Path(sys.argv[1]))
    if now is not None:
        trial, folder = now
        # From 3.12 on Python warns of each fork beside other threads; ...
        warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
        # ... and from 3.13.4 on such a fork waits, at its end, for the tracker that its parent started.
        os.register_at_fork(after_in_child=forget_trackers)
        CAUSES[trial.cause]()
