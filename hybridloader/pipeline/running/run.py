"""A pipeline that runs: the iterator that your loop pulls."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any

from hybridloader._support.errors import IteratorClosed, StateError
from hybridloader.engine.crews import closed_with, park_at_exit
from hybridloader.engine.relay import FINAL, Relay
from hybridloader.fetching.on_error.error_budget import Skipped
from hybridloader.pipeline.operators.base import Chain
from hybridloader.pipeline.running.dropping import NO_ITEM
from hybridloader.pipeline.running.executor import Machine
from hybridloader.pipeline.running.run_position import Counts, RunPosition
from hybridloader.pipeline.running.state import Position, checked
from hybridloader.pipeline.running.statistics import PipelineStats, collect, report

_CLOSED = IteratorClosed("closed")
"""Why a run is over that somebody closed."""

_ENDS = (*FINAL, StateError)
"""Errors after which nothing more will come."""


class Run(Iterator[Any]):
    """One pass over a pipeline: an iterator, and a context manager that ends it.

    Closing it, exhausting it or letting it go ends all workers and threads. What a function raises
    comes out in the place of its item; asking again goes on behind it. One thread asks at a time;
    `close` and `state_dict` may be called from any.
    """

    def __init__(
        self,
        machine: Machine,
        epoch: int,
        epochs: Epochs | None = None,
        resumed: Position | None = None,
    ) -> None:
        self._epochs = epochs  # whose workers these are; none: its own
        # All the mutable state:
        self._asking = threading.RLock()
        self._asked = False
        self._over: BaseException | None = None
        self._finalizer: Any = None
        self._begin(machine, epoch, resumed)

    def _begin(self, machine: Machine, epoch: int, resumed: Position | None) -> None:
        self._machine, self.epoch = machine, epoch
        if self._epochs is None:
            self._finalizer = closed_with(self, machine)
        counts, saved = (Counts(), {}) if resumed is None else (resumed.counts, resumed.saved)
        self._trail = RunPosition(machine.pipeline, epoch, counts, saved)
        self._items: Iterator[Any] = iter(())
        self._left, self._skipped = machine.left, machine.stations.failure_log.records
        if resumed is not None and resumed.finished:
            self._end(StopIteration())
            return
        try:
            self._items = machine.begin(epoch, self._trail)
        except BaseException:
            machine.close()
            raise
        self._left, self._skipped = machine.left, machine.stations.failure_log.records

    def __next__(self) -> Any:
        return self._ask(self._items.__next__)

    def next_nowait(self) -> Any:
        """The next item if it is there.

        Where nothing runs besides the caller, the caller makes it now.

        Raises
        ------
        NotReady
            There is none yet.
        """
        return self._ask(getattr(self._items, "next_nowait", self._items.__next__))

    def _ask(self, get: Any) -> Any:
        if os.getpid() != self._machine.owner:  # and the lock may be one that nobody here will open
            self._refuse()
        with self._asking:
            machine = self._machine
            if self._over is not None or self._left.cancelled:
                self._refuse()
            self._asked = True
            trail, began = self._trail, time.monotonic()
            try:
                item = get()
            except StopIteration as end:
                self._end(end)
                raise
            except _ENDS as error:
                park_at_exit()
                self._end(error)
                raise
            except NO_ITEM:
                raise
            except Exception:
                trail.raised += 1
                trail.given += 1
                raise
            except BaseException:
                # An interrupt. Of what this thread did itself, an item may be lost.
                if not isinstance(self._items, Relay):
                    self._end(IteratorClosed("it was interrupted"))
                raise
            finally:
                machine.waited += time.monotonic() - began
            machine.given += 1
            trail.given += 1
            return item

    def _end(self, why: BaseException) -> None:
        # Not the error itself: its traceback holds this object.
        self._over = why if isinstance(why, StopIteration) else type(why)(*why.args)
        self._trail.finished = isinstance(why, StopIteration)
        if self._epochs is None:
            self.close()

    def _refuse(self) -> None:
        if isinstance(self._over, StopIteration):
            raise StopIteration
        park_at_exit()  # the machine may have been closed between two items of this thread
        if os.getpid() != self._machine.owner:
            raise IteratorClosed(
                "this iterator belongs to the process that this one was forked from; make one here"
            )
        if isinstance(self._over, _ENDS) and self._over is not _CLOSED:
            raise IteratorClosed("the pipeline was ended by the error before") from self._over
        raise IteratorClosed(
            "this iterator is closed" if self._over is _CLOSED else "a later epoch has begun"
        )

    def close(self) -> None:
        """End all workers and threads: any number of times, from any thread; within some 2 seconds."""
        if self._over is None:
            self._over = _CLOSED
        if self._finalizer is not None:
            self._finalizer()
        elif not self._left.cancelled:
            self._machine.break_off()

    @property
    def closed(self) -> bool:
        """True if nothing will come any more."""
        return self._over is not None or self._left.cancelled

    def state_dict(self) -> dict[str, Any]:
        """Where this run is, to go on from with `Pipeline.run` or `Pipeline.epochs`.

        It is behind what `next` gave or raised in the place of an item, whatever lies ready behind that.
        From any thread, at any time, also when the run is closed; nothing is started or waited for.

        Returns
        -------
        dict
            A new one, of what JSON has: below 10 KB, if the state of a source of your own is.

        Raises
        ------
        StateError
            The order of the items is left to chance, by ``in_order=False``; or a source can't tell
            its state.
        """
        return _state(self._machine, self._trail)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where another run was; only before the first item. See `Pipeline.run`.

        Raises
        ------
        StateError
            This run can't go on from there, or has begun; it is what it was.
        """
        if self._epochs is not None:
            raise StateError(
                "one epoch of several can't be sent elsewhere; give the state to epochs(..., state=...)"
            )
        with self._asking:
            if self._asked or self._over is not None:
                raise StateError(
                    "a state is loaded before the first item is asked for, and this run "
                    + ("is over" if self._over is not None else "has begun")
                    + "; make another, with run(state=...)"
                )
            pipeline = self._machine.pipeline
            resumed = checked(state, pipeline)
            self._finalizer()
            # Other workers, too: theirs are seeded.
            self._begin(
                Machine(pipeline, None, resumed, idle=resumed.finished), resumed.epoch, resumed
            )

    @property
    def resuming(self) -> tuple[int, int] | None:
        """How many items have come a second time and were dropped, and of how many; else None.

        Counted wherever in the pipeline that is done, until the last of them is.
        """
        return self._trail.progress

    @property
    def skipped(self) -> tuple[Skipped, ...]:
        """What was left out or replaced in this run, by each stage in the order of its results."""
        return tuple(self._skipped)

    def report(self) -> str:
        """The workers of every stage: what each is doing, and has done. From any thread."""
        return report(self._machine)

    def stats(self) -> PipelineStats:
        """What every stage has done and waited for until now, and which one holds up the others."""
        return collect(self._machine)

    def __enter__(self) -> Run:
        if self.closed and not isinstance(self._over, StopIteration):
            self._refuse()
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _state(machine: Machine, trail: RunPosition) -> dict[str, Any]:
    finished = trail.finished
    counts, saved = (trail.counts, {}) if finished else trail.position()
    if counts.given and not finished:
        machine.refuse_disorder()
    seed, seeded, draws = machine.seed, machine.seeded, machine.draws
    position = Position(seed, seeded, trail.epoch, counts, finished, draws, saved)
    return position.as_dict(machine.descriptions)


