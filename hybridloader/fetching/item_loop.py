"""Loop over the items of a task, in the worker: each goes through functions that may fail.

A good item costs the calls of its functions. The policy decides whether one that fails is retried,
replaced or given up. It resumes after the function that failed, as if each were a stage by itself. The
results of an item before its failure stay, except where it is retried or replaced: all or nothing then.

Only an `Exception` is caught. Nothing is counted here, because a worker sees only its own part.
"""

from __future__ import annotations

import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextvars import Context, copy_context
from dataclasses import replace
from functools import partial
from queue import Empty, SimpleQueue
from time import monotonic, sleep
from typing import Any

from hybridloader._support.text import brief
from hybridloader._support.torch_env import (
    Modes,
    TakenModes,
    modes_here,
    one_thread_on_this_thread,
    renew_autograd_engine,
)
from hybridloader._support.user_objects import Failure, add_note, foreign, place_of
from hybridloader.engine.messages import Abandoned, GivenUp, TaskContext
from hybridloader.engine.worker import SharedItems, get_worker_info, set_worker_info
from hybridloader.fetching.on_error import FailureRecord, Note, Policy, Replace, Retry, Skip, final
from hybridloader.memory.slots import on_this_thread, set_slots
from hybridloader.seeding.sample_rng import SampleRng

# -- Threads inside one worker that share the items of one call, such as the samples of a batch.
#
# In `map` the calling thread does its part of the work, so a `Fanout` of n threads starts n - 1, when
# it is first used. `begin` leaves all of it to n. They hold neither the `Fanout` nor, between two
# calls, any object of the user, and they end when the `Fanout` is collected. They are daemons, unlike
# those of `concurrent.futures`, which Python joins at exit, so an item that is stuck would hold up the
# exit.
#
# An item finds the thread-local state of the calling thread: `get_worker_info`, the slots that
# collation writes into, context variables, torch's modes (`Modes`) and its number of native threads.
# With ``seeding="shared"`` random generators are shared, and the number that an item draws depends on
# timing.


_SLICE = 0.02  # seconds between two checks of the context while waiting for a retry

Opened = list[tuple[str, Callable[[Any], Any]]]
"""Kinds of steps, and their functions as one worker calls them."""


def seeded(policy: Any, rng: SampleRng | None, key: Callable[[Any], bytes] | None = None) -> Any:
    """Return `policy` with replacements that are seeded by the `key` of the failed sample.

    None takes the key of its index.
    """
    if rng is not None and isinstance(policy, Retry):
        return replace(policy, then=seeded(policy.then, rng, key))
    if rng is not None and isinstance(policy, Replace):
        return replace(policy, fn=rng.seeded_replacement(policy.fn, key))
    return policy


def numbered(items: Iterable[Any], context: TaskContext) -> Iterator[Any]:
    """Yield `items`; `context.at` is the number of the item that was given last."""
    for context.at, item in enumerate(items):
        yield item
    context.at = -1


class NoItem(BaseException):
    """There is no item that a function could return: no error of one."""


class TaskResults:
    """Values of one task until now, and notes on its failures."""

    __slots__ = ("_ended", "_placed", "_surplus", "notes", "uneven", "values")

    def __init__(self) -> None:
        self.values: list[Any] = []
        self.notes: list[Note] = []
        self.uneven: list[tuple[int, int]] = []
        """(number of the item, values and errors in places) of each item that has not exactly one."""
        self._placed = 0  # notes of errors that come in the places of items
        self._ended = 0  # values, and such notes, of items that have ended; see `end_item`
        self._surplus = 0

    def note(self, note: Note) -> None:
        self.notes.append(note)
        self._placed += note.takes_a_place

    def end_item(self) -> None:
        """Note that all values and notes of one more item of the task are there."""
        units = len(self.values) + self._placed
        own = units - self._ended
        if own != 1:
            self.uneven.append((self._ended - self._surplus, own))
            self._surplus += own - 1
        self._ended = units

    def end_items(self) -> None:
        """Note that all items whose values and notes are there had one of these each."""
        self._ended = len(self.values) + self._placed

    @property
    def failures(self) -> list[FailureRecord]:
        return [failed for note in self.notes for failed in note.failures]

    def extend(self, other: TaskResults) -> None:
        before = len(self.values)
        self.values.extend(other.values)
        for note in other.notes:
            failures = [
                failed._replace(position=before + failed.position) for failed in note.failures
            ]
            self.note(note._replace(position=before + note.position, failures=failures))

    def hand_over(self, context: TaskContext) -> list[Any]:
        """Return the value of the task, and put the notes beside it."""
        if self.notes:
            context.add("notes", self.notes)
        if self.uneven:
            context.add("uneven", self.uneven)
        return self.values


