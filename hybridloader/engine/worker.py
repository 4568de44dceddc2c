"""Worker: the steps of every worker of every backend, and the loop of threads and processes.

A backend gives it messages and takes its events. It seeds itself, runs the user's `init_fn`, opens
a fetcher for each epoch and answers tasks. It does not know whether it lives in a thread, in a
process or in the caller, nor how its messages travel.
"""

from __future__ import annotations

import pickle
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from threading import get_ident
from time import perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple

from hybridloader._support import system
from hybridloader._support.states import load_into
from hybridloader._support.text import brief
from hybridloader._support.torch_env import TakenModes, seed_datapipe, when_imported
from hybridloader._support.user_objects import Failure, Raised, add_note, foreign, show, twin
from hybridloader.engine.dataset_state import Change, ShardStart, apply, undo_load
from hybridloader.engine.messages import (
    Abandoned,
    Begin,
    Done,
    EndOfShard,
    Event,
    Exhausted,
    Failed,
    Fetch,
    Fetcher,
    Message,
    Payload,
    Ready,
    StartedTask,
    Stop,
    Task,
    TaskContext,
    WorkerSpec,
)
from hybridloader.engine.meter import MEASURES, Meter
from hybridloader.seeding.sample_rng import GLOBALS, SampleRng, now
from hybridloader.seeding.worker_seeds import (
    ProcessSeeds,
    ThreadSeeds,
    WorkerSeeds,
    seeds_by_sample,
)

if TYPE_CHECKING:
    from torch.utils.data._utils.worker import WorkerInfo


# -- `get_worker_info` for workers of every kind, and functions to be called at the end of a worker.
#
# torch keeps the result in one global of the process, which is wrong for a worker thread. Here it is
# kept per thread, and the code of torch's function is replaced by code that reads the thread's result
# first. So it does not matter how the function was imported. torch's `collate_tensor_fn` receives None
# (docs/decisions.md has the reason). Limits:
#
# - In a worker thread the result belongs to that thread and to those of `threads_per_worker`. Other
#   threads that a dataset starts receive None, as in the training script; pass them the `WorkerInfo`. In
#   a worker process every thread receives the result, as with torch.
# - Code that reads ``torch.utils.data._utils.worker._worker_info`` finds torch's global, which is set in
#   worker processes and stays None in threads. A function that was made out of torch's code before the
#   first worker started finds the same.
# - The first worker of a process changes torch's function for good; without a worker its answer is the
#   same as before.


class _Current(threading.local):
    info: WorkerInfo | None = None
    asked = False  # code on this thread, which is a worker's, has asked for it


_current = _Current()

_at_end: dict[int, list[Callable[[], Any]]] = {}
"""By the identity of the worker's info. A process has one worker, whose info may be replaced."""


def _forget_thread() -> None:
    """Forget the info of the thread that forked: the child is no worker, or a worker of another loader.

    The functions that workers of the parent registered are the parent's, too.
    """
    vars(_current).clear()
    _at_end.clear()


system.at_fork(after_in_child=_forget_thread)


def get_worker_info() -> WorkerInfo | None:
    """Return information about the worker that runs this code; None outside of any worker.

    Returns
    -------
    WorkerInfo or None
        torch's own class (or, in a process that has not imported torch, one with the same
        attributes): `id`, `num_workers`, `seed` (``base_seed + id``), `dataset` (the copy
        that this worker reads), `rng` (random generators of this worker alone, for threads) and
        `worker_method` (``"thread"``, ``"multiprocessing"`` or ``"inline"``).
    """
    info = _current.info
    if info is not None:
        _current.asked = True
    return info


def asked_for_info() -> bool:
    """True if code on this thread may divide data by the worker's number, or need not."""
    info = _current.info
    return _current.asked or info is None or info.num_workers < 2


@dataclass(frozen=True)
class Description:
    """Fields of a `WorkerInfo`, in place of one in a process that has not imported torch."""

    id: int
    num_workers: int
    seed: int
    dataset: Any
    rng: Any
    worker_method: str


def set_process_info(info: Any) -> None:
    """Make `info` the answer on every thread of this process: it belongs to one worker."""
    vars(_current).pop("info", None)
    _Current.info = info
    when_imported("torch", _teach_process)


