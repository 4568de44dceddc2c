"""Placement of a stage: where its work is done, by how many workers, and with which options."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any, TypedDict

from hybridloader._support.arguments import flag, function, keywords, seconds, spelled_out, whole
from hybridloader.engine.contract import Backend, get_backend
from hybridloader.engine.messages import RestartPolicy
from hybridloader.engine.scheduler import IN_FLIGHT
from hybridloader.fetching.on_error import Policy, Replace, Retry, Skip, parse_on_error
from hybridloader.memory.limits import ranks_here
from hybridloader.seeding.sample_rng import SampleSeeding, parse_seeding


class Where(TypedDict, total=False):
    """The keywords of a stage; see `Placement`."""

    backend: str | Backend | None
    num_workers: int | str | None
    in_order: bool
    prefetch: int | None
    buffer_bytes: int | None
    timeout: float
    worker_init_fn: Callable[[int], None] | None
    threads_per_worker: int
    concurrency: int
    fuse: bool
    on_error: str | Skip | Retry | Replace | None
    on_worker_death: str | RestartPolicy | None
    task_timeout: float
    seeding: str | SampleSeeding | None


@dataclass(frozen=True)
class Placement:
    """Placement of a stage: its backend, its workers and their options.

    Parameters
    ----------
    backend
        Name of a backend, or a `Backend`. None and ``"inline"`` do the work on the thread that asks for
        the result.
    num_workers
        Number of workers, at least 1; ignored inline. None: the number of cores, by affinity and quota.
        If several ranks of a job run on this machine, an even share of its cores.
    in_order
        True returns results in the order of the items, False as they are done.
    prefetch
        Number of items of this stage that may be in flight, or done and not yet taken. None: two tasks
        for each worker, three with `threads_per_worker` and eight with `concurrency`.
    buffer_bytes
        Maximum bytes of the results of these items. An item is started if the largest result so far
        would fit.
    timeout
        Seconds to wait for the next result while a task is in flight; 0 sets no limit.
    worker_init_fn
        Called in each worker with its number before anything else; inline, with 0.
    threads_per_worker
        Number of threads in each worker. They work on the oldest task first, and then on the next.
    concurrency
        Coroutines of an ``async def`` function that each worker runs at a time, on one event loop. It
        needs no backend.
    fuse
        True if this work may be one task with that of the stages beside it that have the same workers.
        They then share the limit of `on_error`, and its records name them as one stage.
    on_error
        Policy for items that fail. None (or ``"raise"``) raises the error where the item would have
        been returned. ``"skip"``, or a `Skip`, leaves the item out. A `Retry` tries again first. A
        `Replace` substitutes another item. It needs no backend.
    on_worker_death
        None (or ``"raise"``) raises `WorkerDied`. ``"restart"``, or a `RestartPolicy`, restarts a
        worker that dies.
    task_timeout
        Seconds that a worker may take for a task; 0 sets no limit.
    seeding
        Seeding of the random numbers that functions draw. ``"sample"``, or a `SampleSeeding`, seeds
        every item by its number in the stage's input (a sample of a dataset by its index). None does so
        on threads, for all functions of a stage together; in processes it seeds each worker once.
        ``"worker"`` seeds each worker once. ``"shared"`` does not seed threads. It needs no backend.
    auto
        Parameters that are chosen by measurement before the first epoch: none (``""``),
        ``"num_workers"``, or ``"both"`` (also `backend`). Set by ``num_workers="auto"`` and
        ``backend="auto"``.
    ranks
        Number of ranks on this machine, if `num_workers` follows from it.
    """

    backend: Backend | None = None
    num_workers: int = 1
    in_order: bool = True
    prefetch: int | None = None
    buffer_bytes: int | None = None
    timeout: float = 0
    worker_init_fn: Callable[[int], None] | None = None
    threads_per_worker: int = 1
    concurrency: int = 1
    fuse: bool = True
    on_error: Policy | None = None
    on_worker_death: RestartPolicy | None = None
    task_timeout: float = 0
    seeding: SampleSeeding | str | None = None
    auto: str = ""
    ranks: int = field(default=1, compare=False)

    @classmethod
    def of(cls, stage: str, where: Where) -> Placement:
        """Make the placement of `stage` from a user's keywords, and check it."""
        keywords(f"stage {stage!r}", where, Where.__annotations__)
        given: dict[str, Any] = {key: value for key, value in where.items() if value is not None}
        faults = {
            key: of(given.pop(key), f"stage {stage!r}: {key}")
            for key, of in _POLICIES.items()
            if key in given
        }
        if "concurrency" in given:
            faults["concurrency"] = whole(
                f"stage {stage!r}: concurrency", given.pop("concurrency"), 1
            )
        backend, workers = given.pop("backend", None), given.pop("num_workers", None)
        if AUTO in (backend, workers):
            given["auto"], backend = _asked_to_choose(stage, backend, workers)
            workers = 1  # until it is chosen
        if backend is None and (given or workers is not None or faults.get("on_worker_death")):
            keys = ", ".join(key for key in where if key not in _ANYWHERE)
            raise ValueError(
                f"stage {stage!r} has {keys} but no backend, so the calling thread "
                "would do its work; pass a backend, such as backend='threads'"
            )
        for name in given.keys() & {"prefetch", "buffer_bytes", "threads_per_worker"}:
            given[name] = whole(f"stage {stage!r}: {name}", given[name], 1)
        if backend is None:
            return cls(**given, **faults)
        try:
            chosen = get_backend(backend)
        except (ValueError, TypeError) as error:
            raise type(error)(f"stage {stage!r}: {error}") from error
        if workers is None:
            ranks = given["ranks"] = ranks_here()
            workers = _cores(ranks)
        workers = whole(f"stage {stage!r}: num_workers", workers, 1)
        for name in given.keys() & {"timeout", "task_timeout"}:
            seconds(f"stage {stage!r}: {name}", given[name])
        for name in given.keys() & {"in_order", "fuse"}:
            given[name] = flag(f"stage {stage!r}: {name}", given[name])
        if "worker_init_fn" in given:
            function(f"stage {stage!r}: worker_init_fn", given["worker_init_fn"], "callable")
        return cls(backend=chosen, num_workers=workers, **given, **faults)

    @property
    def least(self) -> int:
        """Items of a task, if there are as many, so that a worker has enough to do at once."""
        if self.concurrency > 1:
            return self.concurrency if self._overlaps else _ROUNDS * self.concurrency
        return self.threads_per_worker

    @property
    def at_hand(self) -> int:
        """Tasks that a worker has at most, if any worker may do them."""
        if not self._overlaps:
            return IN_FLIGHT
        return _AHEAD if self.concurrency > 1 else _BEHIND

    @property
    def _overlaps(self) -> bool:
        """True if a worker may process items of several tasks at a time; see `WorkerSpec.overlaps`."""
        watched = self.on_worker_death is not None or self.task_timeout
        several = self.concurrency > 1 or self.threads_per_worker > 1
        return several and not self.inline and not watched

    @property
    def inline(self) -> bool:
        return self.backend is None or self.backend.in_caller


