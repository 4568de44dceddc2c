"""Stages, relays and seeds of one pipeline, which serve all of its epochs and repetitions.

All workers are started first, forks before anything that has a thread. Then the iterators of an epoch
are made, from the source on, and the stages begin. Then the relays' threads start. A later pass (a
repetition, the next epoch) is made by the same rules, on the workers that are there.
"""

from __future__ import annotations

import functools
import os
import random
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import count
from typing import TYPE_CHECKING, Any

from hybridloader._support.states import set_epoch, warn_of_few_shards
from hybridloader._support.text import warn
from hybridloader._support.user_objects import has, no_answer
from hybridloader.devices.pinning import Pinner
from hybridloader.engine.feed import StageFlow
from hybridloader.engine.fetcher import Fetch, TaskContext
from hybridloader.engine.messages import WorkerSpec
from hybridloader.engine.refresh import DatasetChanges
from hybridloader.engine.relay import Relay
from hybridloader.engine.scheduler import ReorderLimit, Scheduler, least_busy
from hybridloader.engine.stage import Stage
from hybridloader.errors import IteratorClosed, StateError, WorkerPicklingError
from hybridloader.fetching.collate import with_entries
from hybridloader.fetching.item_steps import WorkFetch
from hybridloader.fetching.on_error import ErrorBudget, FailureLog
from hybridloader.fetching.readers import MapFetch, ReadersFetch
from hybridloader.fetching.shards import ShardDivision, readers_share_of
from hybridloader.observe.measures import StageMeasures
from hybridloader.observe.observation import Observation
from hybridloader.running.flow import ReaderItems, RelayDepth, StageItems
from hybridloader.running.operator import Chain, Mark
from hybridloader.running.plan import (
    ChainPlan,
    InlineNode,
    Node,
    OperatorNode,
    Path,
    RelayNode,
    WorkerNode,
    chains_in_rows,
    check,
    lay_out,
    passes_on,
)
from hybridloader.running.reader_log import ReaderStarts, resumed_readers
from hybridloader.running.run_position import Counts, cuts_of, reader_marks
from hybridloader.running.runner import Runner
from hybridloader.running.state import Heads, Position, descriptions, shares_of
from hybridloader.seeding.sample_seeds import Origin, SampleSeeding, origin_of

if TYPE_CHECKING:
    from hybridloader._support.threads import Waits
    from hybridloader.engine.meter import TaskParts
    from hybridloader.memory.page_locks import PageLocks
    from hybridloader.observe.observation import Observe
    from hybridloader.seeding.sample_rng import SampleRng


