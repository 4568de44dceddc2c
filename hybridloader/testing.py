"""Contract suite for authors of backends, and a tool for tests that replaces waiting.

`BackendContract` is the executable form of `hybridloader.engine.contract`: subclass it in a test
module, set `backend`, and pytest runs the suite. `Gate` stops workers of any kind until the test opens
it. The rest of the package does not import this module.
"""

from __future__ import annotations

import os
import pickle
import shutil
import tempfile
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from hybridloader.engine.contract import Backend, Crew, WorkerHandle
from hybridloader.engine.messages import (
    Begin,
    Done,
    EndOfShard,
    Event,
    Exhausted,
    Exited,
    Failed,
    Fetch,
    Fetcher,
    FunctionFetcher,
    Message,
    Ready,
    Stop,
    Task,
    TaskContext,
    WorkerSpec,
)
from hybridloader.engine.worker import get_worker_info

__all__ = ["BackendContract", "Call", "Count", "Gate"]

DEADLINE = 60.0
"""Seconds after which a test that waits for a worker gives up; a correct test never waits that long."""


class Gate:
    """Barrier: workers wait until the test opens it, and the test waits until workers have arrived.

    It is a folder, so it works across threads, processes and start methods, and it can be pickled.

    Parameters
    ----------
    folder
        An empty folder. None makes a temporary one, which is removed with this object; workers that
        still wait then pass.
    """

    def __init__(self, folder: str | os.PathLike[str] | None = None) -> None:
        self.folder = Path(folder or tempfile.mkdtemp(prefix="hybridloader-gate-"))
        if folder is None:
            weakref.finalize(self, _remove, self.folder, os.getpid())

    def open(self) -> None:
        (self.folder / "open").touch()

    def arrive(self) -> None:
        """Report the arrival of a worker, and wait until the gate is open. Called by workers."""
        descriptor, _ = tempfile.mkstemp(prefix="arrived-", dir=self.folder)
        os.close(descriptor)
        opened = self.folder / "open"
        self._until(
            lambda: opened.exists() or not self.folder.exists(), "the gate was never opened"
        )

    def await_arrivals(self, count: int = 1) -> None:
        """Wait until `count` workers have arrived. Called by the test."""
        self._until(
            lambda: len(list(self.folder.glob("arrived-*"))) >= count, "no worker came to the gate"
        )

    @staticmethod
    def _until(condition: Callable[[], bool], complaint: str) -> None:
        deadline = time.monotonic() + DEADLINE
        while not condition():
            if time.monotonic() > deadline:
                raise TimeoutError(complaint)
            time.sleep(0.002)  # the only place that polls, so that tests need not


def _remove(folder: Path, owner: int) -> None:
    if os.getpid() == owner:  # a fork has a copy of the gate
        shutil.rmtree(folder, ignore_errors=True)


class Running:
    """Started crew that collects events until the wanted ones have arrived."""

    def __init__(self, crew: Crew, spec: WorkerSpec) -> None:
        self.raw, self._spec = crew, spec
        self.events: list[Any] = []
        self._unread: deque[Done | Failed] = deque()

    def __enter__(self) -> Running:
        try:
            for worker in range(self._spec.workers):
                self.raw.start(worker, self._spec)
            self.raw.settle()
        except BaseException:
            self.raw.close()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        self.raw.close()

    def send(self, worker: int, message: Message) -> None:
        self.raw.send(worker, message)

    def ask(self, indices: Iterable[Any], workers: int = 1) -> list[Done | Failed]:
        """Send a task for each index to `workers` in turn; return the results in order of arrival."""
        seq = -1
        for seq, index in enumerate(indices):
            self.raw.send(seq % workers, Task(seq, index))
        return self.collect(seq + 1)

    def collect(self, count: int) -> list[Done | Failed]:
        """Wait for the next `count` results."""
        deadline = time.monotonic() + DEADLINE
        while len(self._unread) < count:
            self._take(deadline)
        return [self._unread.popleft() for _ in range(count)]

    def collect_until(self, wanted: Callable[[Event], bool]) -> Any:
        """Wait for the first event, from now on, for which `wanted` returns True."""
        deadline = time.monotonic() + DEADLINE
        while True:
            for event in self._take(deadline):
                if wanted(event):
                    return event

    def open(self, result: Done | Failed) -> Any:
        assert isinstance(result, Done), result
        return result.payload.open()

    def _take(self, deadline: float) -> Sequence[Event]:
        left = deadline - time.monotonic()
        if left <= 0:
            stacks = [self.raw.stack(worker) for worker in range(self._spec.workers)]
            raise AssertionError("\n".join([f"nothing came; so far: {self.events}", *stacks]))
        events = self.raw.wait(left)
        self.events.extend(events)
        self._unread.extend(event for event in events if isinstance(event, (Done, Failed)))
        return events


