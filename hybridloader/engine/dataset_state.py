"""State of a dataset: workers send it to the parent with results, and resume from it.

A dataset, or the iterator over it, may have `state_dict` and `load_state_dict`. Its state is taken after
a result, because only then does it belong to that result. A `Cadence` decides how often. The state is
pickled at once, so that the worker can't change it later. A failure to take it raises nothing here: the
loader fails only if the user asks for that state.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from hybridloader._support.states import ASKED, Cadence, Frozen, Given, is_stateful, kept


class ShardStart(NamedTuple):
    """Place and state from which one worker resumes; beside a result, the state without a place."""

    position: int = 0  # samples of the shard before the states `dataset` and `iterator`
    skip: int = 0  # samples of the shard to skip: those after `position` are read and dropped
    dataset: Given | None = None
    iterator: Given | None = None
    ended: bool = False  # the shard has ended
    again: Any = ()  # tasks since `dataset`, to be repeated, if samples are read by index
    next_epoch: bool = False  # the states are of an epoch's end; the worker begins the next epoch
    since: int = 0  # results since the states; if samples are read by index, see `again`

    @property
    def stateful(self) -> bool:
        """True if there is a state to resume from."""
        return self.dataset is not None or self.iterator is not None

    @property
    def results_since(self) -> int:
        """Number of the worker's results since its state was taken."""
        return self.since or len(self.again)


def states_of(
    dataset: Any, samples: Any = None, *, every: int = 0, always: bool = False
) -> DatasetStates | None:
    """Return access to the state of `dataset` and of its iterator `samples`; None if neither has one.

    States are taken as often as is cheap, but at least `every` results apart; with `always`, after
    each result.
    """
    itself = samples is dataset  # then torchdata saves its state once, as the iterator's
    stateful = is_stateful(dataset) and not itself
    if not (stateful or is_stateful(samples)):
        return None
    if always:
        cadence = Cadence(free=math.inf)
    else:
        cadence = Cadence(every=every, free=ASKED) if every else Cadence()
    return DatasetStates(dataset if stateful else None, samples, cadence)


class DatasetStates:
    """Access to the state of the dataset of one fetcher, and of the iterator over it."""

    def __init__(self, dataset: Any, samples: Any, cadence: Cadence) -> None:
        self._dataset = dataset
        self._samples = samples if is_stateful(samples) else None
        self._cadence = cadence

    def due(self, *, ended: bool) -> ShardStart | None:
        """Return the state after the newest result; None if it is not sent with that result."""
        due = self._cadence.due()
        if not (due or ended):
            return None
        state = self.now(ended=ended)
        if due:
            self._cadence.taken()
        return state

    def resume(self, since: int) -> None:
        """Count the results since the state from which this fetcher resumes."""
        self._cadence.go_on(since)

    def now(self, *, ended: bool) -> ShardStart:
        """Return the state as it is now, without a place."""
        dataset = iterator = None
        if self._dataset is not None:
            dataset = kept(self._dataset, "the dataset", Frozen)
        if self._samples is not None:
            iterator = kept(self._samples, "the iterator over the dataset", Frozen)
        return ShardStart(dataset=dataset, iterator=iterator, ended=ended)
