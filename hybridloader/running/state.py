"""States of runs, as dicts of JSON values that are checked; the position that they hold, and its logs.

A state holds the position of a run and the descriptions of its steps, and no item. A state that can't be
gone on from exactly is refused before anything is started; the error names the field and both values.
"""

from __future__ import annotations

import math
import pickle
import threading
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import zip_longest
from typing import Any, NamedTuple

from hybridloader._support.states import (
    COUNT,
    LIST,
    TEXT,
    TRUTH,
    WHOLE,
    Frozen,
    Rule,
    Schema,
    copied,
    dict_of,
    list_of,
)
from hybridloader._support.user_objects import described, no_answer, repr_of
from hybridloader.engine.dataset_state import ShardStart
from hybridloader.errors import StateError
from hybridloader.fetching.readers import MapFetch
from hybridloader.fetching.shards import Place, ShardDivision
from hybridloader.running.operator import Chain, Mark, Source, UpstreamPart, steps_in
from hybridloader.running.plan import (
    ChainPlan,
    FunctionsNode,
    Node,
    OperatorNode,
    Path,
    RelayNode,
    WorkerNode,
)
from hybridloader.seeding.sample_rng import SampleSeeding

VERSION = 5
"""Version of states; it changes with the meaning of a field, and with the order that a seed gives."""

KIND = "pipeline"

SOURCES = (":0", ":0-0")
"""Names of the source in marks: of one that the loop's thread reads, and of readers."""

_MARK = Rule(
    "a mark",
    lambda mark: (
        isinstance(mark, Mapping)
        and set(mark) == set(Mark._fields)
        and type(mark["at"]) is type(mark["epoch"]) is int
    ),
)


class Heads(NamedTuple):
    """Inputs that come first after states of ranks were merged, and of which a part was had."""

    place: str
    """Name of the node that makes several items of one."""
    had: Sequence[int]
    """Number of its items that were had, for each of these inputs; ranks take turns at them."""


_COUNTS = list_of(COUNT, "a list of whole numbers")

_HEADS = Rule(
    "None, or a name and whole numbers",
    lambda heads: (
        heads is None
        or (LIST.fits(heads) and len(heads) == 2 and TEXT.fits(heads[0]) and _COUNTS.fits(heads[1]))
    ),
)


@dataclass(frozen=True)
class Position:
    """Contents of a state."""

    seed: int
    seeded: bool
    """True if the user gave the seed of the run."""
    epoch: int
    given: int
    """Items that your loop was given, and errors in the places of items."""
    raised: int
    """Those of them that were errors."""
    finished: bool = False
    """True if your loop received `StopIteration`."""
    draws: Mapping[str, int] = field(default_factory=dict)
    """Seeds of sources, by path; see `Executor.draw`."""
    marks: Mapping[str, Mark] = field(default_factory=dict)
    """Marks, by place."""
    ranks: list[int] = field(default_factory=list)
    """Numbers of ranks among which sources share their items."""
    rank: list[int] = field(default_factory=list)
    """Numbers of this rank among these; none in a state that was merged."""
    heads: Heads | None = None

    @property
    def own_heads(self) -> Sequence[int]:
        """Numbers of items that were had of the first inputs of this rank; see `Heads`."""
        return self.heads.had[self.rank[0] :: self.ranks[0]] if self.heads and self.rank else ()

    @property
    def begun(self) -> bool:
        """True if some of the epoch was given, here or before states were merged."""
        values = [mark.value for name, mark in self.marks.items() if name in SOURCES]
        return bool(
            self.given
            or None in values
            or any(
                isinstance(value, dict)
                and (value.get("position") or value.get("left") or value.get("readers") == [])
                for value in values
            )
        )

    @property
    def next_epoch(self) -> int:
        """Epoch in which a run resumes: that of the state, or the one after it."""
        return self.epoch + self.finished

    def as_dict(self, operators: list[str]) -> dict[str, Any]:
        """Return the state."""
        marks = {place: mark._asdict() for place, mark in self.marks.items()}
        own = {**vars(self), "draws": dict(self.draws), "marks": marks, "ranks": list(self.ranks)}
        own["rank"] = list(self.rank)
        own["heads"] = None if self.heads is None else [self.heads.place, [*self.heads.had]]
        return {"version": VERSION, "kind": KIND, **own, "operators": list(operators)}