class ItemLoop:
    """Takes items through steps under a policy, in one worker.

    Besides the kinds of `Step` there is ``"batch"``: its function returns an `Attempt`. A function may
    raise `NoItem`, in a retry too, where the last error then stands.
    """

    def __init__(
        self,
        opened: Opened,
        policy: Policy | None,  # None: no error is retried, replaced or skipped
        context: TaskContext,  # checked after every item; a cancelled context ends a wait
        helpers: Fanout | None = None,  # None: items are processed one after the other
        *,
        # Called first with each element of a task, on the thread that processes it; returns the
        # item:
        enter: Callable[[Any], Any] | None = None,
        # True: the results make one batch, so an error is raised here unless the policy skips.
        # False: it is noted, and raised or skipped where its item would have been returned:
        batch: bool = False,
        what: str | None = None,  # name of each item in errors; None: its short repr
    ) -> None:
        self._context, self._helpers, self._enter = context, helpers, enter
        self._batch, self._what = batch, what
        self._retry = policy if isinstance(policy, Retry) else None
        last = final(policy)
        self._replace = last if isinstance(last, Replace) else None
        self.skips = isinstance(last, Skip)
        self.acts = self._retry is not None or self._replace is not None
        self._steps = list(opened)
        for at, (kind, function) in enumerate(opened):
            if kind == "flat_map" and self.acts:
                self._steps[at] = kind, partial(self._at_once, function)
        self._maps: list[tuple[int, Callable[[Any], Any]]] = []  # with the number of the next step
        if all(kind == "map" for kind, _ in opened):
            self._maps = [(at, function) for at, (_, function) in enumerate(opened, 1)]

    def run(
        self,
        items: Iterable[Any],
        *,
        spared: bool = False,  # some may be `GivenUp`
        numbers: bool = True,  # note the number of the current item, in case the worker dies
        results: TaskResults | None = None,
    ) -> TaskResults:
        """Take the items of a task through the steps, and add to `results`."""
        if self._helpers is not None:
            name = "sample" if self._batch else "item"
            return self.joined(self._helpers.map(self.alone, items, self._context, name))
        context, maps = self._context, self._maps
        if results is None:
            results = TaskResults()
        if self._enter is not None:
            items = map(self._enter, items)
        if numbers and context.tracked:
            items = numbered(items, context)
        if spared or not maps:
            through = self._begin if spared else self._through
            for item in items:
                through(item, results)
                results.end_item()
                if context.cancelled:
                    raise Abandoned
            return results
        values, (begin, first), more = results.values, maps[0], maps[1:]
        for item in items:  # maps only: no function call of this package for an item
            at = begin
            try:
                item = first(item)
                if more:
                    for at, function in more:  # noqa: B007  # read after an error
                        item = function(item)
                values.append(item)
            except Exception as raised:
                error = raised
            else:
                if context.cancelled:
                    raise Abandoned
                continue
            results.end_items()
            try:  # outside the clause above, so that further errors have no context
                self.failed(item, error, results, at)
            finally:
                del error
            results.end_item()
            if context.cancelled:
                raise Abandoned
        return results

    @staticmethod
    def joined(parts: Iterable[TaskResults]) -> TaskResults:
        """Return the results of a task whose items went `alone`."""
        results = TaskResults()
        for one in parts:
            results.extend(one)
            results.end_item()
        return results

    def alone(self, item: Any) -> TaskResults:
        """Take one item through the steps. On any thread."""
        results = TaskResults()
        self._begin(item if self._enter is None else self._enter(item), results)
        return results

    def _begin(self, item: Any, results: TaskResults) -> None:
        if type(item) is GivenUp:
            self.failed(item, item.error(), results)
        else:
            self._through(item, results)

    def failed(self, item: Any, error: Exception, results: TaskResults, at: int = 1) -> None:
        """Resume with `item`, at which the function before step number `at` has raised `error`."""
        kind, function = self._steps[at - 1]
        try:
            if kind == "batch" and type(item) is not GivenUp:  # its samples were retried already
                self.note(item, error, results)
                return
            found = self._rescue(partial(_outputs, kind, function), item, error, results)
            self._each(item, iter(found), at, results)
        finally:
            del error

    def _through(self, item: Any, results: TaskResults, at: int = 0) -> None:
        """Take `item` through the steps from number `at` on, and add the outcome to `results`."""
        several: Iterator[Any]
        while at < len(self._steps):
            kind, function = self._steps[at]
            at += 1
            try:
                found = function(item)
                if kind == "map":
                    item = found
                elif kind == "batch":
                    item, outcome = found
                    whole = not outcome.empty  # the batch counts as one item
                    attempted, failures = outcome.attempted - whole, outcome.failures
                    results.note(Note(len(results.values), attempted, failures, None, whole))
                    if not whole:
                        return
                elif kind == "flat_map":
                    several = iter(found)
                elif not found:
                    return
            except Exception as raised:
                error = raised
            else:
                if kind == "flat_map":
                    self._each(item, several, at, results)
                    return
                continue
            try:  # outside the clause above, as in `run`
                self.failed(item, error, results, at)
            finally:
                del error
            return
        results.values.append(item)

    def _each(self, item: Any, several: Iterator[Any], at: int, results: TaskResults) -> None:
        """Take each of the values that a function gave for `item` on, until one raises."""
        while not self._context.cancelled:
            try:
                one = next(several)
            except StopIteration:
                return
            except Exception as error:
                self.note(item, error, results)
                return
            self._through(one, results, at)

    def _at_once(self, function: Callable[[Any], Any], item: Any) -> list[Any]:
        """Return all values that `function` gives for an item, so that no value is given twice."""
        found = []
        for one in function(item):
            found.append(one)
            if self._context.cancelled:
                raise Abandoned
        return found

    # -- a call that has failed ------------------------------------------------------------------------

    def _rescue(
        self,
        function: Callable[[Any], Iterable[Any]],
        item: Any,
        error: Exception,
        results: TaskResults,
    ) -> Iterable[Any]:
        """Return the values that ``function(item)``, which has raised `error`, gives after all.

        None if the failure is noted. A `GivenUp` is not retried.
        """
        error = self._foreign(error)
        try:
            if self._retry is not None and type(item) is not GivenUp:
                wait = min(self._retry.backoff, self._retry.max_backoff)
                for _ in range(self._retry.max_retries):
                    if not isinstance(error, self._retry.retry_on):
                        break
                    self._pause(wait)
                    wait = min(2 * wait, self._retry.max_backoff)
                    self._context.retried += 1
                    try:
                        return function(item)
                    except NoItem:
                        break
                    except Exception as raised:
                        error = self._foreign(raised)
            if self._replace is not None:
                try:
                    found = self._replace.fn(_asked(item), error)
                except Exception as raised:
                    failed = foreign(raised)
                else:
                    self.note(item, error, results, replaced=True)
                    return (found,)
                add_note(
                    failed, "The function of Replace raised this, for a sample that had failed."
                )
                # It may raise the error that it received.
                if failed.__cause__ is None and failed is not error:
                    BaseException.__setattr__(failed, "__cause__", error)
                error = failed
                del failed
            if self._batch and not self.skips:
                raise error
            self.note(item, error, results)
            return ()
        finally:
            del error  # its traceback has this frame

    def _pause(self, seconds: float) -> None:
        while seconds > 0 and not self._context.cancelled:
            sleep(min(seconds, _SLICE))
            seconds -= _SLICE
        if self._context.cancelled:
            raise Abandoned

    def note(
        self, item: Any, error: Exception, results: TaskResults, *, replaced: bool = False
    ) -> None:
        """Note that `item` has failed, and whether another value was put in its place."""
        place, index, in_place = len(results.values), _asked(item), None
        error = self._foreign(error)
        if not self._batch:
            shown = brief(index if self._what is None else self._what)
            index = index if type(index) in (int, str) else shown
            in_place = None if replaced else shown
        failed = FailureRecord(index, place, Failure(error), replaced)
        # The rest of a shard is more than one sample, and no sample of it was attempted.
        left_out = self.skips and place_of(error) != "astray"
        attempted = 0 if replaced else 1
        results.note(Note(place, attempted, [failed], in_place, replaced, left_out))

    def _foreign(self, error: Exception) -> Exception:
        return foreign(error) if self._batch else foreign(error, "a function of a pipeline")


