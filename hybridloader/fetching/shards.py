"""Shards of an iterable dataset: their division among ranks and workers, by number or by name."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import GeneratorType
from typing import Any, NamedTuple
from zlib import crc32

from hybridloader._support.states import ANY, COUNT, DICT, LIST, TEXT, Frozen, Schema, is_stateful
from hybridloader._support.torch_env import is_datapipe
from hybridloader._support.user_objects import attribute, described, foreign
from hybridloader.engine.dataset_state import ShardStart
from hybridloader.errors import ShardLost, StateError

# -- reading an iterable dataset by the shards that it names, each from a given position
#
# A dataset names its shards by two attributes: `shard_names`, the names of the shards of all ranks, and
# `read_shard(name, start)`, which returns the samples of one shard from number `start` on. Such a
# dataset is read through these two, and its `__iter__` is not called. Nothing here decides which worker
# reads which shards after a resume: the loader does.

MOST_FAILURES = 8
"""Errors in a row after which the rest of a shard is skipped, for shards that each error closes."""

_END = object()

ShardPart = list[tuple[str, int, bool]]
"""Shards that one worker reads, in order: the name, the number of the first sample to read, and whether
that sample alone is read."""


class Place(NamedTuple):
    """Position in the part of one worker."""

    passed: int
    """Number of shards before the current one."""
    at: int
    """Number of the next sample of the current shard."""


def names_shards(dataset: Any) -> bool:
    """True if `dataset` names its shards."""
    named = attribute(dataset, "shard_names") is not None
    return named and callable(attribute(dataset, "read_shard"))


def names_of(dataset: Any) -> list[str]:
    """Return the names of the shards of `dataset`. Raises `TypeError` or `ValueError`."""
    given = dataset.shard_names
    names = list(given) if isinstance(given, Sequence) and not isinstance(given, str) else None
    if names is None or not all(isinstance(name, str) for name in names):
        raise TypeError(
            f"{type(dataset).__name__}.shard_names must be a list of str, got {given!r:.80}"
        )
    if len({*names}) < len(names):
        twice = next(name for at, name in enumerate(names) if name in names[:at])
        raise ValueError(
            f"{type(dataset).__name__}.shard_names has {twice!r} twice; give each shard its own name"
        )
    return names


def shares_of(items: list[Any], part: int, parts: int) -> list[Any]:
    """Return the items of one of `parts` ranks or workers, which take turns."""
    return items[part::parts]


def checksum(names: Sequence[str]) -> int:
    return crc32("\0".join(names).encode())


class NamedShardsIterator(Iterator[Any]):
    """Iterator over the samples of the shards in `part`, one shard after the other.

    A generator that has raised is over, so the shard is opened again after the sample that failed.

    Its state is a `Place`. A state to load may have another part to read, as ``"part"``.
    """

    def __init__(self, dataset: Any, part: ShardPart) -> None:
        self._dataset = dataset
        # All the mutable state:
        self._part = part
        self._passed = 0
        self._at = part[0][1] if part else 0
        self._samples: Iterator[Any] | None = None  # of the open shard; None: not open
        self._failed = 0  # errors since the last sample
        self.count = 0  # samples and errors that it has returned
        self.entered: list[tuple[int, Place]] | None = None
        """For each shard that was entered since the list was emptied: `count` then, and the position.
        None does not note them."""

    def __next__(self) -> Any:
        while self._passed < len(self._part):
            name, _, alone = self._part[self._passed]
            try:
                if self._samples is None:
                    self._samples = iter(self._dataset.read_shard(name, self._at))
                sample = next(self._samples, _END)
            except Exception as error:
                self._at += 1
                self.count += 1
                if alone:
                    self._pass_on()
                elif self._samples is None or isinstance(self._samples, GeneratorType):
                    self._samples = None  # a generator that has raised is exhausted
                    self._failed += 1
                    if self._failed == MOST_FAILURES:  # or a deleted shard would never end
                        self._pass_on()
                        raise ShardLost(
                            f"shard {name!r}: read_shard() raised {MOST_FAILURES} times in a row, the "
                            f"last time {described(error)}. The rest of the shard is skipped; check "
                            "that it can be read"
                        ) from error
                raise foreign(error)  # noqa: B904  # the same error, unless it is a StopIteration
            self._failed = 0
            if sample is not _END:
                self._at += 1
                self.count += 1
                if alone:
                    self._pass_on()
                return sample
            self._pass_on()
        raise StopIteration

    def _pass_on(self) -> None:
        self._samples, self._failed = None, 0
        self._passed += 1
        self._at = self._part[self._passed][1] if self._passed < len(self._part) else 0
        if self.entered is not None:
            self.entered.append((self.count, self.place))

    @property
    def place(self) -> Place:
        """Position in the part."""
        return Place(self._passed, self._at)

    def state_dict(self) -> dict[str, Any]:
        return self.place._asdict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if "part" in state:
            self._part = [(name, start, alone) for name, start, alone in state["part"]]
        self._samples = None
        self._passed, self._at = state["passed"], state["at"]


# -- division of the shards that an iterable dataset names, among ranks and workers, and its state
#
# A worker's own state has two numbers, which hold within its part. So a state of the loader describes
# how the parts were made (``base``), for a loader with the same ranks and workers, which resumes
# exactly; and which shards are left, from which position on, for any other. Shards are numbered by
# their sorted names; a set of them is the hexadecimal form of a bit mask.

_FIELDS = Schema(
    "loader's shards",
    (COUNT, "names read"),
    (LIST, "share base first"),
    (TEXT, "left"),
    (DICT, "begun"),
    (ANY, "order whole"),
)


def group_of_ranks() -> tuple[int, int] | None:
    """Return the rank and the number of ranks of `torch.distributed`; None if it is not initialized."""
    distributed: Any = attribute(sys.modules.get("torch"), "distributed")
    if distributed is None or not (distributed.is_available() and distributed.is_initialized()):
        return None
    return distributed.get_rank(), distributed.get_world_size()


def share_of(dataset: Any) -> tuple[int, int] | None:
    """Return the rank and the number of ranks that share the shards; None if `dataset` names none.

    They are those of the dataset, if it has `rank` and `num_replicas`; else of `torch.distributed`.
    """
    if not names_shards(dataset) or is_datapipe(dataset):
        return None
    rank, ranks = attribute(dataset, "rank"), attribute(dataset, "num_replicas")
    if type(rank) is int and type(ranks) is int:
        if not 0 <= rank < ranks:
            raise ValueError(
                f"{type(dataset).__name__} has rank={rank} and num_replicas={ranks}; rank must be "
                "from 0 to num_replicas - 1"
            )
        return rank, ranks
    return group_of_ranks() or (0, 1)


def readers_share_of(source: Any) -> tuple[int, int] | None:
    """Return `share_of` a pipeline's source; None if it has a state besides its shards.

    Such a source is read through its iterator, with its state: a reader of shards has none.
    """
    return None if is_stateful(source) else share_of(source)


class ShardDivision:
    """Division of this rank's shards among its workers, for one epoch."""

    def __init__(
        self,
        order: list[str],  # names of the shards of all ranks, in the order of the epoch
        share: tuple[int, int],  # rank and number of ranks
        workers: int,  # that read
        # Shards of this rank, and the first sample to read of each. None: those of a whole epoch:
        left: Mapping[str, int] | None = None,
        # Samples of this rank that are read before these: the shard and the number of each:
        first: Sequence[tuple[str, int]] = (),
        *,
        own_state: bool = False,  # the dataset has a `state_dict` besides its shards
    ) -> None:
        self.share, self._own_state = share, own_state
        self._in_order, self._names, self._order = order, sorted(order), checksum(order)
        self._numbers = {name: number for number, name in enumerate(self._names)}
        whole = dict.fromkeys(shares_of(order, *share), 0)
        self._base = whole if left is None else dict(left)
        self.whole = self._base == whole
        """True if nothing of the epoch was read before this division."""
        self._begun_before = {name: at for name, at in self._base.items() if at}
        self._first = list(first)
        mine = [(name, at, True) for name, at in first]
        mine += ((name, at, False) for name, at in self._base.items())
        self.parts: list[ShardPart] = [
            shares_of(mine, worker, workers) for worker in range(workers)
        ]
        early = [[self._numbers[name], at] for name, at in first]
        self._saved_base = [f"{self._bits(self._base):x}", self._begun(self._base), early]
        # All the mutable state: for each worker, its finished shards, and a mask of the others.
        self._rest = [(0, self._mask(part)) for part in self.parts]

    @classmethod
    def of(cls, dataset: Any, workers: int) -> ShardDivision | None:
        """Return the division of a whole epoch; None if `dataset` names no shards."""
        share = share_of(dataset)
        if share is None:
            return None
        return cls(names_of(dataset), share, workers, own_state=is_stateful(dataset))

    # -- writing -----------------------------------------------------------------------------------

    def state_after(self, starts: Sequence[ShardStart] | None) -> dict[str, Any]:
        """Return the state after the workers of a loader came to `starts`; None: after the epoch."""
        whole, places = None, list[Place]()
        for worker, start in enumerate(starts or ()):
            places.append(self.place(worker, start))
            if start.skip != start.position:
                whole = (
                    f"the latest batch of worker {worker} raised an error; take the state after "
                    "another batch"
                )
        read = max((start.skip for start in starts or ()), default=0)
        return self.state(None if starts is None else places, read, whole)

    def state(
        self,
        places: Sequence[Place] | None,  # of each worker
        read: int = 0,  # largest number of samples that one of them has read
        whole: str | None = None,  # why the rest can't be divided again; None if it can
    ) -> dict[str, Any]:
        """Return the state after the workers came to `places`; None: after the end of the epoch."""
        left, begun = 0, dict[str, int]()
        for worker, place in enumerate(places or ()):
            part = self.parts[worker]
            left |= self._rest_of(worker, place.passed)
            if place.passed < len(part) and not part[place.passed][2]:
                begun[part[place.passed][0]] = place.at
        begun.update(
            (name, at)
            for name, at in self._begun_before.items()
            if name not in begun and left >> self._numbers[name] & 1
        )
        if self._own_state:
            whole = (
                "the dataset has a state_dict() in addition to its shards, and that state holds for "
                "one worker only"
            )
        return {
            "names": checksum(self._names),
            "order": self._order,
            "share": list(self.share),
            "left": f"{left:x}",
            "begun": self._begun(begun),
            "first": self._first_after(places or ()),
            "base": self._saved_base,
            "read": read,
            "whole": whole,
        }

    def place(self, worker: int, start: ShardStart) -> Place:
        """Return the position at which a worker begins that has the state `start`."""
        if start.iterator is None:
            return self.beginning(worker)
        state = start.iterator.given()
        return Place(state["passed"], state["at"])

    def beginning(self, worker: int) -> Place:
        """Return the position at which a worker begins its part."""
        part = self.parts[worker]
        return Place(0, part[0][1] if part else 0)

    def end(self, worker: int) -> Place:
        """Return the position at which a worker has read its part."""
        return Place(len(self.parts[worker]), 0)

    def _rest_of(self, worker: int, passed: int) -> int:
        """Return the mask of the shards of `worker` that it has not passed."""
        before, mask = self._rest[worker]
        part = self.parts[worker]
        if passed < before:
            before, mask = 0, self._mask(part)
        mask ^= self._mask(part[before:passed])
        self._rest[worker] = passed, mask
        return mask

    def _mask(self, part: ShardPart) -> int:
        return self._bits(name for name, _, alone in part if not alone)

    def _first_after(self, places: Sequence[Place]) -> list[list[int]]:
        """Return the samples that are read first, without those that workers have passed."""
        workers = len(self.parts)
        return [
            [self._numbers[name], at]
            for number, (name, at) in enumerate(self._first)
            if places and number // workers >= places[number % workers].passed
        ]

    def sample_at(self, worker: int, place: Place) -> list[int] | None:
        """Return the number of the shard, and that of the sample, at a position; None at the end."""
        part = self.parts[worker]
        return (
            [self._numbers[part[place.passed][0]], place.at] if place.passed < len(part) else None
        )

    def _bits(self, names: Iterable[str]) -> int:
        return bits_of(map(self._numbers.__getitem__, names))

    def _begun(self, left: Mapping[str, int]) -> dict[str, int]:
        return {str(self._numbers[name]): at for name, at in left.items() if at}

    # -- reading -----------------------------------------------------------------------------------

    def agrees(self, saved: Mapping[str, Any]) -> bool:
        """True if as many workers have the same parts as in the loader that was saved."""
        return saved["order"] == self._order and tuple(saved["share"]) == self.share

    def resumed(self, saved: Mapping[str, Any], *, same_workers: bool) -> ShardDivision:
        """Return the division with which this loader resumes.

        Raises `StateError` if the state is of other shards or another rank, or can't be divided there.
        """
        _FIELDS.check(saved)
        if saved["names"] != checksum(self._names):
            raise StateError(
                "shard_names of the dataset differ from those in the state, so its position is in "
                "other data; resume with the same shards"
            )
        share = tuple(saved["share"])
        if same_workers and self.agrees(saved):
            mask, begun, first = saved["base"]
            left = _left_of(mask, begun, self._names)
        elif share in ((0, 1), self.share):
            if saved["whole"] is not None:
                raise StateError(
                    "the state was saved with other workers, other ranks or another order of the "
                    f"shards, and can't be divided among these: {saved['whole']}"
                )
            left = _left_of(saved["left"], saved["begun"], self._names)
            first = saved["first"]
        else:
            raise StateError(
                f"the state is of rank {share[0]} of {share[1]}, and this is rank {self.share[0]} of "
                f"{self.share[1]}; combine the states of all ranks with merge_states"
            )
        mine = [name for name in self._in_order if name in left]
        if share != self.share:
            mine, first = shares_of(mine, *self.share), shares_of(first, *self.share)
        return ShardDivision(
            self._in_order,
            self.share,
            len(self.parts),
            {name: left[name] for name in mine},
            [(self._names[number], at) for number, at in first],
            own_state=self._own_state,
        )

    def sent(self, starts: Sequence[ShardStart]) -> tuple[ShardStart, ...]:
        """Return `starts` with the part of each worker."""
        return tuple(
            start._replace(iterator=self.iterator_state(worker, self.place(worker, start)))
            for worker, start in enumerate(starts)
        )

    def iterator_state(self, worker: int, place: Place) -> Frozen:
        """Return the state of the iterator of a worker that reads its part from `place` on."""
        return Frozen(pickle.dumps({"part": self.parts[worker], **place._asdict()}))


