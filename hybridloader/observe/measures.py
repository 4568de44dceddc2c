"""Measures of the threads and workers of one loader or pipeline: spans of work, waits, CPU time, bytes.

Those of a stage come from its workers, and the thread that pulls the stage writes them. Those of the
loop's thread, its sampler and relays are their waits. `stats()` reads all of them from any thread.
"""

from __future__ import annotations

import itertools
import math
import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

from hybridloader._support import system
from hybridloader._support.store_use import StoreUse, together
from hybridloader._support.threads import REMEMBERED, Waits, gil_enabled, snapshot
from hybridloader._support.user_objects import size_of
from hybridloader.engine.contract import Backend
from hybridloader.engine.feed import RelayQueue
from hybridloader.engine.messages import ByReference, Done, Fetch, Result, known_bytes
from hybridloader.engine.meter import MEASURES, Measures, Metering
from hybridloader.memory.limits import cgroups, number_in, ranks_here, text_of, whole_number
from hybridloader.observe.figures import (
    CoreUse,
    CoroutineUse,
    Faults,
    LoopRecord,
    Span,
    StageRecord,
    Wait,
    between,
)

_CGROUPS = Path(system.ROOT, "sys/fs/cgroup")
_PROC = Path(system.PROC)


class Limit(NamedTuple):
    """Cores that this process may use, and the folder of the cgroup whose quota limits them, if any."""

    cores: float
    folder: Path | None = None


def limit(mounts: Path = _CGROUPS, proc: Path = _PROC) -> Limit:
    """Return the limit on this process's cores: its affinity, or a lower (maybe fractional) quota."""
    return _within_quotas(len(affinity()), mounts, proc)


def _within_quotas(cores: float, mounts: Path, proc: Path) -> Limit:
    found = Limit(float(cores))
    # In cgroup version 1 a controller has a separate tree, or shares one: "cpuacct,cpu".
    for folder, _ in cgroups("cpu", proc, mounts.joinpath):
        quota = _quota(folder)
        if quota is not None and quota < found.cores:
            found = Limit(quota, folder)
    return found


def share(ranks: int, mounts: Path = _CGROUPS, proc: Path = _PROC) -> float:
    """Return this process's share of the cores of a machine with `ranks` ranks.

    The cores that the cgroups leave to the job are divided by `ranks`. A rank whose affinity is already
    narrower than that keeps all cores of its affinity.
    """
    own = limit(mounts, proc).cores
    if ranks == 1:
        return own
    return min(own, _within_quotas(_cores_of_job(mounts, proc), mounts, proc).cores / ranks)


def _cores_of_job(mounts: Path, proc: Path) -> int:
    """Return the number of cores in the cpuset of this process's cgroup, else of the machine."""
    for folder, _ in cgroups("cpuset", proc, mounts.joinpath):
        for name in ("cpuset.cpus.effective", "cpuset.effective_cpus"):
            try:  # "0-3,8"
                parts = [part.split("-") for part in text_of(folder / name).split(",")]
                return sum(int(ends[-1]) - int(ends[0]) + 1 for ends in parts)
            except ValueError:
                continue
    return os.cpu_count() or 1


def affinity() -> set[int]:
    """Return the numbers of the cores that this process may run on."""
    try:
        return os.sched_getaffinity(0)
    except (AttributeError, OSError):  # not on macOS and Windows
        return set(range(os.cpu_count() or 1))


def _quota(folder: Path) -> float | None:
    """Return the quota of a cgroup in cores; None if it has none."""
    for names in (("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us")):
        try:
            quota, period = [word for name in names for word in text_of(folder / name).split()]
            if quota not in ("max", "-1") and float(period) > 0:
                return float(quota) / float(period)
        except ValueError:
            continue
    return None


class _Reading(NamedTuple):
    """Clock, busy seconds of the cores and of this process; quota periods, all and throttled ones."""

    time: float
    busy: float | None
    own: float
    periods: float = 0.0
    throttled: float = 0.0


