"""Operators that choose which items come, when, and how often, and never change an item."""

from __future__ import annotations

import base64
import random
import sys
import zlib
from abc import abstractmethod
from bisect import bisect_left
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from hybridloader._support.user_objects import counts_as_item, no_answer
from hybridloader.errors import StateError
from hybridloader.fetching.shards import bits_of, group_of_ranks, numbers_in
from hybridloader.running.operator import (
    INFINITE,
    SEED,
    Context,
    Length,
    Mark,
    Needed,
    OneForOne,
    Operator,
    OperatorIterator,
    PassesIterator,
    Upstream,
    UpstreamPart,
    settle_whole,
)


@dataclass(frozen=True)
class Shuffle(Operator):
    """The items in a random order, drawn from a buffer.

    The buffer is filled with the first `buffer_size` items. Then a random one of these is returned,
    each with the same probability, and the next item takes its place in the buffer. At the end the rest
    is returned in the same way. So items that all fit into the buffer are shuffled uniformly, and no
    item comes more than `buffer_size` - 1 places earlier than without the shuffle. The order is a
    function of the seed, the epoch and the number of items.

    Parameters
    ----------
    buffer_size
        Number of items in the buffer, at least 1.
    seed
        Seed of the order. None takes the seed of the run.
    """

    buffer_size: int
    seed: int | None = None

    begins_anew = cheap = marks_inputs = counts_errors = True

    def __post_init__(self) -> None:
        instead = "give how many items may be held; the more, the better they are shuffled"
        settle_whole(self, "buffer_size", 1, instead)
        settle_whole(self, "seed", 0, SEED, optional=True)

    def open(self, items: Iterator[Any], context: Context) -> Iterator[Any]:
        return ShuffleIterator(items, self.buffer_size, context.random(self.seed), context)

    def needed(self, context: Context) -> Needed | None:
        """Return the items that were in the buffer, each at its place there: they are drawn again."""
        saved = context.saved
        if saved is None or not context.start:
            return None
        oldest, taken, errors, text = saved.value
        raised = {oldest + number for number in numbers_in(unpacked(text, self.name))}
        came = [number for number in range(oldest, taken) if number not in raised]
        first = oldest - errors  # items that came before number `oldest`
        draw, size, buffer = context.random(self.seed).random, self.buffer_size, list[int]()
        coming = iter(range(first + len(came)))
        for _ in range(saved.at - errors - len(raised)):
            buffer += islice(coming, size - len(buffer))
            place = int(draw() * len(buffer))
            last = buffer.pop()
            if place < len(buffer):
                buffer[place] = last
        buffer += coming  # where an error came before the buffer was full
        return Needed([came[item - first] for item in buffer], taken)

    def length(self, upstream: Length) -> Length:
        return upstream


class ShuffleIterator(OperatorIterator):
    """Iterator of `Shuffle`.

    Which items are in its buffer, and where, follows from how many items came and were given. So a state
    has these numbers alone, and they are drawn again.
    """

    def __init__(
        self, items: Iterator[Any], size: int, generator: random.Random, context: Context
    ) -> None:
        super().__init__(items)
        self._size = size
        # `random()` alone is promised to give the same numbers in every version of Python.
        self._draw = generator.random
        # All the mutable state:
        self._buffer: list[tuple[int, Any]] = []  # items with their numbers
        self._ended = False
        self._taken = 0  # items, and errors in their places
        self._errors: list[int] = []  # numbers of the errors, but for the first ones
        self._errors_before = 0  # number of these
        self._given = context.start  # items and errors
        # From number `_oldest` on, whether the item has left the buffer:
        self._gone: deque[bool] = deque()
        self._oldest = 0  # number of the first item in the buffer, or of the next that comes
        self._again = 0  # number of the first item that did not come before the state was taken
        self._missing: dict[int, int] = {}  # places in the buffer of items that are to come again
        if context.saved is not None and context.needed is not None:
            self._restore(context.saved, context.needed.numbers)
        self._log = context.log(self._entry(), self._value)

    def _entry(self) -> tuple[int, int, int, int]:
        return self._given, self._oldest, max(self._taken, self._again), len(self._errors)

    def _value(self, oldest: int, taken: int, count: int) -> list[Any] | None:
        """Return the value of a mark after the first `count` of the errors in the list."""
        first = bisect_left(self._errors, oldest, 0, count)
        text = packed(bits_of(number - oldest for number in self._errors[first:count]))
        return None if text is None else [oldest, taken, self._errors_before + first, text]

    def _restore(self, saved: Mark, buffer: Collection[int]) -> None:
        """Note which items of those to come have which place in the buffer."""
        oldest, taken, self._errors_before, text = saved.value
        self._errors = [oldest + number for number in numbers_in(unpacked(text, "shuffle"))]
        for _ in range(saved.at - self._errors_before - len(self._errors)):
            self._draw()  # as `Shuffle.needed` did
        self._missing = {number: place for place, number in enumerate(buffer)}
        self._buffer = [(number, None) for number in buffer]
        self._gone.extend(number not in self._missing for number in range(oldest, taken))
        self._oldest = self._taken = oldest
        self._again = taken

    def _take_again(self) -> None:
        """Take the items that were in the buffer when the state was taken."""
        while self._taken < self._again:
            number = self._taken
            try:
                item = self._pull()
            except Exception as error:
                if not counts_as_item(error):
                    raise
                item = None  # it was raised before
            self._taken += 1
            place = self._missing.pop(number, None)
            if place is not None:
                self._buffer[place] = number, item

    def __next__(self) -> Any:
        if self._taken < self._again:
            self._take_again()
        buffer = self._buffer
        if not self._ended:
            try:
                while len(buffer) < self._size:
                    buffer.append((self._taken, self._pull()))
                    self._taken += 1
                    self._gone.append(False)
            except StopIteration:
                self._ended = True
            except Exception as error:
                if counts_as_item(error):
                    self._errors.append(self._taken)
                    self._gone.append(False)
                    self._taken += 1
                    self._note(self._taken - 1)
                raise
        if not buffer:
            raise StopIteration
        place = int(self._draw() * len(buffer))
        found = last = buffer.pop()
        if place < len(buffer):
            found, buffer[place] = buffer[place], last
        number, item = found
        self._note(number)
        return item

    def _note(self, number: int) -> None:
        """Note that the item of this number is given."""
        gone = self._gone
        gone[number - self._oldest] = True
        while gone and gone[0]:
            gone.popleft()
            self._oldest += 1
        self._given += 1
        self._log(self._entry())