_FIELDS = Schema(
    "pipeline's run",
    (WHOLE, "seed"),
    (TRUTH, "seeded finished"),
    (COUNT, "epoch given raised"),
    (list_of(TEXT, "a list of texts"), "operators"),
    (LIST, "ranks rank"),
    (_HEADS, "heads"),
    (dict_of(WHOLE, "a dict of whole numbers"), "draws"),
    (dict_of(_MARK, "a dict of marks, each with its epoch, place and value"), "marks"),
    version=VERSION,
    kind=("kind", KIND),
    exact=True,
)


def shares_of(pipeline: Chain) -> tuple[list[int], list[int]]:
    """Return the numbers of ranks among which its sources share their items, and of this one in each."""
    found = [step.share for step in steps_in(pipeline) if isinstance(step, Source) and step.share]
    return [ranks for ranks, _ in found], [rank for _, rank in found]


def descriptions(pipeline: Chain) -> list[str]:
    """Describe the steps that decide which items come in which order, and not where or how fast.

    A run must have them in common with the run from whose state it resumes.
    """
    return list(_described(pipeline, ""))


def _described(pipeline: Chain, indent: str) -> Iterator[str]:
    for operator in pipeline.operators:
        text = operator.identity()
        if text is None:
            continue
        yield f"{indent}{text}"
        for branch in operator.branches():
            yield from _described(branch, indent + "| ")


# -- checks ------------------------------------------------------------------------------------------


def checked(
    state: Any,
    pipeline: Chain,
    *,
    epoch: int | None = None,
    seed: int | None = None,
    any_ranks: bool = False,
) -> Position:
    """Return the contents of a state; raise `StateError` if `pipeline` can't resume from it.

    `epoch` and `seed` are those that the user gave; None takes those of the state. With `any_ranks` it
    need not resume by itself on this number of ranks.
    """
    _FIELDS.check(state)
    pairs = zip_longest(state["operators"], descriptions(pipeline), fillvalue="nothing more")
    for number, (his, ours) in enumerate(pairs):
        if his != ours:
            raise StateError(
                f"operators: number {number} is {his!r:.100} in the state and {ours!r} in this "
                "pipeline; make the pipeline as it was made when the state was taken"
            )
    own = {each.name: state[each.name] for each in fields(Position)}
    own["marks"] = {place: Mark(**mark) for place, mark in state["marks"].items()}
    own["heads"] = None if state["heads"] is None else Heads(*state["heads"])
    position = Position(**own)
    for name, given_value, meant in (
        ("epoch", epoch, position.epoch),
        ("seed", seed, position.seed),
    ):
        if given_value is not None and given_value != meant:
            raise StateError(
                f"{name}: the state is of {name} {meant}, and the run has {name}={given_value}; "
                f"omit {name}= to resume"
            )
    if not any_ranks:
        ranks, rank = shares_of(pipeline)
        _same_ranks(position, ranks)
        if (position.ranks, position.rank) != (ranks, rank):
            position = replace(position, ranks=ranks, rank=rank)
    given, raised = position.given, position.raised
    if raised > given:
        raise StateError(f"raised: {raised} errors among given={given} items; the state is damaged")
    return position


def _same_ranks(position: Position, ours: list[int]) -> None:
    """Raise `StateError` for another number of ranks, unless all ranks have come to the same place.

    They have where each step makes one item of one, or of as many as the others: where nothing but the
    sources has left a mark.
    """
    if position.ranks == ours or position.finished or not position.given:
        return
    if all(
        place.endswith(":0") and (mark.value is None or isinstance(mark.value, dict)) and mark.at
        for place, mark in position.marks.items()
    ):
        return
    raise StateError(
        f"ranks: the state is of {position.ranks} ranks and this pipeline is for {ours}; its steps do "
        "not make one item of one, or an error was raised, so each rank is at another position in "
        "the data. Resume on as many ranks, at the end of an epoch, or, if merge_states takes its "
        "steps, from one state of all ranks"
    )


# -- logs of a node: which of its inputs made which of its outputs, and which reader gave which item
#
# A node that gives one output for each input needs no `Ledger`. The thread that pulls a node, or the
# readers, writes the log before it gives an output; any thread may read it.


Numbers = Sequence[float]  # outputs of each input

ONE_EACH: Numbers = ()  # stands for at most one output of each input, of any number of inputs

SEVERAL: Numbers = (math.inf,)  # stands for any number of outputs of one input


class Point(NamedTuple):
    """Place in a node where no input is half used: outputs from `given` on are made of inputs from
    `taken` on alone."""

    given: int
    taken: int


_MOST = 256
"""Least number of entries of a log, or of logs, before a search for those that no state can need."""


