"""How far a pass of a loader has come, as its caller has seen it: counted while results are handed out.

The counts outlive the iterator, so that a state can be taken after an early `break`. They hold no
sample, no worker and no sampler, and never look ahead: what was prefetched and not handed out is only
remembered as indices, as many as the window has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from hybridloader.errors import WorkerDied
from hybridloader.faults.refill import Waiting
from hybridloader.faults.tried import Outcome
from hybridloader.fetch import Apart
from hybridloader.states.carried import DatasetState, Start
from hybridloader.states.copies import Latest

if TYPE_CHECKING:
    from hybridloader.messages import Exhausted
    from hybridloader.states.cadence import Cadence
    from hybridloader.states.replay import Making
    from hybridloader.states.samplers import Snapshot


class Base(NamedTuple):
    """The sampler's latest state, the number of its items drawn by then, and the state before that.

    After its last item, a sampler may tell the beginning of its next epoch.
    """

    number: int
    snapshot: Snapshot
    before: Base | None = None


Draw = tuple[Any, "Base | None"]
"""One item of the sampler, and the state from which it can be drawn again, if there is one."""

_NOTHING: dict[str, Any] = {}

UNKNOWN = object()
"""In the place of an item that was drawn before the state that a pass goes on from."""


class Results(Protocol):
    """What the results come from: a stage, or what stands before one, and what it says of the last."""

    @property
    def last_seq(self) -> int: ...

    @property
    def last_worker(self) -> int: ...

    @property
    def last_position(self) -> int: ...

    last_extras: dict[str, Any] | None

    def __next__(self) -> Any: ...


class Progress:
    """How far one pass has come.

    Parameters
    ----------
    making
        How the sampler's iterator was made.
    epoch
        The number of the pass.
    workers
        How many read the dataset, the caller itself counted as one.
    iterable
        Whether the dataset is.

    Attributes
    ----------
    yielded
        Batches that the caller was given.
    behind
        Items of the sampler, from its beginning, that were handed out or are in `missing`.
    missing
        Those of them that were not handed out.
    log
        What was drawn and not handed out, by number.
    at
        The last one before `behind`.
    end
        Number of all items, once the sampler has ended; -1 before.
    places
        Of an iterable dataset, or one whose state workers hold, where each worker goes on behind what
        was handed out; of the latter without `Start.again`.
    remainders
        Where it went on before the last samples of its shard came, which wait to be joined.
    last_worker
        Whose result was handed out last; -1: none's.
    finished
        Whether the end of the pass was told to the caller.
    base_seed, shared_seed
        What the workers were given.
    waiting
        What was handed out and waits to make a full batch.
    again
        Samples that each worker reads and drops before it goes on; 0 once it has.
    of
        All of these.
    first
        Workers that are to be asked first and have not answered.
    fault
        Why the state of the dataset can't be had.
    own
        The state of the caller's own copy of the dataset.
    exhausted
        How each shard ended, by worker; also of shards whose last results are still on their way.
    """

    def __init__(self, making: Making, epoch: int, workers: int, *, iterable: bool) -> None:
        self.making, self.epoch, self.iterable = making, epoch, iterable
        self.workers = workers
        # All the mutable state:
        self.base_seed = 0
        self.shared_seed: int | None = None
        self.yielded = self.results = self.behind = 0
        self.missing: set[int] = set()
        self.log: dict[int, Draw] = {}
        self.at: Draw | None = None
        self.end = -1
        self.places = [Start()] * workers
        self._again: list[list[Any]] = [[] for _ in range(workers)]
        self.remainders: dict[int, Start] = {}
        self.fault = ""
        self.own = Latest()
        self.last_worker = -1
        self.finished = False
        self.waiting = Waiting()
        self.again: list[int] = [0] * workers
        self.of = 0
        self.first: tuple[int, ...] = ()
        self.exhausted: Mapping[int, Exhausted] = {}
        self._before: tuple[Start, list[Any], int] = Start(), [], 0
        self._latest: Draw | None = None
        self.shift = 0  # from the numbers of tasks to those of the sampler's items
        self._first = 0  # the number of the first task
        self._seq = -1

    def begin(self, first: int, leads: Sequence[Any] = ()) -> None:
        """The stage begins with task `first`; `leads` come again, before the sampler goes on."""
        number = self.behind - len(leads)
        self.shift, self._first, self._seq = first - number, first, first - 1
        for lead in leads:
            self.log[number] = lead, None
            self.missing.add(number)
            number += 1

    def go_on(self, starts: Sequence[Start]) -> None:
        """Note where each worker began."""
        self.places = [start._replace(again=()) for start in starts]
        self._again = [list(start.again) for start in starts]
        self.again = [max(0, start.skip - start.position) for start in starts]
        self.of = sum(self.again)

    def passed(self, stage: Results, error: Exception | None = None) -> None:
        """Note that a result was handed out, or an error. Ignore it if it was none."""
        seq = stage.last_seq
        if seq == self._seq or seq < self._first:  # of the pass before, and this one's are late
            return
        self._seq = seq
        self.results += 1
        worker = self.last_worker = stage.last_worker
        self.again[worker] = 0
        if worker in self.first:
            self.first = tuple(w for w in self.first if w != worker)
        number = seq - self.shift
        extras = stage.last_extras or _NOTHING
        state = extras.get("state")
        self._note_place(worker, stage.last_position, state, extras.get("outcome"))
        if self.iterable:
            return
        # What kills workers is not done again; the state of the next one comes with its first.
        again = state is None and not isinstance(error, WorkerDied)
        if again and self.places[worker].stateful and number in self.log:
            self._again[worker].append(self.log[number][0])
        self._count(number)

    def base(self, length: Callable[[], int | None]) -> Base | None:
        """Return the sampler's state to go on from; `length` tells how many items it gives."""
        base = None if self.at is None else self.at[1]
        if base is None or base.number < self.behind or base.before is None:
            return base
        if self.behind != self.end:
            most = length()
            if most is None or self.behind < most:
                return base
        return base.before

    @property
    def resuming(self) -> tuple[int, int] | None:
        """Samples read again, and how many are to be; None if there are none left."""
        return (self.of - sum(self.again), self.of) if any(self.again) else None

    @property
    def carried(self) -> bool:
        """True if workers have told states."""
        return any(start.stateful for start in self.places)

    @property
    def indices_left(self) -> tuple[list[Any], list[Any]]:
        """What was drawn and must be fetched again: indices of waiting samples, and whole items."""
        apart = [index for _, index in self.waiting.samples]
        whole = []
        for number in sorted(self.missing):
            index, _ = self.log[number]
            if type(index) is Apart:
                apart = [*index, *apart]
            else:
                whole.append(index)
        if self.waiting.whole and self._latest is not None:
            whole.append(self._latest[0])
        return apart, whole

    def opened(self, worker: int, told: DatasetState) -> None:
        """Note the state with which a worker began."""
        at = self.places[worker].skip
        self.places[worker] = Start(at, at, told.dataset, told.iterator, told.ended)
        self.fault, self.again[worker], self._again[worker] = told.fault, 0, []

    def ends(self) -> list[Start]:
        """Return where each worker begins the next pass, if it stays."""
        ends = []
        for worker, at in enumerate(self.places):
            end = self.exhausted.get(worker)
            last = at if end is None or end.told is None else end.told
            start = Start(0, 0, last.dataset, last.iterator, again=tuple(self._again[worker]))
            ends.append(start._replace(behind=start.stateful))
        return ends

    def starts(self) -> list[Start]:
        """Where each worker goes on."""
        both = zip(self.places, self._again, strict=True)
        starts = [place._replace(again=tuple(again)) for place, again in both]
        for end in list(self.exhausted.values()):  # a pinning thread may add to them
            now = starts[end.worker]
            if now.skip == end.position:  # all that came of it was handed out
                last = now if end.told is None else end.told
                at = now.position if end.told is None else end.position
                starts[end.worker] = Start(at, end.position, last.dataset, last.iterator, True)
        if self.waiting.whole:
            place, again, count = self._before
            starts[self.last_worker] = place._replace(again=tuple(again[:count]))
        seen = set()
        for worker, number in self.waiting.samples:
            if worker not in seen and worker in self.remainders:
                seen.add(worker)
                starts[worker] = self.remainders[worker]._replace(skip=number)
        return starts

    def _count(self, number: int) -> None:
        draw = self.log.pop(number, None)
        if draw is not None:
            self._latest = draw
        if number < self.behind:
            self.missing.discard(number)
            return
        self.missing.update(range(self.behind, number))
        self.behind, self.at = number + 1, draw

    def _note_place(
        self, worker: int, position: int, state: DatasetState | None, outcome: Outcome | None
    ) -> None:
        before, again = self.places[worker], self._again[worker]
        self._before = before, again, len(again)
        if state is not None:
            self.places[worker] = Start(
                position, position, state.dataset, state.iterator, state.ended
            )
            self._again[worker] = []
            self.fault = state.fault
        elif self.iterable:
            self.places[worker] = before._replace(skip=position, since=before.since + 1)
        if outcome is not None and outcome.short:
            self.remainders[worker] = before


