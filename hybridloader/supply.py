"""What a stage asks its workers for: the indices of its source, as tasks, as long as there is room.

A source is an iterator, which is pulled and, if need be, waited for; or a `Feed`, which is not. Nothing
here waits for a worker, or knows what becomes of a result that is handed out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from hybridloader.contract import ByReference, Crew
from hybridloader.errors import Failure, NotReady
from hybridloader.feed import UNWATCHED, Feed, Ledger
from hybridloader.messages import Done, Event, Failed, Task
from hybridloader.roster import Roster
from hybridloader.scheduler import Scheduler


class Supply:
    """The source of a stage, and the tasks that were made of it.

    Parameters
    ----------
    ledger
        Is told what happens, and may hold tasks back.
    clock
        Seconds, monotonic.

    Attributes
    ----------
    hungry
        Whether the feed had nothing when it was asked last.
    fed
        Whether the source is a feed, which is to be asked again whenever something has come.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        crew: Crew,
        roster: Roster,
        ledger: Ledger,
        clock: Callable[[], float],
    ) -> None:
        self._scheduler, self._crew, self._roster = scheduler, crew, roster
        self._ledger, self._clock = ledger, clock
        self._indices = roster.indices
        # All the mutable state:
        self.hungry = False
        self._source: Iterator[Any] = iter(())
        self._feed: Feed | None = None
        self._error: Exception | None = None

    def begin(self, source: Iterator[Any] | Feed) -> None:
        """From now on tasks are made of `source`."""
        if isinstance(source, Iterator):
            self._source, self._feed = source, None
        else:
            self._source, self._feed = iter(()), source
        self._error = None

    def end(self) -> None:
        """Let go of the source."""
        self._source, self._feed = iter(()), None

    @property
    def fed(self) -> bool:
        return self._feed is not None

    def when_ready(self, wake: Callable[[], None]) -> None:
        """Call `wake` as soon as a feed that had nothing may have something."""
        if self._feed is not None and self.hungry:
            self._feed.when_ready(wake)

    def take_error(self) -> Exception | None:
        """What the source raised, to be raised when all that came before was handed out."""
        error, self._error = self._error, None
        return error

    def fill(self) -> None:
        """Send tasks while there is room and the source has indices."""
        scheduler, ledger = self._scheduler, self._ledger
        starved = self.hungry = False
        while scheduler.candidate is not None:
            most = ledger.room()
            if most == 0:
                break
            try:
                index = next(self._source) if self._feed is None else self._feed.draw(most)
            except StopIteration:
                scheduler.source_ended()
                starved = True
                break
            except NotReady:
                starved = self.hungry = True
                break
            except Exception as error:
                if self._feed is not None and not isinstance(error, self._feed.final):
                    seq, worker = scheduler.assign()  # it comes out in its turn
                    scheduler.handle(Failed(worker, seq, Failure(error)))
                    continue
                self._error = error  # kept until what came before it has been handed out
                scheduler.source_ended()
                return
            seq, worker = scheduler.assign()
            self._indices[seq] = index
            if scheduler.busy[worker] == 1:
                self._roster.since[worker] = self._clock()
            ledger.sent(seq, index)
            try:
                self._crew.send(worker, Task(seq, index))
            except Exception as error:  # an index that can't be pickled
                if self._feed is not None and self._feed.take_apart(index):
                    self.take_in(Done(worker, seq, ByReference([])))
                else:
                    self.take_in(Failed(worker, seq, Failure(error)))
        if ledger is not UNWATCHED:
            ledger.idle(scheduler.busy.count(0), starved=starved)

    def take_in(self, event: Event) -> bool:
        """Note an event; whether anybody wants what it brings."""
        wanted = self._scheduler.handle(event)
        if wanted and isinstance(event, (Done, Failed)):
            self._ledger.came(event)
        return wanted

    def forget_skipped(self) -> None:
        """What a worker was asked for after the end of its shard will not come."""
        scheduler = self._scheduler
        for seq in [
            s for s in self._indices if s not in scheduler.sent and s not in scheduler.done
        ]:
            del self._indices[seq]
            self._ledger.left(seq)

    def forget(self) -> None:
        """What was asked for will not be handed out."""
        for seq in self._indices:
            self._ledger.left(seq)
        self._indices.clear()