class Entries(list[Any]):
    """Entries in their order; each is a tuple that begins with the number of items before it."""

    __slots__ = ()

    def last(self, n: int) -> Any:
        """Return the last entry that is not after item `n`; None if there is none.

        From the end: a later pass of this epoch, as in a repetition, begins at item 0 again. Of a copy:
        another thread may forget some.
        """
        return next((entry for entry in reversed(self.copy()) if entry[0] <= n), None)

    def forget(self, n: int) -> None:
        """Forget the entries that only a place before item `n` needs."""
        for place in range(len(self) - 1, 0, -1):
            if self[place][0] <= n:
                del self[:place]
                return


class Log:
    """Log from which a position makes marks. A mark is made of the entry there: ``value_of(*values)``.

    An entry is the number of items before it, and these values; without `value_of`, the value itself.
    After an entry without values there is a mark after any number `n` of items: ``value_of(n)``.
    """

    __slots__ = ("_entries", "_limit", "_value_of", "epoch", "forgets", "number")

    def __init__(
        self, epoch: int, first: tuple[Any, ...], value_of: Callable[..., Any] | None = None
    ) -> None:
        self.epoch, self._value_of = epoch, value_of
        # Set by the position that keeps it:
        self.number = 0  # order among its logs
        self.forgets: Callable[[], Any] = lambda: None  # drops the entries that no state can need
        # All the mutable state:
        self._entries = Entries([first])
        self._limit = _MOST

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, entry: tuple[Any, ...]) -> None:
        """Add an entry."""
        self._entries.append(entry)
        if len(self._entries) > self._limit:
            self._forget_some()

    def _forget_some(self) -> None:
        forget = self.forgets()
        if forget is not None:
            forget()
        self._limit = max(_MOST, 2 * len(self))

    def last_before(self, n: int) -> Mark | None:
        """Return the mark of the last place that is not after item `n`."""
        entry = self._entries.last(n)
        return None if entry is None else self._mark(entry, n)

    def _mark(self, entry: Any, n: int) -> Mark:
        """Return the mark of the last place up to item `n`; `entry` is the last one up to there."""
        at, *values = entry
        if not values:
            at, values = n, [n]
        return Mark(self.epoch, at, self._value_of(*values) if self._value_of else values[0])

    def forget(self, n: int) -> None:
        """Forget the entries that only a place before item `n` needs."""
        self._entries.forget(n)

    def forget_later(self) -> None:
        """Forget the places between the first and those to come, which no state can use now."""
        del self._entries[1:]


class Ledger(Log):
    """Ledger of one node in pass `epoch`, which begins at a point. An error counts as an output."""

    __slots__ = ("given", "taken")

    def __init__(self, epoch: int, begins: Point) -> None:
        super().__init__(epoch, (*begins, ONE_EACH))
        self.given, self.taken = begins

    def task(self, inputs: int, uneven: Sequence[tuple[int, int]] = ()) -> None:
        """Note so many inputs: with one output each, or with the number that `uneven` has of one."""
        others = dict(uneven)
        counts: Numbers = [others.get(n, 1) for n in range(inputs)] if others else ONE_EACH
        if counts or self._entries[-1][2]:
            self.add((self.given, self.taken, counts))
        self.given += int(sum(counts)) if counts else inputs
        self.taken += inputs

    def pulled(self, counts: Numbers) -> None:
        """Note that all outputs before come of the inputs before the one that was pulled now.

        It will have `ONE_EACH`, or `SEVERAL` outputs; its caller counts them in `given`.
        """
        given, taken, before = self._entries[-1]
        if counts or before or self.given - given != self.taken - taken:
            here = self.given, self.taken, counts
            if given == self.given:
                self._entries[-1] = here
            else:
                self.add(here)
        self.taken += 1

    def _mark(self, entry: tuple[int, int, Numbers], n: int) -> Mark:
        given, taken, counts = entry
        if not counts:
            more = max(0, min(n, self.given) - given)
            return Mark(self.epoch, given + more, taken + more)
        for count in counts:
            if given + count > n:
                break
            given += int(count)
            taken += 1
        return Mark(self.epoch, given, taken)

    def forget_later(self) -> None:
        given, taken, _ = self._entries[0]
        # Up to the next entry, only this place is known.
        self._entries[:] = [(given, taken, SEVERAL)]