@dataclass(frozen=True)
class Take(Operator):
    """The first `count` items; one that raises counts.

    No later item is requested, and the steps before are closed.
    """

    count: int

    cheap = counts_errors = True

    def __post_init__(self) -> None:
        settle_whole(self, "count", 0, "give a number of items")

    def open(self, items: Iterator[Any], context: Context) -> Iterator[Any]:
        return TakeIterator(items, self.count, context)

    def seek(self, n: int) -> int | None:
        return n if n <= self.count else None

    def length(self, upstream: Length) -> Length:
        if upstream is None:
            return None if self.count else 0
        return min(self.count, upstream)


class TakeIterator(OperatorIterator):
    """Iterator of `Take`."""

    def __init__(self, items: Iterator[Any], count: int, context: Context) -> None:
        super().__init__(items)
        self._left = count - context.start  # all the mutable state

    def __next__(self) -> Any:
        if self._left <= 0:
            self.close()
            raise StopIteration
        try:
            item = self._pull()
        except StopIteration:
            self.close()
            raise
        except Exception as error:
            self._left -= self._failed(error)
            raise
        self._left -= 1
        return item


class _Every(Operator):
    """Base of the steps that skip the first items, and then give every so many-th one."""

    cheap = counts_errors = True

    @property
    @abstractmethod
    def place(self) -> tuple[int, int]:
        """Number of the first item that is given, and how many places after it the next one has."""

    def open(self, items: Iterator[Any], context: Context) -> Iterator[Any]:
        return EveryIterator(items, *self.place, context)

    def seek(self, n: int) -> int:
        first, step = self.place
        return first + (n - 1) * step + 1

    def length(self, upstream: Length) -> Length:
        if upstream is None or upstream == INFINITE:
            return upstream
        first, step = self.place
        return max(0, -(-(int(upstream) - first) // step))


@dataclass(frozen=True)
class SkipFirst(_Every):
    """All but the first `count` items. An error of a skipped item is not raised."""

    count: int

    @property
    def name(self) -> str:
        return "skip"

    def __post_init__(self) -> None:
        settle_whole(self, "count", 0, "give a number of items")

    @property
    def place(self) -> tuple[int, int]:
        return self.count, 1


class EveryIterator(OperatorIterator):
    """Skips `first` items, then gives every `step`-th one. An error of a skipped item is not raised."""

    def __init__(self, items: Iterator[Any], first: int, step: int, context: Context) -> None:
        super().__init__(items)
        self._between = step - 1
        self._skip = self._between if context.start else first  # all the mutable state

    def __next__(self) -> Any:
        while True:
            skips = self._skip > 0
            try:
                item = self._pull()
            except Exception as error:
                if not self._failed(error):
                    raise
                if not skips:
                    self._skip = self._between
                    raise
            else:
                if not skips:
                    self._skip = self._between
                    return item
            self._skip -= 1


@dataclass(frozen=True)
class Enumerate(OneForOne):
    """Pairs of a number, counted from `start`, and an item. An item that raises is counted, too."""

    start: int = 0

    cheap = True

    def __post_init__(self) -> None:
        settle_whole(self, "start", -sys.maxsize, "give the first number")

    def open(self, items: Iterator[Any], context: Context) -> Iterator[Any]:
        return EnumerateIterator(items, self.start, context)


class EnumerateIterator(OperatorIterator):
    """Iterator of `Enumerate`."""

    def __init__(self, items: Iterator[Any], start: int, context: Context) -> None:
        super().__init__(items)
        self._number = start + context.start  # all the mutable state

    def __next__(self) -> Any:
        try:
            item = self._pull()
        except Exception as error:
            self._number += self._failed(error)
            raise
        number = self._number
        self._number = number + 1
        return number, item


@dataclass(frozen=True)
class Repeat(Operator):
    """Repeat all items; each repetition is another epoch of the steps before.

    Parameters
    ----------
    times
        Number of repetitions; None repeats until an epoch has no items.
    """

    times: int | None = None

    cheap = True

    def __post_init__(self) -> None:
        instead = "give how many passes, or None for passes without end"
        settle_whole(self, "times", 0, instead, optional=True)

    def open(self, items: Iterator[Any], context: Context) -> Iterator[Any]:
        raise TypeError(f"{self.name} begins its own passes; open it by `begin`")

    def begin(self, upstream: Upstream, context: Context) -> Iterator[Any]:
        return RepeatIterator(upstream, self.times, context)

    def before(self, n: int, epoch: int, mark: Mark | None) -> Sequence[UpstreamPart] | None:
        if mark is None:
            return None if n else [UpstreamPart(None, 0, epoch * (self.times or 1))]
        return [UpstreamPart(None, n - mark.at, epoch * (self.times or 1) + mark.value)]

    def length(self, upstream: Length) -> Length:
        if upstream == 0 or self.times == 0:
            return 0
        if upstream is None:
            return None  # without end only if a pass gives anything
        return INFINITE if self.times is None else upstream * self.times


class RepeatIterator(PassesIterator):
    """Iterator of `Repeat`. The first repetition begins with it, another when its turn comes."""

    def __init__(self, upstream: Upstream, times: int | None, context: Context) -> None:
        super().__init__(context)
        self._upstream, self._times, self._first = upstream, times, context.epoch * (times or 1)
        if not self._is_over():
            self._begin()

    def _is_over(self) -> bool:
        return not self._gave if self._times is None else self._begun >= self._times

    def _open(self, number: int, start: int) -> Iterator[Any]:
        self._ended = True  # if the pass can't be begun
        items = self._upstream(epoch=self._first + number, start=start)
        self._ended = False
        return items


@dataclass(frozen=True)
class ShardByRank(_Every):
    """The items of one of several processes: every `num_replicas`-th, from number `rank` on.

    When the number of items is no multiple of `num_replicas`, the first shards have one more than the
    others. An error of an item of another process is not raised. The step is moved before the `map`
    stages that precede it, so that no work is thrown away.

    Parameters
    ----------
    num_replicas, rank
        Number of shards, and the number of this one, from 0. None takes those of `torch.distributed` if
        it is initialized when the epoch begins, else shard 0 of 1.
    """

    num_replicas: int | None = None
    rank: int | None = None

    goes_first = True

    @property
    def name(self) -> str:
        return "shard"

    def __post_init__(self) -> None:
        if self.num_replicas is None and self.rank is None:
            return
        if self.num_replicas is None or self.rank is None:
            raise ValueError(
                f"{self.name}: num_replicas={self.num_replicas} and rank={self.rank}: give both, or "
                "neither, to take those of torch.distributed"
            )
        settle_whole(self, "num_replicas", 1, "give the number of shards")
        settle_whole(self, "rank", 0, "give the number of the shard, from 0")
        if self.rank >= self.num_replicas:
            raise ValueError(
                f"{self.name}: rank={self.rank} of num_replicas={self.num_replicas}: ranks go "
                f"from 0 to {self.num_replicas - 1}"
            )

    @property
    def place(self) -> tuple[int, int]:
        num_replicas, rank = self.share
        return rank, num_replicas

    def identity(self) -> str:
        num_replicas, rank = self.share
        return f"{self.name}(num_replicas={num_replicas}, rank={rank})"

    @property
    def share(self) -> tuple[int, int]:
        if self.num_replicas is not None and self.rank is not None:
            return self.num_replicas, self.rank
        rank, num_replicas = group_of_ranks() or (0, 1)
        return num_replicas, rank


# -- sets of whole numbers, see `bits_of`, as texts for states: a bit for each number, compressed

LONGEST = 6_000  # characters of the longest text: a state is to stay below 10 KB


def packed(bits: int) -> str | None:
    """Return the text of a set; None if it would be longer than `LONGEST`."""
    if not bits:
        return ""
    data = zlib.compress(bits.to_bytes((bits.bit_length() + 7) // 8, "little"))
    return base64.b64encode(data).decode() if len(data) <= LONGEST // 4 * 3 else None


def unpacked(text: Any, name: str) -> int:
    """Return the set of a text of the operator `name`. Raises `StateError` if it is damaged."""
    try:
        data = zlib.decompress(base64.b64decode(text, validate=True)) if text else b""
    except Exception as error:
        raise no_answer(
            StateError(f"{name}: the numbers in the state are damaged: {error}")
        ) from error
    return int.from_bytes(data, "little")
