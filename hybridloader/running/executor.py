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
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from operator import attrgetter
from types import GeneratorType
from typing import TYPE_CHECKING, Any, NamedTuple

from hybridloader._support.states import set_epoch
from hybridloader._support.system import cached_property
from hybridloader._support.text import warn
from hybridloader._support.torch_env import one_thread_on_this_thread
from hybridloader._support.user_objects import add_note, has, is_container, no_answer
from hybridloader.devices.pinning import Pinner
from hybridloader.engine.contract import CLOSING
from hybridloader.engine.dataset_state import Change, DatasetChanges
from hybridloader.engine.feed import Relay, StageFlow, TaskBatching
from hybridloader.engine.messages import Fetch, TaskContext, WorkerSpec
from hybridloader.engine.meter import TaskParts
from hybridloader.engine.scheduler import ReorderLimit, Scheduler, least_busy
from hybridloader.engine.stage import Stage
from hybridloader.errors import IteratorClosed, StateError, WorkerPicklingError
from hybridloader.fetching.collate import with_entries
from hybridloader.fetching.on_error import ErrorBudget, FailureLog
from hybridloader.fetching.readers import MapFetch, ReadersFetch, WorkFetch
from hybridloader.fetching.shards import ShardDivision, readers_share_of
from hybridloader.observe.observation import Observation
from hybridloader.observe.tracing import LocalSlices
from hybridloader.running.flow import (
    InlineItems,
    LoggedItems,
    ReaderItems,
    ReaderTaskSizes,
    RunningRelay,
    RunningStage,
    Sending,
    Skipping,
    SourceItems,
    StageItems,
    Taking,
)
from hybridloader.running.operator import (
    Chain,
    GeneratorIterator,
    Mark,
    Needed,
    Upstream,
    UpstreamPart,
)
from hybridloader.running.plan import (
    ChainPlan,
    InlineNode,
    Node,
    OperatorNode,
    Path,
    RelayNode,
    WorkerNode,
    check,
    lay_out,
)
from hybridloader.running.state import (
    ONE_EACH,
    SEVERAL,
    Ledger,
    Log,
    Point,
    Position,
    ReaderLog,
    ReaderStarts,
    RunPosition,
    Turn,
    before,
    cuts_of,
    descriptions,
    is_at,
    one_by_one,
    reader_marks,
    resumed_readers,
    shares_of,
)
from hybridloader.seeding.sample_rng import Origin, SampleRng, SampleSeeding, origin_of

if TYPE_CHECKING:
    from hybridloader._support.threads import Waits


class Runner:
    """Stages, and relays whose threads pull them.

    The finalizer of an iterator closes it, so it holds nothing that may hold that iterator: no sampler
    and no loader.
    """

    running_stages: Iterable[Stage] = ()  # stages that were started
    running_relays: Iterable[Relay] = ()  # relays that were made

    def __init__(self) -> None:
        self.owner = os.getpid()

    def break_off(self) -> None:
        """End the epoch that runs, and the threads of its relays; the workers stay."""
        if os.getpid() != self.owner:
            return
        deadline = time.monotonic() + CLOSING
        for relay in self.interrupt():
            relay.close(deadline)

    def interrupt(self) -> list[Relay]:
        """Interrupt all stages; return the relays, whose threads end now."""
        relays = [*self.running_relays]
        for relay in relays:
            relay.shut()
        for stage in self.running_stages:
            stage.interrupt()
        return relays

    def close(self) -> None:
        """End everything: from any thread, any number of times; within some 2 seconds.

        A garbage collection may call it on the thread of a relay, within a stage: that stage ends when
        its call returns.
        """
        if os.getpid() != self.owner:
            return
        deadline = time.monotonic() + CLOSING
        relays, stages = self.interrupt(), [*self.running_stages]
        for stage in stages:
            stage.leave(deadline)
        for stage in stages:
            stage.close()
        for relay in relays:
            relay.close(deadline)