class Executor(Runner):
    """Runs the epochs of one chain, and ends its workers and threads.

    `seed` and the number of the `first` epoch are those of `Pipeline.run`; a state that is `resumed`
    has a seed, and no stage is started if it has nothing left to do. If the constructor raises, no
    worker is left.
    """

    def __init__(
        self,
        chain: Chain,
        seed: int | None,
        resumed: Position | None = None,
        *,
        first: int = 0,
        idle: bool = False,
        observation: Observation | None = None,  # None: not observed
    ) -> None:
        self.chain = chain
        self.observation = observation
        self.observe: bool | Observe = False  # as it was asked for
        self.plan = lay_out(
            chain, None if resumed is None else cuts_of(resumed.marks, resumed.heads)
        )
        check(self.plan)
        self._drawn: dict[str, int] = {}  # seeds, by the path of a source's chain: see `draw`
        if resumed is None:
            self.seeded, self.seed = seed is not None, drawn() if seed is None else seed
        else:
            self.seeded, self.seed = resumed.seeded, resumed.seed
            self._drawn.update(resumed.draws)
        super().__init__()
        self.closed = TaskContext()
        self.left = TaskContext()  # cancelled when the running epoch is ended
        # All the mutable state:
        self.stages = RunningStages(self.seed, self.closed, observation)
        self._pinners: dict[Any, Pinner | None] = {}  # by the function that makes them
        self.relays: dict[Path, RunningRelay] = {}
        self.initialized: set[Path] = set()  # nodes without workers that had their `worker_init_fn`
        self._coroutines: list[Any] = []  # of functions without workers
        self._inline: dict[tuple[Path, int], TaskContext] = {}  # of these, too, in the latest pass
        self._ending = threading.RLock()
        if resumed is None:
            self._draw_for(self.plan, first)
        try:
            epoch = first if resumed is None else resumed.next_epoch
            marks = {} if resumed is None else resumed.marks
            saved = {node.path: mark.epoch for node, mark in reader_marks(self.plan, marks)}
            needed = [] if idle else list(self._needed(self.plan, epoch))
            for node, epoch in needed:
                if node.reads:
                    self.stages.set_epoch(node, saved.get(node.path, epoch))
            self._resume_readers(marks)
            for node, _ in sorted(needed, key=_start_order):
                self.stages.of(node)
        except BaseException:
            self.close()
            raise

    def _resume_readers(self, marks: Mapping[str, Mark]) -> None:
        for node, mark in reader_marks(self.plan, marks):
            workers, division = node.placement.num_workers, shard_division(node)
            readers = resumed_readers(mark, node.name, division, workers)
            if mark.at and not readers.exact and len(marks) > 1:
                raise StateError(
                    f"{node.name}: the state is of {len(mark.value['readers'])} readers, or of another "
                    f"order of the shards, and this pipeline has {workers} readers. A step after them "
                    "does not make one item of one, so it can't resume with other items: load what "
                    "pipeline.merge_states returns for the states of all ranks"
                )
            self.stages.resumed[node.path] = mark, readers

    # -- passes --------------------------------------------------------------------------------------

    def add_relay(self, node: RelayNode, before: tuple[Node, ...], relay: Relay) -> RunningRelay:
        """Take charge of a relay, which takes the place of the one `before` it."""
        with self._ending:
            if self.closed.cancelled:
                raise no_answer(IteratorClosed("the pipeline was closed"))
            running = self.relays.get(node.path)
            if running is None:
                if self.observation is not None:
                    self.observation.relay(relay.queue)
                running = self.relays[node.path] = RunningRelay(node, before, relay)
            else:
                running.replace(relay)
        return running

    def add_inline(self, path: Path, number: int, context: TaskContext) -> None:
        """Continue the counts of a function without workers, one of those at `path`."""
        before = self._inline.get((path, number))
        if before is not None:
            context.retried += before.retried
            context.parts = before.parts
        self._inline[path, number] = context

    def retried(self, path: Path) -> int:
        """Return the number of calls that functions without workers have made again."""
        contexts = list(self._inline.items())  # a copy: other threads open passes, too
        return sum(context.retried for (at, _), context in contexts if at == path)

    def parts_of(self, path: Path, number: int) -> TaskParts | None:
        """Return the parts of the tasks of such a function, if it is an ``async def``."""
        context = self._inline.get((path, number))
        return None if context is None else context.parts

    def add_coroutines(self, coroutines: Any) -> None:
        """Take charge of coroutines without workers: they are cancelled when the epoch is left."""
        self._coroutines = [*(one for one in self._coroutines if one.is_open), coroutines]

    def pinner_of(self, node: RelayNode) -> Pinner | None:
        """Return the pinner of a relay's items: made once, for the device that is current then."""
        make = node.options.pinner
        if make is None:
            return None
        if make not in self._pinners:
            pinner = self._pinners[make] = make()
            if pinner is None:
                warn(
                    f"{node.name} has no effect: no accelerator that pins memory was found, so "
                    "items are passed on unchanged",
                    "no-effect-of-pinning",
                )
        return self._pinners[make]

    def _needed(self, plan: ChainPlan, epoch: int) -> Iterator[tuple[WorkerNode, int]]:
        """Yield the stages that will run, from the end back to the first operator that is cached.

        Each comes with the epoch in which a run that begins with `epoch` enters it.
        """
        locks: PageLocks | None = None  # of the device that reads what the node gives as it is
        for node in reversed(plan.nodes):
            if isinstance(node, RelayNode) and node.pins:
                pinner = self.pinner_of(node)
                locks = None if pinner is None else pinner.locks
            elif locks is not None and not passes_on(node):
                self.stages.locks[node.path] = locks
                locks = None
            if isinstance(node, WorkerNode):
                yield node, epoch
            elif isinstance(node, OperatorNode):
                before = node.operator.before(0, epoch, None)
                if before == []:  # it needs no item
                    return
                for branch in node.branches:
                    yield from self._needed(branch, epoch)
                for part in before or ():
                    epoch = part.epoch if part.branch is None else epoch

    # -- seeds and states ----------------------------------------------------------------------------

    def _draw_for(self, plan: ChainPlan, epoch: int) -> None:
        """Draw the seeds of all sources that want one, so that every state knows them.

        From torch's default generator, right after the seed of the run, as torch's loader does.
        """
        if plan.chain.operators[0].draws(self.seeded):
            self._drawn.setdefault(_name_of(plan.path), drawn() - epoch)
        for node in plan.nodes:
            for branch in node.branches:
                self._draw_for(branch, epoch)

    def draw(self, path: Path, epoch: int) -> int:
        """Return the seed of the source at `path` in an epoch: drawn for the first, then counted up.

        So the epochs of a resumed run have the seeds that they would have had.
        """
        place = _name_of(path)
        if place not in self._drawn:  # of a sampler that has lost its generator meanwhile
            self._drawn[place] = random.Random(f"{self.seed}/drawn/{place}").getrandbits(62)
        return (self._drawn[place] + epoch) % (1 << 63)

    def state(
        self,
        epoch: int,
        counts: Counts,
        saved: Mapping[str, Mark],
        *,
        finished: bool,
        heads: Heads | None = None,
    ) -> dict[str, Any]:
        """Return the state of a run in an epoch."""
        drawn = dict(self._drawn)
        position = Position(
            self.seed, self.seeded, epoch, *counts, finished, drawn, saved, *self._shares, heads
        )
        return position.as_dict(self.descriptions)

    @functools.cached_property
    def _shares(self) -> tuple[list[int], list[int]]:
        return shares_of(self.chain)

    @functools.cached_property
    def descriptions(self) -> list[str]:
        """Descriptions of the steps, for states of runs."""
        return descriptions(self.chain)

    @functools.cached_property
    def in_rows(self) -> set[Path]:
        """Paths of the chains whose items a later `zip` numbers, so that left-out ones keep places."""
        return chains_in_rows(self.plan)

    # -- statistics ------------------------------------------------------------------------------------

    def waits_before(self, nodes: Sequence[Node]) -> list[Waits]:
        """Return the waits of the thread that pulls `nodes`, for each place that it waits at."""
        for node in reversed(nodes):
            if node.path in self.stages:
                measures = self.stages[node.path].measures
                assert measures is not None
                return [measures.waits]
            if node.path in self.relays:
                sleeps = self.relays[node.path].relay.queue.sleeps
                assert sleeps is not None
                return [sleeps.waits]
        return [one for branch in nodes[0].branches for one in self.waits_before(branch.nodes)]

    # -- ending ----------------------------------------------------------------------------------------

    @property
    def running_stages(self) -> Iterator[Stage]:
        return (running.stage for running in list(self.stages.values()))

    @property
    def running_relays(self) -> Iterator[Relay]:
        return (place.relay for place in list(self.relays.values()))

    def break_off(self) -> None:
        self.left.cancelled = True
        super().break_off()

    def interrupt(self) -> list[Relay]:
        relays = super().interrupt()
        for coroutines in [*self._coroutines]:
            coroutines.close()
        return relays

    def close(self) -> None:
        if os.getpid() != self.owner:  # a fork may have copied a held lock
            self.closed.cancelled = self.left.cancelled = True
            return
        with self._ending:  # no relay comes after this
            self.closed.cancelled = self.left.cancelled = True
        if self.observation is not None:
            self.observation.end()
        super().close()
        for running in self.stages.values():
            if running.measures is not None:
                running.measures.close()


def _name_of(path: Path) -> str:
    """Return the name of a chain in states."""
    return ".".join(map(str, path))


def drawn() -> int:
    """Draw a seed from the generator that the training script's own seed governs.

    With torch's generator it is the draw that torch's loader makes first at every ``iter``. It is
    always on the CPU; torch's loader draws on the default device.
    """
    torch = sys.modules.get("torch")
    if torch is None:
        return random.getrandbits(62)
    return int(torch.empty((), dtype=torch.int64, device="cpu").random_().item())


def _start_order(needed: tuple[WorkerNode, int]) -> int:
    """Put processes that may be forked before those that start fresh, and before threads."""
    node, _ = needed
    if node.backend.in_process:
        return 2
    return 1 if node.backend.fresh else 0


# -- stages of a running pipeline: each is made of its node once, and started
#
# A running stage outlives an epoch of its pipeline: its workers stay for the next. Nothing here knows
# the nodes between two stages.


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