class Turn(NamedTuple):
    """Position in the items of several readers."""

    given: tuple[int, ...]
    """Items and errors of each reader until there."""
    turn: int = 0
    """Reader whose turn it is."""
    ended: frozenset[int] = frozenset()
    """Readers that had ended at their turn."""

    @property
    def active(self) -> list[int]:
        """Readers that have not ended, in the order of their turns."""
        readers = len(self.given)
        order = [(self.turn + k) % readers for k in range(readers)]
        return [reader for reader in order if reader not in self.ended]

    def after(self, count: int) -> Turn:
        """Return the position after `count` more items, if no other reader has ended until there."""
        active = self.active
        if not active or not count:
            return self
        rounds, rest = divmod(count, len(active))
        given = list(self.given)
        for number, reader in enumerate(active):
            given[reader] += rounds + (number < rest)
        return Turn(tuple(given), active[rest], self.ended)


class ReaderStarts(NamedTuple):
    """Readers of one epoch, from its beginning or from where they resume."""

    begins: Turn
    starts: tuple[ShardStart, ...] = ()
    """Start of each reader; empty: all begin at the beginning."""
    division: ShardDivision | None = None
    """Division of the shards that their source names, if it does."""
    exact: bool = True
    """False if the shards are divided again, so that the items come in another order."""
    follows: bool = False
    """True if there is a next item: it had come when the state was taken."""


class _Reads:
    """Samples that one reader has read, beside the items that the loop has received.

    Both numbers differ where an `on_error` left samples out, or tried them again.
    """

    def __init__(self, given: int, start: ShardStart, place: Place | None) -> None:
        self.given, self._read = given, start.skip
        # Items before a task, samples read after each of its items, and after the task:
        self._uneven = Entries()
        self._begins = given - 1, [start.skip], start.skip  # as if of the item before
        # Samples read before each of these:
        self.states = Entries([(start.position, start)] if start.stateful and place is None else [])
        self._shards = Entries([] if place is None else [(start.skip, place)])

    def __len__(self) -> int:
        return len(self._uneven) + len(self.states) + len(self._shards)

    def add(self, units: int, extras: Mapping[str, Any], gone: Collection[int]) -> None:
        """Note the `units` values and errors of a task, of which those in `gone` were left out.

        `extras` has the metadata of its results: ``"ends"``, the number of samples read after each of
        these, if not one for each; ``"state"``, after them; ``"shards"`` that were entered, the samples
        read before each and its position.
        """
        ends = extras.get("ends")
        if ends:
            kept = [end for unit, end in enumerate(ends) if unit not in gone]
            self._uneven.append((self.given, kept, ends[-1]))
            self.given, self._read = self.given + len(kept), ends[-1]
        else:
            self.given, self._read = self.given + units, self._read + units
        if "state" in extras:
            self.states.append((self._read, extras["state"]))
        if "shards" in extras:  # a worker that was restarted reports those from the beginning
            known = self._shards[-1][0] if self._shards else -1
            self._shards += (entered for entered in extras["shards"] if entered[0] >= known)

    def read(self, given: int) -> int:
        """Return the number of samples read for the first `given` items."""
        first, ends, last = self._uneven.last(given - 1) or self._begins
        items = given - first  # from that task on
        return int(ends[items - 1] if items <= len(ends) else last + items - len(ends))

    def place(self, read: int) -> Place | None:
        """Return the position in the shards after so many samples; None if none was entered."""
        found: tuple[int, Place] | None = self._shards.last(read)
        return found and found[1]._replace(at=found[1].at + read - found[0])

    def forget(self, given: int) -> None:
        """Forget the entries that only a position before item `given` needs."""
        read = self.read(given)
        self._uneven.forget(given - 1)
        self.states.forget(read)
        self._shards.forget(read)


