"""How far a pass of a loader has come, as its caller has seen it: counted while results are handed out.

The counts outlive the iterator, so that a state can be taken after an early `break`. They hold no
sample, no worker and no sampler, and never look ahead: what was prefetched and not handed out is only
remembered as indices, as many as the window has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from hybridloader.beside import Beside
from hybridloader.faults.refill import Waiting
from hybridloader.faults.tried import Short
from hybridloader.fetch import Apart
from hybridloader.states.carried import Carried, Start

if TYPE_CHECKING:
    from hybridloader.states.replay import Making, Snapshot


Draw = tuple[Any, "Snapshot | None"]
"""One item of the sampler, and the sampler's state behind it if it has one."""

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
    places
        Of an iterable dataset, where each worker goes on behind what was handed out.
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
        self.places = [Start()] * workers
        self.remainders: dict[int, Start] = {}
        self.fault = ""
        self.last_worker = -1
        self.finished = False
        self.waiting = Waiting()
        self.again: list[int] = [0] * workers
        self.of = 0
        self.first: tuple[int, ...] = ()
        self._before = Start()
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

    def passed(self, stage: Results, found: Any = None) -> None:
        """A result was handed out: `found`, or an error (None). Nothing happens if it was none."""
        seq = stage.last_seq
        if seq == self._seq or seq < self._first:  # of the pass before, and this one's are late
            return
        self._seq = seq
        self.results += 1
        worker = self.last_worker = stage.last_worker
        self.again[worker] = 0
        if worker in self.first:
            self.first = tuple(w for w in self.first if w != worker)
        self._note_place(worker, stage.last_position, found)
        if not self.iterable:
            self._count(seq - self.shift)

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

    def starts(self) -> list[Start]:
        """Where each worker goes on."""
        starts = list(self.places)
        if self.waiting.whole:
            starts[self.last_worker] = self._before
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

    def _note_place(self, worker: int, position: int, found: Any) -> None:
        if not self.iterable and type(found) is not Carried:
            return
        before = self._before = self.places[worker]
        if type(found) is not Carried:
            self.places[worker] = before._replace(skip=position)
        else:
            self.places[worker] = Start(
                position, position, found.dataset, found.iterator, found.ended
            )
            self.fault = found.fault
            found = found.data
        if type(found) is Short and found.samples:
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
    """

    def __init__(
        self,
        indices: Iterator[Any],
        progress: Progress,
        snapshot: Callable[[], Snapshot] | None,
        number: int,
    ) -> None:
        self._indices, self._log, self._snapshot = indices, progress.log, snapshot
        self._number = number

    def __next__(self) -> Any:
        index = next(self._indices)
        if self._snapshot is None:
            self._log[self._number] = index, None
        else:
            self._log[self._number] = index, self._snapshot()
        self._number += 1
        return index


class Counting(Iterator[Any]):
    """The results of a stage, of which is noted what was handed out; states that they carry are kept."""

    def __init__(self, stage: Results, progress: Progress, *, plain: bool) -> None:
        self._stage, self._progress = stage, progress
        self._pull: Callable[[], Any] = stage.__next__
        self._plain = plain and not progress.iterable
        # All the mutable state is that of `progress`.

    def __next__(self) -> Any:
        stage, progress = self._stage, self._progress
        try:
            found = self._pull()
        except Exception:
            progress.passed(stage)
            raise
        # What `passed` comes to where results are in order and nothing waits: 1 us less a batch.
        if self._plain and type(found) is not Carried:
            number = stage.last_seq - progress.shift
            if number == progress.behind:
                progress.behind = number + 1
                progress.at = progress.log.pop(number)
                return found
        progress.passed(stage, found)
        return found.data if type(found) is Carried else found


progress_of: Beside[Progress] = Beside()
"""Of the last pass of each loader."""
