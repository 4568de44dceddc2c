"""Iterator of a `DataLoader`: the behavior of torch's iterator, on one `Stage`.

Torch's base class provides seeds, the sampler's iterator and the order of draws from the generators.
Workers get batches by torch's rule of dispatch.
"""

from __future__ import annotations

import functools
import os
import types
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from operator import attrgetter
from time import perf_counter
from typing import Any, NamedTuple

import torch.utils.data
from torch.utils.data import IterDataPipe, MapDataPipe
from torch.utils.data.dataloader import (
    _BaseDataLoaderIter,
    _DatasetKind,
    _sharding_worker_init_fn,
    _share_dist_seed,
)

from hybridloader._support.states import is_stateful
from hybridloader._support.store_use import uses
from hybridloader._support.text import warn_once
from hybridloader._support.threads import Waits
from hybridloader._support.user_objects import ENDS, Failure, Raised, add_note, is_ours, no_answer
from hybridloader.devices.pinning import Pinner, pinner_for
from hybridloader.engine.contract import Backend, WorkerHandle, closed_with, park_at_exit
from hybridloader.engine.dataset_state import Change, DatasetChanges
from hybridloader.engine.feed import Feed, Relay, RelayQueue
from hybridloader.engine.messages import Abandoned, Fetch, Last, WorkerSpec
from hybridloader.engine.scheduler import Dispatch, least_busy, round_robin, round_robin_with_room
from hybridloader.engine.stage import RestartPolicy, Stage
from hybridloader.errors import IteratorClosed, NotReady, StateError, WorkerTimeout
from hybridloader.fetching.collate import with_entries, without_torch
from hybridloader.fetching.on_error import ErrorBudget, Skipped, parse_on_error
from hybridloader.fetching.readers import IterableFetch, MapFetch, one_by_one
from hybridloader.fetching.shards import share_of
from hybridloader.loader.plan import LoaderPlan
from hybridloader.loader.progress import CheckedResults, Progress, Results
from hybridloader.loader.state import Begins, PassStart, ResumedDispatch
from hybridloader.observe.figures import Faults, LoopRecord, StageRecord
from hybridloader.observe.measures import BRIEF, LoopWaits, SourceTimes, options_of, record_of_relay
from hybridloader.observe.observation import Observation, is_observed
from hybridloader.observe.stats import Stats
from hybridloader.observe.tracing import traced
from hybridloader.records.large import hint_at_large_container
from hybridloader.running.executor import Runner
from hybridloader.seeding.sample_rng import Kind, Origin, origin_of

# -- Results of a loader's stage, pinned or copied to a device before the loop asks for them.
#
#     sampler --> your thread --> [ stage ] --> pinning thread --> queue --> your thread
#
# The pinning thread pulls the stage, pins or copies the batches, and puts them into a queue that is
# bounded in batches and in bytes. The consumer's thread counts batches when it takes them from the
# queue. It also asks the sampler for one index for each result that it takes, as torch does. So the
# sampler's draws don't depend on the pinning thread.


class _QueuedResult(NamedTuple):
    """Result or error of the stage on its way to the consumer, with the stage's report on it."""

    seq: int
    worker: int
    position: int
    extras: dict[str, Any] | None = None
    found: Any = None
    size: int = 0
    error: Raised | None = None


