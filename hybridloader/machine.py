"""The running parts of a pipeline: stages, relays, and the iterators between them.

A machine is built in three steps. First all workers are started, forks before anything that has a
thread. Then the iterators are made, from the source on, and the stages begin. Then the relays'
threads start. What a later pass needs (a repetition, the next epoch) is made anew by the same rules, on
the workers that are there.
"""

from __future__ import annotations

import os
import random
import sys
import threading
import time
from collections.abc import Iterator
from types import GeneratorType
from typing import TYPE_CHECKING, Any

from hybridloader.errors import IteratorClosed, ShippingError, add_note
from hybridloader.feed import Portions
from hybridloader.fetch import Flag
from hybridloader.flow import (
    Depth,
    Fragile,
    Guarded,
    InlineItems,
    ReaderItems,
    StageItems,
    couple,
)
from hybridloader.ledger import Books
from hybridloader.messages import WorkerSpec
from hybridloader.native import one_thread_on_this_thread
from hybridloader.operators.base import Operator, Source, Upstream
from hybridloader.operators.cache import Cache
from hybridloader.operators.join import Branch
from hybridloader.operators.order import Repeat
from hybridloader.operators.work import Lookup, Readers, Work
from hybridloader.plan import Handover, Inline, Node, Single, Workers, check, lay_out
from hybridloader.refresh import Watch
from hybridloader.relay import FINAL, Relay
from hybridloader.scheduler import Scheduler, least_busy
from hybridloader.stage import Stage
from hybridloader.work import ReadersFetch, WorkFetch

if TYPE_CHECKING:
    from hybridloader.pipeline import Pipeline

_PATIENCE = 2.0
"""Seconds that `close` may take."""

Path = tuple[int, ...]
"""Where a node is: its number in its line, after those of the nodes and branches that the line is in."""


class Station:
    """A stage that runs, with its books."""

    def __init__(self, node: Workers, stage: Stage, books: Books, dataset: Any) -> None:
        self.node, self.stage, self.books = node, stage, books
        self.watch = None if dataset is None else Watch(dataset)
        self.readers: ReaderItems | None = None
        self.begun = False


