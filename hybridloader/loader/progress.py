"""How far a pass of a loader has come, as its caller has seen it: counted while results are handed out.

The counts outlive the iterator, so that a state can be taken after an early `break`. They hold no
sample, no worker and no sampler, and never look ahead: what was prefetched and not handed out is only
remembered as indices, as many as the window has.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import count, filterfalse, repeat
from operator import itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from hybridloader._support.errors import WorkerDied
from hybridloader._support.state_copies import Latest
from hybridloader.engine.dataset_state import ShardStart
from hybridloader.fetching.fetch import Apart
from hybridloader.fetching.outcome import Outcome
from hybridloader.loader.refill import Waiting

if TYPE_CHECKING:
    from hybridloader._support.cadence import Cadence
    from hybridloader.engine.messages import Exhausted, Last
    from hybridloader.loader.sampler_replay import SamplerReplay
    from hybridloader.loader.samplers import Snapshot


class Base(NamedTuple):
    """The sampler's latest state, the number of its items drawn by then, and the state before that.

    After its last item, a sampler may tell the beginning of its next epoch.
    """

    number: int
    snapshot: Snapshot
    before: Base | None = None


Draw = tuple[int, Any, "Base | None"]
"""The number of an item of the sampler, the item, and the state from which it can be drawn again."""

UNKNOWN = object()
"""In the place of an item that was drawn before the state that a pass goes on from."""


class Results(Protocol):
    """What the results come from: a stage, or what stands before one, and what it says of the last."""

    last: Last

    def __next__(self) -> Any: ...

    def __iter__(self) -> Iterator[Any]: ...


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
        Items of the sampler, from its beginning, that were handed out or are in `missing`; of an
        iterable dataset, results.
    missing
        Those of them that were not handed out, by number.
    log
        What was drawn behind these, in order; where nothing is counted, the last ones that were drawn.
    at
        The last one before `behind`.
    end
        Number of all items, once the sampler has ended; -1 before.
    places
        Of an iterable dataset, or one whose state workers hold, where each worker goes on behind what
        was handed out; `ShardStart.again` is a list that grows.
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
    own
        The state of the caller's own copy of the dataset.
    exhausted
        How each shard ended, by worker; also of shards whose last results are still on their way.
    """

    def __init__(self, making: SamplerReplay, epoch: int, workers: int, *, iterable: bool) -> None:
        self.making, self.epoch, self.iterable = making, epoch, iterable
        # All the mutable state:
        self.base_seed = 0
        self.shared_seed: int | None = None
        self.yielded = self.behind = 0
        self.missing: dict[int, Draw] = {}
        self.log: deque[Draw] = deque()
        self.at: Draw | None = None
        self.end = -1
        self.go_on([ShardStart()] * workers)
        self.remainders: dict[int, ShardStart] = {}
        self.own = Latest()
        self.last_worker = -1
        self.finished = False
        self.waiting = Waiting()
        self.first: tuple[int, ...] = ()
        self.exhausted: Mapping[int, Exhausted] = {}
        self._before = ShardStart(), 0  # of the last worker, and how many it had to do again then
        self._latest: Draw | None = None
        self.shift = 0  # from the numbers of tasks to those of the sampler's items
        self._first = 0  # the number of the first task
        self._seq = -1
        self._counted = True
        self._last: Last | None = None  # where nothing is counted

    def begin(self, first: int, ahead: int | None, leads: Sequence[Any] = ()) -> None:
        """Begin with task `first`.

        Parameters
        ----------
        ahead
            Most items that are drawn ahead of what is handed out, where results come in their order and
            with nothing beside them: then nothing is to be counted. None: they do not.
        leads
            What comes again, before the sampler goes on.
        """
        number = self.behind - len(leads)
        self.shift, self._first, self._seq = first - number, first, first - 1
        self._counted = ahead is None or bool(leads)
        if ahead is not None and not leads:
            # And the last one, and one more while it is handed out.
            self.log = deque(maxlen=ahead + 2)
        self.missing = {n: (n, lead, None) for n, lead in enumerate(leads, number)}

    def drawing(self, indices: Iterator[Any]) -> Iterator[Any]:
        """`indices`, which are noted in the log, without a step of Python for each."""
        drawn = zip(count(self.behind), indices, repeat(None))
        return map(itemgetter(1), filterfalse(self.log.append, drawn))

    def drawing_with_states(
        self, indices: Iterator[Any], take: Callable[[], Snapshot], cadence: Cadence | None
    ) -> Iterator[Any]:
        """`indices`, which are noted in the log with the states from which to draw them again."""
        log = self.log
        number, base = self.behind, None if self.at is None else self.at[2]
        for index in indices:
            number += 1
            if cadence is None:  # ours always tell the place
                base = Base(number, take())
            elif cadence.due():
                base = Base(number, take(), base and base._replace(before=None))
                cadence.taken()
            log.append((number - 1, index, base))
            yield index
        self.end = number

    def watch(self, results: Results) -> Iterator[Any]:
        """`results`, of which is noted what was handed out."""
        if self._counted:
            return Counting(results, self)
        self._last = results.last
        return results

    def settle(self) -> None:
        """Find out how far it has come, where nothing is counted."""
        last = self._last
        if last is None or last.seq < self._first:
            return
        number, self.last_worker = last.seq - self.shift, last.worker
        self.behind = number + 1
        self.at = next((draw for draw in self.log.copy() if draw[0] == number), None)

    def go_on(self, starts: Sequence[ShardStart]) -> None:
        """Note where each worker began."""
        self.places = [start._replace(again=list(start.again)) for start in starts]
        self.again = [max(0, start.skip - start.position) for start in starts]
        self.of = sum(self.again)

    def passed(self, stage: Results, error: Exception | None = None) -> None:
        """Note that a result was handed out, or an error. Ignore it if it was none."""
        last = stage.last
        seq = last.seq
        if seq == self._seq or seq < self._first:  # of the pass before, and this one's are late
            return
        self._seq = seq
        worker = self.last_worker = last.worker
        self.again[worker] = 0
        if worker in self.first:
            self.first = tuple(w for w in self.first if w != worker)
        state = None
        if last.extras is not None or self.iterable:
            extras = last.extras or {}
            state = extras.get("state")
            self._note_place(worker, last.position, state, extras.get("outcome"))
        if self.iterable:
            self.behind += 1
            return
        draw = self._handed_out(seq - self.shift)
        # What kills workers is not done again; the state of the next one comes with its first.
        again = state is None and not isinstance(error, WorkerDied)
        if again and self.places[worker].stateful and draw is not None:
            self.places[worker].again.append(draw[1])

    def base(self, length: Callable[[], int | None]) -> Base | None:
        """Return the sampler's state to go on from; `length` tells how many items it gives."""
        base = None if self.at is None else self.at[2]
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
    def indices_left(self) -> tuple[list[Any], list[Any]]:
        """What was drawn and must be fetched again: indices of waiting samples, and whole items."""
        apart = [index for _, index in self.waiting.samples]
        whole = []
        for number in sorted(self.missing):
            index = self.missing[number][1]
            if type(index) is Apart:
                apart = [*index, *apart]
            else:
                whole.append(index)
        if self.waiting.whole and self._latest is not None:
            whole.append(self._latest[1])
        return apart, whole

    def opened(self, worker: int, told: ShardStart) -> None:
        """Note the state with which a worker began."""
        at = self.places[worker].skip
        self.places[worker] = told._replace(position=at, skip=at, again=[])
        self.again[worker] = 0

    def ends(self) -> list[ShardStart]:
        """Return where each worker begins the next pass, if it stays."""
        ends = []
        for worker, at in enumerate(self.places):
            end = self.exhausted.get(worker)
            last = at if end is None or end.told is None else end.told
            start = ShardStart(
                0, 0, last.dataset, last.iterator, again=at.again, behind=last.stateful
            )
            ends.append(start)
        return ends

    def starts(self) -> list[ShardStart]:
        """Where each worker goes on."""
        starts = list(self.places)
        for end in list(self.exhausted.values()):  # a pinning thread may add to them
            now = starts[end.worker]
            if now.skip == end.position:  # all that came of it was handed out
                last = now if end.told is None else end.told
                at = now.position if end.told is None else end.position
                starts[end.worker] = ShardStart(at, end.position, last.dataset, last.iterator, True)
        if self.waiting.whole:
            place, count = self._before
            starts[self.last_worker] = place._replace(again=place.again[:count])
        seen = set()
        for worker, number in self.waiting.samples:
            if worker not in seen and worker in self.remainders:
                seen.add(worker)
                starts[worker] = self.remainders[worker]._replace(skip=number)
        return starts

    def _handed_out(self, number: int) -> Draw | None:
        """Return what was drawn for a result."""
        if number < self.behind:
            draw = self.missing.pop(number, None)
        else:
            draw = None
            while self.log:
                draw = self.log.popleft()
                if draw[0] == number:
                    break
                self.missing[draw[0]] = draw
            self.behind, self.at = number + 1, draw
        self._latest = draw or self._latest
        return draw

    def _note_place(
        self, worker: int, position: int, state: ShardStart | None, outcome: Outcome | None
    ) -> None:
        before = self.places[worker]
        self._before = before, len(before.again)
        if state is not None:
            self.places[worker] = state._replace(position=position, skip=position, again=[])
        elif self.iterable:
            self.places[worker] = before._replace(skip=position, since=before.since + 1)
        if outcome is not None and outcome.short:
            self.remainders[worker] = before


class Counting(Iterator[Any]):
    """The results of a stage, of which is noted what was handed out, and the states beside them."""

    def __init__(self, stage: Results, progress: Progress) -> None:
        self._stage, self._progress = stage, progress
        self._pull: Callable[[], Any] = stage.__next__

    def __next__(self) -> Any:
        try:
            found = self._pull()
        except Exception as error:
            self._progress.passed(self._stage, error)
            raise
        self._progress.passed(self._stage)
        return found
