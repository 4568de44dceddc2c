"""Base of the samplers: epochs, and a position in an epoch that can be saved and loaded.

A sampler keeps the position of the iterator that yielded last. An iterator reads its start from the
sampler at its first item, not earlier, because loaders call ``iter`` and discard the iterator. The
position counts the items that the sampler has yielded. A loader with workers asks ahead, so it saves the
sampler's state at the batch that your loop received.
"""

from __future__ import annotations

import base64
import functools
import zlib
from collections.abc import Iterator, Mapping, Sequence, Sized
from typing import Any, ClassVar, TypeVar

import numpy as np
import numpy.typing as npt
from torch.utils.data import Sampler

import hybridloader._support.installed_torch  # noqa: F401 - it refuses a torch that is too old
from hybridloader._support.states import ANY, Schema, up_to
from hybridloader._support.text import whole
from hybridloader._support.user_objects import described, has, no_answer
from hybridloader.errors import StateError
from hybridloader.sampling.permutation import BLOCK, LARGEST, MOST_SAMPLES, seed_of

# -- Checks of the arguments of samplers: numbers of samples, lengths and weights.
#
# Errors are raised at once and name the argument. Nothing is rounded, clipped or guessed. A tensor is
# recognized by its methods.


def count_of(name: str, source: int | Sized) -> int:
    """Return the number of samples: `source` itself, or its length."""
    if any(kind.__module__ == "torch.utils.data.sampler" for kind in type(source).__mro__):
        raise TypeError(
            f"{name} must be the dataset or its length, not the {type(source).__name__}, whose order "
            "and weights would be ignored; in a pipeline, .shard() divides the indices of any sampler"
        )
    if isinstance(source, Sized):
        return whole(f"len({name})", len(source), 0, MOST_SAMPLES)
    if has(source, "__index__"):
        return whole(name, source, 0, MOST_SAMPLES)
    raise TypeError(
        f"{name} must be a number of samples or something with a length, got "
        f"{type(source).__name__}; an iterable dataset has no indices to sample"
    )


def _array(name: str, values: Any) -> npt.NDArray[Any]:
    """Return the numbers of a sequence, an array or a tensor as an array of one dimension."""
    if has(values, "detach"):
        values = values.detach().cpu()
        values = (values.double() if values.is_floating_point() else values).numpy()
    try:
        array = np.asarray(values)
    except ValueError as error:
        raise ValueError(f"{name} must have one dimension: {error}") from None
    if array.ndim != 1:
        raise ValueError(f"{name} must have one dimension, got the shape {array.shape}")
    if not array.size:
        return array.astype(np.int64)
    if array.dtype.kind not in "iuf":
        raise TypeError(f"{name} must be numbers, got {array.dtype} such as {array[0]!r}")
    return array


def lengths_of(lengths: Any) -> npt.NDArray[np.int64]:
    """Return lengths of samples as int64. Raises unless they are whole numbers from 0 up."""
    array = _array("lengths", lengths)
    if array.dtype.kind == "f":
        raise TypeError(
            f"lengths must be whole numbers, got {array.dtype}; count in a finer unit, such as "
            "milliseconds for seconds"
        )
    if array.size and int(array.max()) > LARGEST:
        raise ValueError(f"lengths must be at most {LARGEST}, got {int(array.max())}")
    if array.size and int(array.min()) < 0:
        at = int((array < 0).argmax())
        raise ValueError(f"lengths must not be negative, got lengths[{at}] = {array[at]}")
    return array.astype(np.int64, copy=False)


def weights_of(weights: Any) -> npt.NDArray[np.float64]:
    """Return weights as float64. Raises unless they are finite, not negative, and not all 0."""
    array = _array("weights", weights)
    if not array.size:
        raise ValueError("weights is empty: there is nothing to draw from")
    array = array.astype(np.float64, copy=False)
    # The extremes suffice: min and max of an array with a NaN are NaN.
    least, most = float(array.min()), float(array.max())
    if not (least >= 0 and most < float("inf")):
        at = int((~(np.isfinite(array) & (array >= 0))).argmax())
        raise ValueError(
            f"weights must be finite and not negative, got weights[{at}] = {float(array[at])}"
        )
    if most == 0:
        raise ValueError(f"all {array.size} weights are 0: there is nothing to draw from")
    return array


