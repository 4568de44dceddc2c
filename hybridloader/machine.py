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
from types import GeneratorType
from typing import TYPE_CHECKING, Any

from hybridloader.dropping import Dropping
from hybridloader.errors import IteratorClosed, ShippingError, StateError, add_note
from hybridloader.feed import Portions
from hybridloader.fetch import Flag
from hybridloader.flow import (
    Depth,
    Fragile,
    Guarded,
    ReaderItems,
    StageItems,
    couple,
)
from hybridloader.inline_items import GuardedInlineItems, InlineItems
from hybridloader.ledger import Books
from hybridloader.losses import Losses, Register
from hybridloader.messages import WorkerSpec
from hybridloader.native import one_thread_on_this_thread
from hybridloader.numbering import Counter, Numbering
from hybridloader.operators.base import Operator, Source, Upstream
from hybridloader.operators.cache import Cache
from hybridloader.operators.join import Branch
from hybridloader.operators.order import Repeat
from hybridloader.operators.sources import Indices
from hybridloader.operators.work import Lookup, Placement, Readers, Work
from hybridloader.passes import Pass, Start
from hybridloader.plan import Handover, Inline, Node, Single, Workers, check, lay_out
from hybridloader.readers import ReadersFetch
from hybridloader.refresh import Watch
from hybridloader.relay import FINAL, Relay
from hybridloader.resume import Position, descriptions
from hybridloader.sample_seeds import Origin
from hybridloader.scheduler import Scheduler, least_busy
from hybridloader.stage import Stage
from hybridloader.trail import Layout, Trail, before, number_of, passes_one_by_one
from hybridloader.trail import Path as Path
from hybridloader.work import WorkFetch

if TYPE_CHECKING:
    from hybridloader.draws import Draws
    from hybridloader.pipeline import Pipeline

_PATIENCE = 2.0
"""Seconds that `close` may take."""


