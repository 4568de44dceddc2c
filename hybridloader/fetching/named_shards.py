"""Reading an iterable dataset by the shards that it names, each from a given position.

A dataset names its shards by two attributes: `shard_names`, the names of the shards of all ranks, and
`read_shard(name, start)`, which returns the samples of one shard from number `start` on. Such a dataset
is read through these two, and its `__iter__` is not called. Nothing here decides which worker reads
which shards after a resume: the loader does.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import GeneratorType
from typing import Any, NamedTuple
from zlib import crc32

from hybridloader._support.user_objects import attribute, described, foreign
from hybridloader.errors import ShardLost

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

    Attributes
    ----------
    count
        Number of samples and errors that it has returned.
    entered
        For each shard that was entered since the list was emptied: `count` then, and the position.
        None does not note them.
    """

    def __init__(self, dataset: Any, part: ShardPart) -> None:
        self._dataset = dataset
        # All the mutable state:
        self._part = part
        self._passed = 0
        self._at = part[0][1] if part else 0
        self._samples: Iterator[Any] | None = None  # of the open shard; None: not open
        self._failed = 0  # errors since the last sample
        self.count = 0
        self.entered: list[tuple[int, Place]] | None = None

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
