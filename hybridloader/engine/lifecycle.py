"""Start and end of a stage: its workers start, epochs begin and end, and any thread closes it.

One lock serialises the thread that pulls and the one that closes; the crew and the scheduler need
none of their own. A caller of `close` that can't have the lock, or is the pulling thread itself,
leaves the end to the call that is under way.
"""

from __future__ import annotations

import math
import os
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from hybridloader._support.errors import IteratorClosed, WorkerDied, no_answer
from hybridloader._support.torch_modes import Modes, modes_here
from hybridloader.engine.contract import CLOSING, Backend, Crew, WorkerHandle
from hybridloader.engine.crews import ended_with
from hybridloader.engine.diagnosis import WorkerReport
from hybridloader.engine.feed import Feed, FlowControl, Observer
from hybridloader.engine.messages import Begin, Done, Exhausted, Last, Ready, Result, WorkerSpec
from hybridloader.engine.numbering import ItemCounter, NumberedSending
from hybridloader.engine.refresh import Change
from hybridloader.engine.reorder import ReorderLimit
from hybridloader.engine.restart import RestartPolicy
from hybridloader.engine.scheduler import Dispatch, Fault, Scheduler, round_robin
from hybridloader.engine.states import WorkerState
from hybridloader.engine.supervision import Supervisor
from hybridloader.engine.worker_table import WorkerTable

if TYPE_CHECKING:
    from hybridloader.memory.page_locks import PageLocks

T = TypeVar("T")