# -- work for the workers of a test: a function, or a shard; and the functions of the contract suite.
#
# It is sent to workers of every kind, and imports torch and numpy where it runs.


@dataclass(frozen=True)
class Call(Fetch):
    """A `Fetch` that calls a function: the simplest work for a worker."""

    function: Callable[[Any], Any]
    dataset: Any = None
    private: bool = False

    def open(self, shared_seed: int | None, context: TaskContext) -> Fetcher:
        return FunctionFetcher(self.function)


@dataclass(frozen=True)
class Count(Fetch):
    """A `Fetch` whose shard has `length` items in each epoch."""

    length: int
    dataset: Any = None
    private: bool = True

    def open(self, shared_seed: int | None, context: TaskContext) -> Fetcher:
        items = iter(range(self.length))

        def fetch(index: Any) -> int:
            for item in items:
                return item
            raise EndOfShard

        return FunctionFetcher(fetch)


def echo(index: Any) -> Any:
    return index


def filled(index: int) -> Any:
    import numpy as np

    return np.full(1 << 20, index, dtype=np.int16)


def fail_on_odd(index: int) -> int:
    if index % 2:
        raise ArithmeticError("odd", index)
    return index


def leave(index: Any) -> None:
    raise SystemExit(3)


def unpicklable(index: int) -> Any:
    return "fine" if index else (x for x in "abc")


def broken_init(worker: int) -> None:
    raise LookupError(f"no luck in worker {worker}")


def who(index: Any) -> tuple[int, int, int]:
    from torch.utils.data import get_worker_info as torchs

    ours, theirs = get_worker_info(), torchs()
    assert ours is theirs
    assert ours is not None
    return ours.id, ours.num_workers, ours.seed


def at_gate(gate: Gate) -> Callable[[bytes], int]:
    def wait_then_measure(data: bytes) -> int:
        gate.arrive()
        return len(data)

    return wait_then_measure


def init_into(folder: Path) -> Callable[[int], None]:
    def init(worker: int) -> None:
        import torch

        for _ in range(1_000_000):  # meanwhile a caller that does not wait goes on
            pass
        descriptor, name = tempfile.mkstemp(prefix="init-", dir=folder)
        os.close(descriptor)
        Path(name).write_text(f"{worker} {torch.initial_seed()}")
        torch.manual_seed(0)

    return init