class ReaderLog(Log):
    """Log of a node of readers in epoch `epoch`."""

    __slots__ = ("_division", "_follows", "_reads")

    def __init__(self, epoch: int, readers: ReaderStarts) -> None:
        super().__init__(epoch, (sum(readers.begins.given), readers.begins))
        self._division = division = readers.division
        self._follows = sum(readers.begins.given) if readers.follows else None
        starts = readers.starts or (ShardStart(),) * len(readers.begins.given)
        self._reads = [
            _Reads(given, start, None if division is None else division.place(reader, start))
            for reader, (given, start) in enumerate(zip(readers.begins.given, starts, strict=True))
        ]

    def __len__(self) -> int:
        return len(self._entries) + sum(map(len, self._reads))

    def of(self, reader: int) -> _Reads:
        """Return the record of `reader`, to add to."""
        reads = self._reads[reader]
        if len(reads) > self._limit:
            self._forget_some()
        return reads

    def _mark(self, entry: tuple[int, Turn], n: int) -> Mark:
        turn = entry[1].after(n - entry[0])
        readers, places, most, division = [], list[Place](), 0, self._division
        try:
            for reader, (given, reads) in enumerate(zip(turn.given, self._reads, strict=True)):
                read = reads.read(given)
                most, ended = max(most, read), reader in turn.ended
                state: list[Any] | None = None
                if division is not None:
                    place = division.end(reader) if ended else reads.place(read)
                    places.append(place or division.beginning(reader))
                    state = [*places[-1]]
                else:
                    at, start = reads.states.last(read) or (0, None)
                    # A source may begin again from the state that it had at its end.
                    ended = ended or (start is not None and start.ended and at == read)
                    if start is not None and not ended:
                        state = [at, _given_by(start.dataset), _given_by(start.iterator)]
                readers.append([given, ended, read, state])
        except StateError as error:
            return Mark(self.epoch, n, error)
        value: dict[str, Any] = {"turn": turn.turn, "readers": readers}
        if division is not None:
            value["shards"] = division.state(places, most)
            value["next"] = self._next(turn, places, n)
        return Mark(self.epoch, n, value)

    def _next(self, turn: Turn, places: Sequence[Place], n: int) -> list[int] | None:
        """Return where the next sample is, the shard and its number; None if it has not come."""
        if self._division is None or not turn.active:
            return None
        reader = turn.active[0]
        if n == self._follows or self._reads[reader].given > turn.given[reader]:
            return self._division.sample_at(reader, places[reader])
        return None

    def forget(self, n: int) -> None:
        super().forget(n)
        at, turn = self._entries[0]
        for given, reads in zip(turn.after(n - at).given, self._reads, strict=True):
            reads.forget(given)

    def forget_later(self) -> None:
        for reads in self._reads:
            del reads.states[:-1]


def _given_by(state: Any) -> Any:
    return None if state is None else state.given()


def resumed_readers(
    mark: Mark,  # of the node in a state
    name: str,  # of the node in errors
    whole: ShardDivision | None,  # of an epoch, if the source names its shards
    workers: int,  # number of readers
) -> ReaderStarts:
    """Return the readers that resume from a mark.

    Raises `StateError` if the state is damaged, or of other shards or ranks.
    """
    try:
        shards, saved = mark.value.get("shards"), mark.value["readers"]
        if (shards is None) != (whole is None):
            raise StateError(
                f"{name}: the source of the state {'names' if shards else 'does not name'} its shards"
            )
        if whole is not None:
            return _divided(mark, whole, workers)
        given, ended, starts = [], set(), []
        for reader, (count, over, read, state) in enumerate(saved):
            given.append(int(count))
            if over:
                ended.add(reader)
            start = ShardStart(read if over else 0, read, ended=bool(over))
            if state is not None:
                at, *kept = state
                dataset, iterator = (
                    None if one is None else Frozen(pickle.dumps(one)) for one in kept
                )
                start = ShardStart(at, read, dataset, iterator, since=int(read > at))
            starts.append(start)
        turn = Turn(tuple(given), int(mark.value["turn"]), frozenset(ended))
        return ReaderStarts(turn, tuple(starts))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        if isinstance(error, StateError):
            raise
        raise no_answer(
            StateError(f"{name}: the positions of the readers are damaged: {described(error)}")
        ) from error


def _divided(mark: Mark, whole: ShardDivision, workers: int) -> ReaderStarts:
    shards, saved = mark.value["shards"], mark.value["readers"]
    same = len(saved) == workers
    division = whole.resumed(shards, same_workers=same)
    exact = same and whole.agrees(shards)
    if exact:
        places = [Place(int(passed), int(at)) for _, _, _, (passed, at) in saved]
        reads = [int(read) for _, _, read, _ in saved]
        ended = frozenset(reader for reader, one in enumerate(saved) if one[1])
        turn = Turn(tuple(int(one[0]) for one in saved), int(mark.value["turn"]), ended)
    else:  # numbered on, so that no seed of a sample is used twice
        places = [division.beginning(reader) for reader in range(workers)]
        reads = [int(shards["read"])] * workers
        turn = Turn((mark.at, *[0] * (workers - 1)))
    starts = (
        ShardStart(read, read, None, division.iterator_state(reader, place))
        for reader, (read, place) in enumerate(zip(reads, places, strict=True))
    )
    follows = exact and mark.value["next"] is not None
    return ReaderStarts(turn, tuple(starts), division, exact, follows)


