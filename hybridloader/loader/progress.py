"""Progress of one epoch of a loader, counted as results are returned to the caller.

The counts outlive the iterator, so that a state can be taken after an early `break`. They refer to no
sample, no worker and no sampler. Prefetched batches that were not returned don't count: only their
indices are kept, at most as many as the prefetch window has.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import itemgetter
from typing import Any, NamedTuple, Protocol

from hybridloader._support.states import Cadence
from hybridloader._support.threads import snapshot
from hybridloader._support.user_objects import place_of
from hybridloader.engine.dataset_state import ShardStart
from hybridloader.engine.messages import Exhausted, Last
from hybridloader.fetching.on_error import ErrorBudget, Outcome
from hybridloader.fetching.shards import ShardDivision
from hybridloader.loader.samplers import SamplerReplay, SamplerState


class SamplerCheckpoint(NamedTuple):
    """State of a sampler after `number` of its items, and the state taken before that.

    After its last item, a sampler may already have the state of the beginning of its next epoch.
    """

    number: int
    state: SamplerState
    before: SamplerCheckpoint | None = None


DrawnItem = tuple[int, Any, "SamplerCheckpoint | None"]
"""Number of an item of the sampler, the item, and the checkpoint from which it can be drawn again."""

UNKNOWN = object()  # stands for an item that was drawn before the state from which an epoch resumes


class Results(Protocol):
    """Iterator over results, with the stage's report on the last one."""

    last: Last

    def __next__(self) -> Any: ...

    def __iter__(self) -> Iterator[Any]: ...