# -- sets of whole numbers as the bits of an int: bit k stands for the number k


def bits_of(numbers: Iterable[int]) -> int:
    """Return the set of `numbers`, none below 0."""
    found = bytearray()
    for number in numbers:
        place, bit = divmod(number, 8)
        if place >= len(found):
            found.extend(bytes(place + 1 - len(found)))
        found[place] |= 1 << bit
    return int.from_bytes(found, "little")


def numbers_in(bits: int) -> list[int]:
    """Return the numbers in a set, in order."""
    return [number for number, bit in enumerate(reversed(f"{bits:b}")) if bit == "1"]


def _left_of(mask: Any, begun: Any, names: list[str]) -> dict[str, int]:
    return {
        names[n]: int(begun.get(str(n), 0)) for n in numbers_in(int(mask, 16)) if n < len(names)
    }


def without(saved: Mapping[str, Any], sample: Sequence[int]) -> dict[str, Any]:
    """Return a state in which `sample`, the next one of its shard, is read first and alone."""
    number, at = sample
    begun = {**saved["begun"], str(number): at + 1}
    return {**saved, "begun": begun, "first": [[number, at], *saved["first"]]}


def merged(saved: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return one state of the shards of all ranks. Raises `StateError`."""
    left, begun, first = 0, dict[str, int](), list[list[int]]()
    for one in saved:
        _FIELDS.check(one)
        if one["names"] != saved[0]["names"]:
            raise StateError(
                "the states have different shard_names; merge states of one dataset only"
            )
        if one["whole"] is not None:
            rank, why = one["share"][0], one["whole"]
            raise StateError(f"the state of rank {rank} can't be merged: {why}")
        left |= int(one["left"], 16)
        begun.update(one["begun"])
        first += one["first"]
    shares = sorted(tuple(one["share"]) for one in saved)
    if shares != [(rank, len(saved)) for rank in range(len(saved))]:
        raise StateError(
            f"the states are of the ranks {', '.join(f'{r} of {n}' for r, n in shares)}; merge one "
            "state of each rank"
        )
    return {
        "names": saved[0]["names"],
        "order": None,
        "share": [0, 1],
        "left": f"{left:x}",
        "begun": begun,
        "first": first,
        "base": [f"{left:x}", begun, first],
        "read": max(one["read"] for one in saved),
        "whole": None,
    }