def _asked(item: Any) -> Any:
    return item.index if type(item) is GivenUp else item


def _outputs(kind: str, function: Callable[[Any], Any], item: Any) -> Iterable[Any]:
    """Return the values that a step gives for an item."""
    found = function(item)
    if kind == "flat_map":
        several: Iterable[Any] = found
        return several
    return (found,) if kind == "map" else (item,) if found else ()


_WAIT = 0.05
"""Seconds between two checks of the context while the caller waits for helpers; no worker is woken."""

_PATIENCE = 1.5
"""Seconds that a cancelled call waits for running items. Shorter than the 1.9 s that a crew of threads
waits for its workers, longer than the second after which a worker process is terminated: an item ends
undisturbed where it would with one thread, and a stuck item delays no exit."""


class Fanout:
    """Calls a function for each of several items on `threads` threads, the caller's among them.

    Several threads may use it at once, and the items themselves may. In a forked process it starts new
    threads.
    """

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self._start_afresh()

    @staticmethod
    def of(context: TaskContext, threads: int) -> Fanout:
        """Return the `Fanout` of a worker.

        The worker keeps its threads from one epoch to the next, so a dataset finds again the files and
        connections that it keeps in a `threading.local`.
        """
        found: Fanout = context.helpers or Fanout(threads)
        context.helpers = found
        return found

    def map(
        self,
        function: Callable[[Any], Any],
        items: Iterable[Any],
        context: TaskContext | None = None,  # checked after every item
        what: str = "item",  # name of an item, for the note that its exception gets
    ) -> list[Any]:
        """``[function(item) for item in items]``.

        Items are begun in their order. After an error no other item is begun, and running ones are
        waited for; so the error raised here is the one that a loop would have raised. Raises
        `Abandoned` if the context was cancelled, when running items have ended, or after `_PATIENCE`.
        """
        job = _Job(function, items, context, what)
        helpers = min(self.threads, job.count) - 1
        try:
            if helpers > 0:
                self._call(helpers, job)
            job.take_part(helping=False)
            job.wait()
            return job.result()
        finally:
            job.forget()

    def begin(
        self,
        function: Callable[[Any], Any],
        items: Iterable[Any],
        context: TaskContext | None,
        what: str,
        ring: Callable[[], None],  # called once all items have ended, by the thread of the last one
    ) -> _Job:
        """Have `threads` helpers work as `map` does, after the jobs that were begun before; don't
        wait."""
        job = _Job(function, items, context, what, ring)
        # Start all threads at the first call: those that it uses may be busy at the next one.
        self._call(min(self.threads, job.count), job, start=self.threads)
        return job

    def _start_afresh(self) -> None:
        renew_autograd_engine()
        self._owner = os.getpid()
        self._starting = threading.Lock()
        # All the mutable state: number of threads that run, and their jobs.
        self._started = 0
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()  # None ends all threads
        self._finalizer = weakref.finalize(self, self._jobs.put, None)
        self._finalizer.atexit = False

    def _call(self, helpers: int, job: _Job, *, start: int = 0) -> None:
        """Have `helpers` threads work at `job` too, of at least `start`."""
        if self._owner != os.getpid():
            self._finalizer.detach()  # the fork may have copied its queue in any state
            self._start_afresh()
        job.surroundings = on_this_thread.slots, get_worker_info(), copy_context(), modes_here()
        start = max(start, helpers)
        if self._started < start:
            with self._starting:
                self._start(start)
        for _ in range(helpers):
            self._jobs.put(job)

    def _start(self, threads: int) -> None:
        torch: Any = sys.modules.get("torch")
        alone = torch is not None and torch.get_num_threads() == 1
        while self._started < threads:
            name = f"hybridloader-fanout-{self._started + 1}"
            args = self._jobs, alone
            threading.Thread(target=_help, args=args, name=name, daemon=True).start()
            self._started += 1


