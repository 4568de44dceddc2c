"""The one worker: what every worker of every backend does, step by step.

A backend gives it messages and takes its events. It seeds itself, runs the user's `init_fn`, opens
a fetcher for each epoch and answers tasks. It does not know whether it lives in a thread, in a
process or in the caller, nor how its messages travel.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from dataclasses import replace
from time import perf_counter
from typing import Any, Protocol

from hybridloader.contract import Payload
from hybridloader.datapipes import seed_datapipe
from hybridloader.errors import Failure, ResultNotSendable, no_stop, twin
from hybridloader.fetch import Abandoned, EndOfShard, Fetcher, Flag
from hybridloader.messages import (
    Begin,
    Done,
    Event,
    Exhausted,
    Failed,
    First,
    Message,
    Ready,
    Stop,
    Task,
    WorkerSpec,
)
from hybridloader.refresh import apply
from hybridloader.seeds.draws import Draws
from hybridloader.seeds.seeding import ProcessSeeds, Seeds, seeds_by_sample
from hybridloader.states.carried import Carried, resumed
from hybridloader.worker_info import describe


class Worker:
    """One worker, driven from outside by `step`.

    Whatever the user's code raises as an `Exception` becomes the answer to a task: an error in a
    sample answers that task, an error in `init_fn` or in opening the dataset answers every task of
    the epoch. If the worker reads its own shard, the error answers the first task, and then the
    shard has ended. Anything else (`SystemExit`, `KeyboardInterrupt`) ends the worker.

    Parameters
    ----------
    worker
        Its number, from 0.
    spec
        What all workers of the stage are told; its dataset is the copy that this worker reads.
    seeds
        How it comes to its random numbers.
    wrap
        Makes the payload of a result.
    cancelled
        Up once the iterator was closed, so that the rest of a batch can be left out.
    """

    def __init__(
        self,
        worker: int,
        spec: WorkerSpec,
        seeds: Seeds,
        wrap: Callable[[Any], Payload],
        cancelled: Flag,
    ) -> None:
        self.worker = worker
        self._spec = spec
        self._seeds = seeds
        self._wrap = wrap
        self.cancelled = cancelled
        self._draws = _draws_of(spec, worker, seeds)
        if self._draws is not None and spec.seeding is not None:
            self._seeds = seeds_by_sample(seeds, any_thread=spec.seeding.any_thread)
        self.info = self._describe()
        self._fetcher: Fetcher | None = None
        self._initialised = False
        self._broken: Exception | None = None
        self._told = False  # in this epoch, why it is broken
        self._exhausted = False

    def open(self) -> Ready:
        """Seed, run `init_fn`, open the first fetcher."""
        spec = self._spec
        self.cancelled.draws = self._draws
        with self._seeds.initialising(spec.base_seed, self.worker):
            if self._draws is not None:
                self._draws.prepare()
            try:
                if spec.shared_seed is not None:
                    # As torch, before init_fn: the seeds that init_fn sets are the ones used.
                    seed_datapipe(spec.fetch.dataset, spec.shared_seed)
                if spec.init_fn is not None and spec.workers > 0:
                    spec.init_fn(self.worker)
                self._initialised = True
                if spec.starts:
                    self._fetcher = resumed(spec.fetch, spec.starts[self.worker], self.cancelled)
                else:
                    self._fetcher = spec.fetch.open(None, self.cancelled)
                if spec.skip:
                    skip = getattr(self._fetcher, "skip", None)
                    if skip is not None:
                        skip(spec.skip)
            except Exception as error:
                if spec.workers == 0:
                    raise
                self._broken = no_stop(error)
            return Ready(self.worker, self._first_state() if spec.tells else None)

    def _first_state(self) -> Carried | Failure | None:
        if self._broken is not None:
            return Failure(twin(self._broken))
        starts = self._spec.starts
        # Behind results that came since a state, the next one is told when it is due.
        return None if starts and starts[self.worker].results_since else self._state

    @property
    def _state(self) -> Carried | None:
        """Return the state of the dataset as it is now, if it has one."""
        now: Callable[[], Carried] | None = getattr(self._fetcher, "carried_now", None)
        return None if now is None else now()

    def close(self) -> None:
        """End the work and close what the worker was reading."""
        self._let_go()
        if self._draws is not None:
            self._draws.release()

    def step(self, message: Task | Begin | First) -> Event | None:
        """Do what `message` says; give what there is to report, or None."""
        if isinstance(message, First):
            if self._draws is not None:
                self._draws.begin_at(message.item, message.epoch)
            return None
        with self._seeds.working():
            if isinstance(message, Begin):
                self._begin(message)
                return None
            return self._answer(message)

    def _begin(self, message: Begin) -> None:
        self._exhausted = self._told = False
        before = self._fetcher  # kept until there is another, which takes over its threads
        self._let_go()
        if self._draws is not None and self._spec.seeding is not None:
            self._draws.begin(replace(self._spec.seeding, epoch=message.epoch))
            self.cancelled.draws = self._draws
        if not self._initialised:
            return  # init_fn failed, and that stays the answer to every task
        self._broken = None
        try:
            apply(self._spec.fetch.dataset, message.changes)
            self._fetcher = self._spec.fetch.open(message.shared_seed, self.cancelled)
        except Exception as error:
            self._broken = no_stop(error)
        del before

    def _let_go(self) -> None:
        """Close what the fetcher reads, if it reads an iterator of its own."""
        fetcher, self._fetcher = self._fetcher, None
        close = getattr(fetcher, "close", None)
        if close is None:
            return
        try:
            close()
        except Exception:  # of a generator's `finally`: as Python, which ignores and shows it
            traceback.print_exc()

    def _answer(self, task: Task) -> Event | None:
        if self._exhausted:
            return None
        try:
            if self._broken is not None:
                if self._told and getattr(self._spec.fetch, "in_turn", False):
                    raise EndOfShard  # it will never have anything to give, and the others have
                self._told = True
                return Failed(self.worker, task.seq, Failure(twin(self._broken)), self._position)
            assert self._fetcher is not None
            began = perf_counter()
            payload = self._packed(self._fetcher(task.index))
            seconds = perf_counter() - began
            return Done(self.worker, task.seq, payload, seconds, self._position)
        except EndOfShard:
            self._exhausted = True
            return Exhausted(self.worker, task.seq, self._position, self._state)
        except Abandoned:
            return None
        except Exception as error:
            # torch lets a StopIteration through, and a map-style dataset that leaks one ends the
            # user's loop early, without a word.
            return Failed(self.worker, task.seq, Failure(no_stop(error)), self._position)

    def _packed(self, result: Any) -> Payload:
        try:
            return self._wrap(result)
        except ResultNotSendable:
            mend = getattr(self._fetcher, "mend", None)
            mend = mend or getattr(self._spec.fetch, "mend", None)
            if mend is None:
                raise
            return self._wrap(mend(result, self._wrap))

    @property
    def _position(self) -> int:
        """How far it is in its shard, in samples."""
        return getattr(self._fetcher, "position", 0)

    def _describe(self) -> Any:
        """This worker's `WorkerInfo`; None when the caller does the work itself."""
        spec = self._spec
        if spec.workers == 0:
            return None
        rng = self._seeds.generators(spec.base_seed, self.worker)
        if rng is not None and self._draws is not None:
            rng = self._draws.rng() or rng
        return describe(
            id=self.worker,
            num_workers=spec.workers,
            seed=spec.base_seed + self.worker,
            dataset=spec.fetch.dataset,
            rng=rng,
            worker_method=self._seeds.method,
        )


def _draws_of(spec: WorkerSpec, worker: int, seeds: Seeds) -> Draws | None:
    """What seeds the samples of this worker, if each is to be seeded."""
    origin = spec.seeding
    if origin is None:
        return None
    shared = seeds.method == "thread" or (origin.any_thread and not isinstance(seeds, ProcessSeeds))
    if not (shared or getattr(spec.fetch, "threads", 1) > 1):
        return Draws(origin, worker)
    from hybridloader.seeds.thread_draws import ThreadDraws

    return ThreadDraws(origin, worker, stage=spec.stage)


class Source(Protocol):
    """Where a worker's messages come from."""

    def get(self) -> Message:
        """The next message; waits for it."""


def run(worker: Worker, source: Source, report: Callable[[Event], None]) -> None:
    """Answer messages until `Stop`, or until nobody waits: the loop of a worker with its own thread."""
    try:
        report(worker.open())
        while True:
            message = source.get()
            if isinstance(message, Stop) or worker.cancelled.up:
                return
            event = worker.step(message)
            del message  # slots of what it held go back with the event
            if event is not None:
                report(event)
            del event  # a batch must not outlive its sending
    finally:
        worker.close()