def _teach_process() -> None:
    from torch.utils.data._utils import worker

    _teach_torch()
    info: Any = _Current.info
    if isinstance(info, Description):
        _Current.info = worker.WorkerInfo(**vars(info))
    torchs: Any = worker
    torchs._worker_info = _Current.info  # for code that reads it; a process has one worker


def set_worker_info(info: WorkerInfo | None) -> None:
    """Make `info` the answer on this thread, for our function and for torch's."""
    if info is not None:
        _teach_torch()
    _current.info = info


@contextmanager
def worker_info_set(info: WorkerInfo | None) -> Iterator[None]:
    """Make `info` the answer on this thread within the block."""
    before = _current.info
    set_worker_info(info)
    try:
        yield
    finally:
        _current.info = before


def _teach_torch() -> None:
    """Give torch's function code that asks the thread first. Once per process."""
    from torch.utils.data._utils import collate, worker

    original: Any = worker.get_worker_info
    if original.__globals__.get("_hybridloader_current") is _current:
        return

    def body() -> Any:
        info = _hybridloader_current.info  # type: ignore[name-defined]  # noqa: F821
        if info is None:
            return _worker_info  # type: ignore[name-defined]  # noqa: F821
        if _hybridloader_caller(1).f_code.co_filename == _hybridloader_collate:  # type: ignore[name-defined]  # noqa: F821
            return None
        _hybridloader_current.asked = True  # type: ignore[name-defined]  # noqa: F821
        return info

    original.__globals__.update(
        _hybridloader_current=_current,
        _hybridloader_caller=sys._getframe,
        _hybridloader_collate=collate.default_collate.__code__.co_filename,
    )
    original.__code__ = body.__code__


def at_end_of_worker(function: Callable[[], Any]) -> bool:
    """Register `function` for the end of the worker that runs this code; return False without a worker.

    An error that the function raises is printed. It may run on another thread of the worker.
    """
    info = get_worker_info()
    if info is None:
        return False
    _at_end.setdefault(id(info), []).append(function)
    return True


def end_worker(info: Any) -> None:
    """Call the functions that were registered in the worker with this info, the last one first."""
    keys = [*_at_end] if info.worker_method == "multiprocessing" else [id(info)]
    for key in keys:
        for function in reversed(_at_end.pop(key, ())):
            try:
                function()
            except Exception as error:  # the worker ends in any case
                show(error)


# -- Items that several threads of a worker, or of a crew, process together: samples of tasks or calls.
#
# There is no lock: items are handed out by `deque.popleft` and counted by `list.pop`, which are atomic
# on every build of CPython. That takes 0.3 us for each item; a queue entry and a future each, as
# `concurrent.futures` has them, 10.
#
# A crew of threads sends such tasks to all its workers (`SharedTask`). The threads, or coroutines, of
# one worker fetch the samples of several of its tasks at a time (`TasksUnderWay`).


NEW = 1 / 8  # part of the newest task in the mean of seconds

_LEAST = 1e-3
"""Seconds of a task, with all threads of a worker, from which the next tasks begin early; they do until
tasks take half of that. Passing a task to another thread takes 2 % of it. A crew of threads has a
similar limit."""