class _Job(SharedItems):
    """Items of one call; threads hold this and never the `Fanout`."""

    def __init__(
        self,
        function: Callable[[Any], Any],
        items: Iterable[Any],
        context: TaskContext | None,
        what: str,
        ring: Callable[[], None] | None = None,
    ) -> None:
        super().__init__(items, what)
        self.function: Callable[[Any], Any] | None = function
        self.count = len(self.items)
        self.context = context
        # All the other mutable state:
        self.surroundings: tuple[Any, Any, Context, Modes | None] | None = None
        """Thread-local state of the caller: slots, worker info, context variables and torch's modes."""
        self.ended = not self.count
        self.bell: SimpleQueue[None] = SimpleQueue()  # rung when all have ended
        self.ring = ring  # called when all have ended

    def take_part(self, *, helping: bool) -> None:
        """Work at items until none is left. The caller's interrupts come through at once."""
        function = self.function
        if function is None:
            return
        if self.work(function, self.context, BaseException if helping else Exception):
            self._end()

    def help(self, taken: TakenModes) -> None:
        """Take part on a thread that takes over the caller's thread-local state."""
        surroundings = self.surroundings
        if surroundings is None or not self.todo:
            return
        slots, info, context, modes = surroundings
        taken.take(modes)
        # In a worker process, every thread knows the worker; in a thread worker, only its thread.
        strange = info is not None and get_worker_info() is None
        if strange:
            set_worker_info(info)
        set_slots(slots)
        try:
            context.copy().run(self.take_part, helping=True)
        finally:
            set_slots(None)
            if strange:
                set_worker_info(None)

    def stop(self) -> bool:
        last = super().stop()
        if last:  # no thread has begun an item of it, so none would end it
            self._end()
        return last

    def _end(self) -> None:
        if self.ended:
            return
        self.ended = True
        self.bell.put(None)
        ring = self.ring
        if ring is not None:
            ring()

    def result(self) -> list[Any]:
        if self.context is not None and self.context.cancelled:
            self.forget()
            raise Abandoned
        return super().result()

    def wait_here(self) -> bool:
        return False

    def leave(self) -> bool:
        try:
            self.wait(leaving=True)
        except Abandoned:
            pass
        ended = self.ended
        self.forget()
        return ended

    def wait(self, *, leaving: bool = False) -> None:
        """Wait until the items that helpers have begun are done."""
        context, deadline = self.context, None
        while not self.ended:
            try:
                self.bell.get(timeout=_WAIT)  # in slices, so that Ctrl-C works on Windows
            except Empty:
                pass
            if leaving or (context is not None and context.cancelled):
                self.stop()
                if deadline is None:
                    deadline = monotonic() + _PATIENCE
                elif monotonic() > deadline:
                    raise Abandoned

    def forget(self) -> None:
        super().forget()
        self.function = self.surroundings = self.context = self.ring = None


def _help(jobs: SimpleQueue[_Job | None], alone: bool) -> None:
    """Work at jobs, as a thread of a `Fanout`, until there is a None."""
    if alone:
        one_thread_on_this_thread()
    taken = TakenModes()
    while (job := jobs.get()) is not None:
        job.help(taken)
        del job
    jobs.put(None)  # for the next thread
