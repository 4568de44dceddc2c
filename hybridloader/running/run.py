"""A pipeline that runs: the iterator that your loop pulls."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from time import perf_counter
from typing import Any

from hybridloader._support.states import place_dropped
from hybridloader._support.text import INFO, flag, log, warn, whole
from hybridloader._support.user_objects import ENDS, is_ours, no_answer, takes_a_place
from hybridloader.engine.contract import close_once, closed_with, park_at_exit
from hybridloader.engine.feed import Relay, RelayQueue
from hybridloader.errors import IteratorClosed, StateError
from hybridloader.fetching.on_error import Skipped
from hybridloader.fetching.readers import MapFetch
from hybridloader.observe.figures import CoroutineUse, Faults, StageRecord
from hybridloader.observe.measures import LoopWaits, record_of_caller, record_of_relay
from hybridloader.observe.observation import Observation, is_observed
from hybridloader.observe.stats import Stats
from hybridloader.running.executor import Executor, open_run
from hybridloader.running.flow import Withheld
from hybridloader.running.operator import Chain
from hybridloader.running.plan import InlineNode, Node, OperatorNode, RelayNode, WorkerNode
from hybridloader.running.state import Position, RunPosition, checked, descriptions


class RunObservation(Observation):
    """Observation of the runs of one executor, over all passes until now. It does not hold it."""

    def __init__(self, chain: Chain) -> None:
        super().__init__("Pipeline", chain)
        self.executor: Callable[[], Executor | None] = lambda: None
        """Weak reference to the executor, once it is made."""

    def stats(self) -> Stats:
        executor = self.executor()
        if executor is None:
            raise ReferenceError("the run has ended")
        rows = tuple(_rows(executor, self.loop))
        running = (stage.measures for stage in executor.stages.values())
        reported = (use for measures in running if measures is not None for use in measures.stores)
        return self._stats_of(rows, reported)


def _rows(executor: Executor, loop: LoopWaits) -> Iterator[StageRecord]:
    """Yield the stages and threads of a pipeline, those of its branches before them.

    Your loop's thread has a row if it calls functions in `next()`, or if there is no other.
    """
    for where in sorted([*executor.stages, *executor.relays]):
        if where in executor.stages:
            stage = executor.stages[where]
            assert stage.measures is not None
            yield stage.measures.record(
                stage.node.name,
                items=stage.flow.items_out,
                queued=stage.flow.queued,
                faults=_faults(executor, [stage.node]),
                source=stage.node.reads,
                reads=isinstance(stage.node.works[0].step().function, MapFetch),
            )
            continue
        relay = executor.relays[where]
        names, others = _pulled(executor, relay.before)
        if relay.node.pins:
            names.append(relay.node.name)
        if names:
            ended = max(relay.began, loop.began + loop.seconds)
            name = " + ".join(names)
            yield record_of_relay(name, relay.relay.queue, relay.began, ended, **others)
    names, others = _pulled(executor, executor.plan.nodes)
    if others["options"] or not (executor.stages or executor.relays):
        yield record_of_caller(" + ".join(names), loop, **others)


def _pulled(executor: Executor, before: Sequence[Node]) -> tuple[list[str], dict[str, Any]]:
    """Return the names and the record of the steps of the thread that pulls the nodes `before` it."""
    nodes: list[OperatorNode | InlineNode] = []
    for node in reversed(before):
        if isinstance(node, (WorkerNode, RelayNode)):
            break
        nodes.insert(0, node)
    names = [n.operator.describe() if isinstance(n, OperatorNode) else n.name for n in nodes]
    functions = [node for node in nodes if isinstance(node, InlineNode)]
    uses = [
        CoroutineUse(work.name, work.step().concurrency, parts.coroutines, parts.idle, parts.held)
        for node in functions
        for number, work in enumerate(node.works)
        if (context := executor.inline.get((node.path, number))) is not None
        and (parts := context.parts) is not None
    ]
    return names, {
        "waits": executor.waits_before(before),
        "faults": _faults(executor, nodes),
        # They read a source and call no function of a step.
        "source": not functions and any(node.path[-1] == 0 for node in nodes),
        "options": {"backend": None} if functions else {},
        "coroutines": max(uses, key=lambda use: use.idle + use.held, default=None),
    }


def _faults(executor: Executor, nodes: Sequence[Node]) -> Faults:
    log = executor.failure_log
    replaced = sum(log.replaced[node.path] for node in nodes)
    skipped = sum(log.counts[node.path] for node in nodes) - replaced
    paths = {node.path for node in nodes}
    contexts = list(executor.inline.items())  # a copy: other threads open passes, too
    return Faults(skipped, replaced, sum(c.retried for (at, _), c in contexts if at in paths))


_CLOSED = IteratorClosed("closed")  # reason for the end of a run that was closed


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
        self._executor, self.epoch = executor, epoch
        self._finalizer = closed_with(self, executor) if owner is None else None
        self._observation = observation = executor.observation
        self._loop = None if observation is None else observation.loop
        if observation is not None:
            observation.begin()
        # All the mutable state:
        self._asking = threading.RLock()
        self._over: BaseException | None = None
        self._position = RunPosition(executor.plan, epoch, resumed)
        self._items: Iterator[Any] = iter(())
        self._queue: RelayQueue | None = None  # from which the items are taken
        self._left, self._skipped = executor.left, executor.failure_log.records
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
            self._items = Withheld(self._items, self._position)
        self._left, self._skipped = executor.left, executor.failure_log.records
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
                if loop is not None:
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
                    elif takes_a_place(error):
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
            self._observation.ended()

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
        return self._executor.state(self._position)

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
        tables = []
        for _, running in sorted(self._executor.stages.items()):
            tables.append(f"{running.node.name}\n{running.stage.table.report()}")
        return "\n\n".join(tables)

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
    observe: bool = False,
    first: int = 0,
    idle: bool = False,
) -> Executor:
    """Make the executor of a run, or of several; it is observed if somebody asks for that."""
    observation = RunObservation(chain) if is_observed(observe) else None
    executor = Executor(chain, seed, resumed, first=first, idle=idle, observation=observation)
    if observation is not None:
        observation.executor = weakref.ref(executor)
    return executor


# -- epochs of one pipeline on the same workers: a loader that frameworks hold, and a number of epochs
#
# The loader knows where the next epoch begins, and the position of the latest one; its state is either.
# A state that is loaded only moves that beginning, so it is checked, used and saved again by the rules
# of runs. `Epochs` counts the epochs of a loader and does nothing else.


class PipelineLoader:
    """A pipeline as the loader of a training loop: each `iter` runs the next epoch.

    Frameworks take it as they take a `DataLoader`: Lightning, Fabric, accelerate, the Trainer of
    transformers and ignite save its state with theirs, and resume in the middle of an epoch. See
    docs/resuming.md. Its workers are kept for the next epoch, as with ``persistent_workers=True``. They
    end with `close`, or when the loader is deleted.

    Parameters
    ----------
    pipeline
        Pipeline whose items are the batches.
    seed
        See `Pipeline.run`; one for all epochs. None: drawn when the first epoch begins, or when its
        state is asked for.
    observe
        See `Pipeline.run`.

    Raises
    ------
    TypeError, ValueError
        A parameter is of the wrong kind.

    Examples
    --------
    >>> from hybridloader import Pipeline, PipelineLoader
    >>> def make():
    ...     even = Pipeline.from_dataset(range(12)).filter(lambda x: x % 2 == 0)
    ...     return PipelineLoader(even.batch(2, collate_fn=list))
    >>> loader = make()
    >>> for batch in loader:
    ...     print(batch)
    ...     break
    [0, 2]
    >>> state = loader.state_dict()
    >>> resumed = make()
    >>> resumed.load_state_dict(state)
    >>> list(resumed), list(resumed)
    ([[4, 6], [8, 10]], [[0, 2], [4, 6], [8, 10]])
    """

    def __init__(self, pipeline: Chain, *, seed: int | None = None, observe: bool = False) -> None:
        if not isinstance(pipeline, Chain):
            raise TypeError(
                f"a PipelineLoader runs a Pipeline, not a {type(pipeline).__qualname__}"
            )
        flag("observe", observe)
        self.pipeline = pipeline
        self.seed = None if seed is None else whole("seed", seed)
        self.observe = observe
        # All the mutable state:
        self._epoch = 0  # number of the next epoch
        self._start: Position | None = None  # where it begins; None: at its first item
        self._latest: RunPosition | None = None  # not the run: without a holder, it ends
        self._again: tuple[int, Position | None] | None = (
            None  # both, before the latest epoch began
        )
        self._executor: Executor | None = None
        self._finalizer: Any = None
        self._closed = False

    # -- epochs --------------------------------------------------------------------------------------

    def __iter__(self) -> Run:
        """Run the next epoch; the one before it ends.

        An epoch of which nothing was taken is repeated: Lightning calls `iter` once to see whether it
        can be called.
        """
        latest, again = self._latest, self._again
        taken = latest is None or latest.finished or latest.counts != latest.start
        if again is not None and not taken:
            self._epoch, self._start = again
        return self._begin()

    def _begin(self) -> Run:
        """Begin the next epoch."""
        executor = self._started()
        start = self._start
        if start is not None and start.finished:  # its marks are of the epoch that begins
            start = replace(start, epoch=self._epoch, given=0, raised=0, finished=False)
        run = Run(executor, self._epoch, self, start)
        self._latest, self._again = run._position, (self._epoch, self._start)
        self._epoch, self._start = self._epoch + 1, None
        return run

    def _started(self, *, idle: bool = False) -> Executor:
        """Start the workers if they do not run; `idle` if they will have nothing to do."""
        executor = self._executor
        if self._closed or (executor is not None and executor.closed):
            raise no_answer(IteratorClosed("these epochs are closed"))
        if executor is None:
            executor = self._executor = executor_of(
                self.pipeline,
                self.seed,
                self._start,
                observe=self.observe,
                first=self._epoch,
                idle=idle,
            )
            self._finalizer = closed_with(self, executor)
        return executor

    def __len__(self) -> int:
        """Return the number of items of a whole epoch.

        Raises
        ------
        TypeError
            It is not known before the pipeline has run; the message names the step.
        """
        pipeline: Any = self.pipeline  # this layer knows it as a chain only
        return len(pipeline)

    def __bool__(self) -> bool:
        return True

    def set_epoch(self, epoch: int) -> None:
        """Set the number of the next epoch. Without it, epochs are counted from 0.

        The position of a state that was loaded is kept if it is in this epoch, and dropped with a
        warning if not. The seed of the state is kept.
        """
        self._epoch, self._again, start = whole("epoch", epoch, 0), None, self._start
        if start is None or start.next_epoch == epoch:
            return
        # A framework that knows the length saves after the last item and begins the next epoch.
        length = self.pipeline.length
        ended = length is not None and start.given - start.raised + 1 > length
        ended = ended and epoch == start.epoch + 1
        if start.begun and not ended:
            warn(place_dropped(epoch, start.next_epoch), "position-dropped")
        self._start = replace(
            start, epoch=epoch, given=0, raised=0, finished=False, marks={}, heads=None
        )

    # -- states --------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the latest epoch, after the last item that `next` returned.

        May be called at any time (mid-epoch). The cost does not grow with the epoch, and no worker is
        started. After the end of an epoch the position is the beginning of the next one. Before the
        first epoch, this call draws its seed.

        Returns
        -------
        dict
            See `Run.state_dict`.

        Raises
        ------
        StateError
            See `Run.state_dict`.
        """
        executor = self._executor
        if self._start is not None:
            return self._start.as_dict(descriptions(self.pipeline))
        if executor is None:  # its seeds are those of the first epoch
            executor = Executor(self.pipeline, self.seed, first=self._epoch, idle=True)
            executor.close()
        state = executor.state(self._latest or RunPosition(executor.plan, self._epoch))
        if executor is not self._executor:
            self._start = checked(state, self.pipeline)
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Resume from `state_dict` at the next ``iter()``; end the running epoch.

        Parameters
        ----------
        state_dict
            State of a loader or of a run of such a pipeline; backends, workers and other
            options of placement and speed may differ. ``{}`` means no state.

        Raises
        ------
        StateError
            The state is of another pipeline, or was truncated; the message names the field. Nothing was
            changed.
        """
        if isinstance(state_dict, Mapping) and not state_dict:  # as in torchdata
            return
        self._resume(checked(state_dict, self.pipeline, seed=self.seed))

    def _resume(self, start: Position) -> None:
        """Begin at `start` next, on other workers: theirs are seeded."""
        if self._executor is not None:
            close_once(self, self._executor)
            self._executor = None
        self._epoch, self._start = start.next_epoch, start
        self._latest = self._again = None

    # -- end -----------------------------------------------------------------------------------------

    def close(self) -> None:
        """End all workers and threads. `state_dict` still works; no other epoch can begin."""
        self._closed = True
        if self._executor is not None:
            close_once(self, self._executor)

    def __enter__(self) -> PipelineLoader:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class Epochs(Iterator[Run]):
    """Several epochs of a pipeline, one after the other, on the same workers.

    An iterator of `Run`s, and a context manager. Beginning the next epoch ends the one before it. Epochs
    before that of a `state` count among their number.
    """

    def __init__(
        self,
        loader: PipelineLoader,
        count: int | None,
        first: int,
        state: Mapping[str, Any] | None = None,
    ) -> None:
        self._loader = loader
        self._left = count  # the only mutable state
        loader.set_epoch(first)
        if state is not None:
            resumed = checked(state, loader.pipeline, seed=loader.seed)
            if resumed.epoch < first:
                raise StateError(
                    f"epoch: the state is of epoch {resumed.epoch}, and these begin with first={first}"
                )
            done = resumed.next_epoch - first
            if count is not None:
                if done > count or (done == count and not resumed.finished):
                    raise StateError(
                        f"epoch: the state is of epoch {resumed.epoch}, and these end before epoch "
                        f"{first + count}"
                    )
                self._left = count - done
            loader._resume(resumed)
        loader._started(idle=self._left == 0)

    def __next__(self) -> Run:
        self._loader._started()
        if self._left is not None:
            if self._left == 0:
                self.close()
                raise StopIteration
            self._left -= 1
        return self._loader._begin()

    def close(self) -> None:
        """End all workers and threads."""
        self._loader.close()

    def __enter__(self) -> Epochs:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