class Lifecycle(ABC):
    """A scheduler and a crew, from their first epoch to their end.

    A call that uses them holds `_pulling` and is counted in `_inside`. It ends all at last if they were
    closed meanwhile: by the user's code, a signal's handler or a finalizer.

    Making one raises `BackendUnavailable` or `ShippingError`, before any worker has started.
    """

    def __init__(
        self,
        backend: Backend,
        spec: WorkerSpec,  # ``workers == 0`` means one worker in the caller's context
        *,
        lookahead: int,  # tasks under way or waiting, at most; 0: one, only while it is asked for
        ordered: bool = True,  # give results in the order of their indices
        reorder: ReorderLimit | None = None,  # results that may wait besides, behind a late one
        timeout: float = 0,  # seconds to wait for one result; 0: for ever
        # False: no epoch follows, so workers end with their shards, and all of them with the epoch.
        persistent: bool = False,
        dispatch: Dispatch = round_robin,  # chooses the worker of the next task
        flow_control: FlowControl | None = None,  # is told of tasks, and may hold them back
        observer: Observer | None = None,  # is told what the meters of workers have measured
        forwards: bool = False,  # leave results unopened that go on to another process
        on_worker_death: RestartPolicy | None = None,  # None: a death is raised
        task_timeout: float = 0,  # seconds that a worker may take for one task; 0: any time
        locks: PageLocks | None = None,  # to lock the pages of results that a device will read
        counter: ItemCounter | None = None,  # to number items, under ``seeding="sample"``
        clock: Callable[[], float] = time.perf_counter,  # seconds; one for all processes
    ) -> None:
        backend.check()
        self.backend = backend
        spec = replace(spec, modes=self._modes())
        if on_worker_death is not None or task_timeout > 0:
            spec = replace(spec, tracked=on_worker_death is not None, timed=task_timeout > 0)
        self.spec = spec
        self._timeout, self._eager, self._clock = timeout, lookahead > 0, clock
        self._persistent, self._flow, self._forwards = persistent, flow_control, forwards
        self._reorder = reorder if ordered and lookahead > 1 else None
        self._observer = observer
        scheduler = Scheduler(
            max(1, spec.workers), max(1, lookahead), ordered=ordered, dispatch=dispatch
        )
        self._scheduler = scheduler
        # All the mutable state, besides that of the scheduler, the crew and the table:
        self.last = Last()
        self._source: Iterator[Any] = iter(())
        self._feed: Feed | None = None  # instead of a source that is waited for
        self._quick = self._unsent = False  # the last task was `QUICK`; one has yet to be flushed
        self._times_waits = (
            observer is not None and not backend.in_caller
        )  # else no worker is waited for
        self._waits_since = math.inf  # when somebody began to wait for a result, if that is timed
        self._untold = 0  # results that came since the observer was told of one
        self._hungry = False  # the feed had nothing when it was asked last
        self.epoch = -1  # number of the one that runs
        self._broken_off = -1  # the epoch of which nobody wants more
        self._closing = self._leaving = self._ended = self._gone = False
        self._inside = 0  # calls under way that use the crew, on the thread that has the lock
        self._death_report = ""
        self._error: Exception | None = None  # of the source; raised after all that came before it
        self.exhausted: dict[int, Exhausted] = {}  # of this epoch, by worker
        self._opened: dict[int, Ready] = {}  # those with a state or an error
        self._owner = os.getpid()
        self._pulling = threading.RLock()
        self._crew = crew = backend.open()
        self._counter, self._numbered = counter, None
        self._sender: Crew | NumberedSending = crew  # of messages to workers
        if counter is not None:
            self._sender = numbered = NumberedSending(crew, counter)
            self._numbered = numbered if counter.items else None
        self._finalizer = ended_with(self, crew)
        if locks is not None:
            crew.page_lock(locks)
        self._table = WorkerTable(self.spec, scheduler, crew, clock)
        self._supervisor: Supervisor | None = None
        if on_worker_death is not None or task_timeout > 0:
            self._supervisor = Supervisor(
                on_worker_death,
                task_timeout,
                threads=backend.in_process,
                table=self._table,
                sender=self._sender,
            )
        # Two tasks at a time leave two results at hand. A task's time counts from when it was assigned.
        self._pairs = lookahead >= 4 and self._supervisor is None
        try:
            for worker in range(len(scheduler.workers)):
                self._sender.start(worker, self.spec)
            crew.settle()
        except BaseException:
            self.close()
            raise

    @property
    def handles(self) -> Sequence[WorkerHandle]:
        return self._crew.handles()

    @property
    def closed(self) -> bool:
        return self._closing or self._elsewhere

    @property
    def _elsewhere(self) -> bool:  # this is a fork of the process that has the workers
        return os.getpid() != self._owner and not self.backend.in_caller

    @property
    def next_seq(self) -> int:
        return self._scheduler.next_in

    @property
    def queued(self) -> int:
        """Number of tasks that are under way, or wait to be handed out."""
        return len(self._scheduler.sent) + len(self._scheduler.done)

    @property
    def active(self) -> bool:
        """True if a worker may still get tasks in this epoch."""
        return 1 in self._scheduler.active

    def has_ended(self, worker: int) -> bool:
        """True if the worker's shard has ended and all that came of it was handed out."""
        scheduler = self._scheduler
        return not scheduler.active[worker] and not scheduler.load[worker]

    def report(self) -> list[WorkerReport]:
        return self._table.report()

    def lateness(self, timeout: float) -> str:
        """Word the error for no result within `timeout` seconds; from any thread."""
        return self._table.lateness(timeout)

    def begin(
        self,
        source: Iterator[Any] | Feed,
        shared_seed: int | None = None,
        changes: tuple[Change, ...] = (),
    ) -> None:
        """Begin an epoch over the indices of `source`, and fill the window with its first tasks.

        The rest of the epoch before is dropped. The first epoch needs no message: the workers open it
        when they start.
        """
        if os.getpid() != self._owner:
            self._check_process()
        self._use_crew(self._begin, source, shared_seed, changes)

    def interrupt(self, epoch: int | None = None) -> None:
        """Break this epoch off: a caller that waits for a result gets `IteratorClosed`.

        From any thread. The workers stay, for `begin`. Does nothing if another epoch than number
        `epoch` runs.
        """
        if os.getpid() != self._owner:
            return
        running = self.epoch  # another may begin meanwhile, on another thread
        if epoch is not None and epoch != running:
            return
        self._broken_off = running
        if not self._closing:
            self._crew.wake()

    def leave(self, deadline: float) -> None:
        """Let all workers begin to end, without waiting for them; `close` follows.

        It waits for the thread that pulls, until `deadline` by `time.monotonic`.
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

        Takes at most about 2 seconds. If the thread that pulls is busy in the user's own code (an
        inline worker, a sampler), this returns first and that thread ends the stage later. So it does
        if it is the one that closes: in the sampler, a signal's handler or a finalizer, which may
        come at any point of `pull`.
        """
        self._closing = True
        if os.getpid() != self._owner:
            return
        self._leaving = False  # should this return first, the thread that pulls ends it
        self._crew.wake()
        if not self._pulling.acquire(timeout=CLOSING):
            return
        try:
            self._end()
        finally:
            self._pulling.release()

    # -- the parts -------------------------------------------------------------------------------

    @abstractmethod
    def _fill(self) -> None:
        """Send tasks while there is room and the source has indices."""

    def _draw_from(self, source: Iterator[Any] | Feed) -> None:
        if isinstance(source, Iterator):
            self._source, self._feed = source, None
        else:
            self._source, self._feed = iter(()), source
        if self._eager and self._scheduler.free > 0:
            self._fill()

    def _forget(self, tasks: Iterable[int]) -> None:
        """Drop the indices of tasks that nobody will answer."""
        indices = self._table.indices
        for seq in tasks:
            del indices[seq]
            if self._flow is not None:
                self._flow.left(seq)

    def _close_for(self, fault: Fault) -> None:
        """End all because of a death, unless that was done."""
        if not self._death_report:
            refusal = "" if self._supervisor is None else self._supervisor.refusal
            self._death_report = self._table.death_report(fault, refusal)
        if not self._closing:
            self.close()

    def _check_process(self) -> None:
        if self._elsewhere:  # it would read messages to the other process
            raise no_answer(
                IteratorClosed(
                    "this iterator belongs to the process that this one was forked from; make one here"
                )
            )

    def _refuse(self) -> NoReturn:
        if self._scheduler.fault is not None:
            raise no_answer(WorkerDied(self._death_report))
        if self._ended:
            raise StopIteration
        raise no_answer(IteratorClosed(f"the iterator of stage {self.spec.stage!r} is closed"))

    def _check_wanted(self, epoch: int | None = None) -> None:
        if self._closing:
            self._refuse()
        if self._broken_off == self.epoch or (epoch is not None and epoch != self.epoch):
            raise no_answer(
                IteratorClosed(f"this pass of stage {self.spec.stage!r} was broken off")
            )

    def _use_crew(self, call: Callable[..., T], *arguments: Any) -> T:
        """Make a call that uses crew and scheduler. `pull` has this written out: it is a call less."""
        # No context manager of ours: after an interrupt in its `__enter__` it would keep the lock.
        with self._pulling:
            self._inside += 1
            try:
                return call(*arguments)
            except Exception:
                raise
            except BaseException:  # an interrupt may have swallowed an event: start afresh
                self._closing = True
                raise
            finally:
                self._inside -= 1
                if self._closing:
                    self._end()

    def _begin(
        self, source: Iterator[Any] | Feed, shared_seed: int | None, changes: tuple[Change, ...]
    ) -> None:
        if self._scheduler.fault is not None:  # heard of with a result that was handed out first
            self._close_for(self._scheduler.fault)
        if self._closing:
            self._refuse()
        scheduler = self._scheduler
        self._ended = False
        absent = [i for i, w in enumerate(scheduler.workers) if w is WorkerState.ABSENT]
        discard(scheduler.begin())
        self._forget(list(self._table.indices))
        self.exhausted.clear()
        self._opened.clear()  # those who took the place of a dead one in the pass before
        self.epoch += 1
        self._table.begin()
        try:
            number = self.epoch if self._counter is None else self._counter.epoch
            message = Begin(number, shared_seed, changes, self._modes())
            if self.epoch > 0 or message.modes != self.spec.modes:
                for worker in range(len(scheduler.workers)):
                    if worker not in absent:
                        self._sender.send(worker, message)
            if self._supervisor is not None:
                self._supervisor.begin(message, absent, first=self.epoch == 0)
        except Exception:  # not all of the workers are in this epoch
            self._closing = True
            raise
        self._error = None
        self._untold = 0
        self._draw_from(source)
        self._crew.flush()

    def _modes(self) -> Modes | None:
        """Return the modes of this thread, for workers that are threads."""
        return modes_here() if self.backend.in_process and not self.backend.in_caller else None

    def _end_epoch(self) -> NoReturn:
        error, self._error = self._error, None
        self._ended = True
        if not self._persistent:
            self.close()
        if error is not None:
            raise error
        raise StopIteration

    def _end(self) -> None:
        """End all, unless a call uses the crew (it does so at its end) or `close` is still to follow."""
        if self._gone or self._inside or self._leaving:
            return
        discard(self._scheduler.close())
        self._forget(list(self._table.indices))
        self._draw_from(iter(()))
        interrupt = sys.exc_info()[1]
        try:
            self._crew.close()  # not by the finalizer, which is called once: an interrupt may come here
        except KeyboardInterrupt:
            if not isinstance(interrupt, KeyboardInterrupt):
                raise
            return  # one more; the first is on its way, and the finalizer ends what is left
        self._finalizer.detach()
        self._gone = True


def discard(results: Sequence[Result]) -> None:
    """Free the payloads of results that nobody will be given."""
    for result in results:
        if isinstance(result, Done):
            result.payload.discard()