class BackendContract:
    """Suite that every backend must pass; subclass it and set `backend`.

    Examples
    --------
    >>> from hybridloader.testing import BackendContract
    >>> from hybridloader import Threads
    >>> class TestThreads(BackendContract):
    ...     backend = Threads()
    """

    backend: ClassVar[Backend]

    # -- tools -----------------------------------------------------------------------------------

    def crew(self, spec: WorkerSpec) -> Running:
        """Return a crew of ``spec.workers`` workers: a context manager that starts and closes it."""
        self.backend.check()
        return Running(self.backend.open(), spec)

    @staticmethod
    def spec(function: Callable[[Any], Any], workers: int = 1, **more: Any) -> WorkerSpec:
        return WorkerSpec("contract", workers, Call(function), **more)

    # -- starting, answering ----------------------------------------------------------------------

    def test_every_worker_reports_that_it_is_ready_before_anything_else(self) -> None:
        with self.crew(self.spec(echo, workers=3)) as crew:
            crew.ask("xxx", workers=3)
            for worker in range(3):
                mine = [event for event in crew.events if event.worker == worker]
                assert isinstance(mine[0], Ready)
                assert isinstance(mine[1], Done)

    def test_each_task_is_answered_once_and_in_order_per_worker(self) -> None:
        with self.crew(self.spec(echo, workers=2)) as crew:
            results = crew.ask(range(40), workers=2)
            assert sorted(result.seq for result in results) == list(range(40))
            for worker in range(2):
                mine = [result.seq for result in results if result.worker == worker]
                assert mine == list(range(worker, 40, 2))

    def test_values_arrive_equal_and_writable(self) -> None:
        import numpy as np

        sent: list[Any] = [
            None,
            7,
            "text",
            b"bytes",
            {"a": [1, (2.5, None)]},
            np.arange(5),
            np.arange(100_000, dtype=np.float32).reshape(100, 1000),
            np.empty((0, 3)),
            np.array(3.0),
        ]
        with self.crew(self.spec(echo)) as crew:
            got = [crew.open(result) for result in crew.ask(sent)]
        for before, after in zip(sent, got, strict=True):
            assert type(before) is type(after)
            if isinstance(before, np.ndarray):
                assert before.dtype == after.dtype
                np.testing.assert_array_equal(before, after)
                after[...] = 0  # raises if it is read-only
            else:
                assert before == after

    def test_large_results_do_not_mix_up(self) -> None:
        with self.crew(self.spec(filled, workers=2)) as crew:
            kept = [(done.seq, crew.open(done)) for done in crew.ask(range(12), workers=2)]
            for seq, array in kept:
                assert array.shape == (1 << 20,)
                assert array.min() == array.max() == seq

    def test_unwanted_results_can_be_discarded(self) -> None:
        with self.crew(self.spec(filled)) as crew:
            for index in range(8):
                (result,) = crew.ask([index])
                assert isinstance(result, Done)
                result.payload.discard()

    def test_sending_large_tasks_to_a_busy_worker_does_not_block(self, tmp_path: Path) -> None:
        gate = Gate(tmp_path)
        with self.crew(self.spec(at_gate(gate))) as crew:
            for seq in range(6):
                crew.send(0, Task(seq, bytes(1 << 20)))
            gate.open()
            assert [crew.open(result) for result in crew.collect(6)] == [1 << 20] * 6

    def test_functions_made_on_the_spot_arrive(self) -> None:
        offset = 41
        with self.crew(self.spec(lambda x: x + offset)) as crew:
            assert crew.open(crew.ask([1])[0]) == 42

    # -- errors ----------------------------------------------------------------------------------

    def test_an_error_answers_its_own_task_alone(self) -> None:
        with self.crew(self.spec(fail_on_odd)) as crew:
            results = crew.ask(range(4))
            assert [type(result) for result in results] == [Done, Failed, Done, Failed]
            failed = results[1]
            assert isinstance(failed, Failed)
            error = failed.failure.to_exception("a note")
            assert type(error) is ArithmeticError
            assert error.args == ("odd", 1)

    def test_an_error_in_init_fn_answers_every_task(self) -> None:
        with self.crew(self.spec(echo, init_fn=broken_init)) as crew:
            for result in crew.ask(range(3)):
                assert isinstance(result, Failed)
                assert isinstance(result.failure.to_exception("a note"), LookupError)

    def test_a_result_is_delivered_or_its_task_fails(self) -> None:
        with self.crew(self.spec(unpicklable)) as crew:
            results = crew.ask([0, 1])
            assert isinstance(results[0], Done if self.backend.in_process else Failed)
            assert crew.open(results[1]) == "fine"

    # -- epochs ----------------------------------------------------------------------------------

    def test_the_tasks_of_an_epoch_are_done_before_the_next_one_begins(
        self, tmp_path: Path
    ) -> None:
        gate = Gate(tmp_path)
        with self.crew(self.spec(at_gate(gate))) as crew:
            for seq in range(5):
                crew.send(0, Task(seq, b""))
            crew.send(0, Begin(1))
            crew.send(0, Task(5, b"new"))
            gate.open()
            results = crew.collect(6)
            assert [result.seq for result in results] == list(range(6))
            assert crew.open(results[5]) == 3

    def test_a_shard_ends_once_and_begins_again_with_the_epoch(self) -> None:
        with self.crew(WorkerSpec("contract", 1, Count(2))) as crew:
            for epoch in range(2):
                if epoch:
                    crew.send(0, Begin(epoch))
                first = 10 * epoch
                for seq in range(first, first + 5):
                    crew.send(0, Task(seq, None))
                crew.collect_until(lambda event: isinstance(event, Exhausted))
                ended = [event for event in crew.events if isinstance(event, Exhausted)]
                assert [event.seq for event in ended] == [10 * e + 2 for e in range(epoch + 1)]

    # -- who am I --------------------------------------------------------------------------------

    def test_worker_info_identifies_the_worker_inside_and_is_none_outside(self) -> None:
        with self.crew(self.spec(who, workers=2, base_seed=1000)) as crew:
            results = crew.ask([None, None], workers=2)
            answers = {result.worker: crew.open(result) for result in results}
            assert answers == {0: (0, 2, 1000), 1: (1, 2, 1001)}
            assert get_worker_info() is None

    def test_init_fn_runs_once_per_worker_with_its_seed_in_place(self, tmp_path: Path) -> None:
        import torch

        before = torch.get_rng_state()
        init = init_into(tmp_path)
        with self.crew(self.spec(echo, workers=2, base_seed=77, init_fn=init)) as crew:
            # It may seed the caller's generators, so the caller has waited for it.
            assert not self.backend.in_process or len([*tmp_path.glob("init-*")]) == 2
            crew.ask([None, None], workers=2)
        told = sorted(path.read_text() for path in tmp_path.glob("init-*"))
        assert told == ["0 77", "1 78"]
        assert torch.equal(before, torch.get_rng_state())

    # -- ending ----------------------------------------------------------------------------------

    def test_a_worker_that_gets_a_stop_message_exits_cleanly(self) -> None:
        with self.crew(self.spec(echo, workers=2)) as crew:
            crew.ask("a")
            crew.send(0, Stop())
            exited = crew.collect_until(lambda event: isinstance(event, Exited))
            assert exited == Exited(0, None)
            crew.send(0, Task(1, "to nobody"))  # ignored
            crew.send(1, Task(2, "b"))
            assert crew.open(crew.collect(1)[0]) == "b"

    def test_a_worker_that_is_killed_is_reported_with_a_cause(self) -> None:
        with self.crew(self.spec(echo)) as crew:
            crew.ask("a")
            crew.raw.kill(0)
            crew.collect_until(lambda event: isinstance(event, Exited))
            crew.raw.kill(0)  # a dead worker: nothing happens

    def test_a_worker_that_its_work_ends_is_reported_with_a_cause(self) -> None:
        if self.backend.in_caller:
            return  # it ends the caller
        with self.crew(self.spec(leave)) as crew:
            crew.send(0, Task(0, None))
            exited = crew.collect_until(lambda event: isinstance(event, Exited))
            assert exited.worker == 0
            assert exited.cause

    def test_a_new_worker_takes_the_place_of_one_that_was_killed(self) -> None:
        """Tasks without an answer from the dead worker are forgotten."""
        spec = self.spec(filled, workers=2)
        with self.crew(spec) as crew:
            before = {result.seq: result for result in crew.ask([100, 101], workers=2)}
            for seq in (10, 11, 12):
                crew.raw.kill(1)
                crew.send(1, Task(2, 7))
                crew.collect_until(lambda event: isinstance(event, Exited))
                crew.raw.start(1, spec)
                crew.raw.settle()
                crew.send(1, Task(seq, seq))
                [result] = crew.collect(1)
                assert result.seq == seq
                assert crew.open(result)[-1] == seq
            assert len(crew.raw.handles) == 2
            assert all(handle.is_alive() for handle in crew.raw.handles)
            # Results of dead workers can still be opened.
            assert [int(crew.open(before[seq])[0]) for seq in (0, 1)] == [100, 101]

    def test_wake_ends_a_wait(self) -> None:
        with self.crew(self.spec(echo)) as crew:
            crew.collect_until(lambda event: isinstance(event, Ready))
            crew.raw.wake()
            assert list(crew.raw.wait(DEADLINE)) == []

    def test_wait_with_no_time_returns_at_once(self) -> None:
        with self.crew(self.spec(echo)) as crew:
            crew.collect_until(lambda event: isinstance(event, Ready))
            assert list(crew.raw.wait(0)) == []

    def test_close_ends_busy_and_idle_workers_and_can_be_repeated(self) -> None:
        with self.crew(self.spec(filled, workers=2)) as crew:
            for seq in range(20):
                crew.send(0, Task(seq, seq))
            handles = list(crew.raw.handles)
            assert all(isinstance(handle, WorkerHandle) for handle in handles)
            crew.raw.close()
            assert not any(handle.is_alive() for handle in handles)
            assert None not in [handle.exitcode for handle in handles]
            crew.raw.close()
            crew.raw.wake()

    def test_a_crew_may_get_a_stop_message_before_it_is_closed(self) -> None:
        with self.crew(self.spec(filled, workers=2)) as crew:
            for seq in range(20):
                crew.send(seq % 2, Task(seq, seq))
            handles = list(crew.raw.handles)
            crew.raw.leave()
            crew.raw.leave()
            crew.raw.close()
            assert not any(handle.is_alive() for handle in handles)

    def test_a_crew_that_never_started_a_worker_can_be_closed(self) -> None:
        crew = self.backend.open()
        assert list(crew.handles) == []
        crew.close()

    def test_the_backend_itself_is_a_plain_value(self) -> None:
        copy = pickle.loads(pickle.dumps(self.backend))
        assert copy == self.backend
        assert type(copy) is type(self.backend)
        assert copy.name == copy.name.lower()
