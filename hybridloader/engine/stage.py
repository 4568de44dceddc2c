"""Stage: drives one scheduler and one crew, on the thread that asks for the next item.

                  index                    Task                       index
    source ---------------->  Stage  ---------------->  Crew  ---------------->  Worker.step
   (sampler)                 |     ^                    |  ^                          |
                     assign  v     |  pop               |  |         Done / Failed    |
                          Scheduler                     |  +--------------------------+
                             ^           events         |
                             +--------------------------+

It never reads ahead of `lookahead` tasks, and never asks the source for an index without room for
its task. Where a result is late and workers rest, a `ReorderLimit` lets it read further. `lifecycle.py`
has its start and its end.

A source is an iterator, which the stage pulls and, if need be, waits for. Or it is a `Feed`, which it
never waits for: while the feed has nothing, it hands out results, and sleeps until either comes.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from typing import Any

from hybridloader._support.errors import (
    NotReady,
    Raised,
    TaskTimeout,
    WorkerTimeout,
    add_note,
    foreign,
    is_ours,
    no_answer,
)
from hybridloader._support.failure import Failure
from hybridloader.engine.feed import Observer, is_forwarded, items_in
from hybridloader.engine.lifecycle import Lifecycle, discard
from hybridloader.engine.messages import (
    Done,
    Event,
    Exhausted,
    Exited,
    Failed,
    Ready,
    Result,
    Stop,
    Task,
)
from hybridloader.engine.payload import ByReference
from hybridloader.engine.states import WorkerState

QUICK = 1e-4
"""Seconds of a task so short that two are sent at a time: what it costs to wake a worker is then more
than what the worker gains by being woken at once (decision 24)."""


class Stage(Lifecycle, Iterator[Any]):
    """Running stage: an iterator over its results. See `Lifecycle` for the parameters."""

    @property
    def items_failed(self) -> int:
        """Number of items in the task whose error was raised last; 1 if it was no list of items."""
        index = self._table.failed
        return items_in(index) if isinstance(index, list) or is_forwarded(index) else 1

    def opened(self) -> dict[int, Ready]:
        """Wait until every worker has begun; return the `Ready` of those that told a state or error."""

        def wait() -> dict[int, Ready]:
            deadline = self._clock() + self._timeout if self._timeout > 0 else None
            while WorkerState.STARTING in self._scheduler.workers:
                self._listen(self._remaining(deadline))
            told, self._opened = self._opened, {}
            return told

        return self._use_crew(wait)

    def pull(self, epoch: int | None = None, *, wait: bool = True) -> Any:
        """Return the next result of epoch number `epoch`, or of the one that runs.

        Raises `NotReady` if it has not come and `wait` is False, and `IteratorClosed` if the epoch is
        over, because it was interrupted or another has begun.
        """
        if os.getpid() != self._owner:
            self._check_process()
        with self._pulling:
            if self._closing or self._broken_off == self.epoch or epoch is not None:
                self._check_wanted(epoch)
            last, self._inside = self.last, self._inside + 1
            before = last.seq
            try:
                if self._scheduler.extra and self._scheduler.fault is None:
                    # Many results wait, and workers would rest until all of them were taken.
                    self._waits_since = math.inf  # these came while the caller was busy elsewhere
                    self._hear(self._crew.wait(0.0))
                    if self._closing or self._broken_off == self.epoch:
                        self._check_wanted()  # their wake-up may have gone into that wait
                result = self._scheduler.pop() if self._scheduler.done else None
                if result is None:
                    result = self._wait(wait)
                if self._flow is not None:
                    self._flow.left(result.seq)
                # Refill before the result is opened: the workers should not wait for the consumer.
                if self._eager:
                    self._fill()
                    if self._unsent or not (self._quick and self._scheduler.done):
                        self._crew.flush()
                        self._unsent = False
                    else:
                        self._unsent = True  # goes with the next one
                last.worker, last.seq = result.worker, result.seq
                last.position, last.extras = result.position, result.extras
                return self._hand_out(result)
            except Exception:
                raise
            except BaseException:  # an interrupt may have swallowed an event: start afresh
                self._closing = True
                last.seq = before  # nobody was given what came
                raise
            finally:
                self._inside -= 1
                if self._closing:
                    self._end()

    __next__ = pull

    # -- from the source to the workers ------------------------------------------------------------

    def _fill(self) -> None:
        scheduler, flow, feed = self._scheduler, self._flow, self._feed
        self._hungry = starved = False
        while scheduler.free > 0:
            worker = scheduler.dispatch(scheduler)
            if worker is None:
                break
            most = flow.room() if flow is not None and flow.limited else None
            if most == 0:
                break
            try:
                index = next(self._source) if feed is None else feed.draw(most)
            except StopIteration:
                scheduler.source_ended()
                starved = True
                break
            except Exception as error:
                if is_ours(error, NotReady):
                    self._hungry = starved = True
                    break
                if feed is not None and not feed.ended_by(error):
                    seq = scheduler.assign(worker)  # it comes out in its turn
                    scheduler.take_in([Failed(worker, seq, Failure(error))])
                    continue
                self._error = error
                scheduler.source_ended()
                return
            seq = scheduler.assign(worker)
            self._table.indices[seq] = index
            if scheduler.busy[worker] == 1:
                self._table.since[worker] = self._clock()
            if flow is not None:
                flow.sent(seq, index)
            try:
                self._sender.send(worker, Task(seq, index))
            except Exception as error:  # an index that can't be pickled
                result: Result = Failed(worker, seq, Failure(error))
                if feed is not None and feed.take_apart(index):
                    result = Done(worker, seq, ByReference([]))
                scheduler.take_in([result])
                if flow is not None:
                    flow.came(result)
        if flow is not None:
            flow.idle(scheduler.busy.count(0), starved=starved)

    # -- from the workers to the caller ------------------------------------------------------------

    def _wait(self, wait: bool) -> Result:
        """Return the next result in turn; wait for it, or look once if it has come."""
        scheduler = self._scheduler
        self._fill()
        if self._times_waits:
            self._waits_since = self._clock()
        deadline = self._clock() + self._timeout if self._timeout > 0 else None
        looked = False
        while True:
            if scheduler.done:
                result = scheduler.pop()
                if result is not None:
                    return result
            elif not scheduler.sent and scheduler.drain():
                self._end_epoch()
            if looked:
                raise no_answer(NotReady(f"stage {self.spec.stage!r} has no result yet"))
            if not wait:
                self._listen(0.0)
                looked = True
                continue
            waits_for_source = not scheduler.sent
            if self._feed is not None and self._hungry:
                self._feed.when_ready(self._crew.wake)
            remaining = None
            if deadline is not None or self._supervisor is not None:
                remaining = self._remaining(None if waits_for_source else deadline)
            self._listen(remaining)
            if deadline is not None and waits_for_source:
                deadline = self._clock() + self._timeout  # until now nobody else was late

    def _remaining(self, deadline: float | None) -> float | None:  # seconds; None: for ever
        remaining = None
        if deadline is not None:
            remaining = deadline - self._clock()
            if remaining <= 0:
                raise no_answer(WorkerTimeout(self._table.lateness(self._timeout)))
        return remaining if self._supervisor is None else self._supervisor.sooner(remaining)

    def _listen(self, timeout: float | None) -> None:
        """Take in the workers' events, and send more tasks."""
        flow, supervisor, scheduler = self._flow, self._supervisor, self._scheduler
        known = scheduler.fault is not None  # heard of with results that had come before
        if known:
            pass
        elif flow is None:
            self._hear(self._crew.wait(timeout))
        else:
            began = self._clock()
            events = self._crew.wait(timeout)
            flow.listening(began, self._clock())
            self._hear(events)
        if supervisor is not None and not self._closing:
            try:
                supervisor.look()
            except TaskTimeout:
                self.close()
                raise
        fault = scheduler.fault
        if fault is not None and (known or not scheduler.has_next):
            self._close_for(fault)
        if self._closing or self._broken_off == self.epoch:
            self._check_wanted()
        reorder, done, fills = self._reorder, scheduler.done, self._feed is not None
        # First what costs no call: this is asked after every wait. All the `QUICK` tasks that may wait
        # are some milliseconds of work, so a worker that rests beside a late one loses no more.
        late = reorder is not None and done and scheduler.next_out not in done and not self._quick
        if late and 0 in scheduler.busy and scheduler.stalled:
            assert reorder is not None
            scheduler.widen(reorder.extra(done))
        if fills or scheduler.extra:
            self._fill()
            self._crew.flush()

    def _hear(self, events: Sequence[Event]) -> None:
        """Take in events of workers in their order, successive results together."""
        results: list[Result] = []
        for event in events:
            if isinstance(event, (Done, Failed)):
                results.append(event)
            else:
                self._hear(results)
                results = []
                self._hear_of(event)
        if not results:
            return
        if self._pairs:
            latest = results[-1]
            self._quick = type(latest) is Done and latest.seconds < QUICK
        stale = self._scheduler.take_in(results)
        self._table.take_in(results)
        if self._numbered is not None:
            self._numbered.take_in(results)
        if self._observer is not None:
            self._tell(self._observer, results, stale)
        if self._flow is not None:
            for result in results:
                if result.seq in self._scheduler.done:
                    self._flow.came(result)
        if stale:
            discard(stale)

    def _tell(self, observer: Observer, results: list[Result], stale: list[Result]) -> None:
        """Tell the observer of results, but not of stale ones, whose times are an earlier epoch's."""
        passed_over = {id(result) for result in stale}
        for result in results:
            if id(result) in passed_over:
                continue
            self._untold += 1
            if result.extras is not None:
                observer.told(result, self._waits_since, self._untold)
                self._untold = 0

    def _hear_of(self, event: Ready | Exhausted | Exited) -> None:
        if isinstance(event, Exited):
            if self._closing:
                return
            if self._supervisor is not None:
                death = self._supervisor.take_in(event)
                if death is None:
                    if self._observer is not None:
                        self._observer.replaced(event.worker, event.cause)
                    return
                event = death
        if isinstance(event, Exhausted):
            skipped = self._scheduler.end_shard(event)
            if skipped is None:
                return
            self.exhausted[event.worker] = event
            self._forget(skipped)
            if not self._persistent and self.spec.workers > 0:
                self._scheduler.stop(event.worker)
                self._crew.send(event.worker, Stop())
            if self._eager:  # its place in the window goes to the others
                self._fill()
            return
        self._scheduler.handle(event)
        if isinstance(event, Ready):
            self._table.ready(event.worker)
            if event.told is not None:
                self._opened[event.worker] = event

    def _hand_out(self, result: Result) -> Any:
        """Return the value, or raise the error, of a task that is no longer under way."""
        table = self._table
        from_feed = result.seq not in table.indices  # an error of the feed's: it says where it was
        index = table.indices.pop(result.seq, None)
        if isinstance(result, Failed):
            table.failed = None if from_feed else index
            place = "" if from_feed else table.place(result.worker, index, "fetching")
            if self._observer is not None:
                self._observer.raised(result.worker, result.seq, result.failure.exception)
            Raised(result.failure.to_exception(place)).throw()
        payload = result.payload
        if self._forwards and payload.count is not None and "notes" not in (result.extras or ()):
            return payload
        try:
            observer = self._observer
            if observer is None or (result.extras is None and not observer.opens_slowly):
                return payload.open()
            began = self._clock()
            value = payload.open()
            observer.opened(result.seq, began, self._clock())
            return value
        except Exception as error:
            raised = Raised(foreign(error))
        add_note(raised.error, table.place(result.worker, index, "loading the result of"))
        table.failed = index
        return raised.throw()
