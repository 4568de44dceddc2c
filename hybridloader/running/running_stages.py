"""Stages of a running pipeline: each is made of its node once, and started.

A running stage outlives an epoch of its pipeline: its workers stay for the next. Nothing here knows the
nodes between two stages.
"""

from __future__ import annotations

import functools
import random
import time
from collections.abc import Sequence
from itertools import count
from typing import TYPE_CHECKING, Any

from hybridloader._support.attributes import has
from hybridloader._support.error_handling import no_answer
from hybridloader._support.hf_streams import warn_of_few_shards
from hybridloader._support.state_copies import set_epoch
from hybridloader.engine.fetcher import Fetch, TaskContext
from hybridloader.engine.messages import WorkerSpec
from hybridloader.engine.refresh import DatasetChanges
from hybridloader.engine.relay import Relay
from hybridloader.engine.reorder import ReorderLimit
from hybridloader.engine.scheduler import Scheduler, least_busy
from hybridloader.engine.stage import Stage
from hybridloader.engine.stage_flow import StageFlow
from hybridloader.errors import IteratorClosed, WorkerPicklingError
from hybridloader.fetching.collate import with_entries
from hybridloader.fetching.item_steps import WorkFetch
from hybridloader.fetching.on_error.error_budget import ErrorBudget, FailureLog
from hybridloader.fetching.readers import MapFetch, ReadersFetch
from hybridloader.fetching.shard_division import ShardDivision, readers_share_of
from hybridloader.observe.measures import StageMeasures
from hybridloader.observe.observation import Observation
from hybridloader.running.flow import ReaderItems, RelayDepth, StageItems
from hybridloader.running.operator import Mark
from hybridloader.running.plan import InlineNode, Node, Path, RelayNode, WorkerNode
from hybridloader.running.reader_log import ReaderStarts
from hybridloader.seeding.sample_seeds import Origin, SampleSeeding, origin_of

if TYPE_CHECKING:
    from hybridloader.memory.page_locks import PageLocks
    from hybridloader.seeding.sample_rng import SampleRng


class RunningStage:
    """A stage that runs."""

    def __init__(
        self,
        node: WorkerNode,
        stage: Stage,
        flow: StageFlow,
        measures: StageMeasures | None,
        dataset: Any,
    ) -> None:
        self.node, self.stage, self.flow = node, stage, flow
        self.measures = measures  # None: not observed
        self.watch = None if dataset is None else DatasetChanges(dataset)
        self.readers: ReaderItems | None = None
        self.resumed: tuple[Mark, ReaderStarts] | None = None
        """Readers of the first epoch that resume, and their mark."""


class RunningRelay:
    """A relay that runs; its queue counts on from those of the relays that had its place before.

    `before` are the nodes of its chain that are before it; `stage` is the one that it pulls, if any.
    """

    def __init__(self, node: RelayNode, before: tuple[Node, ...], relay: Relay) -> None:
        self.node, self.before, self.relay = node, before, relay
        self.began = time.perf_counter()
        self.depth: RelayDepth | None = None
        self.stage: StageItems | None = None

    def replace(self, relay: Relay) -> None:
        """Put `relay` in the place of the one before it."""
        self.relay.shut()
        before, queue = self.relay.queue, relay.queue
        queue.count, queue.sleeps = before.count, before.sleeps
        if queue.sleeps is not None:
            queue.sleeps.begin_again(queue.items)
        self.relay = relay


_numbers = count()