def read(cores: Iterable[int], folder: Path | None = None, proc: Path = _PROC) -> _Reading:
    """Read the CPU clocks of the machine, or of the cgroup in `folder` if its quota is the limit.

    A container also sees cores that other containers of the host keep busy. Only the time of the
    container's cgroup counts against its quota.
    """
    now, own = time.perf_counter(), time.process_time()
    if folder is None:
        return _Reading(now, _busy(set(cores), proc), own)
    words = text_of(folder / "cpu.stat").split()
    counts = dict(zip(words[::2], map(whole_number, words[1::2]), strict=False))
    used = (counts.get("usage_usec") or 0) * 1e-6  # version 2
    used = used or (number_in(folder / "cpuacct.usage") or 0) * 1e-9
    periods, throttled = (counts.get(name) or 0 for name in ("nr_periods", "nr_throttled"))
    return _Reading(now, used or None, own, periods, throttled)


def _busy(cores: set[int], proc: Path) -> float | None:
    """Return the busy seconds of `cores` since the machine started; None if unknown."""
    try:
        tick = os.sysconf("SC_CLK_TCK")
        total = 0
        for line in text_of(proc / "stat").splitlines():
            name, *words = line.split()
            if name.startswith("cpu") and name[3:].isdecimal() and int(name[3:]) in cores:
                # user, nice, system, idle, iowait, irq, softirq, steal
                user, nice, system, _, _, *rest = map(int, words[:8])
                total += user + nice + system + sum(rest)
        return total / tick if total else None
    except (AttributeError, OSError, ValueError):
        return None


class CoreUsage:
    """Use of the cores from the construction of this object until `end`."""

    def __init__(self) -> None:
        self._cores = affinity()
        self.available, self._folder = limit()
        ranks = ranks_here()
        self._share = None if ranks == 1 else share(ranks)
        # All the mutable state:
        self._before = self._read()
        self._after: _Reading | None = None

    def end(self) -> None:
        """Stop counting."""
        self._after = self._read()

    def _read(self) -> _Reading:
        return read(self._cores, self._folder)

    def use(self, workers: float = 0.0) -> CoreUse:
        """Return the use until now; `workers` are the CPU seconds of worker processes."""
        before, after = self._before, self._after or self._read()
        seconds = after.time - before.time
        if seconds < 0.05:  # /proc counts in hundredths
            return CoreUse(self.available, share=self._share)
        busy = None
        if before.busy is not None and after.busy is not None:
            # A cgroup may briefly exceed its quota, and the kernel counts ticks late.
            busy = min((after.busy - before.busy) / seconds, self.available)
        own = (after.own - before.own + workers) / seconds
        periods = after.periods - before.periods
        throttled = (after.throttled - before.throttled) / periods if periods > 0 else 0.0
        return CoreUse(self.available, busy, own, throttled, self._share)


BRIEF = 1e-4
"""Calls of `next()` shorter than this many seconds are only summed, unless a trace runs."""


class LoopWaits(Waits):
    """Waits of one loop: its calls of `next()`."""

    def __init__(self) -> None:
        super().__init__(BRIEF)
        self.cores = CoreUsage()
        # All the mutable state:
        self.began = perf_counter()
        self.ended: float | None = None
        self.items = 0  # counted by the caller of `note`

    def end(self) -> None:
        """Note that the loop has ended."""
        if self.ended is None:
            self.ended = perf_counter()
            self.cores.end()

    @property
    def seconds(self) -> float:
        """Seconds since it began, until the end."""
        return (perf_counter() if self.ended is None else self.ended) - self.began

    def record(self) -> LoopRecord:
        """Return the measurements until now."""
        waits = tuple(Wait(*wait) for wait in self.latest)
        return LoopRecord(
            began=self.began,
            ended=self.began + self.seconds,
            items=self.items,
            waited=self.waited,
            waits=waits,
            brief=max(0, self.items - self.longer),
            brief_seconds=self.brief_seconds,
            dropped=max(0, self.longer - len(waits)),
        )


SAMPLED = 64  # one of so many quick indices is timed: C code passes the others on