def fingerprint(array: npt.NDArray[Any]) -> int:
    """Return a checksum of the contents, the same on every platform."""
    plain = np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("<"))
    return zlib.crc32(plain.view(np.uint8).data)


# -- Indices that several ranks have left of a shared order, as an order for other ranks.
#
# Each rank has a different position, so the rest is ragged at its beginning: as far as the ranks are
# apart, its positions are in an array; from there on they follow each other. A rest may have a rest in
# turn.


Ints = npt.NDArray[np.int64]

LONGEST = 7_000  # most characters of the texts in one state, which must stay below 10 KB

Saved = list[list[Any]]
"""A `Leftover` in a state: for each time that ranks were merged the number of ranks, the position of
each, and positions that come first, both as texts."""


class Leftover:
    """Order of the positions that `ranks` have left of an order of `size` positions.

    Rank ``r`` has left the position ``turns[r] + r`` and every `ranks`-th one from there. All turns are
    equal modulo the number of ranks.
    """

    def __init__(
        self,
        size: int,  # that of `before`, if given
        turns: Sequence[int],  # position at which the next turn of each rank begins
        first: Sequence[int],  # further positions that are left; they come first
        before: Leftover | None = None,  # the shared order, if it was itself the rest of an order
    ) -> None:
        ranks = len(turns)
        self._before, self._ranks = before, ranks
        self._turns, self._first = np.asarray(turns, np.int64), np.asarray(first, np.int64)
        base = int(self._turns.min())
        begins = (self._turns - base) // ranks  # in turns from the base on
        full, rest = divmod(max(0, size - base), ranks)  # turns of all ranks, and one of some
        # Within a turn, ranks come in the order of their first turn; from the turn on that all take, by
        # their numbers.
        order = np.argsort(begins, kind="stable")
        ragged = np.arange(min(int(begins.max()), full), dtype=np.int64)[:, np.newaxis]
        parts = [self._first, (base + order + ranks * ragged)[begins[order] <= ragged]]
        self._tail = base + ranks * len(ragged)  # where positions follow each other
        if begins.max() > full:  # some ranks take no turn
            late = np.flatnonzero(begins <= full)
            parts.append(self._tail + late[late < rest])
            self._tail = size
        self._head = np.concatenate(parts)
        self.size = len(self._head) + max(0, size - self._tail)

    def take(self, places: Ints) -> Ints:
        """Return the positions at `places` of this order, in the first order that was shared."""
        found = places + (self._tail - len(self._head))
        early = places < len(self._head)
        found[early] = self._head[places[early]]
        return found if self._before is None else self._before.take(found)

    def saved(self) -> Saved:
        """Return it as JSON values. Raises `StateError` if they are too long for a state."""
        own = [self._ranks, _packed(self._turns), _packed(self._first)]
        return [*([] if self._before is None else self._before.saved()), own]


def leftover_of(size: int, saved: Any) -> Leftover | None:
    """Return the parts of the state of a sampler of `size` indices. Raises `StateError`."""
    if not saved:
        return None
    try:
        return _read(size, tuple((int(ranks), str(t), str(f)) for ranks, t, f in saved))
    except (TypeError, ValueError, zlib.error) as error:
        raise no_answer(
            StateError(f"left: the positions that ranks had left are damaged: {described(error)}")
        ) from error


@functools.lru_cache(maxsize=8)
def _read(size: int, saved: tuple[tuple[int, str, str], ...]) -> Leftover:
    found: Leftover | None = None
    for ranks, turns, first in saved:
        begins, early = _unpacked(turns), _unpacked(first)
        if (
            len(begins) != ranks
            or ranks < 1
            or (begins < 0).any()
            or ((begins - begins[0]) % ranks).any()
        ):
            raise ValueError(f"{len(begins)} positions of {ranks} ranks")
        if len(early) and not 0 <= early.min() <= early.max() < size:
            raise ValueError("a position beyond the last one")
        found = Leftover(size, begins, early, found)  # type: ignore[arg-type]
        size = found.size
    assert found is not None
    return found