class Station:
    """A stage that runs, with its books."""

    def __init__(
        self, node: Workers, stage: Stage, books: Books, dataset: Any, counter: Counter
    ) -> None:
        self.node, self.stage, self.books, self.counter = node, stage, books, counter
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
        pipeline: Pipeline,
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
        self.closed = Flag()
        self.left = Flag()  # of the pass that runs
        self.began = time.monotonic()
        self._ended: float | None = None
        self.given, self.waited = 0, 0.0  # items your loop got, and seconds that it waited for them
        self._lines: dict[int, tuple[Node, ...]] = {}  # by the identity of their pipeline
        self._numbers: dict[int, int] = {}  # of functions in their line, by their identity
        self._nodes_at: dict[Path, tuple[Node, ...]] = {}  # by the path of the line
        # All the mutable state:
        self.stations: dict[Path, Station] = {}
        self.relays: dict[Path, Relay] = {}
        self.feeders: dict[Path, Feeder] = {}
        self._depths: dict[Path, Depth] = {}
        self._behind: dict[Path, StageItems] = {}  # what is right before a relay
        self.register = Register()  # of what was skipped
        self._forks: dict[int, Path] = {}  # by the identity of the fork
        self._ending = threading.RLock()
        if resumed is None:
            self._draw_for(pipeline, (), first)
        try:
            needed = [] if idle else list(self._needed(pipeline, ()))
            for path, node in sorted(needed, key=lambda found: _start_order(found[1])):
                self._station(path, node)
        except BaseException:
            self.close()
            raise

    # -- building ------------------------------------------------------------------------------------

    def begin(self, epoch: int, trail: Trail) -> Iterator[Any]:
        """Make the iterators of one epoch, and start them. What is left of another is broken off."""
        self.break_off()
        self.left = Flag()
        self.register.new_run()
        trail.layout = Layout(self._line, self.path_of)
        run = Pass(self, trail, (), epoch, {}, self.left)
        return self.open_line(self.pipeline, (), run, Start(trail.start.given))

    def open_line(self, pipeline: Pipeline, path: Path, run: Pass, start: Start) -> Iterator[Any]:
        """Open all nodes of one line, and start its relays."""
        started: list[Relay] = []
        nodes = self._nodes_at[path] = self._line(pipeline)
        items = self._open(nodes, len(nodes) - 1, path, run, started, start)
        for relay in started:
            relay.start()
        return items

    def _open(
        self,
        nodes: tuple[Node, ...],
        at: int,
        path: Path,
        run: Pass,
        started: list[Relay],
        start: Start,
    ) -> Iterator[Any]:
        """Open the nodes up to number `at`, to give what is behind the first items."""
        node = nodes[at]
        if isinstance(node, Single):
            return self._open_single(nodes, at, path, run, started, start)
        if not start.items or passes_one_by_one(node):
            return self._open_node(nodes, at, path, run, started, start)
        items = self._open_node(nodes, at, path, run, started, Start())
        return run.without(items, start, node.name)

    def _open_node(
        self,
        nodes: tuple[Node, ...],
        at: int,
        path: Path,
        run: Pass,
        started: list[Relay],
        start: Start,
    ) -> Iterator[Any]:
        """The same, if what comes before is to begin behind as many items."""
        node, where = nodes[at], (*path, at)
        if isinstance(node, Workers):
            return self._open_stage(nodes, at, path, run, started, start)
        items = self._open(nodes, at - 1, path, run, started, start)
        if isinstance(node, Inline):
            if node.placement.worker_init_fn is not None:
                node.placement.worker_init_fn(0)
            for work in node.works:
                draws = self._draws_of(work, path, run.epoch, start.items)
                losses = self._losses(where, node.placement, work.name, run.epoch)
                policy = node.placement.on_error
                try:
                    if losses is None or policy is None:
                        items = InlineItems(items, work.step(), work.name, run.left, draws)
                    else:
                        items = GuardedInlineItems(
                            items, work.step(), work.name, run.left, policy, losses, draws
                        )
                except Exception as error:
                    add_note(error, f"In stage {work.name!r}, setting it up.")
                    raise
            return items
        assert isinstance(node, Handover)
        return self._open_relay(node, where, items, started)

    def _open_single(
        self,
        nodes: tuple[Node, ...],
        at: int,
        path: Path,
        run: Pass,
        started: list[Relay],
        start: Start,
    ) -> Iterator[Any]:
        node = nodes[at]
        assert isinstance(node, Single)
        operator, number = node.operator, number_of(nodes, at)
        saved = run.trail.saved(path, number, run.epoch)
        raised = bool(run.trail.start.raised)
        parts = before(operator, start.items, run.epoch, saved, raised)
        first, begins = start, Start()  # to be dropped here, if it can't begin behind them
        if parts is not None:
            first, begins = Start(), start
        upstream = self._upstream(nodes, at, path, run, started, _upstream_of(operator, begins))
        items = operator.begin(upstream, run.at((*path, at), number, operator, begins, saved))
        if not isinstance(items, Iterator):
            raise TypeError(
                f"operator {node.name!r}: open() must return an iterator, not {items!r}; "
                "return iter(...) of it"
            )
        if isinstance(operator, Source):
            items = Guarded(items, run.left)
        elif isinstance(items, GeneratorType):
            items = Fragile(items, node.name)
        return run.without(items, first, node.name)

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
        stage = items.items if isinstance(items, Dropping) else items
        if isinstance(stage, StageItems):
            self._behind[where] = stage
        if isinstance(stage, (StageItems, ReaderItems)):
            stage.books.behind = relay
        if node.depth is None:
            depth = self._depths[where] = Depth(relay, node.least)
            if isinstance(stage, StageItems):
                couple(stage, depth)
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
        self,
        nodes: tuple[Node, ...],
        at: int,
        path: Path,
        run: Pass,
        started: list[Relay],
        begins: Start,
    ) -> Upstream:
        passes = 0
        operator = nodes[at].operator if isinstance(nodes[at], Single) else None  # type: ignore[union-attr]
        repeat = operator if isinstance(operator, Repeat) else None
        times = 1 if repeat is None else (repeat.times or 1)

        def upstream(
            number: int | None = None, *, epoch: int | None = None, start: int = 0
        ) -> Iterator[Any]:
            nonlocal passes
            number = passes if number is None else number
            passes = number + 1
            if number == 0 and repeat is None and epoch is None:
                return self._open(nodes, at - 1, path, run, started, begins)
            if epoch is None:
                epoch = run.epoch * times + number
            mine: list[Relay] = []
            inner, behind = run.another(path, epoch), Start(start, begins.slack)
            items = self._open(nodes, at - 1, path, inner, mine, behind)
            for relay in mine:
                relay.start()
            return items

        return upstream

    def _open_stage(
        self,
        nodes: tuple[Node, ...],
        at: int,
        path: Path,
        run: Pass,
        started: list[Relay],
        start: Start,
    ) -> Iterator[Any]:
        node = nodes[at]
        assert isinstance(node, Workers)
        station = self._station((*path, at), node)
        stage, books = station.stage, station.books
        changes = station.watch.changes() if station.watch is not None and station.begun else ()
        station.begun = True
        losses = self._losses((*path, at), node.placement, node.name, run.epoch)
        if node.reads:
            station.counter.begin(run.epoch)
            station.readers = ReaderItems(stage, books, losses)
            station.readers.begin(changes)
            return station.readers
        items = self._open(nodes, at - 1, path, run, started, start)
        stage_before = nodes[at - 2] if at > 1 else None
        portions = Portions(
            items,
            sealed=isinstance(stage_before, Workers) and stage_before.sealed,
            least=node.placement.threads_per_worker,
            # What is counted in bytes is counted item by item.
            most=1 if node.placement.buffer_bytes else node.placement.prefetch,
            final=FINAL,
        )
        found = StageItems(stage, books, items, portions, losses)
        found.sealed = node.sealed
        depth, feeder = self._depths.get((*path, at - 1)), self._behind.get((*path, at - 1))
        if depth is not None:
            couple(found, depth)
        if feeder is not None and feeder.sealed:
            feeder.portions.no_larger_than(portions)  # what it gives can't be divided here
        station.counter.begin(run.epoch, start.items)
        found.begin(changes)
        return found

    # -- stages ----------------------------------------------------------------------------------------

    def _line(self, pipeline: Pipeline) -> tuple[Node, ...]:
        found = self._lines.get(id(pipeline))
        if found is None:
            found = self._lines[id(pipeline)] = lay_out(pipeline)
            works = [
                work for node in found if isinstance(node, (Inline, Workers)) for work in node.works
            ]
            self._numbers.update((id(work), number) for number, work in enumerate(works))
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

    def _draw_for(self, pipeline: Pipeline, path: Path, epoch: int) -> None:
        """Draw the seeds of all sources that want one, so that every state knows them.

        From torch's default generator, right behind the seed of the run, as torch's loader does.
        """
        for at, node in enumerate(self._line(pipeline)):
            operator = node.operator if isinstance(node, Single) else None
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
            if not node.reads and not node.placement.ordered and node.placement.workers > 1:
                raise StateError(
                    f"stage {node.name!r} is ordered=False, so which items came depends on timing, and "
                    "no state can say which are left; leave ordered out, or take it between epochs"
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

        counter = Counter(items=not node.reads)
        backend = placement.backend
        if placement.seeding is not None:
            backend = Numbering(backend, counter)
        try:
            stage = Stage(
                backend,
                self._spec(path, node),
                lookahead=2 * placement.workers if node.reads else node.window,
                ordered=placement.ordered and not node.reads,
                timeout=placement.timeout,
                persistent=True,  # whoever pulls it shall not wait for its workers to end
                dispatch=fewest_at_hand if node.reads else least_busy,
                ledger=books,
                sealed=node.sealed,
                on_worker_death=placement.on_worker_death,
                task_timeout=placement.task_timeout,
            )
        except ShippingError as error:
            raise ShippingError(f"stage {node.name!r}: {error}") from error
        dataset = None if placement.backend.in_process else self._dataset(node)
        station = self.stations[path] = Station(node, stage, books, dataset, counter)
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
            fetch: Any = ReadersFetch(first.source, placement.on_error)
        else:
            steps = tuple(work.step() for work in node.works if isinstance(work, Work))
            fetch = WorkFetch(steps, placement.threads_per_worker, placement.on_error)
        generator = random.Random(f"{self.seed}/workers/{path}")
        return WorkerSpec(
            stage=node.name,
            workers=placement.workers,
            fetch=fetch,
            base_seed=generator.getrandbits(62),
            init_fn=placement.worker_init_fn,
            seeding=self._origin(placement, path[:-1], node.works),
        )

    def _origin(
        self, placement: Placement, line: Path, works: tuple[Work | Readers, ...], epoch: int = 0
    ) -> Origin | None:
        """What the seeds follow from. A function has the same, wherever it runs and whatever with."""
        if placement.seeding is None:
            return None
        seed = placement.seeding.seed
        stages = tuple(f"{line}/{self._numbers[id(work)]}" for work in works)
        return Origin(self.seed if seed is None else seed, epoch, stages, any_thread=True)

    def _draws_of(self, work: Work, line: Path, epoch: int, first: int) -> Draws | None:
        """What seeds a function that is called where its results are asked for: on any thread."""
        origin = self._origin(work.placement, line, (work,), epoch)
        if origin is None:
            return None
        from hybridloader.thread_draws import ThreadDraws

        draws = ThreadDraws(origin, 0, stage=work.name)
        draws.prepare()
        draws.begin_at(first, epoch)
        return draws

    def _losses(self, where: Path, placement: Placement, name: str, epoch: int) -> Losses | None:
        if placement.on_error is None:
            return None
        return Losses(placement.on_error, name, epoch, self.register, where)

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


def _upstream_of(operator: Operator, begins: Start) -> Start:
    """Where what is before `operator` begins if that begins there."""
    items, slack = begins
    start = operator.seek(items) if items else 0
    if not start:
        return Start(0, slack)  # it may have several passes, and begin them itself
    certain = items - slack  # items that are there for sure
    least = (operator.seek(certain - 1) or 0) + 1 if certain > 1 else min(certain, 1)
    return Start(start, start - least)


def _name_of(path: Path) -> str:
    """What states call a line."""
    return ".".join(map(str, path))


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
