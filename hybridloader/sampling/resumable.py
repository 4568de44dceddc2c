"""What all our samplers share: epochs, and a place in them that can be saved and found again.

A sampler keeps where the iterator that yielded last has come to; an iterator takes its start from the
sampler when its first item is asked for, not before, because loaders call ``iter`` and throw the
iterator away. It never knows what was done with an index that it has given: a loader with workers
asks ahead, and whoever saves the state beside the batches must save it as it was for that batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

from torch.utils.data import Sampler

from hybridloader._support.arguments import whole
from hybridloader._support.state_schema import ANY, Schema, up_to
from hybridloader.sampling.arguments import LARGEST

T_co = TypeVar("T_co", covariant=True)

VERSION = 1
"""Of the state; it changes with the meaning of a field, and with the order that a seed stands for."""


class Place:
    """Where an iteration started, and how many items it has given."""

    __slots__ = ("epoch", "start", "taken")

    def __init__(self, epoch: int, start: int = 0) -> None:
        self.epoch, self.start, self.taken = epoch, start, 0


class ResumableSampler(Sampler[T_co]):
    """A sampler whose order follows from a seed and an epoch, and that can start anywhere in it.

    A base class: `ShuffleSampler` and the others add what is sampled and how.

    Parameters
    ----------
    epoch
        The first epoch.

    Notes
    -----
    Every iteration is an epoch of its own: the one that `set_epoch` named, or else the one after that
    of the iteration before, whether or not that came to its end. An iteration begins when its first
    item is asked for; ``iter`` alone does nothing.

    Reading a sampler from several threads at the same time is not supported.
    """

    def __init__(self, epoch: int) -> None:
        self._next: Place | None = Place(whole("epoch", epoch, 0))
        """Where the next iteration starts, if not at the epoch after `_begun`."""
        self._begun = 0
        """The epoch of the iteration that began last."""
        self._place: Place | None = None
        """That of the iteration that yielded last, while it is in the middle of its epoch."""

    # What a sampler of a kind adds.

    def _agreement(self) -> dict[str, Any]:
        """What a state must have in common with this sampler, in what JSON has."""
        raise NotImplementedError

    def _positions(self, epoch: int) -> int:
        """How many positions `epoch` has."""
        raise NotImplementedError

    def _items(self, place: Place) -> list[Any]:
        """Some of what comes next after `place`; nothing if that was all."""
        raise NotImplementedError

    def _position(self, place: Place) -> int:
        """The position that an iteration has come to."""
        return place.start + place.taken

    def _left(self, epoch: int, position: int) -> bool:
        """True if anything is left of `epoch` from `position` on."""
        return position < self._positions(epoch)

    # What all have.

    def __iter__(self) -> Iterator[T_co]:
        place = self._begin()  # with the first item
        while items := self._items(place):
            for item in items:
                place.taken += 1
                self._place = place
                yield item
        if self._place is place:
            self._place = None

    def __len__(self) -> int:
        return self._positions(self.epoch)

    @property
    def epoch(self) -> int:
        """The epoch that is under way, or, between two of them, the next."""
        return (self._place or self._upcoming()).epoch

    def set_epoch(self, epoch: int) -> None:
        """Make the next iteration that of `epoch`.

        A place that was loaded and has not been gone on from is kept if it is within `epoch`; an
        iteration that is under way is left alone.
        """
        epoch = whole("epoch", epoch, 0)
        if self._next is None or self._next.epoch != epoch:
            self._next = Place(epoch)
        self._place = None

    def state_dict(self) -> dict[str, Any]:
        """Where the iterator that yielded last has come to, in what JSON has.

        Returns
        -------
        dict
            ``epoch`` and ``position`` say what comes next: an epoch that has ended is told as the
            start of the next. Beside them are a version, the kind of sampler, and everything that
            the sampler which loads it must have in common with this one.
        """
        epoch, position = self._where()
        return {
            "version": VERSION,
            "sampler": type(self).__name__,
            **self._agreement(),
            "epoch": epoch,
            "position": position,
        }

    def upcoming_state_dict(self) -> dict[str, Any]:
        """Where the next iteration starts; as `state_dict`, but when one was broken off, behind it."""
        place = self._upcoming()
        epoch, position = self._settled(place.epoch, self._position(place))
        return {**self.state_dict(), "epoch": epoch, "position": position}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Start the next iteration where another, or this one, had come to.

        Parameters
        ----------
        state_dict
            What `state_dict` gave, in this process or another. Iterations that are under way are
            left alone.

        Raises
        ------
        ValueError
            It is not such a dict, or is from a sampler that differs from this one. Nothing has been
            changed then.
        """
        epoch, position = self._checked(state_dict)
        self._next = Place(epoch, position)
        self._place = None

    def _upcoming(self) -> Place:
        return self._next or Place(self._begun + 1)

    def _begin(self) -> Place:
        place = self._upcoming()
        self._next, self._begun, self._place = None, place.epoch, place
        return place

    def _where(self) -> tuple[int, int]:
        place = self._place or self._upcoming()
        return self._settled(place.epoch, self._position(place))

    def _settled(self, epoch: int, position: int) -> tuple[int, int]:
        if position and not self._left(epoch, position):
            return epoch + 1, 0
        return epoch, position

    def _checked(self, state: Any) -> tuple[int, int]:
        kind = type(self).__name__
        fields = (up_to(LARGEST - 1), "epoch"), (ANY, "position")
        told = Schema(kind, *fields, version=VERSION, kind=("sampler", kind), exact=True)
        told.check(state, self._agreement())
        epoch = state["epoch"]
        Schema(kind, (up_to(self._positions(epoch)), "position")).check(state)
        return self._settled(epoch, state["position"])
