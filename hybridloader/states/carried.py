"""The state of a dataset on its way: with results to the parent, and to the workers that go on from it.

A dataset, or the iterator over it, that has `state_dict` and `load_state_dict` is asked for its
state after a result, because only then does it belong to that result. Its `Cadence` says how often.
The state is frozen at once, so that nothing that the worker does later can change it. A state that
can't be had raises nothing here: a loader that nobody asks for its state must not fail because of
one.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

from hybridloader.errors import StateError
from hybridloader.foreign import attribute
from hybridloader.states.cadence import ASKED, Cadence
from hybridloader.states.copies import Frozen, Latest

if TYPE_CHECKING:
    from hybridloader.fetcher import Fetch, Fetcher, TaskContext


class Start(NamedTuple):
    """Where one worker goes on.

    Attributes
    ----------
    position
        Samples of its shard that `dataset` and `iterator` are behind.
    skip
        Samples of its shard that it is to be behind; what lies between is read and dropped.
    dataset, iterator
        States; None where there is none.
    ended
        Whether the shard has ended.
    again
        For a dataset that is asked by index: tasks done since `dataset`, which are done once more.
    since
        Results since `dataset` and `iterator`; for a dataset that is asked by index, see `again`.
    behind
        Whether the states are of the end of a pass, and the worker is to begin the next pass.
    """

    position: int = 0
    skip: int = 0
    dataset: Frozen | None = None
    iterator: Frozen | None = None
    ended: bool = False
    again: tuple[Any, ...] = ()
    behind: bool = False
    since: int = 0

    @property
    def stateful(self) -> bool:
        """True if there is a state to go on from."""
        return self.dataset is not None or self.iterator is not None

    @property
    def results_since(self) -> int:
        """Number of the worker's results since its state was taken."""
        return self.since or len(self.again)


class DatasetState(NamedTuple):
    """State of a dataset behind a result of one worker.

    Attributes
    ----------
    dataset, iterator
        States; None where there is none.
    ended
        Whether the shard has ended.
    fault
        Why there is no state, if there should be one.
    """

    dataset: Frozen | None
    iterator: Frozen | None
    ended: bool
    fault: str


def is_stateful(thing: Any) -> bool:
    """Whether it has both methods, as torchdata's `Stateful`."""
    return (
        callable(attribute(thing, "state_dict"))
        and callable(attribute(thing, "load_state_dict"))
        and not isinstance(thing, type)
    )


def states_of(dataset: Any, samples: Any = None, *, every: int = 0) -> DatasetStates | None:
    """Return access to the state of `dataset` and of its iterator `samples`; None if neither has one.

    States are told as often as is cheap, but at least `every` results from one to the next.
    """
    itself = samples is dataset  # torchdata saves it once then, as the iterator's
    stateful = is_stateful(dataset) and not itself
    if not (stateful or is_stateful(samples)):
        return None
    cadence = Cadence(every=every, free=ASKED) if every else Cadence()
    return DatasetStates(dataset if stateful else None, samples, cadence)


class DatasetStates:
    """Access to the state of what one fetcher reads: of its first result, its last, and when one is due.

    Parameters
    ----------
    dataset, samples
        The dataset, if it has a state, and the iterator over it, which may have one.
    cadence
        When a state is due.
    """

    def __init__(self, dataset: Any, samples: Any, cadence: Cadence) -> None:
        self._dataset = dataset
        self._samples = samples if is_stateful(samples) else None
        self._cadence = cadence

    def due(self, *, ended: bool) -> DatasetState | None:
        """Return the state behind the result that was just made, if it is to go with it."""
        due = self._cadence.due()
        if not (due or ended):
            return None
        state = self.now(ended=ended)
        if due:
            self._cadence.taken()
        return state

    def go_on(self, since: int) -> None:
        """Count the results since the state that this fetcher goes on from."""
        self._cadence.go_on(since)

    def now(self, *, ended: bool) -> DatasetState:
        """Return the state as it is now."""
        dataset = iterator = None
        fault = ""
        try:
            if self._dataset is not None:
                dataset = frozen(self._dataset, "the dataset")
            if self._samples is not None:
                iterator = frozen(self._samples, "the iterator over the dataset")
        except StateError as error:
            fault = str(error)
        return DatasetState(dataset, iterator, ended, fault)


def frozen(thing: Any, what: str) -> Frozen:
    """The state of `thing`, pickled.

    Raises
    ------
    StateError
        It raised, or can't be pickled; the message names `what`.
    """
    return pickled(state_of(thing, what), f"{what} ({type(thing).__name__})")


def state_of(thing: Any, what: str) -> Any:
    """Ask `thing` for its state. Raises `StateError` as `frozen` does."""
    try:
        return thing.state_dict()
    except Exception as error:
        raise StateError(
            f"{what} ({type(thing).__name__}): its state_dict() raised {type(error).__name__}: {error}"
        ) from error


def copy_of(thing: Any, what: str, latest: Latest) -> Any:
    """A copy of the state of `thing`; raises `StateError` as `frozen` does."""
    return _pickled(latest.copy, state_of(thing, what), f"{what} ({type(thing).__name__})")


def pickled(state: Any, what: str) -> Frozen:
    """`state`, pickled; raises `StateError` as `frozen` does."""
    return Frozen(_pickled(pickle.dumps, state, what))


def _pickled(pickling: Callable[[Any], Any], state: Any, what: str) -> Any:
    try:
        return pickling(state)
    except Exception as error:  # what a foreign __reduce__ raises can be anything
        culprit = ""
        if isinstance(state, dict):
            names = [repr(name) for name, value in state.items() if not _picklable(value)]
            culprit = f", because of {', '.join(names)}" if names else ""
        raise StateError(
            f"{what}: its state can't be pickled{culprit} ({type(error).__name__}: {error}); leave "
            "out of state_dict() what can be made again"
        ) from error


def _picklable(value: Any) -> bool:
    try:
        pickle.dumps(value)
    except Exception:  # as above
        return False
    return True


def resumed(fetch: Fetch, start: Start, context: TaskContext) -> Fetcher:
    """The fetcher of a worker that goes on. The dataset gets its state first, as in torchdata."""
    if start.dataset is not None:
        _load(fetch.dataset, start.dataset, "the dataset")
    fetcher = fetch.open(None, context)
    if start.behind and start.iterator is not None:
        fetcher.resume(start)
        fetcher = fetch.open(None, context)
    fetcher.resume(start._replace(iterator=None, ended=False) if start.behind else start)
    _do_again(fetcher, start.again, context)
    if fetcher.states is not None and start.stateful and not start.behind:
        fetcher.states.go_on(start.results_since)
    return fetcher


def _do_again(fetcher: Fetcher, tasks: tuple[Any, ...], context: TaskContext) -> None:
    """Do again what was done since the state was taken, to bring the dataset to the same place."""
    for task in tasks:
        if context.cancelled:
            return
        with suppress(Exception):  # it was a result then, and what raises now does so when asked
            if context.draws is None:
                fetcher.fetch(task)
            else:
                context.draws.task(fetcher.key, fetcher.fetch, task)
        context.extras = None


def load_iterator(samples: Any, state: Frozen) -> None:
    _load(samples, state, "the iterator over the dataset")


def _load(thing: Any, state: Frozen, what: str) -> None:
    if not is_stateful(thing):
        raise StateError(
            f"the state to go on from holds one of {what}, and {type(thing).__name__} has no "
            "load_state_dict(); make the loader with the dataset that it had when the state was taken"
        )
    thing.load_state_dict(pickle.loads(state.kept))