class RunningStages(dict[Path, RunningStage]):
    """The stages of one pipeline, by the paths of their nodes; `closed` is cancelled once they end."""

    def __init__(
        self, seed: int, closed: TaskContext, observation: Observation | None = None
    ) -> None:
        super().__init__()
        self._seed, self._closed, self._observation = seed, closed, observation
        self.number = next(_numbers)  # their number in a trace
        # All the other mutable state:
        self.failure_log = FailureLog()  # of what was skipped
        self.locks: dict[Path, PageLocks] = {}  # where a device reads what a node gives, as it is
        self._epochs: dict[Path, int] = {}  # of sources that workers read
        # Readers that resume in the first epoch of their stage, and their marks:
        self.resumed: dict[Path, tuple[Mark, ReaderStarts]] = {}

    def set_epoch(self, node: WorkerNode, epoch: int) -> None:
        """Set the epoch of a source that workers read: before they start, and in each later pass."""
        if self._epochs.get(node.path) != epoch:
            self._epochs[node.path] = epoch
            set_epoch(node.works[0].step().function, epoch)

    def of(self, node: WorkerNode) -> RunningStage:
        """Return the stage of `node`, started if it does not run."""
        path, placement = node.path, node.placement
        found = self.get(path)
        if found is not None and not found.stage.closed:
            return found
        self._check_open()
        flow = (
            found.flow
            if found is not None
            else StageFlow(
                placement.num_workers,
                prefetch=placement.prefetch,
                buffer_bytes=placement.buffer_bytes,
            )
        )
        fetch = _fetch(node)
        measures = self._measures(node, fetch) if found is None else found.measures

        def fewest_at_hand(scheduler: Scheduler) -> int | None:
            readers = self[path].readers
            return None if readers is None else readers.fewest_at_hand(scheduler)

        spec = self._spec(node, fetch)
        try:
            stage = Stage(
                node.backend,
                spec,
                lookahead=2 * placement.num_workers if node.reads else node.window,
                ordered=placement.in_order and not node.reads,
                # A limit in items that the user set is kept.
                reorder=None
                if placement.prefetch or node.reads
                else ReorderLimit(placement.num_workers),
                timeout=placement.timeout,
                persistent=True,  # the consumer must not wait for its workers to end
                dispatch=fewest_at_hand
                if node.reads
                else functools.partial(least_busy, in_flight=placement.at_hand),
                flow_control=flow,
                observer=measures,
                forwards=node.forwarded,
                on_worker_death=placement.on_worker_death,
                task_timeout=placement.task_timeout,
                locks=self.locks.get(path),
                numbers=spec.seeding is not None and not node.reads,
            )
        except WorkerPicklingError as error:
            raise WorkerPicklingError(f"stage {node.name!r}: {error}") from error
        dataset = None if node.backend.in_process else spec.fetch.dataset
        if node.reads:  # each thread has a copy of it too
            dataset = spec.fetch.dataset if has(spec.fetch.dataset, "set_epoch") else None
        running = self[path] = RunningStage(node, stage, flow, measures, dataset)
        running.resumed = self.resumed.pop(path, None)
        self._check_open(stage)  # a concurrent close() may have missed this one
        return running

    def _check_open(self, stage: Stage | None = None) -> None:
        """Raise `IteratorClosed` if the stages have ended, and close the one that came too late."""
        if self._closed.cancelled:
            if stage is not None:
                stage.close()
            raise no_answer(IteratorClosed("the pipeline was closed"))

    def _measures(self, node: WorkerNode, fetch: Fetch) -> StageMeasures | None:
        if self._observation is None:
            return None
        workers, key = node.placement.num_workers, (self.number, node.path)
        window = node.placement.at_hand * workers
        return self._observation.measures(
            node.name, key, node.backend, fetch, workers, window, each=True
        )

    def _spec(self, node: WorkerNode, fetch: Fetch) -> WorkerSpec:
        placement = node.placement
        if node.reads:
            source = node.works[0].step().function
            warn_of_few_shards(source, placement.num_workers, node.name)
        resumed = self.resumed.get(node.path)
        generator = random.Random(f"{self._seed}/workers/{node.path}")
        threads = node.backend.in_process and not node.backend.in_caller
        seeding = self._origin(node, range(len(node.works)), threads=threads)
        return WorkerSpec(
            stage=node.name,
            workers=placement.num_workers,
            fetch=fetch,
            base_seed=generator.getrandbits(62),
            init_fn=placement.worker_init_fn,
            seeding=seeding,
            deferred=True,
            starts=() if resumed is None else resumed[1].starts,
        )

    def _origin(
        self, node: InlineNode | WorkerNode, works: Sequence[int], epoch: int = 0, *, threads: bool
    ) -> Origin | None:
        """Return the origin of the seeds of some of the `works`: the same, wherever these run."""
        placement = node.placement
        if not isinstance(placement.seeding, SampleSeeding) and any(
            work.step().concurrency for work in node.works
        ):
            return None  # coroutines take turns on one thread
        return origin_of(
            placement.seeding,
            self._seed,
            threads=threads,
            several=placement.threads_per_worker > 1,
            stages=tuple(f"{node.path[:-1]}/{node.first + number}" for number in works),
            epoch=epoch,
            any_thread=True,
        )

    def sample_rng_of(
        self, node: InlineNode, work: int, epoch: int, first: int, *, relayed: bool
    ) -> SampleRng | None:
        """Return the seeding of a function that is called where its results are asked for.

        With `relayed` the thread of a relay asks, and not your loop's.
        """
        origin = self._origin(node, [work], epoch, threads=relayed)
        function = node.works[work].step().function
        if origin is None or (isinstance(function, MapFetch) and function.draws_nothing):
            return None
        from hybridloader.seeding.thread_sample_rng import ThreadSampleRng

        sample_rng = ThreadSampleRng(origin, 0)
        sample_rng.by_function = True
        sample_rng.prepare()
        sample_rng.first_item = first
        return sample_rng

    def error_budget(
        self, node: InlineNode | WorkerNode, name: str, epoch: int, *, gaps: bool
    ) -> ErrorBudget | None:
        """Return the error budget of a stage in an epoch; None if errors are raised."""
        policy = node.placement.on_error
        if policy is None:
            return None
        budget = ErrorBudget(policy, name, epoch, self.failure_log, node.path, gaps=gaps)
        if self._observation is not None:
            self._observation.budget(budget)
        return budget


def shard_division(node: WorkerNode) -> ShardDivision | None:
    """Return the division of the shards of an epoch among readers, if their source names any."""
    source = node.works[0].step().function
    if readers_share_of(source) is None:
        return None
    return ShardDivision.of(source, node.placement.num_workers)


def _fetch(node: WorkerNode) -> Fetch:
    placement, steps = node.placement, tuple(work.step() for work in node.works)
    if node.reads:
        source, workers = steps[0].function, placement.num_workers
        share = readers_share_of(source)
        return ReadersFetch(source, placement.on_error, share and (*share, workers))
    entries = with_entries(None) if node.backend.fresh else None
    return WorkFetch(steps, placement.threads_per_worker, placement.on_error, entries)
