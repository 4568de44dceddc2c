"""Epochs of one pipeline on the same workers: a loader that frameworks hold, and a number of epochs.

The loader knows where the next epoch begins, and the position of the latest one; its state is either.
A state that is loaded only moves that beginning, so it is checked, used and saved again by the rules of
runs. `Epochs` counts the epochs of a loader and does nothing else.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from hybridloader._support.arguments import whole
from hybridloader._support.caller import warn
from hybridloader._support.error_handling import no_answer
from hybridloader._support.state_schema import place_dropped
from hybridloader.engine.crews import close_once, closed_with
from hybridloader.errors import IteratorClosed, StateError
from hybridloader.observe.observation import Observe, check_observe
from hybridloader.running.executor import Executor
from hybridloader.running.operator import Chain
from hybridloader.running.run import Run, executor_of, state_of
from hybridloader.running.run_position import Counts, RunPosition
from hybridloader.running.state import Position, checked, descriptions


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

    def __init__(
        self, pipeline: Chain, *, seed: int | None = None, observe: bool | Observe = False
    ) -> None:
        if not isinstance(pipeline, Chain):
            raise TypeError(
                f"a PipelineLoader runs a Pipeline, not a {type(pipeline).__qualname__}"
            )
        check_observe(observe)
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
        if self._closed or (executor is not None and executor.closed.cancelled):
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
        if self._latest is not None and executor is not None:
            return state_of(executor, self._latest)
        if executor is None:  # its seeds are those of the first epoch
            executor = Executor(self.pipeline, self.seed, first=self._epoch, idle=True)
            executor.close()
        state = executor.state(self._epoch, Counts(), {}, finished=False)
        if executor is not self._executor:
            self._start = checked(state, self.pipeline)
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Resume from `state_dict` at the next ``iter()``; end the running epoch.

        Parameters
        ----------
        state_dict
            State of a loader, of epochs or of a run of such a pipeline; backends, workers and other
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

    An iterator of `Run`s, and a context manager. Beginning the next epoch ends the one before it.
    """

    def __init__(
        self,
        loader: PipelineLoader,
        count: int | None,
        first: int,
        state: Mapping[str, Any] | None = None,
    ) -> None:
        self._loader, self._count, self._first = loader, count, first
        self._left = count  # the only mutable state
        loader.set_epoch(first)
        if state is not None:
            self.load_state_dict(state)
        loader._started(idle=self._left == 0)

    def __next__(self) -> Run:
        self._loader._started()
        if self._left is not None:
            if self._left == 0:
                self.close()
                raise StopIteration
            self._left -= 1
        return self._loader._begin()

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the latest epoch, or of the first; see `Run.state_dict`."""
        return self._loader.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Resume from `state_dict` with the next epoch; end the running one.

        Epochs before that of the state count among their number. See `PipelineLoader.load_state_dict`.

        Raises
        ------
        StateError
            The state is of another pipeline, or of an epoch that is not among these. Nothing was
            changed.
        """
        loader = self._loader
        resumed = checked(state_dict, loader.pipeline, seed=loader.seed)
        done = resumed.next_epoch - self._first
        if resumed.epoch < self._first:
            raise StateError(
                f"epoch: the state is of epoch {resumed.epoch}, and these begin with first={self._first}"
            )
        if self._count is not None:
            if done > self._count or (done == self._count and not resumed.finished):
                raise StateError(
                    f"epoch: the state is of epoch {resumed.epoch}, and these end before epoch "
                    f"{self._first + self._count}"
                )
            self._left = self._count - done
        loader._resume(resumed)

    def close(self) -> None:
        """End all workers and threads."""
        self._loader.close()

    def __enter__(self) -> Epochs:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
