"""Worker: the steps of every worker of every backend, and the loop of threads and processes.

A backend gives it messages and takes its events. It seeds itself, runs the user's `init_fn`, opens
a fetcher for each epoch and answers tasks. It does not know whether it lives in a thread, in a
process or in the caller, nor how its messages travel.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from threading import get_ident
from time import perf_counter
from typing import Any

from hybridloader._support.states import load_into
from hybridloader._support.torch_env import TakenModes, seed_datapipe
from hybridloader._support.user_objects import Failure, foreign, show, twin
from hybridloader.engine.dataset_state import ShardStart
from hybridloader.engine.fetcher import (
    Abandoned,
    EndOfShard,
    Fetch,
    Fetcher,
    StartedTask,
    TaskContext,
)
from hybridloader.engine.loaded_states import load_for_epoch, undo_load
from hybridloader.engine.messages import (
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
from hybridloader.engine.meter import MEASURES, Meter
from hybridloader.engine.payload import Payload
from hybridloader.engine.refresh import apply
from hybridloader.engine.sharing import Fetched, SharedTask, TasksUnderWay, UnsharedTask
from hybridloader.engine.slices import ALWAYS, LONG
from hybridloader.engine.worker_info import describe, end_worker
from hybridloader.errors import ResultPicklingError
from hybridloader.seeding.sample_rng import GLOBALS, SampleRng, now
from hybridloader.seeding.worker_seeds import (
    ProcessSeeds,
    ThreadSeeds,
    WorkerSeeds,
    seeds_by_sample,
)


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
        elif isinstance(message, UnsharedTask):
            if not message.task.shared:  # else it is sent again
                return self._take_part(message.task, alone=True)
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
            self._rng.begin(replace(self._spec.seeding, epoch=message.epoch))
            self.context.rng = self._rng
        if not self._initialized:
            return  # init_fn failed, and its error answers every task
        self._broken = None
        try:
            undo_load(self._spec.fetch.dataset)
            apply(self._spec.fetch.dataset, message.changes)
            if self._deferred:
                self._fetcher = self._opened(message.shared_seed)
            else:
                self._fetcher = self._spec.fetch.open(message.shared_seed, self.context)
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

    def _take_part(self, task: SharedTask, *, alone: bool = False) -> Event | None:
        """Fetch samples of a task; answer it in place of its worker if the last of them ended here."""
        context, fetcher = self.context, self._fetcher
        sample = self._refuse if self._broken is not None or fetcher is None else fetcher.sample
        self.shared = task
        meter = self.meter
        began = 0.0 if meter is None else perf_counter()
        try:
            last = task.work(sample, context, alone=alone)
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

    @property
    def at_once(self) -> int:
        """Number of samples that are fetched at a time if it `overlaps`."""
        return self._spec.fetch.coroutines or self._spec.fetch.threads

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
        spent = sum(samples.seconds) / self.at_once
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
        looks = on = False
        slices = None
        if meter is not None:
            looks, slices = meter.looks, meter.slices
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
            if slices is not None and began >= slices.since:
                slices.began, slices.on, on = began, True, True
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
            fetched = perf_counter() if looks or on else 0.0
            try:
                payload = self._wrap(value)
            except ResultPicklingError as error:
                payload = self._wrap(fetcher.mend(value, error, self._wrap))
            ended = perf_counter()
            if meter is not None:
                meter.busy += ended - began
                meter.tasks += 1
                if slices is not None:
                    if on:
                        slices.task(task.seq, fetched, ended, spent)
                    else:
                        slices.short += 1
                        if ended - began + spent >= LONG:
                            slices.since = ALWAYS
                if (ended >= meter.due or context.retried) and (on or slices is None):
                    retried = context.take_retried()
                    context.add(MEASURES, meter.measure(began, fetched, ended, retried, spent))
            extras = None if context.extras is None else context.take_extras()
            return Done(
                self.worker, task.seq, payload, ended - began + spent, fetcher.position, extras
            )
        except EndOfShard:
            if self._from_end and not self._position:
                self._open_after_end()
                return self._answer(task)
            self._exhausted = True
            return Exhausted(self.worker, task.seq, self._position, self._state_now())
        except Abandoned:
            return None
        except Exception as error:
            context.extras = None
            if meter is not None and self._broken is None:
                meter.busy += perf_counter() - began
                meter.tasks += 1
            if slices is not None:
                slices.failed(task.seq)
            # torch lets a StopIteration through. One that a map-style dataset leaks would silently end
            # the user's loop early.
            return Failed(self.worker, task.seq, Failure(foreign(error)), self._position)

    def _open_after_end(self) -> None:
        """Begin the epoch, after the state that was loaded for it was the end of the one before."""
        self._from_end = False
        self._let_go()
        try:
            undo_load(self._spec.fetch.dataset, ended=True)
            self._fetcher = self._spec.fetch.open(None, self.context)
        except Exception as error:
            self._broken = foreign(error)

    @property
    def _position(self) -> int:  # number of samples of the shard that were read
        return 0 if self._fetcher is None else self._fetcher.position

    def _describe(self) -> Any:
        """Return this worker's `WorkerInfo`; None when the caller does the work itself."""
        spec = self._spec
        if spec.workers == 0:
            return None
        rng = self._seeds.generators(spec.base_seed, self.worker)
        if self._rng is not None:
            rng = self._rng.info_rng(rng)
        return describe(
            id=self.worker,
            num_workers=spec.workers,
            seed=spec.base_seed + self.worker,
            dataset=spec.fetch.dataset,
            rng=rng,
            worker_method=self._seeds.method,
        )


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
    from hybridloader.seeding.thread_sample_rng import ThreadSampleRng

    return ThreadSampleRng(origin, worker)


def _resumed(fetch: Fetch, start: ShardStart, context: TaskContext) -> Fetcher:
    """Return the fetcher of a worker that begins at `start`.

    The dataset gets its state before the fetcher is opened, as in torchdata.
    """
    if start.dataset is not None:
        load = load_for_epoch if fetch.in_turn else load_into
        load(fetch.dataset, pickle.loads(start.dataset.kept), "the dataset")
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


Incoming = Message | SharedTask | UnsharedTask | Fetched
"""Message as a worker gets it. Two types come from crews whose workers share tasks, the last one from
the worker itself."""