class SourceTimes(Waits):
    """Waits for the items of a source."""

    def timed(self, source: Iterator[Any]) -> Iterator[Any]:
        """Return the items of `source`, timed. An error that it raises passes through."""
        return itertools.chain.from_iterable(self._parts(source))

    def _parts(self, source: Iterator[Any]) -> Iterator[Iterator[Any]]:
        while True:
            began = perf_counter()
            try:
                item = next(source)
            except StopIteration:
                return
            ended = perf_counter()
            self.note(began, ended)
            yield iter((item,))
            del item
            if ended - began < BRIEF:
                self.brief_seconds += (SAMPLED - 1) * (ended - began)
                yield itertools.islice(source, SAMPLED - 1)

    def record(self, name: str, items: int, loop: LoopRecord) -> StageRecord:
        """Return the measurements; `items` is the number that the source has returned."""
        spans = tuple(Span(*pair) for pair in self.latest)
        return StageRecord(
            name=name,
            backend="caller",
            items=items,
            busy=self.waited,
            other=max(0.0, loop.ended - loop.began - self.waited),
            spans=spans,
            since=spans[0].began if len(spans) == REMEMBERED else None,
            source=True,
        )


def record_of_relay(
    name: str,
    queue: RelayQueue,  # it notes its sleeps
    began: float,
    ended: float,
    waits: Sequence[Waits],  # those of its thread for input
    **others: Any,  # fields of the record
) -> StageRecord:
    """Return the record of a relay's thread, which is busy when it does not sleep."""
    waited, blocked = sum(one.waited for one in waits), queue.blocks.waited
    pauses = [one.latest for one in (queue.blocks, *waits)]
    if queue.ended is not None:
        ended = min(ended, queue.ended)
    since = max((ring[0][0] for ring in pauses if len(ring) >= REMEMBERED), default=began)
    return StageRecord(
        name=name,
        backend="thread",
        items=queue.count,
        busy=max(0.0, ended - began - blocked - waited),
        starved=waited,
        blocked=blocked,
        queued=len(queue.items),
        spans=tuple(between(since, ended, itertools.chain(*pauses))),
        since=None if since == began else since,
        **others,
    )


def record_of_caller(
    name: str,
    loop: LoopWaits,
    waits: Sequence[Waits],  # those for input
    **others: Any,  # fields of the record
) -> StageRecord:
    """Return the record of the work that the loop's thread does inside `next()`."""
    made, waited = loop.record(), sum(one.waited for one in waits)
    pauses = [span[:2] for span in between(made.began, made.ended, made.waits)]
    for one in waits:
        pauses += one.latest
    return StageRecord(
        name=name,
        backend="caller",
        items=made.items,
        busy=max(0.0, made.waited - waited),
        starved=waited,
        other=max(0.0, made.ended - made.began - made.waited),
        spans=tuple(between(made.began, made.ended, pauses)),
        **others,
    )


_SLOW = 1e-4
"""If opening a result takes at least this many seconds, the next results are timed, too."""

_WEIGHED = 8
"""Items of a container that are weighed, at most. Weighing an item takes 0.2 us; the other items are
assumed to be like the first ones."""


def metering_of(backend: Backend, fetch: Fetch, *, by_pass: bool) -> Metering:
    """Return the specification of the meters of `backend`'s workers."""
    if not backend.in_process:
        return Metering(time.process_time, by_pass=by_pass, stores=True)
    # The CPU time of the helper threads of one worker thread is unknown.
    thread_time = None if fetch.threads > 1 else getattr(time, "thread_time", None)
    alone = not backend.in_caller
    return Metering(thread_time, alone=alone, gil=alone and gil_enabled(), by_pass=by_pass)


def options_of(backend: Backend, fetch: Fetch, workers: int) -> dict[str, Any]:
    """Return the options of a stage that a user can change with effect, and their values."""
    found: dict[str, Any] = {"backend": backend.name, "num_workers": workers}
    if fetch.spreads:
        found["threads_per_worker"] = fetch.threads
    return found


