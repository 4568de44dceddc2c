"""Results that wait behind a late one: bounded by themselves, apart from what is in work.

The workers are scripted: each answers at once whatever it has been sent, but for those that are held.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
from support.scripted import ScriptedBackend, ScriptedCrew
from support.supervised import (
    BYTES,
    PAGES,
    TASKS,
    ReorderLimit,
    Stage,
    least_busy,
)

from hybridloader.engine import (
    ByReference,
    Done,
    Event,
    Payload,
    Ready,
    Task,
    WorkerSpec,
)
from hybridloader.errors import IteratorClosed, NotReady
from hybridloader.testing import Call

WORKERS, WINDOW = 2, 4


class Sized(Payload):
    def __init__(self, nbytes: int) -> None:
        self._nbytes = nbytes

    @property
    def nbytes(self) -> int:
        return self._nbytes

    def open(self) -> int:
        return self._nbytes


class Workers:
    """A stage whose worker 0 is at task 0 while `late`; `drawn` are the indices it asked for."""

    def __init__(
        self,
        reorder: ReorderLimit | None,
        payload: Any = ByReference,
        seconds: float = 1.0,
        **more: Any,
    ) -> None:
        self.late, self.drawn = True, list[int]()
        self._tasks: list[tuple[int, int]] = []  # worker and number, not answered
        self._idle, self._payload, self._seconds = 0, payload, seconds
        backend = ScriptedBackend(itertools.chain([self._ready], itertools.repeat(self._answer)))
        spec = WorkerSpec("scripted", WORKERS, Call(lambda index: index))
        more = {"dispatch": least_busy, "lookahead": WINDOW, **more}
        self.stage = Stage(backend, spec, reorder=reorder, **more)
        (self.crew,) = backend.crews
        self.stage.begin(self._indices())

    def _indices(self) -> Iterator[int]:
        for index in range(2000):
            self.drawn.append(index)
            yield index

    def _ready(self, crew: ScriptedCrew) -> list[Event]:
        return [Ready(worker) for worker in range(WORKERS)]

    def _answer(self, crew: ScriptedCrew) -> list[Event]:
        """Answer the oldest task of a worker that is not held."""
        self._tasks += [(worker, m.seq) for worker, m in crew.sent if isinstance(m, Task)]
        crew.sent.clear()
        for worker, seq in self._tasks:
            if worker or not self.late:
                self._tasks.remove((worker, seq))
                self._idle = 0
                return [Done(worker, seq, self._payload(seq), self._seconds)]
        self._idle += 1
        assert self._idle < 10, "it waits for a result that nobody works on"
        return []

    def until_asleep(self) -> int:
        """Ask for the late result until nothing more comes; return how many indices were drawn."""
        while not self._idle:
            with pytest.raises(NotReady):
                self.stage.pull(wait=False)
        return len(self.drawn)


def test_workers_go_on_behind_a_late_result_up_to_the_limit_and_no_further() -> None:
    workers = Workers(ReorderLimit(WORKERS))
    assert workers.until_asleep() == WINDOW + TASKS * WORKERS
    workers.late = False
    taken = [next(workers.stage) for _ in range(200)]
    assert taken == list(range(200))


def test_a_slow_consumer_gets_no_more_at_hand_by_being_slow() -> None:
    workers = Workers(ReorderLimit(WORKERS))
    workers.late = False
    for taken in range(1, 50):
        next(workers.stage)
        assert len(workers.drawn) <= taken + WINDOW
    late = Workers(ReorderLimit(WORKERS))
    most = late.until_asleep()
    late.late = False
    ahead = []
    for taken in range(1, 800):
        next(late.stage)
        ahead.append(len(late.drawn) - taken)
    assert max(ahead) <= most
    assert sorted(ahead, reverse=True) == ahead, "it only falls"
    assert ahead[-1] == WINDOW
    assert ahead[2 * (most - WINDOW)] > WINDOW, "by one for each four"


@pytest.mark.parametrize(
    ("nbytes", "extra"),
    [(0, TASKS * WORKERS), (1 << 20, TASKS * WORKERS), (BYTES // 5, 5), (BYTES, 1), (BYTES + 1, 0)],
)
def test_what_may_wait_is_limited_in_bytes(nbytes: int, extra: int) -> None:
    limit = ReorderLimit(WORKERS)
    results = {seq: Done(1, seq, Sized(size), 1.0) for seq, size in enumerate((1, 2, nbytes))}
    assert limit.extra(results) == extra
    by_reference = {0: Done(1, 0, ByReference(bytes(1000)), 1.0)}
    assert 0 < ReorderLimit(1, nbytes=3500).extra(by_reference) <= 3


@pytest.mark.parametrize("end", ["close", "interrupt"])
def test_an_end_that_is_asked_for_during_a_look_without_a_wait_is_heeded(end: str) -> None:
    """Such a look takes the wake-up, so that the next wait would know of nothing."""
    workers = Workers(ReorderLimit(WORKERS))
    workers.until_asleep()
    crew = workers.crew

    def look(timeout: float | None) -> list[Event]:
        crew.wait = never  # type: ignore[method-assign]
        getattr(workers.stage, end)()
        return []

    def never(timeout: float | None) -> list[Event]:
        pytest.fail("it waits although its end was asked for")

    crew.wait = look  # type: ignore[method-assign]
    with pytest.raises(IteratorClosed):
        workers.stage.pull()


def test_a_worker_rests_rather_than_fill_memory_that_takes_longer_to_make_than_the_result() -> None:
    nbytes = BYTES // 8
    for seconds, extra in ((0.9 * nbytes / PAGES, 0), (1.1 * nbytes / PAGES, 8)):
        assert ReorderLimit(WORKERS).extra({0: Done(1, 0, Sized(nbytes), seconds)}) == extra
