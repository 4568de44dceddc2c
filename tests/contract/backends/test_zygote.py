"""Fresh workers that one process forks: what is shared, when it refuses, and how all of it ends."""

from __future__ import annotations

import ctypes
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from support.failing_datasets import Samples, at_gate, load, start
from support.forking import in_a_fork
from support.platforms import DEADLINE, needs_zygote

from hybridloader import RestartPolicy, SharedMemory, Spawn, WorkerDied
from hybridloader.testing import Gate

pytestmark = needs_zygote

KINDS: dict[str, Any] = {
    "spawn": Spawn(),
    "shared-memory-forkserver": SharedMemory(start_method="forkserver"),
}


def zygotes() -> list[psutil.Process]:
    return [one for one in psutil.Process().children() if "-zygote" in " ".join(one.cmdline())]


def zygote() -> psutil.Process:
    (found,) = zygotes()
    return found


def of_process(index: int) -> tuple[int, int, int]:
    return index, os.getpid(), os.getppid()


class Loading:
    """A dataset that does something when it is loaded in another process."""

    def __init__(self, act: Callable[[], Any], function: Callable[[int], Any] = int) -> None:
        self.act, self.function = act, function

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        return self.function(index)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.kept = self.act()


# -- the way it is meant -----------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_all_workers_are_forks_of_one_process_that_loads_the_dataset_once(
    kind: str, tmp_path: Path
) -> None:
    log = tmp_path / "log"

    def note() -> None:
        with log.open("a") as file:
            file.write(f"{os.getpid()}\n")

    with start(load(Loading(note, of_process), KINDS[kind], workers=2)) as iterator:
        pids = [worker.pid for worker in iterator._workers]  # before any worker can be there
        found = [sample for batch in iterator for sample in batch]
    assert [index for index, *_ in found] == list(range(8))
    assert {pid for _, pid, _ in found} == set(pids)
    (parent,) = {parent for *_, parent in found}
    assert log.read_text().split() == [str(parent)]
    assert parent != os.getpid()
    assert [worker.exitcode for worker in iterator._workers] == [0, 0]