# -- Position of a run in its stream of items: items given, and marks that operators made on the way.
#
# A position is found backwards from the last item that was given: each operator returns how many of the
# items before it made those, until one can't, or a source is reached. Items in queues and on workers
# never matter. The thread that pulls makes marks; any thread may read them.


class Counts(NamedTuple):
    """Numbers of items that your loop was given."""

    given: int
    """Items, and errors in the places of items."""
    raised: int
    """Those of them that were errors."""


class _Stop(NamedTuple):
    """A node on the way back from the last item."""

    node: Node
    log: Log | None
    mark: Mark
    replayed: bool  # the nodes after it can't report their position


class RunPosition:
    """Position of one run, which may begin at the position of another run."""

    def __init__(self, plan: ChainPlan, epoch: int, resumed: Position | None = None) -> None:
        resumed = resumed or Position(0, False, epoch, given=0, raised=0)
        self._plan, self.epoch, self._saved = plan, epoch, resumed.marks
        self._spans = spans_of(self._saved)
        self._used: set[str] = set()  # marks that operators were opened with
        self.start = Counts(resumed.given, resumed.raised)
        self.heads, self.own_heads = resumed.heads, resumed.own_heads
        self.opened = False
        # All the mutable state. One thread counts, errors first:
        self.given, self.raised = self.start
        self.finished = False  # the loop has got its StopIteration
        self.droppings: list[Any] = []  # items that come again, `done` of `count` until now
        # And under the lock, which the handler of a signal may take again to save a state:
        self._lock = threading.RLock()
        # By the path of the node, and each pass, in the order of these:
        self._places: dict[Path, list[Log]] = {}
        self._made, self._kept, self._limit = 0, 0, _MOST

    # -- marks -----------------------------------------------------------------------------------------

    def mark(self, node: Node, epoch: int, at: int, value: Any) -> None:
        """Note that an operator could resume after `at` items of that epoch from `value`."""
        with self._lock:
            passes = self._places.get(node.path)
            if passes and passes[-1].epoch == epoch:
                passes[-1].add((at, value))
            else:
                self.keep(node, Log(epoch, (at, value)))

    def keep(self, node: Node, log: Log) -> None:
        """Keep the log of a node, which asks for `forget` now and then."""
        with self._lock:
            # Weak: the position has iterators, which have the log.
            log.number, log.forgets = self._made, weakref.WeakMethod(self.forget)
            self._places.setdefault(node.path, []).append(log)
            self._made += 1
            self._kept += 1
            if self._kept > self._limit:
                self.forget()

    def saved(self, node: OperatorNode, epoch: int, *, opens: bool = False) -> Mark | None:
        """Return the mark of an operator in the run before, if it was in this pass.

        It is opened with that once: a later pass may have the number of this one, as that of a
        repetition within another.
        """
        name = name_of(node)
        saved = self._saved.get(name)
        if saved is None or saved.epoch != epoch or (opens and name in self._used):
            return None
        if opens:
            self._used.add(name)
        return saved

    def point(self, node: FunctionsNode, n: int, epoch: int) -> Point | None:
        """Return the last place in a node, not after its output `n`, that the run before has saved.

        A function that shared its node then, and has a node for itself now, is asked for as many items
        as those functions were: the items between them have no numbers. The last of them that is not one
        to one begins at that place.
        """
        raised = bool(self.start.raised)
        if one_by_one(node, raised=raised):
            return Point(n, n)
        for first, last, mark in self._spans.get(node.path[:-1], ()):
            if mark.epoch == epoch and first <= node.first and node.last <= last:
                later = (
                    other
                    for other in self._plan.all_nodes
                    if isinstance(other, FunctionsNode)
                    and other.path[:-1] == node.path[:-1]
                    and node.last < other.first <= last
                )
                if not all(one_by_one(other, raised=raised) for other in later):
                    return Point(n, n)
                if mark.at <= n:
                    return Point(mark.at, mark.value)
        return None

    @property
    def counts(self) -> Counts:
        """Items given until now. From any thread: an error may be counted a moment too soon, which only
        has more done again than is needed."""
        given = self.given
        return Counts(given, min(self.raised, given))

    @property
    def progress(self) -> tuple[int, int] | None:
        """Items that came again and were dropped, and of how many; None if none are to be."""
        droppings = list(self.droppings)
        if all(dropping.done >= dropping.count for dropping in droppings):
            return None
        return sum(d.done for d in droppings), sum(d.count for d in droppings)

    def source_of(self, plan: ChainPlan, node: Node, epoch: int, n: int) -> int:
        """Return the number of the source's item of which output `n` of `node` is made, which came."""
        for before in reversed(plan.nodes[1 : node.path[-1] + 1]):
            if not isinstance(before, OperatorNode) and before.one_by_one:
                continue
            with self._lock:
                stop = self._stop(before, n, epoch, False)
            assert stop is not None  # its log has all its items
            n = stop.mark.value
        return n

    # -- the way back ----------------------------------------------------------------------------------

    def position(self) -> tuple[Counts, dict[str, Mark], Heads | None]:
        """Return the counts until now, and copies of the marks from which to resume; from any thread.

        Then the heads, as long as a run that resumes from these marks needs them.
        """
        if self.finished:
            return self.counts, self._upcoming(), None
        found: dict[str, Mark] = {}
        with self._lock:
            counts = self.counts
            for stop in self._back(counts):
                mark = stop.mark
                if isinstance(mark.value, Exception):
                    raise StateError(
                        f"a source has no state after item {mark.at}: {repr_of(mark.value)}"
                    ) from mark.value
                found[name_of(stop.node)] = mark
        source = found.get(name_of(self._plan.nodes[0]))
        needs_heads = source is not None and source.at < len(self.own_heads)
        return counts, copied(found), self.heads if needs_heads else None

    def _upcoming(self) -> dict[str, Mark]:
        """Return the marks that the next epoch begins with: of sources whose epochs follow from each
        other."""
        found = {}
        for node in self._plan.all_nodes:
            if isinstance(node, OperatorNode) and (value := node.operator.upcoming()) is not None:
                found[name_of(node)] = Mark(at=0, value=value, epoch=self.epoch + 1)
        return found

    def _back(self, counts: Counts) -> Iterator[_Stop]:
        if not self.opened:
            return iter(())
        return self._along(self._plan, counts.given, self.epoch, bool(counts.raised), False)

    def _along(
        self, plan: ChainPlan, n: int, epoch: int, raised: bool, replayed: bool
    ) -> Iterator[_Stop]:
        """Yield the operators of a chain that have marks, from its end on, after `n` of its items."""
        for node in reversed(plan.nodes):
            if not isinstance(node, OperatorNode):
                reads = isinstance(node, WorkerNode) and node.reads
                passed = one_by_one(node, raised=raised) if n else node.path not in self._places
                if passed and not reads:
                    continue
                stop = self._stop(node, n, epoch, replayed)
                if n and not reads and (stop is None or (raised and seeds_by_number(node))):
                    n, replayed = 0, True
                elif stop is not None:
                    yield stop
                    n = stop.mark.value if n and not reads else n
                continue
            for at, again in ((n, replayed), (0, True)):
                stop, replayed = self._stop(node, at, epoch, again), again
                parts = before(node, at, epoch, stop and stop.mark, raised)
                if parts is not None:
                    break
            if stop is not None:
                yield stop
            parts = parts or ()
            for part in parts:
                if part.branch is not None:
                    branch = node.branches[part.branch]
                    yield from self._along(branch, part.start, part.epoch, raised, replayed)
            own = [part for part in parts if part.branch is None]
            if not own:
                return
            n, epoch = own[0].start, own[0].epoch

    def _stop(self, node: Node, n: int, epoch: int, replayed: bool) -> _Stop | None:
        """Return the last mark of a node that is not after item `n`."""
        for log in self._places.get(node.path, ()):
            mark = log.last_before(n) if log.epoch == epoch else None
            if mark is not None:
                return _Stop(node, log, mark, replayed)
        if not isinstance(node, OperatorNode):
            point = None if isinstance(node, RelayNode) else self.point(node, n, epoch)
            return None if point is None else _Stop(node, None, Mark(epoch, *point), replayed)
        # It may not have been opened again yet.
        saved = self.saved(node, epoch)
        if saved is None or saved.at > n:
            return None
        return _Stop(node, None, saved, replayed)

    def forget(self) -> None:
        """Drop the marks that no state from now on can need."""
        with self._lock:
            self._forget()
            self._kept = sum(map(len, self._places.values()))
            self._limit = max(_MOST, 2 * self._kept)

    def _forget(self) -> None:
        stops = [stop for stop in self._back(self.counts) if stop.log is not None]
        needed = {id(stop.log) for stop in stops}
        for stop in stops:
            log, own = stop.log, stop.node.path
            assert log is not None
            log.forget(stop.mark.at)
            if stop.replayed:
                log.forget_later()
            for place, passes in self._places.items():
                same = place == own
                if same or is_before(place, own):
                    passes[:] = [
                        other
                        for other in passes
                        if id(other) in needed
                        or (other.number > log.number and not (same and stop.replayed))
                    ]