class Machine:
    """Runs one pipeline.

    Parameters
    ----------
    pipeline
        What to run.
    seed
        Of everything random that has no seed of its own. None: drawn from torch's default generator.

    Raises
    ------
    BackendUnavailable, ShippingError, ValueError
        It can't be run; no worker is left.
    """

    def __init__(self, pipeline: Pipeline, seed: int | None) -> None:
        check(pipeline)
        self.pipeline = pipeline
        self.seeded = seed is not None
        self.seed = drawn() if seed is None else seed
        self.owner = os.getpid()
        self.closed = Flag()
        self.left = Flag()  # of the pass that runs
        self.began = time.monotonic()
        self._ended: float | None = None
        self.given, self.waited = 0, 0.0  # items your loop got, and seconds that it waited for them
        self._lines: dict[int, tuple[Node, ...]] = {}  # by the identity of their pipeline
        self._nodes_at: dict[Path, tuple[Node, ...]] = {}  # by the path of the line
        # All the mutable state:
        self.stations: dict[Path, Station] = {}
        self.relays: dict[Path, Relay] = {}
        self.feeders: dict[Path, Feeder] = {}
        self._depths: dict[Path, Depth] = {}
        self._behind: dict[Path, StageItems] = {}  # what is right before a relay
        self._forks: dict[int, Path] = {}  # by the identity of the fork
        self._ending = threading.RLock()
        try:
            needed = list(self._needed(pipeline, ()))
            for path, node in sorted(needed, key=lambda found: _start_order(found[1])):
                self._station(path, node)
        except BaseException:
            self.close()
            raise

    # -- building ------------------------------------------------------------------------------------

    def begin(self, epoch: int) -> Iterator[Any]:
        """Make the iterators of one epoch, and start them. What is left of another is broken off."""
        self.break_off()
        self.left = Flag()
        return self.open_line(self.pipeline, (), _Pass(self, (), epoch, {}, self.left))

    def open_line(self, pipeline: Pipeline, path: Path, run: _Pass) -> Iterator[Any]:
        """Open all nodes of one line, and start its relays."""
        started: list[Relay] = []
        nodes = self._nodes_at[path] = self._line(pipeline)
        items = self._open(nodes, len(nodes) - 1, path, run, started)
        for relay in started:
            relay.start()
        return items

    def _open(
        self, nodes: tuple[Node, ...], at: int, path: Path, run: _Pass, started: list[Relay]
    ) -> Iterator[Any]:
        """Open the nodes up to number `at`."""
        node, where = nodes[at], (*path, at)
        if isinstance(node, Single):
            return self._open_single(nodes, at, path, run, started)
        if isinstance(node, Workers):
            return self._open_stage(nodes, at, path, run, started)
        items = self._open(nodes, at - 1, path, run, started)
        if isinstance(node, Inline):
            if node.placement.worker_init_fn is not None:
                node.placement.worker_init_fn(0)
            for work in node.works:
                try:
                    items = InlineItems(items, work.step(), work.name, run.left)
                except Exception as error:
                    add_note(error, f"In stage {work.name!r}, setting it up.")
                    raise
            return items
        return self._open_relay(node, where, items, started)

    def _open_single(
        self, nodes: tuple[Node, ...], at: int, path: Path, run: _Pass, started: list[Relay]
    ) -> Iterator[Any]:
        node = nodes[at]
        assert isinstance(node, Single)
        operator = node.operator
        # Counted without what runs on workers: a seed means the same wherever work is done.
        number = sum(isinstance(before, Single) for before in nodes[:at])
        upstream = self._upstream(nodes, at, path, run, started)
        items = operator.begin(upstream, run.at((*path, at), number, operator))
        if not isinstance(items, Iterator):
            raise TypeError(
                f"operator {node.name!r}: open() must return an iterator, not {items!r}; "
                "return iter(...) of it"
            )
        if isinstance(operator, Source):
            return Guarded(items, run.left)
        return Fragile(items, node.name) if isinstance(items, GeneratorType) else items

    def _open_relay(
        self, node: Handover, where: Path, items: Iterator[Any], started: list[Relay]
    ) -> Relay:
        name = f"hybridloader-{node.what or node.name}"
        # It may collate, and all cores are taken: by the workers.
        relay = Relay(
            items,
            name,
            depth=node.depth or node.least,
            prepare=one_thread_on_this_thread,
            start=False,
        )
        if isinstance(items, StageItems):
            self._behind[where] = items
        if isinstance(items, (StageItems, ReaderItems)):
            items.books.behind = relay
        if node.depth is None:
            depth = self._depths[where] = Depth(relay, node.least)
            if isinstance(items, StageItems):
                couple(items, depth)
        with self._ending:
            if self.closed.up:
                raise IteratorClosed("the pipeline was closed")
            before = self.relays.get(where)
            self.relays[where] = relay
        feeder = self.feeders.setdefault(where, Feeder(node))
        feeder.follow(before, relay)
        started.append(relay)
        return relay

    def _upstream(
        self, nodes: tuple[Node, ...], at: int, path: Path, run: _Pass, started: list[Relay]
    ) -> Upstream:
        passes = 0
        operator = nodes[at].operator if isinstance(nodes[at], Single) else None  # type: ignore[union-attr]
        times = (operator.times or 1) if isinstance(operator, Repeat) else 1

        def upstream() -> Iterator[Any]:
            nonlocal passes
            number, passes = passes, passes + 1
            if number == 0 and times == 1 and not isinstance(operator, Repeat):
                return self._open(nodes, at - 1, path, run, started)
            inner = _Pass(self, run.path, run.epoch * times + number, {}, run.left)
            mine: list[Relay] = []
            items = self._open(nodes, at - 1, path, inner, mine)
            for relay in mine:
                relay.start()
            return items

        return upstream

    def _open_stage(
        self, nodes: tuple[Node, ...], at: int, path: Path, run: _Pass, started: list[Relay]
    ) -> Iterator[Any]:
        node = nodes[at]
        assert isinstance(node, Workers)
        station = self._station((*path, at), node)
        stage, books = station.stage, station.books
        changes = station.watch.changes() if station.watch is not None and station.begun else ()
        station.begun = True
        if node.reads:
            station.readers = ReaderItems(stage, books)
            station.readers.begin(changes)
            return station.readers
        items = self._open(nodes, at - 1, path, run, started)
        before = nodes[at - 2] if at > 1 else None
        portions = Portions(
            items,
            sealed=isinstance(before, Workers) and before.sealed,
            least=node.placement.threads_per_worker,
            # What is counted in bytes is counted item by item.
            most=1 if node.placement.buffer_bytes else node.placement.prefetch,
            final=FINAL,
        )
        found = StageItems(stage, books, items, portions)
        found.sealed = node.sealed
        depth, feeder = self._depths.get((*path, at - 1)), self._behind.get((*path, at - 1))
        if depth is not None:
            couple(found, depth)
        if feeder is not None and feeder.sealed:
            feeder.portions.no_larger_than(portions)  # what it gives can't be divided here
        found.begin(changes)
        return found

    # -- stages ----------------------------------------------------------------------------------------

    def _line(self, pipeline: Pipeline) -> tuple[Node, ...]:
        found = self._lines.get(id(pipeline))
        if found is None:
            found = self._lines[id(pipeline)] = lay_out(pipeline)
        return found

    def _needed(self, pipeline: Pipeline, path: Path) -> Iterator[tuple[Path, Workers]]:
        """The stages that will run, from the end back to the first thing that is cached."""
        nodes = self._line(pipeline)
        for at in reversed(range(len(nodes))):
            node = nodes[at]
            if isinstance(node, Workers):
                yield (*path, at), node
            elif isinstance(node, Single):
                if isinstance(node.operator, Cache) and node.operator.ready():
                    return
                for number, branch in enumerate(node.operator.branches()):
                    inner = self.path_of(node.operator, (*path, at), number)
                    yield from self._needed(branch, inner)

    def path_of(self, operator: Operator, path: Path, number: int) -> Path:
        """The path of a branch; the pipeline of a fork has one, from wherever it is opened."""
        if isinstance(operator, Branch):
            return self._forks.setdefault(id(operator.fork), (-1 - len(self._forks),))
        return (*path, number)

    def _station(self, path: Path, node: Workers) -> Station:
        found = self.stations.get(path)
        if found is not None and not found.stage.closed:
            return found
        if self.closed.up:
            raise IteratorClosed("the pipeline was closed")
        placement = node.placement
        assert placement.backend is not None
        books = found.books if found is not None else self._books(node)

        def fewest_at_hand(scheduler: Scheduler) -> int | None:
            readers = self.stations[path].readers
            return None if readers is None else readers.fewest_at_hand(scheduler)

        try:
            stage = Stage(
                placement.backend,
                self._spec(path, node),
                lookahead=2 * placement.workers if node.reads else node.window,
                ordered=placement.ordered and not node.reads,
                timeout=placement.timeout,
                persistent=True,  # whoever pulls it shall not wait for its workers to end
                dispatch=fewest_at_hand if node.reads else least_busy,
                ledger=books,
                sealed=node.sealed,
            )
        except ShippingError as error:
            raise ShippingError(f"stage {node.name!r}: {error}") from error
        dataset = None if placement.backend.in_process else self._dataset(node)
        station = self.stations[path] = Station(node, stage, books, dataset)
        return station

    def _books(self, node: Workers) -> Books:
        placement = node.placement
        return Books(
            placement.workers, prefetch=placement.prefetch, buffer_bytes=placement.buffer_bytes
        )

    def _spec(self, path: Path, node: Workers) -> WorkerSpec:
        placement = node.placement
        first = node.works[0]
        if isinstance(first, Readers):
            fetch: Any = ReadersFetch(first.source)
        else:
            steps = tuple(work.step() for work in node.works if isinstance(work, Work))
            fetch = WorkFetch(steps, placement.threads_per_worker)
        generator = random.Random(f"{self.seed}/workers/{path}")
        return WorkerSpec(
            stage=node.name,
            workers=placement.workers,
            fetch=fetch,
            base_seed=generator.getrandbits(62),
            init_fn=placement.worker_init_fn,
        )

    @staticmethod
    def _dataset(node: Workers) -> Any:
        for work in node.works:
            if isinstance(work, Lookup):
                return work.function.dataset
        return None

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
        self.left.up = True
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
        with self._ending:
            self.closed.up = self.left.up = True
            relays = list(self.relays.values())
        if os.getpid() != self.owner:
            return
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


