"""The running parts of a pipeline: stages, relays, and the iterators between them.

A machine is built in three steps. First all workers are started, forks before anything that has a
thread. Then the iterators are made, from the source on, and the stages begin. Then the relays'
threads start. What a later pass needs (a repetition, the next epoch) is made anew by the same rules, on
the workers that are there.
"""

from __future__ import annotations

import functools
import os
import random
import sys
import threading
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from hybridloader._support.caller import warn
from hybridloader._support.errors import IteratorClosed, StateError
from hybridloader.devices.pinning import Pinner
from hybridloader.engine.fetcher import TaskContext
from hybridloader.engine.relay import Relay
from hybridloader.pipeline.operators.base import Chain, Operator
from hybridloader.pipeline.operators.cache import Cache
from hybridloader.pipeline.operators.join import Branch, Zip
from hybridloader.pipeline.operators.sources import Indices
from hybridloader.pipeline.running.flow import Depth, StageItems
from hybridloader.pipeline.running.line import Line
from hybridloader.pipeline.running.passes import Pass, Start
from hybridloader.pipeline.running.plan import (
    Node,
    OperatorNode,
    RelayNode,
    WorkerNode,
    lay_out,
    passes_on,
)
from hybridloader.pipeline.running.relay_metrics import RelayMetrics
from hybridloader.pipeline.running.run_position import Layout, RunPosition
from hybridloader.pipeline.running.run_position import Path as Path
from hybridloader.pipeline.running.running_stages import RunningStages
from hybridloader.pipeline.running.state import Position, descriptions
from hybridloader.pipeline.running.validation import check, forks_in_rows

if TYPE_CHECKING:
    from hybridloader.memory.page_locks import PageLocks

_PATIENCE = 2.0
"""Seconds that `close` may take."""