def is_before(place: Path, other: Path) -> bool:
    """Return True if items from the node `place` go through `other`: it is earlier, or on a branch."""
    chain, behind = other[:-1], other[-1]
    if place[:-1] == chain:
        return place[-1] < behind
    return place[: len(chain) + 1] == (*chain, 0)


def name_of(node: Node) -> str:
    """Return the name of a node in states: the path of its chain, and its number there.

    Functions are numbered apart from other operators: those of the node, from the first to the last.
    """
    number: int | str = ""
    if isinstance(node, OperatorNode):
        number = node.number
    elif not isinstance(node, RelayNode):
        number = f"{node.first}-{node.last}"
    return f"{'.'.join(map(str, node.path[:-1]))}:{number}"


def head_place(node: Node) -> str | None:
    """Return the place in `Heads` of a node that makes several items of one; None if it does not.

    For functions it goes from the first that does so to the last: those before may have another node.
    """
    if isinstance(node, OperatorNode):
        return name_of(node) if node.operator.makes_several else None
    if isinstance(node, FunctionsNode):
        for number, work in enumerate(node.works, node.first):
            if work.makes_several:
                return f":{number}-{node.last}"
    return None


def is_at(node: Node, heads: Heads) -> bool:
    """Return True if a node makes the items that `heads` counts."""
    first, dash, last = heads.place[1:].partition("-")
    if isinstance(node, OperatorNode) or not dash:
        return heads.place == name_of(node)
    return isinstance(node, FunctionsNode) and node.first <= int(first) and node.last == int(last)