_numbers = count()


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
        self.plan = lay_out(
            chain, None if resumed is None else cuts_of(resumed.marks, resumed.heads)
        )
        check(self.plan)
        start = resumed or Position(
            drawn() if seed is None else seed, seed is not None, first, given=0, raised=0
        )
        self.seeded, self.seed = start.seeded, start.seed
        self._drawn = dict(start.draws)  # seeds, by the path of a source's chain: see `draw`
        super().__init__()
        self._number = next(_numbers)  # that of its stages in a trace
        self.left = TaskContext()  # cancelled when the running epoch is ended
        # All the mutable state:
        self.closed = False
        self.stages: dict[Path, RunningStage] = {}
        self.failure_log = FailureLog()  # of what was skipped
        self._epochs: dict[Path, int] = {}  # of sources that workers read
        # Readers that resume in the first epoch of their stage, until they have, and their marks:
        self.resumed: dict[Path, tuple[Mark, ReaderStarts]] = {}
        self._pinners: dict[Any, Pinner | None] = {}  # by the function that makes them
        self.relays: dict[Path, RunningRelay] = {}
        self.initialized: set[Path] = set()  # nodes without workers that had their `worker_init_fn`
        self.coroutines: list[Any] = []  # of functions without workers, cancelled with their epoch
        self.inline: dict[tuple[Path, int], TaskContext] = {}  # of these, too, in the latest pass
        self._ending = threading.RLock()
        if resumed is None:
            self._draw_for(self.plan, first)
        try:
            marks = start.marks
            saved = {node.path: mark.epoch for node, mark in reader_marks(self.plan, marks)}
            needed = [] if idle else list(self._needed(self.plan, start.next_epoch))
            for node, epoch in needed:
                if node.reads:
                    self.set_epoch(node, saved.get(node.path, epoch))
            self._resume_readers(marks)
            # Processes that may be forked come before those that start fresh, and before threads.
            needed.sort(key=lambda each: (each[0].backend.in_process, each[0].backend.fresh))
            for node, _ in needed:
                self.stage_of(node)
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
            self.resumed[node.path] = mark, readers

    # -- stages: each is made of its node once, and started; its workers stay for the next epoch -------

    def set_epoch(self, node: WorkerNode, epoch: int) -> None:
        """Set the epoch of a source that workers read: before they start, and in each later pass."""
        if self._epochs.get(node.path) != epoch:
            self._epochs[node.path] = epoch
            set_epoch(node.works[0].step().function, epoch)

    def stage_of(self, node: WorkerNode) -> RunningStage:
        """Return the stage of `node`, started if it does not run."""
        path, placement, stages = node.path, node.placement, self.stages
        found = stages.get(path)
        if found is not None and not found.stage.closed:
            return found
        self._check_open()
        fetch = _fetch(node)
        if found is None:
            flow = StageFlow(placement.prefetch)
            measures = None
            if self.observation is not None:
                key, window = (self._number, node.path), placement.at_hand * placement.num_workers
                measures = self.observation.measures(
                    node.name, key, node.backend, fetch, placement.num_workers, window, each=True
                )
        else:
            node.backend.check()  # again: `check` was when the run began
            flow, measures = found.flow, found.measures

        def fewest_at_hand(scheduler: Scheduler) -> int | None:
            readers = stages[path].readers
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
                numbers=spec.seeding is not None and not node.reads,
            )
        except WorkerPicklingError as error:
            raise WorkerPicklingError(f"stage {node.name!r}: {error}") from error
        dataset = None if node.backend.in_process else spec.fetch.dataset
        if node.reads:  # each thread has a copy of it too
            dataset = spec.fetch.dataset if has(spec.fetch.dataset, "set_epoch") else None
        watch = None if dataset is None else DatasetChanges(dataset)
        running = stages[path] = RunningStage(node, stage, flow, measures, watch)
        self._check_open(stage)  # a concurrent close() may have missed this one
        return running

    def _check_open(self, stage: Stage | None = None) -> None:
        """Raise `IteratorClosed` if all has ended, and close the stage that came too late."""
        if self.closed:
            if stage is not None:
                stage.close()
            raise no_answer(IteratorClosed("the pipeline was closed"))

    def _spec(self, node: WorkerNode, fetch: Fetch) -> WorkerSpec:
        placement = node.placement
        resumed = self.resumed.get(node.path)
        generator = random.Random(f"{self.seed}/workers/{node.path}")
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
            self.seed,
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
        function = node.works[work].step().function
        if (
            isinstance(function, MapFetch)
            and not function.batched
            and is_container(function.dataset)
        ):
            return None  # nothing draws: an index is looked up in a list, an array or a tensor
        origin = self._origin(node, [work], epoch, threads=relayed)
        if origin is None:
            return None
        from hybridloader.seeding.thread_generators import ThreadSampleRng

        sample_rng = ThreadSampleRng(origin, 0)
        sample_rng.by_function = True
        sample_rng.prepare()
        sample_rng.first_item = first
        return sample_rng

    def error_budget(
        self, node: InlineNode | WorkerNode, name: str, epoch: int
    ) -> ErrorBudget | None:
        """Return the error budget of a stage in an epoch; None if errors are raised."""
        policy = node.placement.on_error
        if policy is None:
            return None
        budget = ErrorBudget(policy, name, epoch, self.failure_log, node.path)
        if self.observation is not None:
            self.observation.budget(budget)
        return budget

    # -- passes --------------------------------------------------------------------------------------

    def add_relay(self, node: RelayNode, before: tuple[Node, ...], relay: Relay) -> RunningRelay:
        """Take charge of a relay, which takes the place of the one `before` it."""
        with self._ending:
            self._check_open()
            running = self.relays.get(node.path)
            if running is None:
                if self.observation is not None:
                    self.observation.relay(relay.queue)
                running = self.relays[node.path] = RunningRelay(node, before, relay)
            else:
                running.replace(relay)
        return running

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
        for node in reversed(plan.nodes):
            if isinstance(node, RelayNode):
                self.pinner_of(node)  # its device is looked for before any worker starts
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
            self._drawn[_name_of(plan.path)] = drawn() - epoch
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

    def state(self, position: RunPosition) -> dict[str, Any]:
        """Return the state of a run. Raises `StateError` if it depends on timing."""
        finished = position.finished
        counts, saved, heads = position.position()
        for stage in self.stages.values() if counts.given and not finished else ():
            node = stage.node
            if not node.reads and not node.placement.in_order and node.placement.num_workers > 1:
                raise StateError(
                    f"stage {node.name!r} is in_order=False, so which items came depends on timing, and "
                    "no state has the rest; omit in_order, or take the state between epochs"
                )
        own = self.seed, self.seeded, position.epoch, *counts, finished, dict(self._drawn), saved
        return Position(*own, *shares_of(self.chain), heads).as_dict(self.descriptions)

    @cached_property
    def descriptions(self) -> list[str]:
        """Descriptions of the steps, for states of runs."""
        return descriptions(self.chain)

    # -- statistics ------------------------------------------------------------------------------------

    def waits_before(self, nodes: Sequence[Node]) -> list[Waits]:
        """Return the waits of the thread that pulls `nodes`, for each place that it waits at."""
        for node in reversed(nodes):
            if node.path in self.stages:
                measures = self.stages[node.path].measures
                assert measures is not None
                return [measures.waits]
            if node.path in self.relays:
                return [self.relays[node.path].relay.queue.waits]
        return [one for branch in nodes[0].branches for one in self.waits_before(branch.nodes)]

    # -- ending ----------------------------------------------------------------------------------------

    @property
    def running_stages(self) -> Iterator[Stage]:  # type: ignore[override]
        return (running.stage for running in list(self.stages.values()))

    @property
    def running_relays(self) -> Iterator[Relay]:  # type: ignore[override]
        return (place.relay for place in list(self.relays.values()))

    def break_off(self) -> None:
        self.left.cancelled = True
        super().break_off()

    def interrupt(self) -> list[Relay]:
        relays = super().interrupt()
        for coroutines in [*self.coroutines]:
            coroutines.close()
        return relays

    def close(self) -> None:
        if os.getpid() != self.owner:  # a fork may have copied a held lock
            self.closed = self.left.cancelled = True
            return
        with self._ending:  # no relay comes after this
            self.closed = self.left.cancelled = True
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