class SharedItems:
    """Items, begun in their order, each by one thread, and their results.

    After an error no other item is begun, and running ones still end. So all items before the failed
    one have ended when all have, and the error of the lowest place is the one that a loop would raise.
    """

    def __init__(self, items: Iterable[Any], name: str = "") -> None:
        self._name = name  # of an item, for the note that its error gets
        self.items = items if isinstance(items, (list, tuple, range)) else list(items)
        count = len(self.items)
        # All the mutable state:
        self.todo = deque(enumerate(self.items))
        self.begun: dict[int, int] = {}  # places in progress, and the identity of the thread
        self.results: list[Any] = [None] * count
        self.errors: dict[int, BaseException] = {}
        self.seconds: list[float] = []  # seconds of each item
        # One entry fewer than items: the last to end finds it empty.
        self._unfinished = [None] * (count - 1)

    def work(
        self,
        function: Callable[[Any], Any],
        context: TaskContext | None,  # checked after every item
        catch: type[BaseException] = Exception,  # errors of items; others are raised immediately
    ) -> bool:
        """Process items until all have begun; return True if this call has finished the last one."""
        todo, begun, results, me = self.todo, self.begun, self.results, get_ident()
        since = perf_counter()
        while True:
            try:
                place, item = todo.popleft()
            except IndexError:
                return False
            begun[place] = me
            try:
                results[place] = function(item)
            except catch as error:
                self.errors[place] = error
                self.stop()
            del item
            now = perf_counter()
            self.seconds.append(now - since)
            since = now
            del begun[place]
            if self._finish():
                return True
            if context is not None and context.cancelled:
                return self.stop()

    def stop(self) -> bool:
        """Begin no more items; return True if none is in flight."""
        last = False
        try:
            while True:
                self.todo.popleft()
                last = self._finish()
        except IndexError:
            return last

    def _finish(self) -> bool:
        """Count an item that has ended or will not be begun; True for the last one."""
        try:
            self._unfinished.pop()
        except IndexError:
            return True
        return False

    def result(self) -> list[Any]:
        """Return the results, once all have ended; raise the error of the first bad item. Once."""
        try:
            if self.errors:
                place = min(self.errors)
                if self._name:
                    add_note(self.errors[place], f"{self._name} {brief(self.items[place])}")
                Raised(self.errors[place]).throw()
            return self.results
        finally:
            self.forget()

    def forget(self) -> None:
        """Drop all objects of the user: a thread that comes late still finds this."""
        self.todo.clear()
        self.items = self.results = []
        self.errors = {}


class SharedTask(SharedItems):
    """Task of one worker, whose samples several workers fetch. A message to each of them."""

    def __init__(
        self,
        worker: int,
        task: Task,
        samples: Any,  # indices of the samples
        measures: deque[Any],
    ) -> None:
        super().__init__(samples)
        self.worker, self.seq, self.task = worker, task.seq, task
        self.measures = measures
        """Measures of workers that fetched samples of this epoch's tasks and have answered none of
        them."""

    def forget(self) -> None:
        super().forget()
        self.task = self.task._replace(index=None)


class Fetched(NamedTuple):
    """Message of a worker to itself: the samples of a task have ended."""

    task: Task
    samples: StartedTask


class TasksUnderWay:
    """Source of messages for a worker, which begins tasks as they come.

    The threads fetch samples of the oldest task first. They start on the next task as soon as all
    samples of the oldest have begun, so a slow sample delays one thread only. The worker's own thread
    fetches no samples of these tasks: it takes messages, and collates and answers the tasks in order,
    each after its samples have ended. So a collation that draws random numbers behaves as with one task
    at a time. Coroutines run on the worker's own thread, while it would wait for a message.

    Short tasks are done one at a time, and so is the first task with threads: passing a task to another
    thread and back takes about 20 us.

    Messages that are no such task wait until those before them are answered. `next` and `report` are for
    the worker's loop, in place of the functions given.
    """

    def __init__(
        self,
        begin: Callable[[Task, Callable[[], None]], StartedTask | None],  # `Worker.begin`
        context: TaskContext,
        get: Callable[[], Any],  # waits for a message; returns None if `ring` was called
        report: Callable[[Event], None],
        listen: Callable[[], Callable[[], None]],  # gives `ring`; called before it is needed
        *,
        early: bool = False,  # begin tasks early from the first on
    ) -> None:
        self._begin, self._context = begin, context
        self._get, self._report, self._listen = get, report, listen
        # All the mutable state:
        self._ring: Callable[[], None] | None = None  # called by threads when samples have ended
        self._mean = 0.0  # recent seconds of a task
        self._longest = 0.0  # most seconds of a sample of the current task
        self._early = early  # tasks begin before earlier ones are answered
        self._begun: deque[Fetched] = deque()
        self._later: deque[Any] = deque()

    def next(self) -> Any:
        """Wait for the worker's next message."""
        begun, later = self._begun, self._later
        while True:
            if begun and begun[0].samples.ended:
                # With fewer samples than threads, a task takes as long as its longest sample.
                self._longest = max(begun[0].samples.seconds, default=0.0)
                return begun.popleft()
            if later and self._started(later[0]):
                later.popleft()
                continue
            if later and not begun:
                return later.popleft()
            waited = bool(begun) and begun[0].samples.wait_here()
            if waited and self._ring is not None:
                self._ring()  # its None follows the messages so far, so `get` does not wait
            while (message := self._get()) is not None and not self._context.cancelled:
                later.append(message)
                if not waited:
                    break
            if self._context.cancelled:
                return message

    def _started(self, message: Any) -> bool:
        """Have the threads begin a task; False if the worker is to do it, as a whole and in its turn."""
        if not (self._early and isinstance(message, Task)):
            return False
        if self._ring is None:
            self._ring = self._listen()
        samples = self._begin(message, self._ring)
        if samples is None:
            return False
        self._begun.append(Fetched(message, samples))
        return True

    def report(self, event: Event) -> None:
        """Report an event, and learn from it."""
        if type(event) is Done:
            seconds, self._longest = max(event.seconds, self._longest), 0.0
            self._mean = seconds if not self._mean else self._mean + (seconds - self._mean) * NEW
            self._early = self._mean > (_LEAST / 2 if self._early else _LEAST)
        self._report(event)

    def close(self) -> None:
        """Begin no more samples, and wait for those in flight."""
        left = [task.samples for task in self._begun]
        self._begun.clear()
        for samples in left:
            samples.stop()
        for samples in left:
            if not samples.leave():
                break


