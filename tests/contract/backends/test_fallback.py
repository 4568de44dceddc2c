"""Fallbacks where processes are a risk: threads in daemonic processes.

And what a left-out `backend` is: it starts workers as multiprocessing would, from Python 3.14 on
without a fork.
"""

from __future__ import annotations

import multiprocessing
import os
from typing import Any, ClassVar

import pytest
import torch
from support.failing_datasets import Samples
from support.fake_accelerator import FakeAccelerator
from support.platforms import needs_fork

from hybridloader import DataLoader, Fork, Inline, Memory, Pipeline, SharedMemory, Spawn, Threads
from hybridloader.engine import Backend, Crew
from hybridloader.errors import BackendUnavailable

pytestmark = pytest.mark.usefixtures("unwarned")

PROCESSES = [
    pytest.param(Fork(), id="fork"),
    pytest.param(Spawn(), id="spawn"),
    pytest.param(SharedMemory(), id="shared-memory"),
]


class Elsewhere(Backend):
    """Backend of another package, which does not say that it starts children."""

    name: ClassVar[str] = "elsewhere"
    in_process: ClassVar[bool] = False

    def open(self) -> Crew:
        raise LookupError("it was opened")


@pytest.fixture
def _daemonic(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process, as if another loader had made it."""
    monkeypatch.setitem(multiprocessing.current_process()._config, "daemon", True)  # type: ignore[attr-defined]


# -- daemonic processes ----------------------------------------------------------------------------


def pid(index: int) -> int:
    return os.getpid()


def processes_of(backend: Any) -> set[int]:
    dataset: Any = Samples(pid, 2)
    loader = DataLoader(dataset, num_workers=1, collate_fn=list, backend=backend)
    return {pid for batch in loader for pid in batch}


@pytest.mark.usefixtures("_daemonic")
@pytest.mark.parametrize("backend", PROCESSES)
def test_in_a_daemonic_process_threads_take_the_place_of_processes_and_it_is_told_once(
    backend: Any,
) -> None:
    pipe = Pipeline.from_iterable(range(2)).map(pid, backend=backend, num_workers=1)
    with pytest.warns(UserWarning, match=r"daemonic.*threads instead.*backend='threads'") as caught:
        found = [processes_of(backend), processes_of(None), set(pipe)]
    assert found == [{os.getpid()}] * 3
    assert [warning.filename for warning in caught] == [__file__]


def run_again(pipe: Any, found: Any) -> None:
    with pytest.warns(UserWarning, match="daemonic"):
        found.put((os.getpid(), [*pipe]))


@needs_fork
def test_a_pipeline_that_has_run_takes_threads_in_a_daemonic_fork() -> None:
    """Its plan is kept for its next run, but not by a fork."""
    pipe = Pipeline.from_iterable(range(2)).map(pid, backend=Fork(), num_workers=1)
    assert os.getpid() not in set(pipe)
    context = multiprocessing.get_context("fork")
    found = context.SimpleQueue()
    process = context.Process(target=run_again, args=(pipe, found), daemon=True)
    process.start()
    process.join(60)
    assert process.exitcode == 0
    assert found.get() == (process.pid, [process.pid] * 2)
    process.close()
    found.close()


@pytest.mark.usefixtures("_daemonic")
@pytest.mark.filterwarnings("ignore:.*daemonic")
def test_threads_that_take_the_place_of_processes_have_their_limit_of_memory() -> None:
    dataset: Any = Samples(lambda index: torch.zeros(1 << 20), 4)
    options: dict[str, Any] = {"num_workers": 1, "device": FakeAccelerator(manual=False)}
    with pytest.warns(UserWarning, match=r"limit of 12,?345 bytes"):
        list(DataLoader(dataset, 2, backend=Fork(Memory(limit=12345)), **options))


@pytest.mark.usefixtures("_daemonic")
def test_what_serves_there_or_is_not_known_stays() -> None:
    for backend in (Inline(), Threads(copy_dataset=True)):
        assert processes_of(backend) == {os.getpid()}
    with pytest.raises(LookupError, match="opened"):
        processes_of(Elsewhere())


# -- a left-out backend ----------------------------------------------------------------------------

changed = False
"""Set in this process alone: a forked worker inherits it, a fresh one does not."""


def inherited(_: int) -> bool:
    return changed


@pytest.mark.forkserver
@pytest.mark.parametrize(
    "method",
    [
        pytest.param(method, marks=pytest.mark.full if method == "forkserver" else ())
        for method in multiprocessing.get_all_start_methods()
    ],
)
def test_a_left_out_backend_follows_the_start_method_of_multiprocessing(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = multiprocessing.get_start_method(allow_none=True)
    monkeypatch.setitem(globals(), "changed", True)
    loader: Any = DataLoader(Samples(inherited, 2), num_workers=1, collate_fn=list)
    multiprocessing.set_start_method(method, force=True)
    try:
        assert list(loader) == [[method == "fork"]] * 2
    finally:
        multiprocessing.set_start_method(before, force=True)


@pytest.mark.usefixtures("_daemonic")
@needs_fork
@pytest.mark.parametrize("backend", PROCESSES)
def test_a_backend_that_is_opened_by_hand_still_refuses(backend: Any) -> None:
    with pytest.raises(BackendUnavailable, match=r"daemonic.*threads"):
        backend.check()