# -- Iterators of a pipeline's nodes for one epoch or repetition, made from the source on.
#
# Stages and relays outlive an epoch, so the executor has them. No worker is started here.


class Offset(NamedTuple):
    """Place in a stream of items where something begins."""

    items: int = 0  # items before that place
    slack: int = 0  # number of these that need not be there; see `Skipping`
    needed: Needed | None = None  # items from that place on that a resumed run needs; None: all


def open_run(executor: Executor, position: RunPosition) -> Iterator[Any]:
    """Make the iterators of one run, and start them. The run before is broken off."""
    executor.break_off()
    executor.left = TaskContext()
    observation = executor.observation
    if observation is not None:
        executor.left.parts = TaskParts()
        if observation.trace is not None:
            executor.left.slices = LocalSlices(observation.trace)
    executor.failure_log.records = []  # the list of the run before stays as it is
    position.opened = True
    heads = position.heads
    if heads and position.own_heads and not any(is_at(node, heads) for node in executor.plan.nodes):
        raise no_answer(
            StateError(
                f"heads: when states were merged, the functions {heads.place!r} shared workers; give "
                "them the same backend and options, until their first items have come"
            )
        )
    run = ChainPass(executor, position, executor.plan, position.epoch, executor.left)
    return run.open(Offset(position.start.given))