class Worker:
    """One worker, driven from outside by `step`.

    An `Exception` of the user's code becomes the answer to a task: an error in a sample answers that
    task, an error in `init_fn` or in opening the dataset answers every task of the epoch. If the worker
    reads its own shard, the error answers the first task, and then the shard has ended. Anything else
    (`SystemExit`, `KeyboardInterrupt`) ends the worker.
    """

    def __init__(
        self,
        worker: int,  # number of the worker, from 0
        spec: WorkerSpec,  # its dataset is this worker's copy
        seeds: WorkerSeeds,
        wrap: Callable[[Any], Payload],  # makes the payload of a result
        context: TaskContext,
    ) -> None:
        self.worker, self.context = worker, context
        self._spec, self._seeds, self._wrap = spec, seeds, wrap
        self._rng = _sample_rng_of(spec, worker, seeds)
        if self._rng is not None and spec.seeding is not None:
            self._seeds = seeds_by_sample(seeds, any_thread=spec.seeding.any_thread)
        self.info = self._describe()
        self.meter = None if spec.metering is None else Meter(spec.metering)
        if self.meter is not None:
            context.parts, context.slices = self.meter.parts, self.meter.slices
            if context.slices is not None:
                context.slices.worker = worker
        self._modes = TakenModes()
        self._fetcher: Fetcher | None = None
        self._initialized = False
        self._deferred = spec.deferred
        self._broken: Exception | None = None
        self._reported = False  # `_broken` was reported in this epoch
        self._exhausted = False
        # The loaded state may be the end of the epoch before, or the beginning of this one.
        self._from_end = bool(spec.starts) and spec.starts[worker].next_epoch
        self.shared: SharedTask | None = None  # that this worker is fetching samples of

    @property
    def broken(self) -> bool:
        """True if its only answer in this epoch is an error."""
        return self._broken is not None

    @property
    def draws_in_turn(self) -> bool:
        """True if its samples draw from its own generators, in the order of its tasks."""
        return self._rng is not None and self._rng.kept is not None

    def open(self) -> Ready:
        """Seed, run `init_fn`, open the first fetcher."""
        spec = self._spec
        self._modes.take(spec.modes)
        self.context.rng = self._rng
        with self._seeds.initializing(spec.base_seed, self.worker):
            if self._rng is not None:
                self._rng.prepare()
            try:
                if spec.shared_seed is not None:
                    # Before init_fn, as in torch, so that seeds set by init_fn remain in use.
                    seed_datapipe(spec.fetch.dataset, spec.shared_seed)
                if spec.init_fn is not None and spec.workers > 0:
                    spec.init_fn(self.worker)
                if self._rng is not None:
                    self._seeds.keep_for(self._rng, spec.base_seed, self.worker)
                self._initialized = True
                if not spec.deferred:
                    self._fetcher = self._opened(None)
            except Exception as error:
                if spec.workers == 0:
                    raise
                self._broken = foreign(error)
            return Ready(self.worker, self._first_state() if spec.reports_state else None)

    def _opened(self, shared_seed: int | None) -> Fetcher:
        """Open the fetcher of the first epoch."""
        spec, self._deferred = self._spec, False
        if spec.starts:
            fetcher = _resumed(spec.fetch, spec.starts[self.worker], self.context)
        else:
            fetcher = spec.fetch.open(shared_seed, self.context)
        if spec.skip:
            fetcher.skip(spec.skip)
        return fetcher

    def _first_state(self) -> ShardStart | Failure | None:
        if self._broken is not None:
            return Failure(twin(self._broken))
        starts = self._spec.starts
        # After results that came since a state, the next state is reported when it is due.
        return None if starts and starts[self.worker].results_since else self._state_now()

    def _state_now(self) -> ShardStart | None:
        fetcher = self._fetcher
        if fetcher is None or fetcher.states is None:
            return None
        return fetcher.states.now(ended=fetcher.ended)

    def close(self) -> None:
        """End the work, and close the iterators and files of the worker."""
        self._let_go()
        context = self.context
        loop, context.loop, context.helpers = context.loop, None, None
        if loop is not None:
            try:
                loop.close()
            except Exception as error:
                show(error)
        if self.info is not None:
            end_worker(self.info)
        if self._rng is not None:
            self._rng.release()
        if self.meter is not None:
            self.meter.close()
        self._modes.close()

    def step(self, message: Incoming) -> Event | None:
        """Act on `message`; return the event to report, or None."""
        working = self._seeds.working
        if isinstance(message, Task):
            if working is None:
                return self._answer(message)
            with working():
                return self._answer(message)
        if isinstance(message, Begin):
            with nullcontext() if working is None else working():
                self._begin(message)
        elif isinstance(message, SharedTask):
            return self._take_part(message)
        elif isinstance(message, Fetched):
            return self._fetched(message)
        return None

    def _begin(self, message: Begin) -> None:
        self._exhausted = self._reported = False
        if self.meter is not None:
            self.meter.begin_pass()
        self._let_go()
        self._modes.take(message.modes)
        if self._rng is not None and self._spec.seeding is not None:
            self._rng.begin(message.epoch)
            self.context.rng = self._rng
        if not self._initialized:
            return  # init_fn failed, and its error answers every task
        self._broken = None
        self._open_next(message.shared_seed, message.changes)

    def _open_next(self, shared_seed: int | None, changes: tuple[Change, ...] = ()) -> None:
        """Open the fetcher of an epoch."""
        try:
            undo_load(self._spec.fetch.dataset)
            apply(self._spec.fetch.dataset, changes)
            if self._deferred:
                self._fetcher = self._opened(shared_seed)
            else:
                self._fetcher = self._spec.fetch.open(shared_seed, self.context)
        except Exception as error:
            self._broken = foreign(error)

    def _let_go(self) -> None:
        fetcher, self._fetcher = self._fetcher, None
        if fetcher is None:
            return
        try:
            fetcher.close()
        except Exception as error:  # in a generator's `finally`: shown and ignored, as in Python
            show(error)

    def _take_part(self, task: SharedTask) -> Event | None:
        """Fetch samples of a task; answer it in place of its worker if the last of them ended here."""
        context, fetcher = self.context, self._fetcher
        sample = self._refuse if self._broken is not None or fetcher is None else fetcher.sample
        self.shared = task
        meter = self.meter
        began = 0.0 if meter is None else perf_counter()
        try:
            last = task.work(sample, context)
        except Abandoned:
            return None
        except BaseException:
            task.stop()
            me = get_ident()
            context.task = task.seq
            context.at = next((at for at, by in task.begun.copy().items() if by == me), -1)
            if task.items is not task.task.index:
                context.at = 0  # all are samples of one item
            raise
        finally:
            self.shared = None
            if meter is not None:
                ended = perf_counter()
                meter.part(began, ended)
        if not last or context.cancelled:
            if meter is not None and ended >= meter.due:
                # Another worker may end the last sample.
                task.measures.append(meter.measure_parts(ended, context.take_retried()))
            return None
        if task.measures and meter is not None:
            meter.due = float("-inf")  # the measures are sent with this task's own
        event = self._assembled(task.task, task, sum(task.seconds))
        task.forget()
        if isinstance(event, Done) and event.extras is not None and MEASURES in event.extras:
            event.extras[MEASURES] = event.extras[MEASURES].joined(task.measures)
        return event._replace(worker=task.worker) if isinstance(event, (Done, Failed)) else None

    @property
    def overlaps(self) -> bool:
        """True if its threads, or coroutines, may fetch the samples of several tasks at a time."""
        return self._spec.overlaps

    def wake(self) -> None:
        """Have it look for messages while its own thread fetches samples. From any thread."""
        fetcher = self._fetcher
        if fetcher is not None:
            fetcher.wake()

    @property
    def wakes(self) -> bool:
        """True if `wake` does something."""
        return self._spec.fetch.coroutines > 0

    def begin(self, task: Task, ring: Callable[[], None]) -> StartedTask | None:
        """Have the samples of a task fetched; None if it is to be done as a whole.

        `ring` is called by one of the threads that fetch them when all have ended.
        """
        if self._fetcher is None or type(task.index) not in (list, tuple) or not task.index:
            return None
        if self._rng is not None:
            self._rng.first_item = task.item
        return self._fetcher.begin(task.index, ring)

    def _fetched(self, message: Fetched) -> Event | None:
        """Answer a task whose samples this worker's threads, or coroutines, have fetched."""
        task, samples = message
        fetch = self._spec.fetch
        spent = sum(samples.seconds) / (fetch.coroutines or fetch.threads)  # that work at a time
        if self.meter is not None:
            now = perf_counter()
            self.meter.part(now - spent, now, here=False)
        return self._assembled(task, samples, spent)

    def _assembled(
        self, task: Task, samples: StartedTask | SharedTask, spent: float
    ) -> Event | None:
        """Answer a task whose samples have all ended."""
        fetcher = self._fetcher

        def assemble(index: Any) -> Any:
            found = samples.result()
            assert fetcher is not None
            return fetcher.assemble(found, index)

        return self._answer(task, assemble, spent)

    def _refuse(self, index: Any) -> Any:
        assert self._broken is not None
        raise twin(self._broken)

    def _answer(
        self,
        task: Task,
        fetch: Callable[[Any], Any] | None = None,
        spent: float = 0.0,  # seconds that its samples took before this call
    ) -> Event | None:
        if self._exhausted:
            return None
        context, fetcher, meter = self.context, self._fetcher, self.meter
        looks, slices = (False, None) if meter is None else (meter.looks, meter.slices)
        try:
            if self._broken is not None:
                if self._reported and self._spec.fetch.in_turn:
                    raise EndOfShard  # it will never have a result; the other workers have
                self._reported = True
                return Failed(self.worker, task.seq, Failure(twin(self._broken)), self._position)
            assert fetcher is not None
            if fetch is None:
                fetch = fetcher.fetch
            if looks:
                meter.begin()  # type: ignore[union-attr]
            began = perf_counter()
            if slices is not None:
                slices.begin(began)
            try:
                rng = self._rng
                if rng is None:
                    value = fetch(task.index)
                else:
                    rng.first_item = task.item
                    value = rng.task(fetcher.key, fetch, task.index)
            except (Exception, Abandoned):  # other errors end the worker, and keep `at`
                context.at = -1
                raise
            if context.tracked:
                context.at = -1
            if fetcher.states is not None:
                state = fetcher.states.due(ended=fetcher.ended)
                if state is not None:
                    context.add("state", state)
            fetched = perf_counter() if looks or slices is not None else 0.0
            payload = self._wrap(value)
            ended = perf_counter()
            if meter is not None:
                meter.busy += ended - began
                meter.tasks += 1
                shown = slices is None or slices.end(task.seq, began, fetched, ended, spent)
                if shown and (ended >= meter.due or context.retried):
                    retried = context.take_retried()
                    context.add(MEASURES, meter.measure(began, fetched, ended, retried, spent))
            extras = None if context.extras is None else context.take_extras()
            return Done(
                self.worker, task.seq, payload, ended - began + spent, fetcher.position, extras
            )
        except EndOfShard:
            if self._from_end and not self._position:
                # The state that was loaded for this epoch was the end of the one before.
                self._from_end = False
                self._let_go()
                self._open_next(None)
                return self._answer(task)
            self._exhausted = True
            return Exhausted(self.worker, task.seq, self._position, self._state_now())
        except Abandoned:
            return None
        except Exception as error:
            context.extras = None
            if meter is not None and self._broken is None:
                ended = perf_counter()
                meter.busy += ended - began
                meter.tasks += 1
                if slices is not None:
                    slices.end(task.seq, began, ended, ended)
            # torch lets a StopIteration through. One that a map-style dataset leaks would silently end
            # the user's loop early.
            return Failed(self.worker, task.seq, Failure(foreign(error)), self._position)

    @property
    def _position(self) -> int:  # number of samples of the shard that were read
        return 0 if self._fetcher is None else self._fetcher.position

    def _describe(self) -> Any:
        """Return this worker's `WorkerInfo`, or a `Description` if torch is not imported.

        None when the caller does the work itself.
        """
        spec = self._spec
        if spec.workers == 0:
            return None
        rng = self._seeds.generators(spec.base_seed, self.worker)
        if self._rng is not None:
            rng = self._rng.info_rng(rng)
        seed, method = spec.base_seed + self.worker, self._seeds.method
        info = Description(self.worker, spec.workers, seed, spec.fetch.dataset, rng, method)
        if "torch" not in sys.modules:
            return info
        from torch.utils.data._utils.worker import WorkerInfo

        return WorkerInfo(**vars(info))


