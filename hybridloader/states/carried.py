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
from typing import Any, NamedTuple

from hybridloader.errors import StateError
from hybridloader.foreign import attribute
from hybridloader.states.cadence import ASKED, Cadence
from hybridloader.states.copies import Frozen, Latest


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


class Carried:
    """A result, and the state of the dataset behind it.

    Attributes
    ----------
    data
        The result.
    dataset, iterator
        States; None where there is none.
    ended
        Whether the shard has ended.
    fault
        Why there is no state, if there should be one.
    """

    __slots__ = ("data", "dataset", "ended", "fault", "iterator")

    def __init__(
        self, data: Any, dataset: Frozen | None, iterator: Frozen | None, ended: bool, fault: str
    ) -> None:
        self.data, self.dataset, self.iterator = data, dataset, iterator
        self.ended, self.fault = ended, fault

    def __reduce__(self) -> Any:
        return Carried, (self.data, self.dataset, self.iterator, self.ended, self.fault)


def is_stateful(thing: Any) -> bool:
    """Whether it has both methods, as torchdata's `Stateful`."""
    return all(
        callable(attribute(thing, name)) for name in ("state_dict", "load_state_dict")
    ) and not isinstance(thing, type)


def carrying(
    fetcher: Callable[[Any], Any], dataset: Any, samples: Any = None, *, every: int = 0
) -> Any:
    """Wrap `fetcher`: some results are `Carried` if the dataset, or its iterator, has a state.

    There are as many of these as is cheap, but at least `every` results from one to the next.
    """
    itself = samples is dataset  # torchdata saves it once then, as the iterator's
    stateful = is_stateful(dataset) and not itself
    if stateful or is_stateful(samples):
        cadence = Cadence(every=every, free=ASKED) if every else Cadence()
        return _Carrying(fetcher, dataset if stateful else None, samples, cadence)
    return fetcher


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


class _Carrying:
    """Fetcher whose first and last results are `Carried`, and those at which a state is due.

    In all else it behaves as the fetcher within.
    """

    def __init__(
        self,
        fetcher: Callable[[Any], Any],
        dataset: Any,
        samples: Any,
        cadence: Cadence,
    ) -> None:
        self.within, self._dataset = fetcher, dataset
        self._samples = samples if is_stateful(samples) else None
        self._cadence = cadence
        self._mend: Any = getattr(fetcher, "mend", None)
        if self._mend is not None:
            self.mend = self._mended

    def __call__(self, index: Any) -> Any:
        data = self.within(index)
        due = self._cadence.due()
        if not (due or self._ended):
            return data
        carried = self._with_state(data)
        if due:
            self._cadence.taken()
        return carried

    @property
    def _ended(self) -> bool:
        return getattr(self.within, "ended", False)

    def go_on(self, since: int) -> None:
        """Count the results since the state that this fetcher goes on from."""
        self._cadence.go_on(since)

    def carried_now(self) -> Carried:
        """Return the state alone, as it is now."""
        return self._with_state(None)

    def _with_state(self, data: Any) -> Carried:
        dataset = iterator = None
        fault = ""
        try:
            if self._dataset is not None:
                dataset = frozen(self._dataset, "the dataset")
            if self._samples is not None:
                iterator = frozen(self._samples, "the iterator over the dataset")
        except StateError as error:
            fault = str(error)
        return Carried(data, dataset, iterator, self._ended, fault)

    def _mended(self, result: Any, check: Callable[[Any], Any]) -> Any:
        if type(result) is not Carried:
            return self._mend(result, check)
        return self._with_state(self._mend(result.data, check))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name == "mend":
            raise AttributeError(name)
        return getattr(self.within, name)


def resumed(fetch: Any, start: Start, cancelled: Any) -> Any:
    """The fetcher of a worker that goes on. The dataset gets its state first, as in torchdata."""
    if start.dataset is not None:
        _load(fetch.dataset, start.dataset, "the dataset")
    fetcher = fetch.open(None, cancelled)
    if start.behind and start.iterator is not None:
        fetcher.resume(start)
        fetcher = fetch.open(None, cancelled)
    resume = getattr(fetcher, "resume", None)
    if resume is not None:
        resume(start._replace(iterator=None, ended=False) if start.behind else start)
    within = fetcher.within if type(fetcher) is _Carrying else fetcher
    _do_again(within, start.again, cancelled)
    if type(fetcher) is _Carrying and start.stateful and not start.behind:
        fetcher.go_on(start.results_since)
    return fetcher


def _do_again(fetcher: Callable[[Any], Any], tasks: tuple[Any, ...], cancelled: Any) -> None:
    """Do again what was done since the state was taken, to bring the dataset to the same place."""
    for task in tasks:
        if cancelled.up:
            return
        with suppress(
            Exception
        ):  # it was a result then, and whatever raises now does so when asked
            fetcher(task)


def load_iterator(samples: Any, state: Frozen) -> None:
    _load(samples, state, "the iterator over the dataset")


def _load(thing: Any, state: Frozen, what: str) -> None:
    if not is_stateful(thing):
        raise StateError(
            f"the state to go on from holds one of {what}, and {type(thing).__name__} has no "
            "load_state_dict(); make the loader with the dataset that it had when the state was taken"
        )
    thing.load_state_dict(pickle.loads(state.kept))