@dataclass
class ChainPass:
    """Iterators of one chain for one epoch or repetition."""

    executor: Executor
    position: RunPosition  # position of the run that this pass is a part of
    plan: ChainPlan
    epoch: int
    left: TaskContext  # cancelled when the consumer needs no more items
    within_relay: bool = False
    """True if this chain is a branch, and the thread of a relay pulls its items for another chain."""
    _started: list[Relay] = field(default_factory=list, init=False)

    def relayed(self, node: Node) -> bool:
        """Return True if the thread of a relay pulls the items of `node`."""
        behind = self.plan.nodes[node.path[-1] + 1 :]
        return self.within_relay or RelayNode in map(type, behind)

    def open(self, start: Offset, at: int | None = None) -> Iterator[Any]:
        """Open the nodes up to number `at`, None being the last, and start the relays among them."""
        items = self._open(len(self.plan.nodes) - 1 if at is None else at, start)
        for relay in self._started:
            relay.start()
        return items

    def begun(self, node: Node, items: Iterator[Any], at: int, start: Offset) -> Iterator[Any]:
        """Return the items of a node, of which number `at` comes first, from `start` on.

        In the places of items that are not needed, or that other ranks have had, are errors.
        """
        if self.position.own_heads and (was_had := self._was_had(node)) is not None:
            items = Skipping(items, self.left, node.name, at, was_had)
        first = start.items - at  # that the run before has given
        if not first and start.needed is None:
            return items
        numbers, until = start.needed or Needed((), 0)
        wanted = frozenset(numbers)

        def is_gone(number: int) -> bool | None:
            return number not in wanted if number < until else None

        skipping = Skipping(items, self.left, node.name, start.items, is_gone, first, start.slack)
        if first:
            self.position.droppings.append(skipping)
        return skipping

    def _open(self, at: int, start: Offset) -> Iterator[Any]:
        """Open the nodes up to number `at`, to continue after the first items."""
        node = self.plan.nodes[at]
        if isinstance(node, OperatorNode):
            return self._open_operator(node, at, start)
        if isinstance(node, RelayNode):
            return self._open_relay(node, at, self._open(at - 1, start))
        if isinstance(node, WorkerNode) and node.reads:
            items, begins_at = self._open_readers(node, start.items)
            return self.begun(node, items, begins_at, start)
        point = self.position.point(node, start.items, self.epoch) if start.items else Point(0, 0)
        begins = point or Point(0, 0)
        # Items that certainly exist after the node certainly exist before it.
        before = Offset(begins.taken, start.slack if begins.given == start.items else 0)
        if one_by_one(node, raised=bool(self.position.start.raised)):
            before, start = before._replace(needed=start.needed), start._replace(needed=None)
        if isinstance(node, WorkerNode):
            items = self._open_stage(node, at, begins, before)
        else:
            items = self._open_inline(node, self._open(at - 1, before), begins)
        return self.begun(node, items, begins.given, start)

    def _was_had(self, node: Node) -> Callable[[int], bool | None] | None:
        """Return a function that is true for the items of a node that other ranks have had, if any."""
        position, had = self.position, self.position.own_heads
        if position.heads is None or not is_at(node, position.heads):
            return None
        source_of = partial(position.source_of, self.plan, node, self.epoch)
        came = Counter[int]()  # items of each item of the source

        def was_had(number: int) -> bool | None:
            source = source_of(number)
            if source >= len(had):
                return None
            came[source] += 1
            return came[source] <= had[source]

        return was_had

    def _ledger(self, node: InlineNode | WorkerNode, begins: Point) -> Ledger | None:
        """Return the ledger of a node; None if it gives one item for each that it takes."""
        unordered = not node.placement.in_order and node.placement.num_workers > 1
        if unordered or node.one_by_one:
            return None
        ledger = Ledger(self.epoch, begins)
        self.position.keep(node, ledger)
        return ledger

    def _open_operator(self, node: OperatorNode, at: int, start: Offset) -> Iterator[Any]:
        operator = node.operator
        saved = self.position.saved(node, self.epoch, opens=True)
        opening = opening_of(node, start, self.epoch, saved, bool(self.position.start.raised))
        context = OperatorContext(self, node, opening)
        first = opening.first._replace(needed=context.needed)
        items = operator.begin(self._upstream(at, first), context)
        if not isinstance(items, Iterator):
            raise TypeError(
                f"operator {node.name!r}: open() must return an iterator, not {items!r}; "
                "return iter(...) of it"
            )
        if at == 0:
            items = SourceItems(items, self.left)
        elif isinstance(items, GeneratorType):
            over = (
                f"operator {node.name!r} ended with the previous error, because it is a generator; an "
                "iterator class with __next__ can return more items after an error"
            )
            items = GeneratorIterator(items, lambda _: no_answer(IteratorClosed(over)))
        return self.begun(node, items, opening.begins.items, start)

    def _upstream(self, at: int, begins: Offset) -> Upstream:
        """Return the function with which the operator at number `at` opens the nodes before it."""
        epochs = count(self.epoch)

        def upstream(*, epoch: int | None = None, start: int = 0) -> Iterator[Any]:
            usual = next(epochs)
            if epoch is None and usual == self.epoch:
                return self._open(at - 1, begins)
            again = replace(self, epoch=usual if epoch is None else epoch)
            return again.open(Offset(start, begins.slack), at - 1)

        return upstream

    def _open_inline(self, node: InlineNode, items: Iterator[Any], begins: Point) -> Iterator[Any]:
        executor, policy = self.executor, node.placement.on_error
        init_fn = node.placement.worker_init_fn
        if init_fn is not None and node.path not in executor.initialized:
            init_fn(0)  # once for all passes, as in a worker
            executor.initialized.add(node.path)
        ledger = self._ledger(node, begins)
        for number, work in enumerate(node.works):
            sample_rng = executor.sample_rng_of(
                node, number, self.epoch, begins.taken, relayed=self.relayed(node)
            )
            budget = executor.error_budget(node, work.name, self.epoch)
            try:
                found = InlineItems(
                    items, work.step(), work.name, self.left, sample_rng, policy, budget
                )
                earlier = executor.inline.get((node.path, number))
                if earlier is not None:  # of a pass before, whose counts go on
                    found.context.retried += earlier.retried
                    found.context.parts = earlier.parts
                executor.inline[node.path, number] = found.context
                if found.coroutines is not None:
                    still_open = [one for one in executor.coroutines if one.is_open]
                    executor.coroutines = [*still_open, found.coroutines]
                if ledger is not None and number == 0:
                    several = any(work.makes_several for work in node.works)
                    found.log(ledger, SEVERAL if several else ONE_EACH)
                items = found
            except Exception as error:
                add_note(error, f"In stage {work.name!r}, setting it up.")
                raise
        return items if ledger is None else LoggedItems(items, ledger)

    def _open_relay(self, node: RelayNode, at: int, items: Iterator[Any]) -> Iterator[Any]:
        executor = self.executor
        pinner = executor.pinner_of(node)
        relay = Relay(
            items if pinner is None else Sending(items, pinner, node.name),
            f"hybridloader-{node.thread}",
            depth=node.options.depth or node.least,
            weigh=None if pinner is None else attrgetter("size"),
            limit=0 if pinner is None else pinner.buffer_bytes,
            # It may collate, and the workers use all cores.
            prepare=one_thread_on_this_thread if pinner is None else pinner.prepare,
        )
        stage = items
        while isinstance(stage, Skipping):
            stage = stage.items
        if isinstance(stage, (StageItems, ReaderItems)):
            stage.flow.relay = relay.queue
        running = executor.add_relay(node, self.plan.nodes[:at], relay)
        running.stage = stage if isinstance(stage, StageItems) else None
        if running.stage is not None:
            running.couple(running.stage)
        self._started.append(relay)
        return relay if pinner is None else Taking(relay, pinner)

    def _stage(
        self, node: WorkerNode
    ) -> tuple[RunningStage, tuple[Change, ...], ErrorBudget | None]:
        """Return the stage of `node`, with the changes of its dataset that its workers need."""
        executor = self.executor
        stage = executor.stage_of(node)
        if node.reads:
            executor.set_epoch(node, self.epoch)
        changes = () if stage.watch is None else stage.watch.changes()
        budget = executor.error_budget(node, node.name, self.epoch)
        return stage, changes, budget

    def _open_readers(self, node: WorkerNode, count: int) -> tuple[Iterator[Any], int]:
        """Begin the readers to continue after `count` items; return how many of these they leave out."""
        stage, changes, budget = self._stage(node)
        resumed = self.executor.resumed.pop(node.path, None)
        if resumed is None:
            division = shard_division(node)
            found = ReaderStarts(Turn((0,) * node.placement.num_workers), (), division)
        else:
            mark, found = resumed
            if mark.epoch != self.epoch or mark.at > count:
                raise no_answer(
                    StateError(
                        f"stage {node.name!r}: the state is after item {mark.at} of pass {mark.epoch}, "
                        f"and item {count} of pass {self.epoch} is needed; begin the epoch again"
                    )
                )
        log = ReaderLog(self.epoch, found)
        self.position.keep(node, log)
        readers = ReaderItems(stage, budget, log, found)
        stage.readers = readers
        if readers.count:
            self.position.droppings.append(readers)
        readers.begin(ReaderTaskSizes(), changes, self.epoch)
        return readers, sum(found.begins.given)

    def _open_stage(
        self, node: WorkerNode, at: int, begins: Point, before: Offset
    ) -> Iterator[Any]:
        placement = node.placement
        stage, changes, budget = self._stage(node)
        items = self._open(at - 1, before)
        stage_before = self.plan.nodes[at - 2] if at > 1 else None
        batching = TaskBatching(
            items,
            forwarded=isinstance(stage_before, WorkerNode) and stage_before.forwarded,
            least=placement.least,
            most=placement.prefetch,
        )
        found = StageItems(stage, items, batching, budget, self._ledger(node, begins))
        relay = self.executor.relays.get((*self.plan.path, at - 1))
        if relay is not None:
            relay.couple(found)
            if relay.stage is not None and relay.stage.forwarded:
                relay.stage.batching.later = batching
        found.begin(batching, changes, self.epoch, begins.taken)
        return found