def _sample_rng_of(spec: WorkerSpec, worker: int, seeds: WorkerSeeds) -> SampleRng | None:
    origin = spec.seeding
    if origin is None:
        return None
    shared = isinstance(seeds, ThreadSeeds) or (
        origin.any_thread and not isinstance(seeds, ProcessSeeds)
    )
    # A sample on a thread may iterate a loader.
    shared = shared or now.generators is not GLOBALS
    if not (shared or spec.fetch.threads > 1):
        return SampleRng(origin, worker)
    from hybridloader.seeding.thread_generators import ThreadSampleRng

    return ThreadSampleRng(origin, worker)


def _resumed(fetch: Fetch, start: ShardStart, context: TaskContext) -> Fetcher:
    """Return the fetcher of a worker that begins at `start`.

    The dataset gets its state before the fetcher is opened, as in torchdata.
    """
    if start.dataset is not None:
        load_into(fetch.dataset, pickle.loads(start.dataset.kept), "the dataset")
    fetcher = fetch.open(None, context)
    if start.next_epoch and start.iterator is not None:
        fetcher.resume(start)
        fetcher = fetch.open(None, context)
    fetcher.resume(start._replace(iterator=None, ended=False) if start.next_epoch else start)
    _do_again(fetcher, start.again, context)
    if fetcher.states is not None and start.stateful and not start.next_epoch:
        fetcher.states.resume(start.results_since)
    return fetcher