class Epochs(Samples):
    """A dataset whose worker is killed at one sample of one epoch, the first time."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __getitem__(self, index: int) -> Any:
        if (self.epoch, index) == (3, 5) and self.function(index):
            os.kill(os.getpid(), signal.SIGKILL)
        return self.epoch, index, os.getppid()


def test_what_the_parent_sets_is_seen_by_a_worker_that_is_started_later(tmp_path: Path) -> None:
    def first_time(index: int) -> bool:
        try:
            (tmp_path / "died").mkdir()
        except FileExistsError:
            return False
        return True

    dataset = Epochs(first_time)
    loader = load(dataset, "spawn", persistent_workers=True, on_worker_death="restart")
    with start(loader) as iterator:
        found = [sample for batch in iterator for sample in batch]
        dataset.set_epoch(3)
        found += [sample for batch in iter(loader) for sample in batch]
    assert (tmp_path / "died").exists()
    assert [sample[:2] for sample in found] == [(e, k) for e in (0, 3) for k in range(8)]


# -- deaths ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("death", "words"),
    [
        (lambda: os._exit(3), r"exited with code 3"),
        (lambda: ctypes.string_at(0), r"SIGSEGV.*(.|\n)*string_at"),
    ],
    ids=["exit", "crash"],
)
def test_a_dataset_that_ends_the_process_that_loads_it_ends_the_stage_with_the_cause(
    death: Callable[[], Any], words: str
) -> None:
    with (
        start(load(Loading(death), "spawn", workers=2)) as iterator,
        pytest.raises(
            WorkerDied, match=rf"was not forked by the process that forks the workers, .*{words}"
        ),
    ):
        next(iterator)
    assert [worker.pid for worker in iterator._workers] == [None, None]


def interrupted(*_: Any) -> None:
    raise KeyboardInterrupt("by the dataset")


@pytest.mark.parametrize(
    ("backend", "dataset", "init", "forked"),
    [
        ("spawn", Loading(interrupted), None, "was not forked by .*, which "),
        ("spawn", Samples(int), interrupted, ""),
        pytest.param(Spawn(preload=False), Loading(interrupted), None, "", marks=pytest.mark.full),
        ("fork", Samples(int), interrupted, ""),
    ],
    ids=["loading zygote", "forked worker", "fresh worker", "fork"],
)
def test_an_exception_that_ends_a_worker_is_named_first_with_its_traceback(
    backend: Any, dataset: Any, init: Any, forked: str
) -> None:
    words = (
        rf"worker 0 \(process.*\) was ended by KeyboardInterrupt: by the dataset "
        rf"\({forked}exited with code 1\)(.|\n)*Traceback(.|\n)*, in interrupted\n"
    )
    with pytest.raises(WorkerDied, match=words):
        list(load(dataset, backend, worker_init_fn=init))


@pytest.mark.parametrize(
    "backend",
    ["spawn", pytest.param(SharedMemory("spawn"), marks=pytest.mark.full)],
    ids=["zygote", "multiprocessing"],
)
def test_of_a_fresh_process_that_can_not_import_our_module_the_end_and_its_stderr_are_named(
    backend: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    missing = "hybridloader.engine.serving"
    code = f"import sys; sys.modules[{missing!r}] = None"  # so Python refuses to import it
    (tmp_path / "sitecustomize.py").write_text(code)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(WorkerDied, match=r"exited with code 1(.|\n)*its stderr shows the error"):
        list(load(Samples(int), backend))


def test_the_death_of_the_zygote_is_that_of_its_workers() -> None:
    gate = Gate()
    with start(load(Samples(at_gate(gate, 2)), "spawn", workers=2)) as iterator:
        assert next(iterator) == [0]
        gate.await_arrivals(1)
        workers = [psutil.Process(worker.pid) for worker in iterator._workers]
        zygote().kill()
        psutil.wait_procs(workers, DEADLINE)
        assert not any(worker.is_running() for worker in workers)
        with pytest.raises(
            WorkerDied, match=r"ended with the process that forks the workers, .* SIGKILL"
        ):
            list(iterator)


def test_a_zygote_that_is_stopped_ends_with_its_loader() -> None:
    with start(load(Samples(int), "spawn")) as iterator:
        assert next(iterator) == [0]
        found = zygote()
        found.suspend()
    assert not found.is_running()


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
def test_a_zygote_that_died_is_replaced_with_its_workers_if_workers_are() -> None:
    policy = RestartPolicy(max_restarts=1)  # whatever the number of workers: they die of one cause
    loader = load(Samples(of_process, 64), "spawn", workers=4, on_worker_death=policy)
    with start(loader) as iterator:
        found = next(iterator)
        first, workers = zygote(), [psutil.Process(worker.pid) for worker in iterator._workers]
        first.kill()
        psutil.wait_procs(workers, DEADLINE)  # they may be quicker with their tasks than to die
        for batch in iterator:
            found += batch
    assert [index for index, *_ in found] == list(range(64))
    assert {parent for *_, parent in found} > {first.pid}


def test_a_loader_that_is_closed_while_the_dataset_loads_does_not_wait_for_it() -> None:
    gate = Gate()
    iterator = start(load(Loading(gate.arrive), "spawn", workers=2))
    gate.await_arrivals(1)
    found = zygote()
    iterator.close()
    assert not found.is_running()


def test_a_stack_is_that_of_the_process_that_loads_while_no_worker_is_there() -> None:
    gate = Gate()

    def load_slowly() -> None:
        gate.arrive()

    with start(load(Loading(load_slowly), "spawn", timeout=0.2)) as iterator:
        gate.await_arrivals(1)
        with pytest.raises(RuntimeError, match=r"has not loaded the work yet(.|\n)*load_slowly"):
            next(iterator)


def test_a_fork_of_the_users_leaves_the_zygote_alone() -> None:
    with start(load(Samples(of_process), "spawn", workers=2)) as iterator:
        found = next(iterator)
        assert in_a_fork(iterator.close) == 0
        found += [sample for batch in iterator for sample in batch]
    assert [index for index, *_ in found] == list(range(8))


# -- refusals ----------------------------------------------------------------------------------------


def a_thread() -> threading.Thread:
    thread = threading.Thread(target=threading.Event().wait, name="of-the-dataset", daemon=True)
    thread.start()
    return thread


def a_native_thread() -> Any:
    """Start a thread that Python does not know."""
    thread, library = ctypes.c_ulong(), ctypes.CDLL(None)
    library.pthread_create(ctypes.byref(thread), None, library.pause, None)
    return thread.value


def a_file() -> Any:
    return open(__file__)  # it is to stay open


def a_mapped_file_with_a_lock() -> Any:
    import fcntl
    import mmap

    file = open(__file__)  # noqa: SIM115  # it is to stay open
    fcntl.lockf(file, fcntl.LOCK_SH)
    return file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


def a_pipe() -> Any:
    return os.pipe()


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "thread": (a_thread, r"has started threads \(of-the-dataset\)"),
    "native thread": (a_native_thread, r"has started threads \(.+\)"),
    "file": (a_file, r"has opened .*test_zygote\.py, and"),
    "locked": (a_mapped_file_with_a_lock, r"has opened .*test_zygote\.py, and"),
    "pipe": (a_pipe, r"has opened pipe:\[\d+\], pipe:\[\d+\], and"),
}


@pytest.mark.usefixtures("unwarned")
@pytest.mark.parametrize(
    ("what", "kind"),
    [
        ("thread", "spawn"),
        ("file", "spawn"),
        *(
            pytest.param(what, "spawn", marks=pytest.mark.full)
            for what in ("native thread", "locked")
        ),
        pytest.param("pipe", "shared-memory-forkserver", marks=pytest.mark.full),
    ],
)
def test_workers_are_started_one_by_one_where_a_fork_could_do_harm(what: str, kind: str) -> None:
    act, words = REFUSED[what]
    loader = load(Loading(act, of_process), KINDS[kind], workers=2, persistent_workers=True)
    with start(loader) as iterator:
        with pytest.warns(UserWarning, match=rf"one by one.* it {words}"):
            found = [sample for batch in iterator for sample in batch]
        assert not zygotes()
        found += [sample for batch in iter(loader) for sample in batch]
    assert [index for index, *_ in found] == [*range(8), *range(8)]
    assert {parent for *_, parent in found} == {os.getpid()}
    assert len({pid for _, pid, _ in found}) == 2


def test_a_file_that_is_mapped_is_no_reason_to_refuse(tmp_path: Path) -> None:
    import numpy as np

    path = tmp_path / "array"
    np.arange(8, dtype=np.int64).tofile(path)

    class Mapped(Loading):
        def __getitem__(self, index: int) -> Any:
            return int(self.kept[index]), os.getppid()

    def mapped() -> Any:
        file = path.open("rb")
        array = np.memmap(file, np.int64, mode="r")
        array.file = file  # type: ignore[attr-defined]  # it stays open, too
        return array

    dataset = Mapped(mapped)
    with start(load(dataset, "spawn", workers=2)) as iterator:
        found = [sample for batch in iterator for sample in batch]
    assert [value for value, _ in found] == list(range(8))
    assert {parent for _, parent in found} != {os.getpid()}