class OperatorContext:
    """The `Context` of the operator of `node` in the epoch or repetition `of`; see there."""

    def __init__(self, of: ChainPass, node: OperatorNode, opening: Opening) -> None:
        begins, saved = opening.begins, opening.saved
        if saved is not None and saved.at > begins.items:
            raise no_answer(
                StateError(
                    f"operator {node.name!r} would have to begin at item {begins.items}, and the state "
                    f"has it from item {saved.at}; begin the epoch again"
                )
            )
        self._pass, self._node, self._begins = of, node, begins
        self.epoch, self.start, self.saved = of.epoch, begins.items, saved
        self.first = opening.first.items
        executor = of.executor
        self.seed = executor.seed if executor.seeded else None
        self.run_seed = executor.seed
        self._opened = 0
        self.needed = node.operator.needed(self) if opening.marked else None

    def random(self, seed: int | None) -> random.Random:
        return generator_of(self._node, self._pass.plan, self.epoch, self.run_seed, seed)

    def draw(self) -> int:
        return self._pass.executor.draw(self._pass.plan.path, self.epoch)

    def open(self, pipeline: Chain, start: int = 0, number: int | None = None) -> Iterator[Any]:
        own = self._pass
        branch = self._opened if number is None else number
        self._opened = branch + 1
        plan = self._node.branches[branch]
        if plan.chain is not pipeline:
            raise ValueError(
                f"operator {self._node.name!r} did not name {pipeline!r} as branch {branch}"
            )
        inner = replace(own, plan=plan, within_relay=own.relayed(self._node))
        return inner.open(Offset(start, self._begins.slack))

    def mark(self, at: int, value: Any) -> None:
        self._pass.position.mark(self._node, self.epoch, at, value)

    def log(
        self, first: tuple[Any, ...], value_of: Callable[..., Any]
    ) -> Callable[[tuple[Any, ...]], None]:
        made = Log(self.epoch, first, value_of)
        self._pass.position.keep(self._node, made)
        return made.add

    def drop(self, items: Iterator[Any], at: int) -> Iterator[Any]:
        return self._pass.begun(self._node, items, at, self._begins)


