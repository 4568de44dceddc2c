"""The one worker: what every worker of every backend does, step by step.

A backend gives it messages and takes its events. It seeds itself, runs the user's `init_fn`, opens
a fetcher for each epoch and answers tasks. It does not know whether it lives in a thread, in a
process or in the caller, nor how its messages travel.
"""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from typing import Any, Protocol

from hybridloader.contract import Payload
from hybridloader.errors import Failure, ResultNotSendable, twin
from hybridloader.fetch import Abandoned, EndOfShard, Fetcher, Flag, seed_datapipe
from hybridloader.messages import (
    Begin,
    Done,
    Event,
    Exhausted,
    Failed,
    Message,
    Ready,
    Stop,
    Task,
    WorkerSpec,
)
from hybridloader.refresh import apply
from hybridloader.seeding import Seeds
from hybridloader.worker_info import describe


class Worker:
    """One worker, driven from outside by `step`.

    Whatever the user's code raises as an `Exception` becomes the answer to a task: an error in a
    sample answers that task, an error in `init_fn` or in opening the dataset answers every task
    of the epoch. Anything else (`SystemExit`, `KeyboardInterrupt`) ends the worker.

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
        self.info = self._describe()
        self._fetcher: Fetcher | None = None
        self._initialised = False
        self._broken: Exception | None = None
        self._exhausted = False

    def open(self) -> Ready:
        """Seed, run `init_fn`, open the first fetcher."""
        spec = self._spec
        with self._seeds.initialising(spec.base_seed, self.worker):
            try:
                if spec.shared_seed is not None:
                    # As torch, before init_fn: the seeds that init_fn sets are the ones used.
                    seed_datapipe(spec.fetch.dataset, spec.shared_seed)
                if spec.init_fn is not None and spec.workers > 0:
                    spec.init_fn(self.worker)
                self._initialised = True
                self._fetcher = spec.fetch.open(None, self.cancelled)
            except Exception as error:
                if spec.workers == 0:
                    raise
                self._broken = error
        return Ready(self.worker)

    def step(self, message: Task | Begin) -> Event | None:
        """Do what `message` says; give what there is to report, or None."""
        with self._seeds.working():
            if isinstance(message, Begin):
                self._begin(message)
                return None
            return self._answer(message)

    def _begin(self, message: Begin) -> None:
        self._exhausted = False
        if not self._initialised:
            return  # init_fn failed, and that stays the answer to every task
        self._broken = None
        try:
            apply(self._spec.fetch.dataset, message.changes)
            self._fetcher = self._spec.fetch.open(message.shared_seed, self.cancelled)
        except Exception as error:
            self._broken = error

    def _answer(self, task: Task) -> Event | None:
        if self._exhausted:
            return None
        try:
            if self._broken is not None:
                return Failed(self.worker, task.seq, Failure(twin(self._broken)))
            assert self._fetcher is not None
            began = perf_counter()
            payload = self._packed(self._fetcher(task.index))
            return Done(self.worker, task.seq, payload, perf_counter() - began)
        except EndOfShard:
            self._exhausted = True
            return Exhausted(self.worker, task.seq)
        except Abandoned:
            return None
        except StopIteration as error:
            # torch lets it through, and a map-style dataset that leaks a StopIteration ends the
            # user's loop early, without a word. As in PEP 479, it becomes a RuntimeError.
            leak = RuntimeError("the dataset or the collate function raised StopIteration")
            leak.__cause__ = error
            return Failed(self.worker, task.seq, Failure(leak))
        except Exception as error:
            return Failed(self.worker, task.seq, Failure(error))

    def _packed(self, result: Any) -> Payload:
        try:
            return self._wrap(result)
        except ResultNotSendable:
            mend = getattr(self._spec.fetch, "mend", None)
            if mend is None:
                raise
            return self._wrap(mend(result, self._wrap))

    def _describe(self) -> Any:
        """This worker's `WorkerInfo`; None when the caller does the work itself."""
        spec = self._spec
        if spec.workers == 0:
            return None
        return describe(
            id=self.worker,
            num_workers=spec.workers,
            seed=spec.base_seed + self.worker,
            dataset=spec.fetch.dataset,
            rng=self._seeds.generators(spec.base_seed, self.worker),
            worker_method=self._seeds.method,
        )


class Source(Protocol):
    """Where a worker's messages come from."""

    def get(self) -> Message:
        """The next message; waits for it."""


def run(worker: Worker, source: Source, report: Callable[[Event], None]) -> None:
    """Answer messages until `Stop`, or until nobody waits: the loop of a worker with its own thread."""
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
