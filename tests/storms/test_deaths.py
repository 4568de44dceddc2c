"""Workers that die, and batches that come late."""

from __future__ import annotations

import ctypes
import os
import re
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support import bare_platform
from support.failing_datasets import Samples, at_gate, load, outcomes, start
from support.platforms import DEADLINE, posix
from torch.utils.data import Dataset

from hybridloader import DataLoader, RestartPolicy, WorkerDied, WorkerTimeout
from hybridloader.errors import IteratorClosed
from hybridloader.testing import Gate

WAITING = ["threads", "fork"]
every_process = pytest.mark.parametrize("backend", ["fork", "spawn"])

# -- dead workers --------------------------------------------------------------------------------


def _die_by(name: str) -> Callable[[], Any]:
    return lambda: os.kill(os.getpid(), getattr(signal, name))


DEATHS: dict[str, tuple[Callable[[], Any], str]] = {
    "kill": (_die_by("SIGKILL"), r"SIGKILL[\s\S]*(OOM kill|lack of memory)"),
    "alarm": (_die_by("SIGVTALRM"), "SIGVTALRM"),
    "bus error": (_die_by("SIGBUS"), r"SIGBUS[\s\S]*shared-memory mount"),
    "segfault": (lambda: ctypes.string_at(0), r"SIGSEGV[\s\S]*in string_at"),
    "exit-0": (lambda: os._exit(0), "code 0"),
    "sys.exit": (lambda: sys.exit(5), "code 5"),
    "sys.exit-none": (sys.exit, "code 0"),
}
"""Ends of a worker, with the words that tell them."""
if hasattr(signal, "SIGRTMAX"):  # one without a name
    DEATHS["real-time"] = (
        lambda: os.kill(os.getpid(), signal.SIGRTMAX - 3),
        rf"signal {signal.SIGRTMAX - 3}\.",
    )


def _dying(death: str) -> Callable[[int], int]:
    def sample(index: int) -> int:
        if index == 3:
            _quietly(DEATHS[death][0])
        return index

    return sample


def _quietly(die: Callable[[], Any]) -> None:
    """Keep what a dying process has to say (faulthandler's, for instance) out of the log."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 2)
    die()


@posix
@pytest.mark.parametrize("death", DEATHS)
def test_a_dead_worker_is_named_with_what_killed_it_and_what_it_had_to_do(death: str) -> None:
    iterator = start(load(Samples(_dying(death)), "fork", workers=2))
    pid = [worker.pid for worker in iterator._workers][1]
    found = []
    with pytest.raises(WorkerDied) as caught:
        found.extend(iterator)
    text = str(caught.value)
    # torch/csrc/DataLoader.cpp says so, and scripts that start jobs anew match on it.
    torchs = rf"DataLoader worker \(pid {pid}\) (is killed by signal: |exited unexpectedly)"
    assert re.match(torchs, text)
    for words in ("worker 1 ", f"pid {pid}", r"\[3\]", "'DataLoader'", DEATHS[death][1]):
        assert re.search(words, text), words
    assert text.splitlines()[-2].startswith("1 ")  # the table of the workers, before the link
    with pytest.raises(WorkerDied, match=f"pid {pid}"):
        next(iterator)
    assert not any(worker.is_alive() for worker in iterator._workers)


@posix
@pytest.mark.parametrize("sent", ["result", "error"])
def test_a_death_while_a_batch_is_sent_is_blamed_on_none_of_its_samples_alone(sent: str) -> None:
    class Deadly(Exception):
        def __reduce__(self) -> Any:
            os._exit(7)

    def sample(index: int) -> Any:
        if sent == "error" and index == 2:
            raise Deadly
        return Deadly()

    policy = RestartPolicy(deaths_per_sample=1)
    loader = load(Samples(sample), "fork", batch_size=4, on_worker_death=policy)
    with (
        start(loader) as iterator,
        pytest.raises(WorkerDied, match="1 worker died at a task that contains this sample"),
    ):
        next(iterator)


@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="the stream alone shows the end")
def test_a_death_is_noticed_while_a_fork_of_the_worker_keeps_its_connection_open() -> None:
    until, end = os.pipe()

    def sample(index: int) -> int:
        if index == 3:
            if os.fork() == 0:
                os.close(end)
                os.read(until, 1)
                os._exit(0)
            os._exit(7)
        return index

    with (
        start(load(Samples(sample), "fork", timeout=DEADLINE)) as iterator,
        pytest.raises(WorkerDied, match=r"code 7"),
    ):
        list(iterator)
    os.close(end)
    os.close(until)


@pytest.mark.parametrize("exception", [SystemExit, KeyboardInterrupt])
def test_a_thread_that_is_ended_is_named(exception: type[BaseException]) -> None:
    def sample(index: int) -> int:
        if index == 3:
            raise exception(5)  # the exiting line
        return index

    iterator = start(load(Samples(sample), "threads", workers=2))
    with pytest.raises(WorkerDied) as caught:
        list(iterator)
    text = str(caught.value)
    for word in ("worker 1 ", "[3]", exception.__name__, "# the exiting line"):
        assert word in text
    with pytest.raises(WorkerDied):
        next(iterator)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_caller_that_plays_the_workers_exits_itself(workers: int) -> None:
    def sample(index: int) -> int:
        if index == 3:
            sys.exit(5)
        return index

    iterator = start(load(Samples(sample), "inline", workers=workers))
    with pytest.raises(SystemExit) as caught:
        list(iterator)
    assert caught.value.code == 5
    with pytest.raises(IteratorClosed):
        next(iterator)


def _die_once(flag: Path, die: Callable[[], Any]) -> Callable[[int], int]:
    def sample(index: int) -> int:
        if index == 1 and not flag.exists():
            flag.touch()
            die()
        return index

    return sample


@posix
@pytest.mark.parametrize("persistent", [True, False])
@pytest.mark.parametrize("backend", WAITING)
def test_after_a_death_the_next_epoch_works_again(
    backend: str, persistent: bool, tmp_path: Path
) -> None:
    die = (lambda: sys.exit(3)) if backend == "threads" else _die_by("SIGKILL")
    dataset = Samples(_die_once(tmp_path / "flag", die), 4)
    loader = load(dataset, backend, persistent_workers=persistent)
    with pytest.raises(WorkerDied):
        list(loader)
    assert [list(loader) for _ in range(2)] == [[[0], [1], [2], [3]]] * 2


@every_process
def test_a_worker_that_dies_at_its_start_is_named(backend: str) -> None:
    with pytest.raises(WorkerDied, match=r"worker 0 .*code 9"):
        list(load(Samples(int), backend, worker_init_fn=lambda worker: os._exit(9)))


class _DiesWithItsSegments(Dataset[torch.Tensor]):
    """The first worker process dies at item 1, and the names of its segments are gone with it, as on
    Windows, where a segment lives as long as a process has it open."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == 1 and not self.mark.exists():
            self.mark.touch()
            for name in {*re.findall(r"/dev/shm/psm_\w+", Path("/proc/self/maps").read_text())}:
                os.unlink(name)
            os._exit(3)
        return torch.full((300_000,), float(index))


