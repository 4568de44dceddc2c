"""The pump: drives one scheduler and one crew, on the thread of whoever asks for the next item.

                  index                    Task                       index
    source ---------------->  Stage  ---------------->  Crew  ---------------->  Worker.step
   (sampler)                 |     ^                    |  ^                          |
                     assign  v     |  pop               |  |         Done / Failed    |
                          Scheduler                     |  +--------------------------+
                             ^           events         |
                             +--------------------------+

One lock serialises the thread that pulls and whoever closes; the crew and the scheduler need none
of their own. It never reads ahead of `lookahead` tasks, and never asks the source for an index
that it has no place for.

A source is an iterator, which the pump pulls and, if need be, waits for. Or it is a `Feed`, which it
never waits for: while the feed has nothing, the pump hands out results, and sleeps until either comes.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from hybridloader.contract import Backend, WorkerHandle
from hybridloader.crews import ended_with
from hybridloader.diagnosis import WorkerReport
from hybridloader.errors import (
    IteratorClosed,
    NotReady,
    TaskTimeout,
    WorkerDied,
    WorkerTimeout,
)
from hybridloader.faults.overruns import Overruns
from hybridloader.faults.recovery import Recovery
from hybridloader.faults.restart import RestartPolicy
from hybridloader.feed import UNWATCHED, Feed, Ledger, is_sealed, items_in
from hybridloader.handing_out import hand_out
from hybridloader.messages import (
    Begin,
    Done,
    Event,
    Exhausted,
    Exited,
    Ready,
    Result,
    Stop,
    WorkerSpec,
)
from hybridloader.refresh import Change
from hybridloader.roster import Roster
from hybridloader.scheduler import ACTIVE, Dispatch, Run, Scheduler, Work, round_robin
from hybridloader.supply import Supply

if TYPE_CHECKING:
    from hybridloader.buffers.page_locks import PageLocks

_PATIENCE = 2.0
"""Seconds that `close` waits for the thread that pulls."""


class Stage(Iterator[Any]):
    """The running form of one stage: an iterator over its results.

    Parameters
    ----------
    backend
        Where the work is done.
    spec
        What the workers are told. ``spec.workers == 0`` means one worker in the caller's context.
    lookahead
        How many tasks may be under way or waiting. 0: one, and only while it is asked for.
    ordered
        Whether results come in the order of their indices.
    timeout
        Seconds to wait for one result; 0 waits for ever.
    persistent
        Whether another epoch may come. If not, a worker is told to stop as soon as its shard has
        ended, and all are ended with the epoch.
    dispatch
        Which worker gets the next task.
    ledger
        Is told what happens, and may hold tasks back.
    sealed
        Whether results that can be sent on to another process are given unopened, as payloads.
    on_worker_death
        When another worker takes the place of one that died; None: its death is raised.
    task_timeout
        Seconds that a worker may take for one task; 0: any time.
    locks
        Lock the pages in which results lie, because a device is going to read them; None: they are not.
    clock
        Seconds, monotonic.

    Raises
    ------
    BackendUnavailable, ShippingError
        Before any worker has started.
    """

    def __init__(
        self,
        backend: Backend,
        spec: WorkerSpec,
        *,
        lookahead: int,
        ordered: bool = True,
        timeout: float = 0,
        persistent: bool = False,
        dispatch: Dispatch = round_robin,
        ledger: Ledger = UNWATCHED,
        sealed: bool = False,
        on_worker_death: RestartPolicy | None = None,
        task_timeout: float = 0,
        locks: PageLocks | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        backend.check()
        self.backend = backend
        self.spec = spec if on_worker_death is None else replace(spec, tracked=True)
        self._timeout = timeout
        self._persistent = persistent
        self._clock = clock
        self._eager = lookahead > 0
        self._ledger = ledger
        self._sealed = sealed
        workers = max(1, spec.workers)
        self._scheduler = Scheduler(workers, max(1, lookahead), ordered=ordered, dispatch=dispatch)
        # All the mutable state, besides the scheduler and the crew:
        self.epoch = -1  # the number of the one that runs
        self._last_exit: Exited | None = None
        self._obituary = ""
        self._closing = self._leaving = self._ended = self._gone = False
        self._inside = 0  # calls of `begin` and `pull` under way, on the thread that has the lock
        self._broken_off = -1  # the epoch of which nobody wants more
        # Of the result that was handed out last:
        self.last_worker, self.last_seq, self.last_position = 0, -1, 0
        self.exhausted: dict[int, Exhausted] = {}  # of this epoch, by worker
        self._opened: dict[int, Ready] = {}  # those that told
        self._owner = os.getpid()
        self._pulling = threading.RLock()
        self._crew = backend.open()
        self._finalizer = ended_with(self, self._crew)
        if locks is not None:
            self._crew.page_lock(locks)
        roster = self._roster = Roster(self.spec, self._scheduler, self._crew, clock)
        self._supply = Supply(self._scheduler, self._crew, roster, ledger, clock)
        self._recovery = None if on_worker_death is None else Recovery(on_worker_death, roster)
        self._overruns: Overruns | None = None
        if task_timeout > 0:
            self._overruns = Overruns(
                roster,
                task_timeout,
                threads=backend.in_process,
                replaced=self._recovery is not None,
            )
        try:
            for worker in range(workers):
                self._crew.start(worker, self.spec)
            self._crew.settle()
        except BaseException:
            self.close()
            raise

    @property
    def handles(self) -> Sequence[WorkerHandle]:
        """The workers, as objects with `pid`, `is_alive`, `terminate` and `join`."""
        return self._crew.handles()

    @property
    def closed(self) -> bool:
        return self._closing or self._elsewhere

    @property
    def _elsewhere(self) -> bool:
        """Whether the workers are those of the process that this one was forked from."""
        return os.getpid() != self._owner and not self.backend.in_caller

    @property
    def next_seq(self) -> int:
        """The number of the next task."""
        return self._scheduler.next_in

    @property
    def items_failed(self) -> int:
        """Number of items in the task whose error was raised last; 1 if it was no list of items."""
        index = self._roster.failed
        return items_in(index) if type(index) is list or is_sealed(index) else 1

    @property
    def active(self) -> bool:
        """Whether a worker may still get tasks in this epoch."""
        return any(state in ACTIVE for state in self._scheduler.workers)

    def has_ended(self, worker: int) -> bool:
        """Whether the worker's shard has ended and all that came of it was handed out."""
        scheduler = self._scheduler
        return scheduler.workers[worker] not in ACTIVE and not scheduler.load[worker]

    def report(self) -> list[WorkerReport]:
        """What each worker is doing; from any thread."""
        return self._roster.report()

    def lateness(self, timeout: float) -> str:
        """What to say when no result has come for `timeout` seconds; from any thread."""
        return self._roster.lateness(timeout)

    def begin(
        self,
        source: Iterator[Any] | Feed,
        shared_seed: int | None = None,
        changes: tuple[Change, ...] = (),
    ) -> None:
        """Begin an epoch over the indices of `source`, and fill the window with its first tasks.

        What is left of the epoch before is dropped. The first epoch needs no message: the workers
        open it when they start.
        """
        if os.getpid() != self._owner:
            self._check_process()
        with self._pulling:
            if self._closing:
                self._refuse()
            self._inside += 1
            try:
                self._begin(source, shared_seed, changes)
            except Exception:
                raise
            except BaseException:  # an interrupt, after which not all workers may know of it
                self._closing = True
                raise
            finally:
                self._come_out()

    def opened(self) -> dict[int, Ready]:
        """Wait until every worker has begun; return what each has told, if it was to tell."""
        with self._pulling:
            self._inside += 1
            try:
                deadline = self._clock() + self._timeout if self._timeout > 0 else None
                while Work.STARTING in self._scheduler.workers:
                    remaining = None if deadline is None else deadline - self._clock()
                    if remaining is not None and remaining <= 0:
                        raise WorkerTimeout(self._roster.lateness(self._timeout))
                    if self._overruns is not None:
                        remaining = self._overruns.sooner(remaining)
                    self._listen(remaining)
                told, self._opened = self._opened, {}
                return told
            except Exception:
                raise
            except BaseException:  # as in `pull`
                self._closing = True
                raise
            finally:
                self._come_out()

    def __next__(self) -> Any:
        return self.pull(None, wait=True)

    def pull(self, epoch: int | None, *, wait: bool) -> Any:
        """The next result.

        Parameters
        ----------
        epoch
            The one whose result is wanted, by its number; None: whichever runs.
        wait
            Whether to wait for it.

        Raises
        ------
        NotReady
            It is not there yet, and is not to be waited for.
        IteratorClosed
            The epoch is over, because it was interrupted or another has begun.
        """
        if os.getpid() != self._owner:
            self._check_process()
        with self._pulling:
            if self._closing:
                self._refuse()
            if self._broken_off == self.epoch or (epoch is not None and epoch != self.epoch):
                raise IteratorClosed(f"this pass of stage {self.spec.stage!r} was broken off")
            self._inside += 1
            try:
                return self._pull(wait)
            except Exception:
                raise
            except BaseException:  # an interrupt may have swallowed an event: start afresh
                self._closing = True
                raise
            finally:
                self._come_out()

    def interrupt(self, epoch: int | None = None) -> None:
        """Nobody wants more of this epoch: whoever waits for a result gets `IteratorClosed`.

        From any thread. The workers stay, for `begin`. Nothing happens if another epoch than number
        `epoch` runs.
        """
        running = self.epoch  # another may begin meanwhile, on another thread
        if epoch is not None and epoch != running:
            return
        self._broken_off = running
        if not self._closing:
            self._crew.wake()

    def leave(self, deadline: float) -> None:
        """Let all workers begin to end, without waiting for them; `close` follows.

        Parameters
        ----------
        deadline
            Until when to wait for the thread that pulls, by `time.monotonic`.
        """
        if os.getpid() != self._owner or self._closing:
            return
        self._closing = self._leaving = True
        self._crew.wake()
        if self._pulling.acquire(timeout=max(0.0, deadline - time.monotonic())):
            try:
                if not self._inside:
                    self._crew.leave()
            finally:
                self._pulling.release()

    def close(self) -> None:
        """End all workers: from any thread, in any state, any number of times.

        Takes at most about 2 seconds. Where the thread that pulls is busy in the user's own code
        (an inline worker, a sampler), it returns without having ended it; that thread then does so
        itself. So does it where it is that very thread: in the sampler, in a signal's handler or in a
        finalizer, which may come at any point of `pull`.
        """
        self._closing = True
        if os.getpid() != self._owner:
            return
        self._crew.wake()
        if not self._pulling.acquire(timeout=_PATIENCE):
            self._leaving = False
            return
        try:
            self._leaving = False
            if not self._inside:
                self._end()
        finally:
            self._pulling.release()

    # -- the parts -------------------------------------------------------------------------------

    def _check_process(self) -> None:
        if self._elsewhere:  # it would read what the workers send to the other
            raise IteratorClosed(
                "this iterator belongs to the process that this one was forked from; make one here"
            )

    def _come_out(self) -> None:
        """A call of `begin` or `pull` ends; if it was closed meanwhile, so does all.

        Both hold the lock by `with` itself. A context manager of ours around lock and count would be
        shorter, and an interrupt within its `__enter__` would keep the lock for ever.
        """
        self._inside -= 1
        # Whoever has it leave closes it.
        if self._closing and not (self._inside or self._leaving):
            self._end()

    def _end(self) -> None:
        if self._gone:
            return
        if self._scheduler.run not in (Run.CLOSING, Run.CLOSED):
            self._discard(self._scheduler.close())
        self._supply.forget()
        self._supply.end()
        self._crew.close()  # not by the finalizer, which is called once: an interrupt may come here
        self._finalizer.detach()
        self._gone = True

    def _begin(
        self, source: Iterator[Any] | Feed, shared_seed: int | None, changes: tuple[Change, ...]
    ) -> None:
        self._ended = False
        absent = [i for i, w in enumerate(self._scheduler.workers) if w is Work.ABSENT]
        self._discard(self._scheduler.begin())
        self._supply.forget()
        self.exhausted.clear()
        self._opened.clear()  # those who took the place of a dead one in the pass before
        self.epoch += 1
        self._roster.begin()
        if self.epoch > 0:
            message = Begin(self.epoch, shared_seed, changes)
            for worker in range(len(self._scheduler.workers)):
                if worker not in absent:
                    self._crew.send(worker, message)
        if self._recovery is not None:
            self._recovery.begin(shared_seed)
            for worker in absent:
                self._recovery.start(worker)
        self._supply.begin(source)
        if self._eager:
            self._supply.fill()
        self._crew.flush()

    def _pull(self, wait: bool) -> Any:
        result = self._scheduler.pop()
        if result is None:
            self._supply.fill()
            result = self._wait() if wait else self._look()
        self._ledger.left(result.seq)
        # Refill before the result is opened: the workers should not wait for the consumer.
        if self._eager:
            self._supply.fill()
            self._crew.flush()
        self.last_worker, self.last_seq = result.worker, result.seq
        self.last_position = result.position
        return hand_out(result, self._roster, sealed=self._sealed)

    def _refuse(self) -> None:
        """Say why there is no next item."""
        if self._scheduler.fault is not None:
            raise WorkerDied(self._obituary)
        if self._ended:
            raise StopIteration
        raise IteratorClosed(f"the iterator of stage {self.spec.stage!r} is closed")

    def _wait(self) -> Result:
        """Wait for the next result in turn."""
        scheduler = self._scheduler
        deadline = self._clock() + self._timeout if self._timeout > 0 else None
        while True:
            result = self._ready()
            if result is not None:
                return result
            remaining = None
            if deadline is not None and scheduler.sent:
                remaining = deadline - self._clock()
                if remaining <= 0:
                    raise WorkerTimeout(self._roster.lateness(self._timeout))
            self._supply.when_ready(self._crew.wake)
            waits_for_source = not scheduler.sent
            if self._overruns is not None:
                remaining = self._overruns.sooner(remaining)
            self._listen(remaining)
            if deadline is not None and waits_for_source:
                deadline = self._clock() + self._timeout  # until now nobody else was late

    def _look(self) -> Result:
        """The next result in turn, if it is there."""
        result = self._ready()
        if result is None:
            self._listen(0.0)
            result = self._ready()
        if result is None:
            raise NotReady(f"stage {self.spec.stage!r} has no result yet")
        return result

    def _ready(self) -> Result | None:
        """The next result in turn, if it has come; ends the epoch if there is none any more."""
        result = self._scheduler.pop()
        if result is None and self._scheduler.drain():
            self._end_epoch()
        return result

    def _listen(self, timeout: float | None) -> None:
        """Take in what the workers report, and give them more to do."""
        scheduler = self._scheduler
        began = self._clock()
        events = self._crew.wait(timeout)
        self._ledger.listening(self._clock() - began)
        for event in events:
            self._hear(event)
        if self._overruns is not None and not self._closing:
            try:
                self._overruns.look()
            except TaskTimeout:
                self.close()
                raise
        if scheduler.fault is not None:
            refusal = "" if self._recovery is None else self._recovery.refusal
            fault = scheduler.fault
            self._obituary = self._roster.obituary(fault, self._last_exit, refusal)
            self.close()
        if self._closing:
            self._refuse()
        if self._broken_off == self.epoch:
            raise IteratorClosed(f"this pass of stage {self.spec.stage!r} was broken off")
        if self._supply.fed:
            self._supply.fill()
            self._crew.flush()

    def _hear(self, event: Event) -> None:
        """Take in one event of a worker."""
        if isinstance(event, Exited):
            if self._closing:
                return
            if self._overruns is not None:
                event = self._overruns.explained(event)
            if (
                event.cause is not None
                and self._recovery is not None
                and self._recovery.take_in(event)
            ):
                self._crew.flush()
                return
            self._last_exit = event
        wanted = self._supply.take_in(event)
        self._roster.heard(event, wanted)
        if not wanted:
            self._discard([event])
        elif isinstance(event, Exhausted):
            self.exhausted[event.worker] = event
            self._supply.forget_skipped()
            self._retire(event.worker)
        elif isinstance(event, Ready) and event.told is not None:
            self._opened[event.worker] = event

    def _retire(self, worker: int) -> None:
        """The worker's shard has ended: its place in the window goes to the others."""
        if not self._persistent and self.spec.workers > 0:
            self._scheduler.stop(worker)
            self._crew.send(worker, Stop())
        if self._eager:
            self._supply.fill()

    def _end_epoch(self) -> None:
        error = self._supply.take_error()
        self._ended = True
        if not self._persistent:
            self.close()
        if error is not None:
            raise error
        raise StopIteration

    def _discard(self, events: Sequence[Any]) -> None:
        for event in events:
            if isinstance(event, Done):
                event.payload.discard()
