"""One backend's part of the long run, in a runner process: cycles of work, and a look after each."""

from __future__ import annotations

import gc
import os
import queue
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks import usage
from benchmarks.calibration import loops_for
from benchmarks.case import Answer, Spec
from benchmarks.datasets.plain import spin
from benchmarks.long_run.samples import Plain
from benchmarks.long_run.work import cycle
from benchmarks.timing import Clock, Meter, percentile

STEADY_BATCHES, STEADY_BATCH = 400, 8
"""Epoch whose `next()` is timed: some 100 us of work a batch."""

TURN = 100e-6
"""Seconds of one turn of the reference loop."""

SHARE = 0.7
"""CPU seconds that a part may use a second: other work on the machine shall not be disturbed."""

Look = dict[str, float]
"""State at one time; its names are those of `COLUMNS`."""

COLUMNS = (
    *("at", "memory_mb", "descriptors", "threads", "processes", "segments"),
    *("p50_us", "p99_us", "reference_p50_us", "reference_p99_us"),
)


def part(backend: str, spec: Spec) -> Answer:
    """Work on `backend` for `spec["seconds"]`; the answer has the looks by column, and what was done."""
    warnings.simplefilter("ignore")  # more workers than cores, workers that die
    tally: Counter[str] = Counter()
    with Steady(backend) as steady:
        looks = work_and_look(
            spec["seconds"],
            lambda number: cycle(backend, spec["seed"], number, tally),
            lambda: holdings() | steady.latencies(),
            usage.CpuMeter(),
        )
    columns = {name: [round(look[name], 3) for look in looks] for name in COLUMNS}
    return {"looks": columns, "tally": dict(tally)}


def work_and_look(
    seconds: float,
    work: Callable[[int], None],
    look: Callable[[], Look],
    meter: Meter,
    *,
    share: float = SHARE,
    clock: Clock = time.perf_counter,
    sleep: Callable[[float], None] = time.sleep,
) -> list[Look]:
    """Work and look in turn for `seconds`, resting so as to use `share` of a core at the most."""
    start = began = clock()
    found: list[Look] = []
    while began - start < seconds:
        meter.start()
        work(len(found))
        found.append({"at": clock() - start} | look())
        sleep(max(0.0, meter.stop() / share - (clock() - began)))
        began = clock()
    return found


def holdings() -> Look:
    """What this process and all below it hold, and the named segments of shared memory."""
    gc.collect()
    return usage.holdings() | {"segments": segments(Path("/dev/shm"), os.getpid())}


def segments(folder: Path, pid: int) -> int:
    """Number of segments that have a name and were made by, or for, process `pid`."""
    return len(list(folder.glob(f"hl-{pid}-*")))


class Steady:
    """A loader that stays for the whole part, with its workers, and the loop to hold it against.

    The reference is a loop of Python in the caller's thread, or on a bare thread that is asked through
    a queue, so that it depends on the machine's state as the loader does.
    """

    def __init__(self, backend: str) -> None:
        from hybridloader import DataLoader

        plain = Plain(STEADY_BATCH * STEADY_BATCHES)
        where: dict[str, Any] = {}
        if backend != "inline":
            where = {"backend": backend, "num_workers": 2, "persistent_workers": True}
        self._loader = DataLoader(plain, batch_size=STEADY_BATCH, **where)
        self._bare = None if backend == "inline" else Bare(loops_for(TURN))
        self._loops = loops_for(TURN)

    def __enter__(self) -> Steady:
        return self

    def __exit__(self, *exception: object) -> None:
        if self._bare is not None:
            self._bare.close()
        del self._loader

    def latencies(self) -> Look:
        """Median and 99th percentile of `next()`, and of a turn of the reference before and after."""
        times = _times(self._reference(), STEADY_BATCHES // 2)
        batches = iter(self._loader)
        next(batches)
        own = _times(batches, STEADY_BATCHES - 1)
        times += _times(self._reference(), STEADY_BATCHES // 2)
        for _ in batches:
            pass
        found = {"p50_us": percentile(own, 0.5), "p99_us": percentile(own, 0.99)}
        found |= {"reference_p50_us": percentile(times, 0.5)}
        found |= {"reference_p99_us": percentile(times, 0.99)}
        return {name: 1e6 * value for name, value in found.items()}

    def _reference(self) -> Iterator[Any]:
        while True:
            yield spin(self._loops) if self._bare is None else self._bare.turn()


def _times(items: Iterator[Any], count: int) -> list[float]:
    found = []
    for _ in range(count):
        start = time.perf_counter()
        next(items)
        found.append(time.perf_counter() - start)
    return found


class Bare:
    """A thread that runs a loop of Python when it is asked."""

    def __init__(self, loops: int) -> None:
        self._asked: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._loops = loops
        self._thread = threading.Thread(target=self._serve, name="reference", daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        while (loops := self._asked.get()) > 0:
            self._done.put(spin(loops))

    def turn(self) -> int:
        """Have the loop run once."""
        self._asked.put(self._loops)
        return self._done.get()

    def close(self) -> None:
        """End the thread."""
        self._asked.put(0)
        self._thread.join()