_AHEAD = 8
"""Tasks prefetched for a worker whose coroutines may be of several, each of as many items as run at a
work. With waits that are exponentially distributed, and 32 at a time, it does as much as asyncio alone:
0.95 of what it could, head and tail of the epoch included. With 2 tasks of four times as many: 0.88."""

_BEHIND = 3
"""Tasks prefetched for a worker whose threads may share several: one that ends, one that runs, and one
after it. Of items that wait for 20 ms and compute for 4.4, with 16 threads in each of two processes,
two cores are busy for 0.94 of the time; with two tasks 0.89, with four tasks 0.95."""

_ROUNDS = 4
"""Items of a task for each coroutine at a time where a worker is watched, so that it ends a task before
it begins the next. With the waits above it does 0.53 of what it could; with equal waits, 0.9."""

_ANYWHERE = ("backend", "on_error", "seeding", "concurrency")
"""Keywords that need no backend."""

_POLICIES: dict[str, Callable[[Any, str], Any]] = {
    "on_error": parse_on_error,
    "on_worker_death": RestartPolicy.of,
    "seeding": parse_seeding,
}


AUTO = "auto"


def _asked_to_choose(stage: str, backend: Any, workers: Any) -> tuple[str, Any]:
    """Return the options that ``"auto"`` leaves to be chosen, and the backend until then."""
    if backend is None or workers not in (AUTO, None):
        raise ValueError(
            f"stage {stage!r}: num_workers='auto' needs a backend, or backend='auto' chooses both; "
            "backend='auto' needs no num_workers"
        )
    return ("both", "threads") if backend == AUTO else ("num_workers", backend)


def _cores(ranks: int) -> int:
    """Number of cores of this process, one of `ranks` on the machine, rounded up."""
    from hybridloader.observe.cores import share

    return math.ceil(share(ranks))


_DEFAULTS = {one.name: one.default for one in fields(Placement)} | {"num_workers": None}

in_keywords = spelled_out(Where, _DEFAULTS)
"""Decorator of methods that take these keywords: their signature lists each with its default."""