class Drawing(Iterator[Any]):
    """The sampler's iterator, of which is noted what it gave.

    Parameters
    ----------
    indices
        The iterator.
    progress
        Is told.
    snapshot
        Gives the state of the sampler, if it has one.
    number
        The first item's number among those of the sampler.
    base
        The state of the sampler that a pass goes on from.
    cadence
        When its state is taken; None: after every item.
    """

    def __init__(
        self,
        indices: Iterator[Any],
        progress: Progress,
        snapshot: Callable[[], Snapshot] | None,
        number: int,
        base: Base | None = None,
        cadence: Cadence | None = None,
    ) -> None:
        self._indices, self._snapshot = indices, snapshot
        self._progress, self._log = progress, progress.log
        self._number, self._base, self._cadence = number, base, cadence
        self._own = progress.behind  # what comes before it is not the sampler's

    def __next__(self) -> Any:
        number = self._number
        try:
            index = next(self._indices)
        except StopIteration:
            self._progress.end = number
            raise
        self._number = number + 1
        if self._snapshot is not None and number >= self._own:
            cadence = self._cadence
            if cadence is None:
                self._take()
            elif cadence.due():
                self._take()
                cadence.taken()
        self._log[number] = index, self._base
        return index

    def _take(self) -> None:
        assert self._snapshot is not None
        base = self._base if self._cadence is not None else None  # ours always tell the place
        self._base = Base(self._number, self._snapshot(), base and base._replace(before=None))


class Counting(Iterator[Any]):
    """The results of a stage, of which is noted what was handed out, and the states beside them."""

    def __init__(self, stage: Results, progress: Progress, *, plain: bool) -> None:
        self._stage, self._progress = stage, progress
        self._pull: Callable[[], Any] = stage.__next__
        self._plain = plain and not progress.iterable
        # All the mutable state is that of `progress`.

    def __next__(self) -> Any:
        stage, progress = self._stage, self._progress
        try:
            found = self._pull()
        except Exception as error:
            progress.passed(stage, error)
            raise
        # What `passed` comes to where results are in order and nothing waits: 1 us less a batch.
        if self._plain and stage.last_extras is None:
            number = stage.last_seq - progress.shift
            if number == progress.behind:
                progress.behind = number + 1
                progress.at = progress.log.pop(number)
                return found
        progress.passed(stage)
        return found