def generator_of(
    node: OperatorNode, plan: ChainPlan, epoch: int, run_seed: int, seed: int | None
) -> random.Random:
    """Return the generator of an operator in an epoch, from its seed or else from the run's."""
    if seed is not None:
        return random.Random(f"{seed}/{epoch}")
    return random.Random(f"{run_seed}/{plan.path}/{node.number}/{epoch}")


class Opening(NamedTuple):
    """Where an operator begins that is to return the items of a place and all after it."""

    parts: Sequence[UpstreamPart] | None  # see `Operator.before`
    begins: Offset  # of its items; those before the place are dropped
    first: Offset  # of the items before it
    saved: Mark | None = None  # its mark in the run before, if it begins with that
    marked: bool = False  # it begins at that mark


def opening_of(
    node: OperatorNode, start: Offset, epoch: int, saved: Mark | None, raised: bool
) -> Opening:
    """Return how an operator is opened for the items from `start` on."""
    parts = before(node, start.items, epoch, saved, raised)
    if parts is None:  # it can't begin after its first items: they are made again
        return Opening(parts, Offset(), Offset())
    if parts and parts[0].given is not None:
        return Opening(parts, Offset(parts[0].given), Offset(parts[0].start), saved, True)
    begins, slack, seek = start._replace(needed=None), start.slack, node.operator.seek
    first = (seek(begins.items) if begins.items else 0) or 0
    if first:  # else it may have several passes, and begin them itself
        certain = begins.items - slack  # items that are there for sure
        slack = first - ((seek(certain - 1) or 0) + 1 if certain > 1 else min(certain, 1))
    return Opening(parts, begins, Offset(first, slack), saved)