class Epochs(Iterator[Run]):
    """Several passes over a pipeline, one after the other, on the same workers.

    An iterator of `Run`s, and a context manager. Beginning the next pass breaks the last one off.
    """

    def __init__(
        self,
        pipeline: Chain,
        count: int | None,
        seed: int | None,
        first: int,
        resumed: Position | None = None,
    ) -> None:
        self._first = first
        # All the mutable state:
        self._left, self._next, self._resumed = count, first, resumed
        self._trail: RunPosition | None = (
            None  # of the run, which is not held: whoever has it may let it go
        )
        if resumed is not None:
            self._skip_to(resumed)
        self._machine = Machine(pipeline, seed, resumed, first=first, idle=self._left == 0)
        self._finalizer = closed_with(self, self._machine)

    def _skip_to(self, resumed: Position) -> None:
        """Begin in the epoch of a state, or behind it."""
        done = resumed.epoch + resumed.finished - self._first
        if resumed.epoch < self._first:
            raise StateError(
                f"epoch: the state is of epoch {resumed.epoch}, and these begin with first={self._first}"
            )
        if self._left is not None:
            if done > self._left or (done == self._left and not resumed.finished):
                raise StateError(
                    f"epoch: the state is of epoch {resumed.epoch}, and these end before epoch "
                    f"{self._first + self._left}"
                )
            self._left -= done
        self._next += done

    def __next__(self) -> Run:
        if self._machine.closed.cancelled:
            raise IteratorClosed("these epochs are closed")
        if self._left is not None:
            if self._left == 0:
                self.close()
                raise StopIteration
            self._left -= 1
        epoch, self._next = self._next, self._next + 1
        resumed, self._resumed = self._resumed, None
        if resumed is not None and resumed.finished:
            resumed = None
        run = Run(self._machine, epoch, self, resumed)
        self._trail = run._trail
        return run

    def state_dict(self) -> dict[str, Any]:
        """Where the epoch that began last is, or the first if none has begun; see `Run.state_dict`."""
        machine = self._machine
        if self._trail is not None:
            return _state(machine, self._trail)
        if self._resumed is not None:
            return self._resumed.as_dict(machine.descriptions)
        position = Position(machine.seed, machine.seeded, self._next, draws=machine.draws)
        return position.as_dict(machine.descriptions)

    def close(self) -> None:
        """End all workers and threads."""
        self._finalizer()

    def __enter__(self) -> Epochs:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