class StageMeasures:
    """Measures of one stage, and its `Observer`. It is full once `window` tasks have come back.

    `options` are those of `StageRecord`. With `each`, as in a pipeline, it counts the seconds of all
    tasks and waits, and the seconds of idle workers by cause. A loader, whose tasks may take
    microseconds, only has the measures of the meters.
    """

    def __init__(
        self,
        backend: Backend,
        fetch: Fetch,
        workers: int,
        window: int,
        options: Mapping[str, Any] | None = None,
        *,
        each: bool = False,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.each, self._clock = each, clock
        self.metering = metering_of(backend, fetch, by_pass=not each)
        self.backend, self.workers, self._window = backend, max(1, workers), max(1, window)
        self._options = options_of(backend, fetch, workers) if options is None else options
        self._in_turn, self._concurrency = fetch.in_turn, fetch.coroutines
        self.begin_again()

    def begin_again(self) -> None:
        """Reset all measures."""
        # All the mutable state:
        self._tasks = 0  # returned; without `each`, those that measures have reported
        self.restarted = 0
        self.opens_slowly = False
        self.busy = self.sending = 0.0
        self.first: float | None = None  # begin of the first task
        self.full: float | None = None  # when the stage was full for the first time
        self._seconds: dict[str, float] = {}  # those that are known, by their field of the record
        self._use = CoroutineUse("", self._concurrency, 0, 0.0, 0.0)
        self._busy_of = [0.0] * self.workers
        self._retried = 0
        self._weight = self._weighed = 0  # bytes of some results, and their number
        self._array_weight = 0  # bytes of these that are of arrays
        self._scale = 1  # tasks per task that reported measures
        self._spans: deque[Span] = deque(maxlen=REMEMBERED)
        self._dropped: float | None = None  # end of the last span that was dropped
        self._gil_waits: deque[float] = deque(maxlen=REMEMBERED)
        # Only with `each`:
        self.began: float | None = None
        self.ended: float | None = None
        self.worked = 0.0  # seconds that workers worked, together
        self.waits = Waits()  # of the consumer of the stage for it
        self.starved = 0.0  # worker seconds idle for lack of input
        self._blocked = 0.0  # worker seconds idle because results were not taken, while pulled
        self._idle_workers, self._starved, self._since = 0, False, 0.0
        self.stores: tuple[StoreUse, ...] = ()  # use by workers that are processes
        self._away = 0.0  # seconds in which the consumer did not pull the stage
        self._away_since: float | None = None

    def of_loop(self, loop: LoopWaits) -> None:
        """Note the loop of a loader; a trace makes it note shorter waits, too."""

    # -- called by the stage -------------------------------------------------------------------------

    def idle(self, workers: int, *, starved: bool) -> None:
        if not (workers or self._idle_workers) and self.began is not None:
            return  # all workers are and were busy, as for most batches: don't read the clock
        now = self._clock()
        if self._idle_workers:
            passed = self._idle_workers * (now - self._since)
            if self._starved:
                self.starved += passed
            else:
                self._blocked += passed
        self._idle_workers, self._starved, self._since = workers, starved, now
        if self.began is None:
            self.began = now

    def waited_for(self, began: float, ended: float) -> None:
        self.waits.note(began, ended)

    def came(self, event: Result, since: float) -> None:
        if self.each:
            self._tasks += 1
            if isinstance(event, Done):
                self.worked += event.seconds
        measures = None if event.extras is None else event.extras.pop(MEASURES, None)
        if measures is None or not isinstance(event, Done):
            return
        if not self.each:
            self._tasks += measures.tasks
        now = time.perf_counter()
        if self.full is None and self._tasks >= self._window:
            self.full = now
        self._scale = measures.tasks
        self._note(measures, since, now)
        for others in measures.others:
            self._note(others, math.inf, now)  # the consumer does not wait for these
        self._busy_of[event.worker] += measures.busy
        payload = event.payload
        if isinstance(payload, ByReference):
            size = size_of(payload.peek(), _WEIGHED)
        else:
            size = known_bytes(payload)
        if size:
            self._array_weight += payload.array_bytes
            self._weight += size
            self._weighed += 1

    def opened(self, seq: int, began: float, ended: float) -> None:
        self.sending += (1 if self.opens_slowly else self._scale) * (ended - began)
        self.opens_slowly = ended - began >= _SLOW
        self._add(began, ended, 1.0)

    def replaced(self, worker: int, cause: str | None) -> None:
        self.restarted += 1

    def raised(self, worker: int, seq: int, error: BaseException) -> None:
        pass

    def _note(self, measures: Measures, since: float, now: float) -> None:
        first = measures.spans[0][0]
        self.first = first if self.first is None else min(first, self.first)
        for began, ended, busy in measures.spans:
            self._add(began, ended, min(1.0, busy / (ended - began)) if ended > began else 1.0)
        self.busy += measures.busy
        for name, seconds in (
            ("cpu", measures.cpu),
            ("wait_for_core", measures.wait_for_core),
            ("collating", measures.collating * measures.busy),
            ("packing", measures.packing * measures.busy),
        ):
            if seconds is not None:
                self._seconds[name] = self._seconds.get(name, 0.0) + seconds
        if measures.wait_for_gil is not None:
            self._gil_waits.append(measures.wait_for_gil)
        use = self._use
        self._use = use._replace(
            begun=use.begun + measures.coroutines,
            idle=use.idle + measures.idle,
            held=use.held + measures.held,
        )
        if measures.stores:
            self.stores = together((*self.stores, *measures.stores))
        self.sending += self._scale * measures.reporting
        self._retried += measures.retried
        ended = measures.spans[-1][1]
        sent = max(since, ended)  # from then on the consumer waited for it
        if sent < now:
            self.sending += now - sent
            self._add(sent, now, 1.0)

    def _add(self, began: float, ended: float, density: float) -> None:
        if len(self._spans) == REMEMBERED:
            # Spans of several workers are not in the order of their ends.
            self._dropped = max(self._dropped or 0.0, self._spans[0].ended)
        self._spans.append(Span(began, ended, density / self.workers, density))

    # -- called by the consumer of the stage, with `each` ----------------------------------------------

    def pulled(self) -> None:
        """Note that the consumer asks for results."""
        if self._away_since is not None:
            self._away += self._clock() - self._away_since
            self._away_since = None

    def turned_away(self) -> None:
        """Note that the consumer no longer asks for results."""
        self._away_since = self._clock()

    def close(self) -> None:
        """Note that the stage has ended."""
        if self.ended is None:
            self.idle(0, starved=False)
            self.ended = self._clock()

    # -- statistics ------------------------------------------------------------------------------------

    @property
    def elapsed(self) -> float:
        """Seconds since the first task, until the end."""
        if self.began is None:
            return 0.0
        return (self._clock() if self.ended is None else self.ended) - self.began

    @property
    def blocked(self) -> float:
        """Worker seconds idle because no consumer took results.

        While the consumer does not pull the stage, the ends of tasks are not seen. All time that the
        workers did not work then counts as blocked.
        """
        return min(self._rest, max(self._blocked, self.workers * self._away))

    @property
    def other(self) -> float:
        """Worker seconds spent starting, receiving tasks, or waiting for a CPU."""
        return max(0.0, self._rest - self.blocked)  # each reads the clock, if the stage still runs

    @property
    def _rest(self) -> float:
        return max(0.0, self.workers * self.elapsed - self.worked - self.starved)

    def record(
        self,
        name: str,
        items: int,
        queued: int,
        faults: Faults,
        *,
        source: bool = False,
        reads: bool = False,
    ) -> StageRecord:
        """Return the record of the stage; the arguments are counted elsewhere.

        Without `each`, the caller replaces the seconds of workers that were busy, and those by cause.
        """
        return StageRecord(
            name=name,
            backend=self.backend.name,
            num_workers=self.workers,
            items=items,
            busy=self.worked,
            starved=self.starved,
            blocked=self.blocked,
            other=self.other,
            **self._seconds,
            gil_waits=snapshot(self._gil_waits),
            sending=self.sending,
            bytes=self._weight * self._tasks // self._weighed if self._weighed else None,
            arrays=self._array_weight / self._weight if self._weight else 0.0,
            queued=queued,
            faults=faults + Faults(0, 0, self._retried, self.restarted),
            spans=snapshot(self._spans),
            since=self._dropped,
            first=self.first,
            parts=tuple(self._busy_of) if self._in_turn else (),
            coroutines=self._use._replace(step=name) if self._concurrency else None,
            full=self.full,
            in_process=self.backend.in_process,
            source=source,
            reads=source or reads,
            options=self._options,
        )