def _packed(numbers: Ints) -> str:
    if not len(numbers):
        return ""
    steps = np.diff(numbers, prepend=np.int64(0)).astype("<i8")
    # Bytes of the same weight side by side: most of those above are 0.
    planes = steps.view(np.uint8).reshape(-1, 8).T.tobytes()
    return base64.b64encode(zlib.compress(planes, 9)).decode()


def _unpacked(text: str) -> Ints:
    if not text:
        return np.empty(0, np.int64)
    planes = np.frombuffer(zlib.decompress(base64.b64decode(text, validate=True)), np.uint8)
    steps = np.ascontiguousarray(planes.reshape(8, -1).T).view("<i8").reshape(-1)
    return np.cumsum(steps, dtype=np.int64)


T_co = TypeVar("T_co", covariant=True)

Items = Any  # several items: an array of numbers, or a list

VERSION = 1
"""Version of the state. It changes if the meaning of a field or the order for a seed changes."""


class SamplerPlace:
    """Place of an iteration: its epoch, and the position of its next item.

    The position counts in the order of the epoch, or in the order of the rest that other ranks `left`.
    """

    __slots__ = ("epoch", "left", "position")

    def __init__(self, epoch: int, position: int = 0, left: Leftover | None = None) -> None:
        self.epoch, self.position, self.left = epoch, position, left