@pytest.mark.skipif(sys.platform != "linux", reason="removes files of /dev/shm")
@pytest.mark.parametrize("policy", ["raise", "restart"])
def test_a_result_that_vanished_with_its_worker_counts_as_not_made(
    policy: str, tmp_path: Path
) -> None:
    loader = DataLoader(
        _DiesWithItsSegments(tmp_path / "died"),
        None,
        num_workers=1,
        backend="fork",
        on_worker_death=policy,
    )
    with bare_platform.lacking("without sockets", tmp_path):
        iterator = start(loader)
        iterator._workers[0].join(DEADLINE)  # the first result has arrived, and is not opened yet
        assert not iterator._workers[0].is_alive()
        if policy == "raise":
            with pytest.raises(WorkerDied, match=r"exited with code 3"):
                next(iterator)
        else:
            assert [float(sample[0]) for sample in iterator] == [0.0, 1.0, 2.0, 3.0]


# -- timeout -------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", WAITING)
def test_a_late_batch_is_named_and_can_still_be_waited_for(backend: str, tmp_path: Path) -> None:
    gate = Gate(tmp_path)
    loader = load(Samples(at_gate(gate, 1), 4), backend, timeout=0.3, persistent_workers=True)
    iterator = start(loader)
    found: list[Any] = []
    errors: list[WorkerTimeout] = []
    while len(found) < 4:
        try:
            found.append(next(iterator))
        except WorkerTimeout as error:
            errors.append(error)
            if len(found) == 1:
                gate.await_arrivals()
                gate.open()
    assert found == [[0], [1], [2], [3]]
    late = next(error for error in errors if "[1]" in str(error))
    assert isinstance(late, RuntimeError)
    assert isinstance(late, TimeoutError)
    assert "worker 0 " in str(late)
    assert "DataLoader timed out after 0.3 seconds" in str(late)  # torch's words
    assert outcomes(iterator) == []


def test_a_caller_that_does_the_work_never_times_out() -> None:
    # A timeout that any sample takes longer than.
    assert list(load(Samples(lambda index: index, 2), "inline", timeout=1e-9)) == [[0], [1]]