class _Pass:
    """One pass over a line, as one of its operators sees it."""

    def __init__(
        self,
        machine: Machine,
        path: Path,
        epoch: int,
        shared: dict[Any, Any],
        left: Flag,
        operator: Operator | None = None,
        number: int = 0,
    ) -> None:
        self._machine, self.path = machine, path
        self._operator, self._number = operator, number
        self.epoch, self.shared, self.left = epoch, shared, left
        self._opened = 0

    def at(self, path: Path, number: int, operator: Operator) -> _Pass:
        """The same pass, for the operator at `path`, the one with that number in its line."""
        return _Pass(self._machine, path, self.epoch, self.shared, self.left, operator, number)

    @property
    def seed(self) -> int | None:
        machine = self._machine
        return machine.seed if machine.seeded else None

    def random(self, seed: int | None) -> random.Random:
        if seed is not None:
            return random.Random(f"{seed}/{self.epoch}")
        return random.Random(f"{self._machine.seed}/{self.path[:-1]}/{self._number}/{self.epoch}")

    def open(self, pipeline: Pipeline) -> Iterator[Any]:
        assert self._operator is not None
        number, self._opened = self._opened, self._opened + 1
        path = self._machine.path_of(self._operator, self.path, number)
        inner = _Pass(self._machine, path, self.epoch, self.shared, self.left)
        return self._machine.open_line(pipeline, path, inner)