class ResumableSampler(Sampler[T_co]):
    """Sampler whose order depends only on a seed and an epoch, and that can start at any position.

    This is a base class: `ShuffleSampler` and the other subclasses define the order.

    Parameters
    ----------
    n
        Number of samples.
    seed
        From 0 to ``2**64 - 1``.
    epoch
        First epoch.

    Notes
    -----
    Each iteration is an epoch: the one set by `set_epoch`, or else the one after the last epoch that
    began, even if that one was not finished. An iteration begins at its first item; ``iter`` alone does
    nothing.

    Only one thread at a time may read a sampler.
    """

    _STATED: ClassVar[tuple[str, ...]] = ("seed",)
    """Attributes that must be equal in a state and in the sampler that loads it; values as in JSON."""

    _OPTIONAL: ClassVar[str] = ""
    """Further fields of a state, each followed by a ``?``."""

    _BLOCK: ClassVar[int] = BLOCK
    """Number of positions to compute at a time."""

    _step = 1
    """Positions from an item to the next one."""

    def __init__(self, n: int, seed: int, epoch: int) -> None:
        self._n, self.seed = n, seed_of(seed)
        # All the mutable state:
        self._next = SamplerPlace(whole("epoch", epoch, 0))  # where the next iteration begins
        self._place: SamplerPlace | None = None  # of the iteration that yielded last, until it ends

    def _read(self, epoch: int, start: int, stop: int) -> Items:
        """Return the items from position `start` to before `stop`."""
        raise NotImplementedError

    def _positions(self, epoch: int) -> int:
        """Return the number of positions of `epoch`."""
        return self._n

    def _goes_on(self, place: SamplerPlace) -> bool:
        """Return True if there is an item at `place`."""
        return place.position < self._positions(place.epoch)

    def _place_in(self, state: Mapping[str, Any]) -> SamplerPlace:
        """Return the place of a state; the state has been checked, except for its position."""
        return SamplerPlace(state["epoch"], state["position"])

    def _items(self, place: SamplerPlace, most: int) -> Items:
        """Return the `most` items that follow `place`, or fewer at the end."""
        stop = min(place.position + most, self._positions(place.epoch))
        return self._read(place.epoch, place.position, stop)

    def _agreement(self) -> dict[str, Any]:
        """Return the fields that must be equal in a state and in this sampler."""
        return {"n": self._n, **{name: getattr(self, name) for name in self._STATED}}

    def __iter__(self) -> Iterator[T_co]:
        step = self._step
        for place, items in self._blocks(self._BLOCK):
            for item in _listed(items):
                place.position += step
                self._place = place
                yield item

    def batches(
        self, batch_size: int, drop_last: bool, *, arrays: bool = False
    ) -> Iterator[Sequence[T_co]]:
        """Return the batches of torch's `BatchSampler` over this sampler, at a lower cost.

        Parameters
        ----------
        batch_size
            Items in a batch.
        drop_last
            Leave out the last batch if it has fewer.
        arrays
            Return batches of numbers as arrays of int64, without a Python object for each number.
        """
        for place, items in self._blocks(max(1, self._BLOCK // batch_size) * batch_size):
            items = items if arrays else _listed(items)
            stop = len(items) // batch_size * batch_size if drop_last else len(items)
            for start in range(0, stop, batch_size):
                batch = items[start : start + batch_size]
                place.position += self._step * len(batch)
                self._place = place
                yield batch

    def _blocks(self, most: int) -> Iterator[tuple[SamplerPlace, Items]]:
        """Begin an epoch; yield up to `most` items at a time. The caller advances the place."""
        place = self._place = self._next  # with the first item
        self._next = SamplerPlace(place.epoch + 1)
        items = self._items(place, most)
        while len(items) == most:
            yield place, items
            items = self._items(place, most)
        yield place, items
        if self._place is place:
            self._place = None

    def __len__(self) -> int:
        return self._positions(self.epoch)

    @property
    def epoch(self) -> int:
        """Current epoch; between two epochs, the next one."""
        return (self._place or self._next).epoch

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration.

        A loaded position that no iteration has used yet is kept if it is in `epoch`. Running iterations
        are not affected.
        """
        epoch = whole("epoch", epoch, 0)
        if self._next.epoch != epoch:
            self._next = SamplerPlace(epoch)
        self._place = None

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the iterator that yielded last, as a dict of JSON types.

        Returns
        -------
        dict
            ``epoch`` and ``position`` of the next item; the end of an epoch is the start of the next.
            The other fields are a version, the kind of sampler, and the arguments that must be equal in
            the sampler that loads the state.
        """
        return self._state_at(self._place or self._next)

    def state_after(self, state: Mapping[str, Any], items: int) -> dict[str, Any] | None:
        """Return the state `items` items after `state`, without drawing these items.

        Returns
        -------
        dict or None
            None after the last item of the epoch.
        """
        place = self._place_in(state)
        place.position += items * self._step
        if items and not self._goes_on(place):
            return None
        return {**state, "position": place.position}

    def upcoming_state_dict(self) -> dict[str, Any]:
        """Return the start of the next iteration. Within an iteration it differs from `state_dict`."""
        return self._state_at(self._next)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Start the next iteration at the position in `state_dict`. Running iterations don't change.

        Parameters
        ----------
        state_dict
            State of a sampler with the same arguments, maybe from another process.

        Raises
        ------
        StateError
            A `ValueError`: `state_dict` is not such a state. The sampler is unchanged.
        """
        kind = type(self).__name__
        fields = (up_to(LARGEST - 1), "epoch"), (ANY, f"position {self._OPTIONAL}")
        schema = Schema(kind, *fields, version=VERSION, kind=("sampler", kind), exact=True)
        schema.check(state_dict, self._agreement())
        place = self._place_in(state_dict)
        most = self._positions(place.epoch) if place.left is None else place.left.size
        Schema(kind, (up_to(most), "position")).check(state_dict)
        self._next = self._settled(place)
        self._place = None

    def _state_at(self, place: SamplerPlace) -> dict[str, Any]:
        place = self._settled(place)
        state = {"version": VERSION, "sampler": type(self).__name__, **self._agreement()}
        state.update(epoch=place.epoch, position=place.position)
        return state if place.left is None else {**state, "left": place.left.saved()}

    def _settled(self, place: SamplerPlace) -> SamplerPlace:
        """Return `place`, or the start of the next epoch if it is the end of one."""
        if (place.position or place.left is not None) and not self._goes_on(place):
            return SamplerPlace(place.epoch + 1)
        return place


def _listed(items: Items) -> list[Any]:
    found: list[Any] = items if isinstance(items, list) else items.tolist()
    return found
