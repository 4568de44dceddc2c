"""A pipeline that runs: the iterator that your loop pulls."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import suppress
from time import perf_counter
from typing import Any

from hybridloader._support.error_handling import ENDS, NO_ITEM, is_ours, no_answer
from hybridloader._support.log import INFO, log
from hybridloader.engine.crews import close_once, closed_with, park_at_exit
from hybridloader.engine.relay import Relay, RelayQueue
from hybridloader.errors import IteratorClosed, StateError
from hybridloader.fetching.on_error.error_budget import Skipped
from hybridloader.observe.observation import Observe, asked
from hybridloader.observe.stats import Stats
from hybridloader.running.dropping import Withheld
from hybridloader.running.executor import Executor
from hybridloader.running.operator import Chain
from hybridloader.running.passes import open_run
from hybridloader.running.run_position import RunPosition
from hybridloader.running.state import Position, checked
from hybridloader.running.statistics import RunObservation, report

_CLOSED = IteratorClosed("closed")
"""Reason for the end of a run that was closed."""


class Run(Iterator[Any]):
    """One iteration of a pipeline: an iterator, and a context manager that ends it.

    All workers and threads end when it is closed, exhausted or deleted. A function's error is raised
    where its item would have been returned; the next call of ``next()`` continues after it. Only one
    thread at a time may call ``next()``. Any thread may call `close` and `state_dict`.
    """

    def __init__(
        self,
        executor: Executor,
        epoch: int,
        owner: object | None = None,
        resumed: Position | None = None,
    ) -> None:
        self._owner = owner  # of the workers, which lives as long as this; None: they are its own
        # All the mutable state:
        self._asking = threading.RLock()
        self._asked = False
        self._over: BaseException | None = None
        self._finalizer: Any = None
        self._begin(executor, epoch, resumed)

    def _begin(self, executor: Executor, epoch: int, resumed: Position | None) -> None:
        self._executor, self.epoch = executor, epoch
        if self._owner is None:
            self._finalizer = closed_with(self, executor)
        self._observation = observation = executor.observation
        self._loop = None if observation is None else observation.loop
        if observation is not None:
            observation.begin()
        self._position = RunPosition(executor.plan, epoch, resumed)
        self._items: Iterator[Any] = iter(())
        self._queue: RelayQueue | None = None  # from which the items are taken
        self._left, self._skipped = executor.left, executor.stages.failure_log.records
        if resumed is not None and resumed.begun:
            log(INFO, "pipeline: resumes in epoch %d after %d items", resumed.epoch, resumed.given)
        if resumed is not None and resumed.finished:
            self._end(StopIteration())
            return
        try:
            self._items = open_run(executor, self._position)
        except BaseException:
            executor.close()
            raise
        self._queue = self._items.queue if isinstance(self._items, Relay) else None
        if self._position.own_heads:
            self._items = Withheld(self._items, self._position.note_withheld)
        self._left, self._skipped = executor.left, executor.stages.failure_log.records
        if observation is not None:
            loop = observation.loop
            if not (loop.items or loop.longer):  # starting the workers was waited for, too
                loop.note(loop.began, perf_counter())

    def __next__(self) -> Any:
        return self._ask(self._items.__next__)

    def next_nowait(self) -> Any:
        """Return the next item if it is there.

        The caller makes it now if nothing else runs.

        Raises
        ------
        NotReady
            No item is ready yet.
        """
        return self._ask(getattr(self._items, "next_nowait", self._items.__next__))

    def _ask(self, get: Any) -> Any:
        if os.getpid() != self._executor.owner:  # the lock may be a held copy
            self._refuse()
        position, queue, loop = self._position, self._queue, self._loop
        given, taken = position.given, 0 if queue is None else queue.count
        try:
            with self._asking:
                if self._over is not None or self._left.cancelled:
                    self._refuse()
                self._asked = True
                if loop is not None:
                    began = perf_counter()
                    if began >= loop.due:
                        self._observation.due()  # type: ignore[union-attr]
                        began = perf_counter()
                try:
                    item = get()
                except StopIteration as end:
                    self._end(end)
                    raise
                except Exception as error:
                    if is_ours(error, ENDS):
                        park_at_exit()
                        self._end(error)
                    elif not is_ours(error, NO_ITEM):
                        position.raised += 1
                        position.given += 1
                    raise
                finally:
                    if loop is not None:
                        seconds = perf_counter() - began
                        if seconds < loop.brief:  # as in `note`, without its call
                            loop.brief_seconds += seconds
                        else:
                            loop.note(began, began + seconds)
                        if self._over is not None:
                            self._note_end()
                if loop is not None:
                    loop.items += 1
                position.given += 1
            return item
        except Exception:
            raise
        except BaseException:
            # An interrupt: an item that this thread made, or had taken from the queue, is lost.
            if queue is None or queue.count != taken:
                position.given = given
                with suppress(KeyboardInterrupt):  # a second interrupt; the finalizer ends the rest
                    self._end(IteratorClosed("it was interrupted"))
                    self._note_end()
            raise

    def _end(self, why: BaseException) -> None:
        # Not the error itself: its traceback holds this object.
        self._over = why if isinstance(why, StopIteration) else type(why)(*why.args)
        self._position.finished = isinstance(why, StopIteration)
        if self._owner is None:
            self.close()

    def _note_end(self) -> None:
        if self._observation is not None:
            self._observation.ended(finished=self._position.finished)

    def _refuse(self) -> None:
        if isinstance(self._over, StopIteration):
            raise StopIteration
        park_at_exit()  # the executor may have been closed between two items of this thread
        if os.getpid() != self._executor.owner:
            raise no_answer(
                IteratorClosed(
                    "this iterator belongs to the process that this one was forked from; make one here"
                )
            )
        if self._over is not None and self._over is not _CLOSED:
            raise no_answer(IteratorClosed("the previous error ended the pipeline")) from self._over
        raise no_answer(
            IteratorClosed(
                "this iterator is closed"
                if self._over is _CLOSED
                else "a later epoch has begun, or a state was loaded"
            )
        )

    def close(self) -> None:
        """End all workers and threads within about 2 seconds; repeatable, from any thread."""
        if self._over is None:
            self._over = _CLOSED
            self._note_end()
        if self._finalizer is not None:
            close_once(self, self._executor)
        elif not self._left.cancelled:
            self._executor.break_off()

    @property
    def closed(self) -> bool:
        """True if no item will follow."""
        return self._over is not None or self._left.cancelled

    def state_dict(self) -> dict[str, Any]:
        """Return the state of this run, to resume with `Pipeline.run` or `Pipeline.epochs`.

        Its position is after the last item that `next` returned, or the last error that it raised;
        prefetched items do not count. May be called from any thread and at any time, also when the run
        is closed. It starts nothing and waits for nothing.

        Returns
        -------
        dict
            A new dict of JSON values: below 10 KB, unless your source has a larger state.

        Raises
        ------
        StateError
            The order of the items depends on timing, by ``in_order=False``. Or the state of a source
            can't be taken.
        """
        return state_of(self._executor, self._position)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from the state of another run; only before the first item. See `Pipeline.run`.

        Raises
        ------
        StateError
            This run can't resume from the state, or has begun. Nothing was changed.
        """
        if self._owner is not None:
            raise StateError(
                "one epoch of several can't be sent elsewhere; load the state into the epochs, or into "
                "the PipelineLoader, that it is one of"
            )
        with self._asking:
            if self._asked or self._over is not None:
                raise StateError(
                    "a state is loaded before the first item is asked for, and this run "
                    + ("is over" if self._over is not None else "has begun")
                    + "; make another, with run(state=...)"
                )
            pipeline, observe = self._executor.chain, self._executor.observe
            resumed = checked(state, pipeline)
            self._finalizer()
            # Other workers, too: theirs are seeded.
            executor = executor_of(pipeline, None, resumed, observe=observe, idle=resumed.finished)
            self._begin(executor, resumed.epoch, resumed)

    @property
    def resuming(self) -> tuple[int, int] | None:
        """Number of items that were made again and dropped to resume, and their total; else None.

        All steps of the pipeline count, until the last of these items was dropped.
        """
        return self._position.progress

    @property
    def skipped(self) -> tuple[Skipped, ...]:
        """Items left out or replaced in this run, by each stage in the order of its results."""
        return tuple(self._skipped)

    def report(self) -> str:
        """Return a table of the workers of every stage. From any thread."""
        return report(self._executor)

    def stats(self) -> Stats:
        """Return the statistics of every stage until now, and the bottleneck.

        May be called from any thread, also when the run is closed. See docs/why-is-it-slow.md.

        Raises
        ------
        RuntimeError
            The run is not observed: it was not made with ``observe=True``.
        """
        if self._observation is None:
            raise RuntimeError(
                "stats() needs a run that observes: pipe.run(observe=True), "
                "pipe.epochs(n, observe=True), or PipelineLoader(pipe, observe=True)"
            )
        return self._observation.stats()

    def __enter__(self) -> Run:
        if self.closed and not isinstance(self._over, StopIteration):
            self._refuse()
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def executor_of(
    chain: Chain,
    seed: int | None,
    resumed: Position | None = None,
    *,
    observe: bool | Observe = False,
    first: int = 0,
    idle: bool = False,
) -> Executor:
    """Make the executor of a run, or of several; it is observed if somebody asks for that."""
    chain = chain.settled()
    who = asked(observe)
    observation = None if who is None else RunObservation(who, chain)
    executor = Executor(chain, seed, resumed, first=first, idle=idle, observation=observation)
    executor.observe = observe
    if observation is not None:
        observation.of(executor)
    return executor


def state_of(executor: Executor, position: RunPosition) -> dict[str, Any]:
    finished = position.finished
    counts, saved = (position.counts, position.upcoming()) if finished else position.position()
    for stage in executor.stages.values() if counts.given and not finished else ():
        node = stage.node
        if not node.reads and not node.placement.in_order and node.placement.num_workers > 1:
            raise StateError(
                f"stage {node.name!r} is in_order=False, so which items came depends on timing, and "
                "no state has the rest; omit in_order, or take the state between epochs"
            )
    heads = None if finished else position.heads_after(saved)
    return executor.state(position.epoch, counts, saved, finished=finished, heads=heads)
