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
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from hybridloader._support.caller import warn
from hybridloader._support.error_handling import no_answer
from hybridloader.devices.pinning import Pinner
from hybridloader.engine.fetcher import TaskContext
from hybridloader.engine.relay import Relay
from hybridloader.engine.stage import Stage
from hybridloader.errors import IteratorClosed, StateError
from hybridloader.observe.observation import Observation
from hybridloader.running.operator import Chain, Mark
from hybridloader.running.plan import (
    ChainPlan,
    Node,
    OperatorNode,
    Path,
    RelayNode,
    WorkerNode,
    lay_out,
    passes_on,
)
from hybridloader.running.reader_log import resumed_readers
from hybridloader.running.run_position import Counts, cuts_of, reader_marks
from hybridloader.running.runner import Runner
from hybridloader.running.running_stages import RunningRelay, RunningStages, shard_division
from hybridloader.running.state import Heads, Position, descriptions, shares_of
from hybridloader.running.validation import chains_in_rows, check

if TYPE_CHECKING:
    from hybridloader._support.waits import Waits
    from hybridloader.engine.meter import TaskParts
    from hybridloader.memory.page_locks import PageLocks
    from hybridloader.observe.observation import Observe


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
        self.initialised: set[Path] = set()  # nodes without workers that had their `worker_init_fn`
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
