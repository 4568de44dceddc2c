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
"""

from __future__ import annotations

import atexit
import multiprocessing.util  # its exit handler must be registered before ours, to run after it
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from hybridloader.contract import Backend, Crew, WorkerHandle
from hybridloader.diagnosis import death, late, name_of, place
from hybridloader.errors import Failure, IteratorClosed, WorkerDied, WorkerTimeout, add_note
from hybridloader.messages import Begin, Done, Exhausted, Failed, Result, Stop, Task, WorkerSpec
from hybridloader.refresh import Change
from hybridloader.scheduler import Dispatch, Run, Scheduler, round_robin

assert multiprocessing.util is not None

_PATIENCE = 2.0
"""Seconds that `close` waits for the thread that pulls."""

_crews: weakref.WeakKeyDictionary[Crew, int] = weakref.WeakKeyDictionary()
"""Every crew and the process that owns it."""


def _close_crews() -> None:
    for crew, owner in list(_crews.items()):
        _close_crew(crew, owner)


atexit.register(_close_crews)


def _close_crew(crew: Crew, owner: int) -> None:
    if os.getpid() == owner:  # in a fork of the owner the workers are somebody else's
        crew.close()


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
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        backend.check()
        self.backend = backend
        self.spec = spec
        self._timeout = timeout
        self._persistent = persistent
        self._clock = clock
        self._eager = lookahead > 0
        workers = max(1, spec.workers)
        self._scheduler = Scheduler(workers, max(1, lookahead), ordered=ordered, dispatch=dispatch)
        # All the mutable state, besides the scheduler and the crew:
        self._epoch = -1
        self._source: Iterator[Any] = iter(())
        self._source_error: Exception | None = None
        self._indices: dict[int, Any] = {}  # of the tasks not yet handed out, for errors
        self._obituary = ""
        self._closing = self._ended = False
        self._owner = os.getpid()
        self._pulling = threading.RLock()
        self._crew = backend.open()
        _crews[self._crew] = self._owner
        self._finalizer = weakref.finalize(self, _close_crew, self._crew, self._owner)
        self._finalizer.atexit = False  # _close_crews does it, in the right order
        try:
            for worker in range(workers):
                self._crew.start(worker, spec)
        except BaseException:
            self.close()
            raise

    @property
    def handles(self) -> Sequence[WorkerHandle]:
        """The workers, as objects with `pid`, `is_alive`, `terminate` and `join`."""
        return self._crew.handles()

    @property
    def closed(self) -> bool:
        return self._closing

    def begin(
        self,
        source: Iterator[Any],
        shared_seed: int | None = None,
        changes: tuple[Change, ...] = (),
    ) -> None:
        """Begin an epoch over the indices of `source`, and fill the window with its first tasks.

        What is left of the epoch before is dropped. The first epoch needs no message: the workers
        open it when they start.
        """
        with self._pulling:
            if self._closing:
                self._refuse()
            self._ended = False
            self._discard(self._scheduler.begin())
            self._indices.clear()
            self._epoch += 1
            if self._epoch > 0:
                message = Begin(self._epoch, shared_seed, changes)
                for worker in range(len(self._scheduler.workers)):
                    self._crew.send(worker, message)
            self._source = source
            self._source_error = None
            if self._eager:
                self._fill()
            self._crew.flush()

    def __next__(self) -> Any:
        with self._pulling:
            if self._closing:
                self._refuse()
            result = self._scheduler.pop()
            if result is None:
                self._fill()
                try:
                    result = self._wait()
                except Exception:
                    raise
                except BaseException:  # an interrupt may have swallowed an event: start afresh
                    self.close()
                    raise
            # Refill before the result is opened: the workers should not wait for the consumer.
            if self._eager:
                self._fill()
                self._crew.flush()
            return self._open(result)

    def close(self) -> None:
        """End all workers: from any thread, in any state, any number of times.

        Takes at most about 2 seconds. Where the thread that pulls is busy in the user's own code
        (an inline worker), it returns without having ended it; that thread then does so itself.
        """
        self._closing = True
        if os.getpid() != self._owner:
            return
        self._crew.wake()
        if not self._pulling.acquire(timeout=_PATIENCE):
            return
        try:
            if self._scheduler.run not in (Run.CLOSING, Run.CLOSED):
                self._discard(self._scheduler.close())
            self._indices.clear()
            self._source = iter(())
            self._finalizer()
        finally:
            self._pulling.release()

    # -- the parts -------------------------------------------------------------------------------

    def _refuse(self) -> None:
        """Say why there is no next item."""
        if self._scheduler.fault is not None:
            raise WorkerDied(self._obituary)
        if self._ended:
            raise StopIteration
        raise IteratorClosed(f"the iterator of stage {self.spec.stage!r} is closed")

    def _fill(self) -> None:
        """Send tasks while there is room and the source has indices."""
        scheduler = self._scheduler
        while scheduler.candidate is not None:
            try:
                index = next(self._source)
            except StopIteration:
                scheduler.source_ended()
                return
            except Exception as error:  # kept until what came before it has been handed out
                self._source_error = error
                scheduler.source_ended()
                return
            seq, worker = scheduler.assign()
            self._indices[seq] = index
            try:
                self._crew.send(worker, Task(seq, index))
            except Exception as error:  # an index that can't be pickled
                scheduler.handle(Failed(worker, seq, Failure(error)))

    def _wait(self) -> Result:
        """Wait for the next result in turn."""
        scheduler = self._scheduler
        deadline = self._clock() + self._timeout if self._timeout > 0 else None
        while True:
            result = scheduler.pop()
            if result is not None:
                return result
            if scheduler.drain():
                self._end_epoch()
            remaining = None if deadline is None else deadline - self._clock()
            if remaining is not None and remaining <= 0:
                raise WorkerTimeout(self._lateness())
            for event in self._crew.wait(remaining):
                if not scheduler.handle(event):
                    self._discard([event])
                elif isinstance(event, Exhausted):
                    self._retire(event.worker)
            if scheduler.fault is not None:
                self._obituary = self._describe_death()
                self.close()
            if self._closing:
                self.close()
                self._refuse()

    def _retire(self, worker: int) -> None:
        """The worker's shard has ended: its place in the window goes to the others."""
        if not self._persistent and self.spec.workers > 0:
            self._scheduler.stop(worker)
            self._crew.send(worker, Stop())
        if self._eager:
            self._fill()

    def _end_epoch(self) -> None:
        error, self._source_error = self._source_error, None
        self._ended = True
        if not self._persistent:
            self.close()
        if error is not None:
            raise error
        raise StopIteration

    def _open(self, result: Result) -> Any:
        index = self._indices.pop(result.seq, None)
        if isinstance(result, Done):
            try:
                return result.payload.open()
            except Exception as error:
                add_note(error, self._place(result.worker, index, "loading the result of"))
                raise
        exception = result.failure.to_exception(self._place(result.worker, index, "fetching"))
        del result
        try:
            raise exception
        finally:
            del exception  # a traceback whose frame holds its own exception is a cycle

    def _discard(self, events: Sequence[Any]) -> None:
        for event in events:
            if isinstance(event, Done):
                event.payload.discard()

    # -- words -----------------------------------------------------------------------------------

    def _place(self, worker: int, index: Any, doing: str) -> str:
        return place(self.spec.stage, name_of(self.handles, worker), index, doing)

    def _describe_death(self) -> str:
        fault = self._scheduler.fault
        assert fault is not None
        return death(self.spec.stage, name_of(self.handles, fault.worker), fault, self._indices)

    def _lateness(self) -> str:
        sent = self._scheduler.sent
        late_ones = sorted(sent)[:1] if self._scheduler.ordered else sorted(sent)
        workers = [name_of(self.handles, sent[seq]) for seq in late_ones]
        indices = [self._indices.get(seq) for seq in late_ones]
        return late(self.spec.stage, workers, indices, self._timeout)