class Feeder:
    """How long a relay's thread was held up, over all relays that had its place."""

    def __init__(self, node: Handover) -> None:
        self.node = node
        self.began = time.monotonic()
        self.ended: float | None = None
        self._relay: Relay | None = None
        self._blocked = self._waited = 0.0
        self._items = 0

    def follow(self, before: Relay | None, relay: Relay) -> None:
        """`relay` takes the place of `before`."""
        if before is not None:
            before.shut()
            self._blocked += before.blocked
            self._waited += before.waited
            self._items += before.count
        self._relay = relay

    @property
    def blocked(self) -> float:
        """Seconds that its thread waited for whoever takes."""
        return self._blocked + (self._relay.blocked if self._relay is not None else 0.0)

    @property
    def waited(self) -> float:
        """Seconds that whoever takes waited."""
        return self._waited + (self._relay.waited if self._relay is not None else 0.0)

    @property
    def items(self) -> int:
        """That went through."""
        return self._items + (self._relay.count if self._relay is not None else 0)

    @property
    def queued(self) -> int:
        """Items that wait now."""
        return 0 if self._relay is None else self._relay.waiting

    @property
    def elapsed(self) -> float:
        return (time.monotonic() if self.ended is None else self.ended) - self.began


def drawn() -> int:
    """A seed, from the generator that the training script's own seed governs.

    With torch's it is the same draw that torch's loader makes first at every ``iter``.
    """
    torch = sys.modules.get("torch")
    if torch is None:
        return random.getrandbits(62)
    return int(torch.empty((), dtype=torch.int64).random_().item())


def _start_order(node: Workers) -> int:
    """Processes that may be forked come before those that start fresh, and before threads."""
    backend = node.placement.backend
    assert backend is not None
    if backend.in_process:
        return 2
    return 1 if backend.name == "spawn" else 0