class IndexFeed(Feed):
    """Feed of a stage with indices that the consumer's thread draws.

    It refers to no sampler: a thread keeps the stage alive, and a sampler may refer to the loader.
    """

    def __init__(self) -> None:
        # All the mutable state; filled by one thread and emptied by another:
        self._indices: deque[Any] = deque()  # at last the error or `StopIteration` of the source
        self._wake: Callable[[], None] | None = None

    def draw_from(self, source: Iterator[Any] | None) -> Iterator[Any] | None:
        """Add an index of `source`, or its end; return `source`, or None after its end."""
        if source is None:
            return None
        try:
            self._indices.append(next(source))
        except Exception as error:
            ended = isinstance(error, StopIteration)  # whose traceback may refer to the sampler
            self._indices.append(Raised(StopIteration() if ended else error))
            source = None
        self._notify()
        return source

    def draw(self, most: int | None) -> Any:
        if not self._indices:
            raise no_answer(NotReady("the sampler is read when a batch is taken"))
        index = self._indices.popleft()
        if type(index) is Raised:
            index.throw()
        return index

    def ended_by(self, error: Exception) -> bool:
        return True  # as in torch, a sampler that has raised is not asked again

    def when_ready(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        if self._indices:  # added in the meantime
            self._notify()

    def _notify(self) -> None:
        wake, self._wake = self._wake, None
        if wake is not None:
            wake()


class _PinningIterator(Iterator[Any]):
    """Iterator of the pinning thread: pulls the results of an epoch and pins them.

    Errors count batches from `first`; `waits` are those for the stage, if they are observed.
    """

    def __init__(self, stage: Stage, pinner: Pinner, first: int, waits: Waits | None) -> None:
        self._stage, self._pinner, self._epoch = stage, pinner, stage.epoch
        self._waits = waits
        self._number = first - 1  # all the mutable state

    def __next__(self) -> _QueuedResult:
        stage, waits = self._stage, self._waits
        self._number += 1
        began = 0.0 if waits is None else perf_counter()
        try:
            result = stage.pull(self._epoch, wait=True)
        except StopIteration:
            raise
        except Exception as error:
            if is_ours(error, ENDS):
                raise
            return _QueuedResult(*self._place, error=Raised(error))
        finally:
            if waits is not None:
                waits.note(began, perf_counter())
        try:
            extras = stage.last.extras
            sent = self._pinner.send(result)
            return _QueuedResult(*self._place, extras, sent, sent.size)
        except Exception as error:
            add_note(
                error,
                f"In stage {self._pinner.stage!r} of the loader, at batch {self._number} of this epoch.",
            )
            return _QueuedResult(*self._place, error=Raised(error))

    @property
    def _place(self) -> tuple[int, int, int]:
        last = self._stage.last
        return last.seq, last.worker, last.position


class PinnedResults(Iterator[Any]):
    """Results of one epoch, for the consumer's thread; it takes the place of the stage.

    It waits `timeout` seconds for one result; 0 waits forever. `source` provides the indices of the
    stage's `feed`; without a feed the stage draws them itself, on the pinning thread.
    """

    def __init__(
        self,
        thread: Runner,
        stage: Stage,
        pinner: Pinner,
        relay: Relay,
        timeout: float,
        feed: IndexFeed | None,
        source: Iterator[Any] | None,
    ) -> None:
        self._thread, self._stage, self._relay, self._timeout = thread, stage, relay, timeout
        self._feed, self._pinner, self._epoch = feed, pinner, stage.epoch
        # All the mutable state:
        self.last = Last()
        self._source = source

    def __next__(self) -> Any:
        if os.getpid() != self._thread.owner:
            raise no_answer(
                IteratorClosed(
                    "this iterator belongs to the parent of this forked process; make a new one here"
                )
            )
        queued = self._wait()
        last = self.last
        before = last.seq
        last.seq, last.worker, last.position, last.extras = queued[:4]
        try:
            if self._feed is not None:
                self._source = self._feed.draw_from(self._source)
            if queued.error is not None:
                queued.error.throw()
            return self._pinner.take(queued.found)
        except Exception:
            raise
        except BaseException:
            last.seq = before  # the result was not returned
            with suppress(KeyboardInterrupt):  # a second interrupt; the finalizer ends the rest
                self._thread.close()
            raise

    def _wait(self) -> _QueuedResult:
        try:
            queued: _QueuedResult = self._relay.get(self._timeout or None)
            return queued
        except NotReady:
            raise no_answer(WorkerTimeout(self._stage.table.lateness(self._timeout))) from None
        except StopIteration:
            raise
        except IteratorClosed:
            pass
        except BaseException:  # the thread died, or an interrupt may have lost a batch
            with suppress(KeyboardInterrupt):
                self._thread.close()
            raise
        self._stage.pull(self._epoch, wait=True)  # raises the reason
        raise no_answer(IteratorClosed("this epoch was ended early"))


STAGE, SAMPLER = "DataLoader", "sampler"  # names of the rows of the stage and of the sampler


class LoaderObservation(Observation):
    """Observation of the latest epoch of `iterator`, whose stage has `workers` and a `window` of tasks.

    It outlives the iterator, and refers to no loader, sampler, batch or worker. It stops counting when
    the iterator is collected.
    """

    def __init__(
        self, iterator: object, plan: LoaderPlan, fetch: Fetch, workers: int, window: int
    ) -> None:
        number = plan.record.number  # the same for all iterators of a loader
        super().__init__(STAGE, number)
        options = options_of(plan.backend, fetch, workers)  # that advice may name
        if plan.multiprocessing_context is not None:  # another backend might contradict it
            del options["backend"]
        if workers:
            options["persistent_workers"] = bool(plan.persistent_workers)
        self.stage = self.measures(STAGE, number, plan.backend, fetch, workers, window, options)
        # All the other mutable state, of the present epoch:
        self._running: weakref.ref[Stage] | None = None
        self._sampler: SourceTimes | None = None
        self._progress: Progress | None = None
        self._before = 0  # batches of this epoch that an earlier run returned
        self._budget: ErrorBudget | None = None
        self._pin: tuple[str, RelayQueue, Waits, float] | None = None
        weakref.finalize(iterator, self.end).atexit = False
        self.begin()

    def begin_again(self) -> None:
        """Begin another epoch; reset all measurements."""
        self.stage.begin_again()
        self._stores = uses()
        self.loop = self._new_loop()
        self._sampler = self._progress = self._budget = self._pin = None
        self.begin()

    def begun(self, stage: Stage, progress: Progress, budget: ErrorBudget | None) -> None:
        """Note that ``iter()`` returns; its time counts as a wait of the loop."""
        self._running, self._progress, self._budget = weakref.ref(stage), progress, budget
        self._before = progress.yielded
        self.stage.of_loop(self.loop)
        if budget is not None:
            self.budget(budget)
        self.loop.note(self.loop.began, perf_counter())

    def pinned(self, stage: str, queue: RelayQueue, waits: Waits) -> None:
        """Note that a thread will pin batches, or copy them to a device, and put them into `queue`.

        It notes its `waits` for the stage.
        """
        self._pin = stage, queue, waits, perf_counter()
        self.relay(queue)
        traced(self.trace, "wait", waits)

    def drawn(self, source: Iterator[Any]) -> Iterator[Any]:
        """Return the indices of `source`, some of which are timed."""
        self._sampler = SourceTimes(BRIEF)
        traced(self.trace, SAMPLER, self._sampler)
        return self._sampler.timed(source)

    def ended(self) -> None:
        self.end()
        super().ended()

    def stats(self) -> Stats:
        # Another thread may be beginning an epoch, in which these are None at first.
        progress, sampler, pin = self._progress, self._sampler, self._pin
        if progress is not None:
            self.loop.items = max(0, progress.yielded - self._before)
        loop = self.loop.record()
        stage = None if self._running is None else self._running()
        queued = 0 if stage is None or stage.closed else stage.queued
        stages = []
        if sampler is not None:
            stages.append(sampler.record(SAMPLER, loop.items + queued, loop))
        stages.append(self._row_of_stage(loop, queued, 0.0 if sampler is None else sampler.waited))
        if pin is not None:
            name, queue, waits, began = pin
            ended = max(loop.ended, began)
            stages.append(record_of_relay(name, queue, began, ended, waits=[waits]))
        return self._stats_of(tuple(stages), self.stage.stores)

    def _row_of_stage(self, loop: LoopRecord, queued: int, asking: float) -> StageRecord:
        """Return the row of the stage; `asking` are the seconds that the sampler took."""
        measures, budget = self.stage, self._budget
        records = () if budget is None else tuple(budget.records)
        replaced = sum(record.replaced for record in records)
        first = loop.ended if measures.first is None else measures.first
        # Worker seconds: until the start, and without work.
        starting = measures.workers * min(max(0.0, first - loop.began), loop.ended - loop.began)
        whole = measures.workers * (loop.ended - loop.began)
        idle = max(0.0, whole - starting - measures.busy - measures.sending)
        if measures.backend.in_caller:  # the loop's thread does the work
            idle = 0.0
        starved = min(idle, measures.workers * asking)
        faults = Faults(len(records) - replaced, replaced)
        return replace(
            measures.record(STAGE, loop.items, queued, faults, reads=True),
            busy=measures.busy,
            starved=starved,
            blocked=idle - starved,
            other=max(0.0, whole - measures.busy - idle),
        )


_TORCHS_NEXT = _BaseDataLoaderIter.__next__
_profiling: Callable[[], bool] = torch._C._autograd._profiler_enabled


class LoaderIterator(_BaseDataLoaderIter):
    """Iterator over an epoch of a loader; with persistent workers, over one epoch after another.

    As a context manager it closes itself at the end of the block. The workers end when the iterator is
    closed, deleted or, unless they are persistent, exhausted. torch's base class reads `loader`; this
    class only reads `plan`.
    """

    def __init__(self, loader: torch.utils.data.DataLoader[Any], plan: LoaderPlan) -> None:
        self._pass_start = PassStart(plan, again=False)
        with self._pass_start.generators_restored():
            super().__init__(loader)
            self._pass_start.replace_draws(self)
        self._plan, self._backend, options = plan, plan.backend, plan.options
        # torch's base class keeps numpy integers as they are.
        self._num_workers = int(plan.num_workers)
        self._prefetch_factor = int(plan.prefetch_factor or 2)
        self._on_error = parse_on_error(options.on_error)
        by_index = self._dataset_kind == _DatasetKind.Map
        copies = by_index and self._num_workers > 0 and self._backend.copies
        self._sends_states = copies and is_stateful(self._dataset)
        """True if workers have copies of a map-style dataset whose state goes with results."""
        self._worker_init_fn = plan.worker_init_fn
        if isinstance(self._dataset, (IterDataPipe, MapDataPipe)):
            self._shard_datapipe()
            self._watch = None
        else:
            self._watch = DatasetChanges(self._dataset) if self._persistent_workers else None
        self._origin = self._new_origin()
        self._pinner = pinner_for(options.device, pin_memory=bool(plan.pin_memory))
        # One thread an epoch, and never two that pull at once:
        self._pin_thread: Runner | None = None
        if self._pinner is not None and self._num_workers and not self._backend.in_caller:
            self._pin_thread = Runner()
            closed_with(self, self._pin_thread)
        fetch = self._new_fetch()
        self._observation: LoaderObservation | None = None
        if is_observed(options.observe):
            window = self._prefetch_factor * self._num_workers
            self._observation = LoaderObservation(self, plan, fetch, self._num_workers, window)
        plan.record.observation = self._observation
        self._loop: LoopWaits | None = None
        self._stage = self._start(fetch)
        plan.record.report = weakref.WeakMethod(self.report)
        self._next_batch: Callable[[], Any] = self._stage.pull
        self._budget: ErrorBudget | None = None
        if self._num_workers:
            self._draw_again(loader)
        self._begin()

    def _new_fetch(self) -> Fetch:
        """Return the fetch of the workers; warn if its threads would be idle."""
        plan, dataset = self._plan, self._plan.dataset
        collate_fn = for_workers(plan.collate_fn, self._backend)
        if self._backend.fresh:
            collate_fn = with_entries(collate_fn)
        if plan.iterable:
            share = share_of(dataset)
            return IterableFetch(
                dataset,
                collate_fn,
                plan.batched,
                plan.drop_last,
                isinstance(dataset, IterDataPipe),
                self._on_error,
                state_every=plan.state_every,
                share=None if share is None else (*share, int(plan.num_workers)),
            )
        fetch = MapFetch(
            dataset,
            collate_fn,
            plan.batched,
            isinstance(dataset, MapDataPipe),
            plan.options.threads_per_worker,
            self._on_error,
            sends_states=self._sends_states,
            state_every=plan.state_every,
        )
        if fetch.threads > 1 and plan.batched and not one_by_one(dataset):
            warn_once(
                f"threads_per_worker has no effect for {type(dataset).__name__}: its __getitems__ is "
                "asked for a whole batch at once. Raise num_workers, or use threads in __getitems__.",
                "threads-without-effect",
            )
        return fetch

    def _shard_datapipe(self) -> None:
        """Have each rank and each worker read its part of a data pipe, by torch's rules."""
        if self._num_workers == 0:
            pipe: Any = self._dataset
            torch.utils.data.graph_settings.apply_sharding(pipe, self._world_size, self._rank)
        else:
            self._worker_init_fn = functools.partial(
                _sharding_worker_init_fn, self._worker_init_fn, self._world_size, self._rank
            )

    def _start(self, fetch: Fetch) -> Stage:
        self._backend.check()
        if not self._backend.in_process:
            hint_at_large_container(self._dataset)
        separate = not self._backend.in_caller and not self._sends_states
        self._reorder = self._plan.reorder if separate else None
        self._dispatch = self._rule_of_dispatch()
        if self._pass_start.loads:
            self._dispatch = ResumedDispatch(self._dispatch)
        spec = WorkerSpec(
            stage="DataLoader",
            workers=self._num_workers,
            fetch=fetch,
            base_seed=int(self._base_seed),
            init_fn=self._worker_init_fn and for_workers(self._worker_init_fn, self._backend),
            shared_seed=self._shared_seed,
            seeding=self._origin,
            starts=self._pass_start.starts,
            reports_state=self._plan.state_every > 0,
        )
        # The consumer of a pinning thread has the time limit instead; an inline worker is the caller.
        waits = self._pin_thread is None and not self._backend.in_caller
        return Stage(
            self._backend,
            spec,
            lookahead=self._prefetch_factor * self._num_workers,
            ordered=self._plan.in_order,
            reorder=self._reorder,
            timeout=self._timeout if waits else 0,
            persistent=self._persistent_workers,
            dispatch=self._dispatch,
            on_worker_death=RestartPolicy.of(self._plan.options.on_worker_death),
            task_timeout=self._plan.options.task_timeout,
            observer=None if self._observation is None else self._observation.stage,
        )

    def _rule_of_dispatch(self) -> Dispatch:
        """Return torch's rule, or a faster one if no batch depends on the worker that makes it."""
        if not self._plan.in_order:
            return round_robin_with_room
        plan = self._plan
        by_worker = plan.iterable or self._sends_states or isinstance(self._dataset, MapDataPipe)
        if by_worker or not plan.seeded_by_sample:
            return round_robin
        return functools.partial(least_busy, in_flight=self._prefetch_factor)

    def _draw_again(self, loader: Any) -> None:
        """Repeat two draws as torch does: the sampler's iterator, and a seed for data pipes.

        torch's workers have the seed that was drawn before they started; this second one is unused.
        """
        shared_seed = self._shared_seed
        if self._pass_start.resume.begins is Begins.AS_TORCH:
            super()._reset(loader, first_iter=True)
        elif shared_seed is not None and loader.generator is not None:
            _share_dist_seed(loader.generator, self._pg)  # type: ignore[no-untyped-call]
        self._shared_seed = shared_seed

    def _reset(self, loader: torch.utils.data.DataLoader[Any], first_iter: bool = False) -> None:
        """Begin another epoch; after a state was loaded, with new workers."""
        if self._observation is not None:
            self._observation.begin_again()
        if self._pin_thread is not None:
            self._pin_thread.break_off()
        self._pass_start = PassStart(self._plan.again(loader), again=True)
        with self._pass_start.generators_restored():
            super()._reset(loader)
            self._pass_start.replace_draws(self)
        before, origin = self._origin, self._new_origin()
        self._origin = origin
        if self._pass_start.loads or (before and origin and before.seed != origin.seed):
            self._stage.close()
        if self._stage.closed:  # also after a worker died, or the iterator was closed
            self._stage = self._start(self._new_fetch())
        self._begin(() if self._watch is None else self._watch.changes())

    def _new_origin(self) -> Origin | None:
        """Return seed and epoch of the samples, for workers; None if samples are not seeded.

        This draws nothing: a policy without a seed uses the seed that torch has drawn for the workers.
        """
        plan, start = self._plan, self._pass_start
        origin = origin_of(
            plan.seeding,
            int(self._base_seed),
            threads=plan.on_threads,
            several=plan.options.threads_per_worker > 1,
        )
        if origin is None or not (origin.kind is Kind.SAMPLE or start.seed_stays):
            # torch's workers have no epoch. So a script that resumes by restoring the generator, and
            # counts epochs from 0 again, draws the same numbers.
            return origin
        return replace(origin, epoch=start.epoch)

    def _begin(self, changes: tuple[Change, ...] = ()) -> None:
        """Begin an epoch, without errors."""
        start, stage = self._pass_start, self._stage
        del self._pass_start
        progress = self._progress = start.progress(int(self._base_seed), self._shared_seed)
        progress.exhausted = stage.exhausted
        if isinstance(self._dispatch, ResumedDispatch):
            start.direct(self._dispatch)
        # If results come in order and without states, the last one determines the position.
        plain = self._plan.in_order and self._on_error is None and not self._sends_states
        ahead = self._prefetch_factor * self._num_workers if plain else None
        if ahead is not None and self._reorder is not None:
            ahead += self._reorder.tasks
            if self._pinner is not None:
                ahead += self._pinner.batches_ahead + 2  # queued, held by the thread, and taken
        source = start.source(self._sampler_iter, progress, stage.next_seq, ahead)
        if self._observation is not None and not progress.iterable:
            source = self._observation.drawn(source)
        results = self._results(source, progress, changes)
        if self._on_error is not None:
            record = self._plan.record
            number = 0 if record.budget is None else record.budget.epoch + 1
            self._budget = record.budget = ErrorBudget(self._on_error, "DataLoader", number)
            self._next_batch = CheckedResults(results, progress, self._budget).__next__
        else:
            self._next_batch = progress.watch(results).__next__
        if self._plan.state_every:
            self._wait_for_workers(progress)
        if start.resume.begins is not Begins.AS_TORCH:
            self._num_yielded = progress.yielded
            self._discard(start.resume.discard)
        if self._observation is not None:
            self._observation.begun(stage, progress, self._budget)
            self._loop = self._observation.loop

    def _wait_for_workers(self, progress: Progress) -> None:
        for worker, event in self._stage.opened().items():
            report = event.shard_start
            if isinstance(report, Failure):
                self.close()
                raise report.to_exception(
                    f"In worker {worker} of stage 'DataLoader', at its beginning."
                )
            if report is not None:
                progress.note_opened(worker, report)

    def _results(
        self, source: Iterator[Any], progress: Progress, changes: tuple[Change, ...]
    ) -> Results:
        """Begin an epoch of the stage; return its results, for this thread.

        With a pinning thread, `break_off` must have ended the epoch before.
        """
        stage, thread, pinner = self._stage, self._pin_thread, self._pinner
        seed, epoch = self._shared_seed, 0 if self._origin is None else self._origin.epoch
        if thread is None or pinner is None:
            stage.begin(source, seed, changes, epoch)
            return stage
        feed, left, waits = None, None, None
        # Else indices are ignored, or when they are drawn can't be observed.
        if not progress.iterable and self._reorder is None:
            feed, left = IndexFeed(), source
            for _ in range(self._prefetch_factor * self._num_workers):  # as torch does at first
                left = feed.draw_from(left)
        stage.begin(feed or source, seed, changes, epoch)
        if self._observation is not None:
            waits = Waits(BRIEF)
        relay = Relay(
            _PinningIterator(stage, pinner, progress.yielded, waits),
            f"hybridloader-{pinner.stage}",
            depth=pinner.batches_ahead,
            weigh=attrgetter("size"),
            limit=pinner.buffer_bytes,
            prepare=pinner.prepare,
        )
        if self._observation is not None and waits is not None:
            self._observation.pinned(pinner.stage, relay.queue, waits)
        thread.running_stages, thread.running_relays = [stage], [relay]
        relay.start()
        return PinnedResults(thread, stage, pinner, relay, self._timeout, feed, left)

    def _discard(self, count: int) -> None:
        for done in range(count):
            try:
                next(self)
            except StopIteration:
                raise StateError(
                    f"_num_yielded is {count} in the state, but the dataset has only {done} batches"
                ) from None
            except Exception as error:
                if is_ours(error, (*ENDS, WorkerTimeout)):
                    raise
                # A failed batch counts as returned: its error was raised before the state was taken.

    def __next__(self) -> Any:
        # torch's method enters a profiler range for every batch, which costs 15-30 us and only matters
        # to a running profiler. It also warns of more batches than the dataset's len(). Monitors may
        # have replaced it; then it is called.
        if (
            _BaseDataLoaderIter.__next__ is not _TORCHS_NEXT
            or self._IterableDataset_len_called is not None
            or _profiling()
        ):
            return super().__next__()
        data = self._next_data()
        self._num_yielded += 1
        return data

    def _next_data(self) -> Any:
        loop, began = self._loop, 0.0
        if loop is not None:
            began = perf_counter()
        try:
            data = self._next_batch()
        except Exception as error:
            if loop is not None:
                loop.note(began, perf_counter())
            if isinstance(error, StopIteration):
                self._progress.finished = True
                if self._observation is not None:
                    self._observation.ended()
            park_at_exit()
            raise
        if self._pinner is not None and self._pin_thread is None:
            try:
                data = self._pinner.here(data)
            except Exception as error:
                place = f"at batch {self._progress.yielded} of this epoch"
                add_note(error, f"In stage {self._pinner.stage!r} of the loader, {place}.")
                raise
        self._progress.yielded += 1
        if loop is not None:
            seconds = perf_counter() - began
            if seconds < loop.brief:  # inlined from `note`, to save a call
                loop.brief_seconds += seconds
            else:
                loop.note(began, began + seconds)
        return data

    @property
    def skipped(self) -> tuple[Skipped, ...]:
        """Samples of this epoch that were skipped or replaced, in the order of the batches."""
        return () if self._budget is None else tuple(self._budget.records)

    def report(self) -> str:
        """Return a table of the workers and their tasks. Any thread may call it."""
        return self._stage.table.report()

    def stats(self) -> Stats:
        """Return the statistics of this epoch until now; see `hybridloader.DataLoader.stats`."""
        if self._observation is None:
            raise RuntimeError("stats() needs an iterator of a loader with observe=True")
        return self._observation.stats()

    @property
    def _workers(self) -> Sequence[WorkerHandle]:
        return self._stage.handles

    def _shutdown_workers(self) -> None:
        self.close()

    def close(self) -> None:
        """End the workers, within about 2 seconds. Any thread may call it, any number of times."""
        if self._pin_thread is not None:
            self._pin_thread.close()
        self._stage.close()
        if self._observation is not None:
            self._observation.end()

    def __enter__(self) -> LoaderIterator:
        relays = () if self._pin_thread is None else self._pin_thread.running_relays
        if self._stage.closed and not any(relay.queue.items for relay in relays):
            raise IteratorClosed("this iterator is closed")
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _call_while_alive(method: weakref.WeakMethod[Any], argument: Any) -> Any:
    """Call a method of a loader, which a thread does not keep alive, nor its persistent workers.

    The iterator keeps the method alive.
    """
    found = method()
    if found is None:
        raise Abandoned
    return found(argument)


def for_workers(function: Any, backend: Backend) -> Any:
    """Return `function` in the form in which it is passed to workers of `backend`."""
    if not backend.in_process:
        return without_torch(function)
    method = isinstance(function, types.MethodType)
    of_a_loader = method and isinstance(function.__self__, torch.utils.data.DataLoader)
    if of_a_loader:
        return functools.partial(_call_while_alive, weakref.WeakMethod(function))
    return function