class Progress:
    """Counts of one epoch over a dataset that `workers` workers read, or the caller if there are none.

    `replay` describes how the sampler's iterator was made.
    """

    def __init__(self, replay: SamplerReplay, epoch: int, workers: int, *, iterable: bool) -> None:
        self.replay, self.epoch, self.iterable = replay, epoch, iterable
        self.workers, readers = workers, max(1, workers)
        # All the mutable state:
        self.base_seed = 0
        self.shared_seed: int | None = None
        self.yielded = 0  # number of batches returned to the caller
        self.resumed_at = 0  # number of these before the state from which this epoch resumed
        self.count = 0
        """Number of items of the sampler, from its first, that were returned or are in `missing`; for an
        iterable dataset, of results that were returned."""
        self.missing: dict[int, DrawnItem] = {}
        """Items among these that were not returned, by number."""
        self.log: deque[DrawnItem] = deque()
        """Items that were drawn after these, in order; if nothing is counted, the last ones drawn."""
        self.at: DrawnItem | None = None  # last of the first `count` items
        self.end = -1  # number of all items, after the sampler has ended; -1 before
        self.places = [ShardStart(again=[]) for _ in range(readers)]
        """Positions of the workers after the returned results, if the dataset is iterable or workers
        have its state. `ShardStart.again` is a list that grows."""
        self.last_worker = -1  # worker of the result that was returned last; -1 if there was none
        self.finished = False  # True if the caller has reached the end of the epoch
        self.exhausted: Mapping[int, Exhausted] = {}
        """Ends of shards, by worker; their last results may still be in flight."""
        self.division: ShardDivision | None = None
        """Division of the shards that an iterable dataset names; None if it names none."""
        self._rereading = readers * [0]  # samples that each worker still has to read again
        self._reread_in_all = 0
        self._shift = 0  # from the numbers of tasks to those of the sampler's items
        self._first = 0  # number of the first task
        self._seq = -1
        self._counted = True
        self._last: Last | None = None  # if nothing is counted

    def resume_workers(self, starts: Sequence[ShardStart]) -> None:
        """Note where each worker begins."""
        self.places = [start._replace(again=list(start.again)) for start in starts]
        self._rereading = [max(0, start.skip - start.position) for start in starts]
        self._reread_in_all = sum(self._rereading)

    @property
    def stateful(self) -> bool:
        """True if a worker may begin its next epoch at another position, which `ends` returns."""
        return bool(self.exhausted) or any(place.stateful for place in self.places)

    @property
    def resuming(self) -> tuple[int, int] | None:
        """Number of samples read again, and number to read again; None if there are none left."""
        if not any(self._rereading):
            return None
        return self._reread_in_all - sum(self._rereading), self._reread_in_all

    def begin(self, first: int, ahead: int | None, repeated: Sequence[Any] = ()) -> None:
        """Begin with task `first`; the items `repeated` are repeated before the sampler continues.

        If results come in order and with nothing beside them, nothing needs to be counted; `ahead` is
        then the most items that are drawn ahead of those handed out, and None otherwise.
        """
        number = self.count - len(repeated)
        self._shift, self._first, self._seq = first - number, first, first - 1
        self._counted = ahead is None or bool(repeated)
        if repeated:
            self.missing = {n: (n, lead, None) for n, lead in enumerate(repeated, number)}
        elif ahead is not None:
            # Plus the last item, and one more while it is returned.
            self.log = deque(maxlen=ahead + 2)

    # -- as items are drawn --------------------------------------------------------------------------

    def logged(self, indices: Iterator[Any]) -> Iterator[Any]:
        """Return `indices`, which C code logs as they are drawn: `append` returns None for each."""
        drawn = zip(itertools.count(self.count), indices, itertools.repeat(None))
        return map(itemgetter(1), itertools.filterfalse(self.log.append, drawn))

    def logged_with_states(
        self, indices: Iterator[Any], take: Callable[[], SamplerState], cadence: Cadence | None
    ) -> Iterator[Any]:
        """Return `indices`, which are logged with the checkpoint before each as they are drawn."""
        log, number = self.log, self.count
        checkpoint = None if self.at is None else self.at[2]
        for index in indices:
            number += 1
            if cadence is None:  # after every item
                checkpoint = SamplerCheckpoint(number, take())
            elif cadence.due():
                before = checkpoint and checkpoint._replace(before=None)
                checkpoint = SamplerCheckpoint(number, take(), before)
                cadence.taken()
            log.append((number - 1, index, checkpoint))
            yield index
        self.end = number

    # -- as results are returned ---------------------------------------------------------------------

    def watch(self, results: Results) -> Iterator[Any]:
        """Return `results`, which are counted as they are returned."""
        if self._counted:
            return CountedResults(results, self)
        self._last = results.last
        return results

    def settle(self) -> None:
        """Find the position in the epoch, if results are not counted."""
        last = self._last
        if last is None or last.seq < self._first:
            return
        number, self.last_worker = last.seq - self._shift, last.worker
        self.count = number + 1
        self.at = next((item for item in snapshot(self.log) if item[0] == number), None)

    def note_result(self, last: Last, error: Exception | None = None) -> None:
        """Count a returned result or error, if it is of a task of this epoch."""
        seq = last.seq
        if seq == self._seq or seq < self._first:  # a late one of the previous epoch
            return
        self._seq = seq
        worker = self.last_worker = last.worker
        self._rereading[worker] = 0
        state = None
        if last.extras is not None or self.iterable:
            extras = last.extras or {}
            state = extras.get("state")
            self._note_place(worker, last.position, state)
        if self.iterable:
            self.count += 1
            return
        item = self._handed_out(seq - self._shift)
        # A task that kills workers is not repeated; the next worker's state comes with its first result.
        repeats = state is None and not (error is not None and place_of(error) == "given up")
        if repeats and self.places[worker].stateful and item is not None:
            self.places[worker].again.append(item[1])

    def note_opened(self, worker: int, state: ShardStart) -> None:
        """Note the state in which a worker began."""
        at = self.places[worker].skip
        self.places[worker] = state._replace(position=at, skip=at, again=[])
        self._rereading[worker] = 0

    def _handed_out(self, number: int) -> DrawnItem | None:
        """Return the item of a returned result, and count it."""
        if number < self.count:
            item = self.missing.pop(number, None)
        else:
            item = None
            while self.log:
                item = self.log.popleft()
                if item[0] == number:
                    break
                self.missing[item[0]] = item
            self.count, self.at = number + 1, item
        return item

    def _note_place(self, worker: int, position: int, state: ShardStart | None) -> None:
        before = self.places[worker]
        if state is not None:
            self.places[worker] = state._replace(position=position, skip=position, again=[])
        elif self.iterable:
            self.places[worker] = before._replace(skip=position, since=before.since + 1)

    # -- for a state ---------------------------------------------------------------------------------

    def checkpoint(self, length: Callable[[], int | None]) -> SamplerCheckpoint | None:
        """Return the checkpoint to resume from; `length` returns the length of the sampler."""
        found = None if self.at is None else self.at[2]
        if found is None or found.number < self.count or found.before is None:
            return found
        if self.count != self.end:
            most = length()
            if most is None or self.count < most:
                return found
        return found.before

    @property
    def left(self) -> list[Any]:
        """Items of the sampler that must be fetched again, in their order."""
        return [self.missing[number][1] for number in sorted(self.missing)]

    def ends(self) -> list[ShardStart]:
        """Return the position at which each persistent worker begins the next epoch."""
        ends = []
        for worker, at in enumerate(self.places):
            end = self.exhausted.get(worker)
            last = at if end is None or end.shard_start is None else end.shard_start
            if self.division is not None:  # at an end, the positions in named shards are of no use
                last = last._replace(iterator=None)
            ends.append(
                ShardStart(
                    0, 0, last.dataset, last.iterator, again=at.again, next_epoch=last.stateful
                )
            )
        return ends

    def starts(self) -> list[ShardStart]:
        """Return the position at which each worker resumes this epoch."""
        starts = list(self.places)
        for end in list(self.exhausted.values()):  # a pinning thread may add to them
            now = starts[end.worker]
            if now.skip == end.position:  # all its results were returned
                last = now if end.shard_start is None else end.shard_start
                at = now.position if end.shard_start is None else end.position
                starts[end.worker] = ShardStart(at, end.position, last.dataset, last.iterator, True)
        return starts