class Machine:
    """Runs one pipeline.

    Parameters
    ----------
    pipeline
        What to run.
    seed
        Of everything random that has no seed of its own. None: drawn from torch's default generator.
    resumed
        The state whose seeds are to be used instead.
    first
        The number of the first epoch.
    idle
        Whether nothing is to run, because there is nothing left to do.

    Raises
    ------
    BackendUnavailable, ShippingError, ValueError
        It can't be run; no worker is left.
    """

    def __init__(
        self,
        pipeline: Chain,
        seed: int | None,
        resumed: Position | None = None,
        *,
        first: int = 0,
        idle: bool = False,
    ) -> None:
        check(pipeline)
        self.pipeline = pipeline
        self._draws: dict[str, int] = {}  # by the path of a source's line: see `draw`
        if resumed is None:
            self.seeded, self.seed = seed is not None, drawn() if seed is None else seed
        else:
            self.seeded, self.seed = resumed.seeded, resumed.seed
            self._draws.update(resumed.draws)
        self.owner = os.getpid()
        self.closed = TaskContext()
        self.left = TaskContext()  # of the pass that runs
        self.began = time.monotonic()
        self._ended: float | None = None
        self.given, self.waited = 0, 0.0  # items your loop got, and seconds that it waited for them
        self._lines: dict[int, tuple[Node, ...]] = {}  # by the identity of their pipeline
        self._nodes_at: dict[Path, tuple[Node, ...]] = {}  # by the path of the line
        # All the mutable state:
        self.stations = RunningStages(self.seed, self.closed)
        self._pinners: dict[int, Pinner | None] = {}  # by the identity of their operator
        self.relays: dict[Path, Relay] = {}
        self.feeders: dict[Path, RelayMetrics] = {}
        self.depths: dict[Path, Depth] = {}  # of relays
        self.behind: dict[Path, StageItems] = {}  # what is right before a relay
        self._forks: dict[int, Path] = {}  # by the identity of the fork
        self._ending = threading.RLock()
        if resumed is None:
            self._draw_for(pipeline, (), first)
        try:
            needed = [] if idle else list(self._needed(pipeline, ()))
            for path, node in sorted(needed, key=lambda found: _start_order(found[1])):
                self.stations.of(path, node)
        except BaseException:
            self.close()
            raise

    # -- building ------------------------------------------------------------------------------------

    def begin(self, epoch: int, trail: RunPosition) -> Iterator[Any]:
        """Make the iterators of one epoch, and start them. What is left of another is broken off."""
        self.break_off()
        self.left = TaskContext()
        self.stations.failure_log.new_run()
        trail.layout = Layout(self._line, self.path_of)
        run = Pass(self, trail, (), epoch, {}, self.left)
        return self.open_line(self.pipeline, (), run, Start(trail.start.given))

    def open_line(self, pipeline: Chain, path: Path, run: Pass, start: Start) -> Iterator[Any]:
        """Open all nodes of one line, and start its relays."""
        nodes = self._nodes_at[path] = self._line(pipeline)
        return Line(self, nodes, path, run).open(len(nodes) - 1, start)

    def add_relay(self, node: RelayNode, where: Path, relay: Relay) -> None:
        """Take charge of a relay, which takes the place of the one before it."""
        with self._ending:
            if self.closed.cancelled:
                raise IteratorClosed("the pipeline was closed")
            before = self.relays.get(where)
            self.relays[where] = relay
        feeder = self.feeders.setdefault(where, RelayMetrics(node))
        feeder.follow(before, relay)

    # -- stages ----------------------------------------------------------------------------------------

    def _line(self, pipeline: Chain) -> tuple[Node, ...]:
        found = self._lines.get(id(pipeline))
        if found is None:
            found = self._lines[id(pipeline)] = lay_out(pipeline)
            self.stations.number(found)
        return found

    def _needed(self, pipeline: Chain, path: Path) -> Iterator[tuple[Path, WorkerNode]]:
        """The stages that will run, from the end back to the first thing that is cached."""
        nodes = self._line(pipeline)
        locks: PageLocks | None = None  # of the device that reads what the node gives as it is
        for at in reversed(range(len(nodes))):
            node, place = nodes[at], (*path, at)
            if isinstance(node, RelayNode) and node.operator is not None:
                pinner = self.pinner_of(node)
                locks = None if pinner is None else pinner.locks
            elif locks is not None and not passes_on(node):
                self.stations.locks[place] = locks
                locks = None
            if isinstance(node, WorkerNode):
                yield place, node
            elif isinstance(node, OperatorNode):
                if isinstance(node.operator, Cache) and node.operator.ready():
                    return
                for number, branch in enumerate(node.operator.branches()):
                    inner = self.path_of(node.operator, place, number)
                    yield from self._needed(branch, inner)

    def pinner_of(self, node: RelayNode) -> Pinner | None:
        """What its thread handles items with: made once, for the device that was current then."""
        if node.operator is None:
            return None
        key = id(node.operator)
        if key not in self._pinners:
            pinner = self._pinners[key] = node.operator.pinner()
            if pinner is None:
                warn(
                    f"{node.name} has nothing to do: no accelerator that pins memory was found, so "
                    "items pass as they are",
                )
        return self._pinners[key]

    def _draw_for(self, pipeline: Chain, path: Path, epoch: int) -> None:
        """Draw the seeds of all sources that want one, so that every state knows them.

        From torch's default generator, right behind the seed of the run, as torch's loader does.
        """
        for at, node in enumerate(self._line(pipeline)):
            operator = node.operator if isinstance(node, OperatorNode) else None
            if isinstance(operator, Indices) and operator.draws(self.seeded):
                self._draws.setdefault(_name_of(path), drawn() - epoch)
            elif operator is not None:
                for number, branch in enumerate(operator.branches()):
                    self._draw_for(branch, self.path_of(operator, (*path, at), number), epoch)

    def draw(self, path: Path, epoch: int) -> int:
        """A seed of the source at `path` for one pass: drawn for the first, the next one for the next.

        So the passes of a resumed run have the seeds that they would have had.
        """
        place = _name_of(path)
        if place not in self._draws:  # of a sampler that has lost its generator meanwhile
            self._draws[place] = random.Random(f"{self.seed}/drawn/{place}").getrandbits(62)
        return (self._draws[place] + epoch) % (1 << 63)

    @functools.cached_property
    def descriptions(self) -> list[str]:
        """What states of runs of this pipeline say of it."""
        return descriptions(self.pipeline)

    def refuse_disorder(self) -> None:
        """Raise `StateError` if the order of the items depends on timing."""
        for station in self.stations.values():
            node = station.node
            if not node.reads and not node.placement.in_order and node.placement.num_workers > 1:
                raise StateError(
                    f"stage {node.name!r} is in_order=False, so which items came depends on timing, and "
                    "no state can say which are left; leave in_order out, or take it between epochs"
                )

    @property
    def draws(self) -> dict[str, int]:
        """What was drawn, by path."""
        return dict(self._draws)

    def path_of(self, operator: Operator, path: Path, number: int) -> Path:
        """The path of a branch; the pipeline of a fork has one, from wherever it is opened."""
        if isinstance(operator, Branch):
            return self._forks.setdefault(id(operator.fork), (-1 - len(self._forks),))
        return (*path, number)

    def joins_rows(self, operator: Operator, *, inside: bool) -> bool:
        """Tell whether a `zip` numbers the branches of `operator`: it is one, or inside of one."""
        if isinstance(operator, Branch):
            return id(operator.fork) in self._forks_in_rows
        return inside or isinstance(operator, Zip)

    @functools.cached_property
    def _forks_in_rows(self) -> set[int]:
        """Forks of which a branch is in a `zip`, by identity."""
        return forks_in_rows(self.pipeline)

    # -- what statistics ask ---------------------------------------------------------------------------

    @property
    def seconds(self) -> float:
        """Since it began, until it was closed."""
        return (time.monotonic() if self._ended is None else self._ended) - self.began

    def places(self) -> list[Path]:
        """Where there are stages and relays."""
        return [*self.stations, *self.feeders]

    def nodes_before(self, where: Path) -> tuple[Node, ...]:
        """The nodes of a line before the one at `where`."""
        return self._nodes_at[where[:-1]][: where[-1]]

    def waited_before(self, where: Path) -> float:
        """Seconds that the thread of the relay at `where` has waited for what it pulls."""
        *path, at = where
        while at > 0:
            at -= 1
            station, feeder = self.stations.get((*path, at)), self.feeders.get((*path, at))
            if station is not None:
                return station.books.waited
            if feeder is not None:
                return feeder.waited
        branches = [p for p in self.feeders if p[: len(path) + 1] == (*path, 0)]
        return sum(self.feeders[p].waited for p in branches)

    # -- ending ----------------------------------------------------------------------------------------

    def break_off(self) -> None:
        """End the pass that runs; its workers stay."""
        self.left.cancelled = True
        relays = list(self.relays.values())
        for relay in relays:
            relay.shut()
        for station in self.stations.values():
            station.stage.interrupt()
        deadline = time.monotonic() + _PATIENCE
        for relay in relays:
            relay.close(deadline)

    def close(self) -> None:
        """End everything: from any thread, any number of times; within some 2 seconds."""
        if os.getpid() != self.owner:  # a fork may have copied the lock while somebody had it
            self.closed.cancelled = self.left.cancelled = True
            return
        with self._ending:
            self.closed.cancelled = self.left.cancelled = True
            relays = list(self.relays.values())
        self._ended = self._ended or time.monotonic()
        deadline = time.monotonic() + _PATIENCE
        for relay in relays:
            relay.shut()
        stages = [station.stage for station in self.stations.values()]
        for stage in stages:
            stage.interrupt()
        for stage in stages:
            stage.leave(deadline)
        for stage in stages:
            stage.close()
        for station in self.stations.values():
            station.books.close()
        for feeder in self.feeders.values():
            feeder.ended = feeder.ended or time.monotonic()
        for relay in relays:
            relay.close(deadline)


def _name_of(path: Path) -> str:
    """What states call a line."""
    return ".".join(map(str, path))


def drawn() -> int:
    """A seed, from the generator that the training script's own seed governs.

    With torch's generator it is the draw that torch's loader makes first at every ``iter``. It is
    always on the CPU; torch's loader draws on the default device.
    """
    torch = sys.modules.get("torch")
    if torch is None:
        return random.getrandbits(62)
    return int(torch.empty((), dtype=torch.int64, device="cpu").random_().item())


def _start_order(node: WorkerNode) -> int:
    """Processes that may be forked come before those that start fresh, and before threads."""
    backend = node.placement.backend
    assert backend is not None
    if backend.in_process:
        return 2
    return 1 if backend.fresh else 0