def _do_again(fetcher: Fetcher, tasks: Sequence[Any], context: TaskContext) -> None:
    """Repeat the tasks since the state was taken, to bring the dataset to the same place."""
    for task in tasks:
        if context.cancelled:
            return
        # It had a result then; an error is raised again when the sample is read.
        with suppress(Exception):
            if context.rng is None:
                fetcher.fetch(task)
            else:
                context.rng.task(fetcher.key, fetcher.fetch, task)
        context.extras = None


def run(
    worker: Worker,
    get: Callable[[], Any],  # waits for an `Incoming`
    report: Callable[[Event], None],
    # Returns a function by which any thread makes `get` return None; None: one task at a time.
    listen: Callable[[], Callable[[], None]] | None = None,
) -> None:
    """Answer messages until `Stop`, or until no one waits: the worker loop of threads and processes."""
    under_way = None
    if listen is not None and worker.overlaps:
        under_way = TasksUnderWay(
            worker.begin, worker.context, get, report, listen, early=worker.wakes
        )
        get, report = under_way.next, under_way.report
    meter = worker.meter
    if meter is not None:
        meter.open()
    try:
        began = perf_counter()
        ready = worker.open()
        if meter is not None:
            meter.opened(began)
        report(ready)
        while True:
            message = get()
            if isinstance(message, Stop) or worker.context.cancelled:
                return
            event = worker.step(message)
            del message  # slots of its content are freed and returned with the event
            if event is not None:
                if meter is None or not meter.reports:
                    report(event)
                else:
                    meter.report(report, event)
            del event  # a batch must not outlive its sending
    finally:
        if under_way is not None:
            under_way.close()
        worker.close()


Incoming = Message | SharedTask | Fetched
"""Message as a worker gets it: shared tasks from crews that share them, `Fetched` from itself."""