class CountedResults(Iterator[Any]):
    """Results of a stage; `progress` counts each as it is returned."""

    def __init__(self, results: Results, progress: Progress) -> None:
        self._results, self._progress = results, progress
        self._pull: Callable[[], Any] = results.__next__

    def __next__(self) -> Any:
        try:
            found = self._pull()
        except Exception as error:
            self._progress.note_result(self._results.last, error)
            raise
        self._progress.note_result(self._results.last)
        return found


class CheckedResults(Iterator[Any]):
    """Batches of a stage whose samples may fail: `budget` counts them.

    A batch of which no sample is left is left out. `progress` counts a result when it is returned or
    left out: if the budget raises an error first, the result follows the error.
    """

    def __init__(self, results: Results, progress: Progress, budget: ErrorBudget) -> None:
        self._last, self._progress, self._budget = results.last, progress, budget
        self._pull: Callable[[], Any] = results.__next__
        # All the mutable state:
        self._received: list[tuple[Any, Outcome | None]] = []  # one result that was not counted yet

    def __next__(self) -> Any:
        last = self._last
        while True:
            if not self._received:
                try:
                    found = self._pull()
                except Exception as error:
                    self._progress.note_result(last, error)
                    raise
                outcome = None if last.extras is None else last.extras.get("outcome")
                self._received.append((found, outcome))
                if outcome is not None:
                    worker = last.worker if self._progress.workers else None
                    self._budget.count(outcome.attempted, outcome.failures, worker)
            self._progress.note_result(last)
            # The traceback of an inline worker's error refers to the caller's frames.
            last.extras = None
            found, outcome = self._received.pop()
            if outcome is None or not outcome.empty:
                return found