Spans = dict[Path, list[tuple[int, int, Mark]]]
"""Numbers of the first and last function of nodes, by the path of their chain, with their marks."""


def spans_of(marks: Mapping[str, Mark]) -> Spans:
    """Return the marks that a state has of functions."""
    found: Spans = {}
    for name, mark in marks.items():
        path, _, number = name.rpartition(":")
        first, dash, last = number.partition("-")
        if dash:
            place = tuple(int(part) for part in path.split(".") if part)
            found.setdefault(place, []).append((int(first), int(last), mark))
    return found


def reader_marks(plan: ChainPlan, marks: Mapping[str, Mark]) -> Iterator[tuple[WorkerNode, Mark]]:
    """Yield the nodes of readers where there is something to resume, with their marks."""
    for node in plan.all_nodes:
        if isinstance(node, WorkerNode) and node.reads:
            mark = marks.get(name_of(node))
            # Shards may have been divided before the first item.
            shards = mark is not None and isinstance(mark.value, dict) and "shards" in mark.value
            if mark is not None and (mark.at or shards):
                yield node, mark


def cuts_of(marks: Mapping[str, Mark], heads: Heads | None = None) -> dict[Path, set[int]]:
    """Return where the nodes of a run that resumes from these marks must begin."""
    found = {
        path: {number for first, last, _ in spans for number in (first, last + 1)}
        for path, spans in spans_of(marks).items()
    }
    if heads is not None:
        for path, spans in spans_of({heads.place: Mark(0, 0, None)}).items():
            found.setdefault(path, set()).update(last + 1 for _, last, _ in spans)
    return found


def one_by_one(node: FunctionsNode | RelayNode, *, raised: bool) -> bool:
    """Return True if a resumed node gives the rest of its items for the rest of its input.

    Not if errors were `raised` and it seeds items by their numbers: these are the numbers of the items
    that reached the node, and which of the errors came before it is not known.
    """
    return node.one_by_one and not (raised and seeds_by_number(node))


def seeds_by_number(node: FunctionsNode | RelayNode) -> bool:
    """Return True if a node seeds items by their numbers."""
    if isinstance(node, RelayNode):
        return False
    return isinstance(node.placement.seeding, SampleSeeding) and not all(
        isinstance(work.step().function, MapFetch) for work in node.works
    )


def before(
    node: OperatorNode, n: int, epoch: int, mark: Mark | None, raised: bool
) -> Sequence[UpstreamPart] | None:
    """Call `Operator.before`; for most operators errors in the places of items are no items."""
    if n and raised and not node.operator.counts_errors and (node.branches or node.path[-1]):
        return None
    return node.operator.before(n, epoch, mark)
