"""Batches of items by a key, such as their length, or by a budget, such as a number of tokens.

Items in a batch stay in order; batches come in the order in which they are filled. A key or cost is
computed once for each item, in the thread that pulls.
"""

from __future__ import annotations

import math
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any

from hybridloader._support import arguments
from hybridloader._support.arguments import is_number
from hybridloader._support.attributes import attribute
from hybridloader._support.caller import warn
from hybridloader._support.error_handling import Raised, counts_as_item, foreign
from hybridloader._support.text import short
from hybridloader.memory.limits import DEFAULT_MEMORY, Memory
from hybridloader.pipeline.operators.collating import SIZE, CollateFn, Collating, check_collation
from hybridloader.pipeline.operators.packed_numbers import numbers_in, packed, unpacked
from hybridloader.pipeline.operators.parameters import check_flags, settle_whole
from hybridloader.running.operator import (
    INFINITE,
    Context,
    Length,
    Mark,
    Needed,
    Operator,
    OperatorIterator,
    UpstreamPart,
)


@dataclass(frozen=True)
class BucketBy(Operator):
    """Batches of items that have the same key.

    A batch is returned when its bucket is full. At the end of the epoch the buckets that are not full
    are returned, in the order of their first items. The items in the buckets are held in memory: if
    almost every item has its own key, all items are.

    Parameters
    ----------
    key
        Function from an item to something hashable.
    batch_size
        Items in a batch: a number, or a mapping or function from a key to one.
    drop_last
        True drops the batches that are not full.
    collate_fn, memory
        See `Batch`.
    """

    key: Callable[[Any], Any]
    batch_size: int | Mapping[Any, int] | Callable[[Any], int]
    _: KW_ONLY
    drop_last: bool = False
    collate_fn: CollateFn | None = None
    memory: Memory = DEFAULT_MEMORY

    begins_anew = counts_errors = True

    def __post_init__(self) -> None:
        arguments.function(
            f"{self.name}: key", self.key, "a function from an item to something hashable"
        )
        if isinstance(self.batch_size, Mapping):
            for key, size in self.batch_size.items():
                arguments.whole(f"{self.name}: batch_size[{key!r}]", size, 1, instead=SIZE)
        elif not callable(self.batch_size):
            settle_whole(
                self, "batch_size", 1, f"{SIZE}, or a mapping or function from a key to it"
            )
        check_flags(self, "drop_last")
        check_collation(self, self.collate_fn, self.memory)

    def open(self, items: Iterator[Any], context: Context) -> Iterator[Any]:
        collate = Collating(self.collate_fn, self.memory, context.locks)
        return BucketByIterator(items, self, collate, context)

    def before(self, n: int, epoch: int, mark: Mark | None) -> Sequence[UpstreamPart] | None:
        if not n:
            return super().before(n, epoch, mark)
        if mark is None or mark.value is None:
            return None
        return [UpstreamPart(None, mark.value[0], epoch, mark.at)]

    def needed(self, context: Context) -> Needed | None:
        """Return the items that were in a bucket."""
        saved = context.saved
        if saved is None or not context.start:
            return None
        oldest, taken, text = saved.value
        held = numbers_in(unpacked(text, self.name))
        return Needed([oldest + number for number in held], taken)

    def length(self, upstream: Length) -> Length:
        return upstream if upstream in (0, INFINITE) else None

    def size_of(self, key: Any) -> int:
        """Return the number of items with this key in a batch."""
        if isinstance(self.batch_size, int):
            return self.batch_size
        if isinstance(self.batch_size, Mapping):
            if key not in self.batch_size:
                raise ValueError(
                    f"{self.name}: batch_size has no entry for the key {key!r}; it has entries for "
                    f"{short(list(self.batch_size))}; add one, or give a function"
                )
            return self.batch_size[key]
        try:
            size = self.batch_size(key)
        except Exception as error:
            Raised(foreign(error, "bucket_by: batch_size")).throw()
        return arguments.whole(f"{self.name}: batch_size({key!r})", size, 1, instead=SIZE)


_LONGEST = 50_000
"""Items that a state can distinguish after the oldest one in a bucket: one bit each, 8 kB at most. If
more come before that bucket is full, the steps before are run again from the beginning."""


class BucketByIterator(OperatorIterator):
    """Iterator of `BucketBy`."""

    def __init__(
        self,
        items: Iterator[Any],
        rules: BucketBy,
        collate: Callable[[list[Any]], Any],
        context: Context,
    ) -> None:
        super().__init__(items)
        self._rules, self._collate = rules, collate
        # All the mutable state:
        self._buckets: dict[Any, tuple[int, list[tuple[int, Any]]]] = {}
        """Size, and the items with their numbers, of each key."""
        self._left: deque[list[tuple[int, Any]]] | None = None
        """Batches that are left, once the items before have ended."""
        self._taken = self._oldest = (
            0  # items; the number of the first one that is held, or of the next
        )
        self._held = 0  # bit k: whether item `_oldest` + k is held
        self._again = 0  # number of the first item that did not come before the state was taken
        self._wanted = frozenset[int]()  # numbers of those before it that were held
        if context.saved is not None and context.needed is not None:
            self._oldest, self._again, text = context.saved.value
            self._held = unpacked(text, rules.name)
            self._taken, self._wanted = self._oldest, frozenset(context.needed.numbers)
        self._log = context.log(self._entry(), lambda _, entry: _bucket_state(*entry))

    def _entry(self) -> tuple[int, int, int | None]:
        short = self._taken - self._oldest <= _LONGEST
        return self._oldest, max(self._taken, self._again), self._held if short else None

    def __next__(self) -> Any:
        try:
            batch = self._next_batch()
        except Exception as error:
            if counts_as_item(error) and not isinstance(error, StopIteration):
                self._note(())
            raise
        self._note(batch)
        return self._collate([item for _, item in batch])

    def _note(self, given: Sequence[tuple[int, Any]]) -> None:
        for number, _ in given:
            self._held &= ~(1 << (number - self._oldest))
        held = self._held
        past = (held & -held).bit_length() - 1 if held else self._taken - self._oldest
        self._held >>= past
        self._oldest += past
        self._log.add(self._entry())

    def _next_batch(self) -> list[tuple[int, Any]]:
        if self._left is not None:
            return self._leftover(self._left)
        rules, buckets = self._rules, self._buckets
        while True:
            number = self._taken
            try:
                item = self._pull()
            except StopIteration:
                self._left = deque(() if rules.drop_last else (b for _, b in buckets.values()))
                buckets.clear()
                return self._leftover(self._left)
            except Exception as error:
                self._taken += counts_as_item(error)
                if number < self._again and counts_as_item(error):
                    continue  # it was raised before
                raise
            self._taken += 1
            if number < self._again and number not in self._wanted:
                continue
            try:
                key = rules.key(item)
            except Exception as error:
                Raised(foreign(error, "bucket_by: key")).throw()
            try:
                bucket = buckets.get(key)
            except TypeError:
                raise _unhashable(key, item) from None
            if bucket is None:
                torch = sys.modules.get("torch")
                if torch is not None and isinstance(key, torch.Tensor):
                    raise _unhashable(key, item)  # it has a hash, but one for each object
                bucket = buckets[key] = rules.size_of(key), []
            size, batch = bucket
            self._held |= 1 << (number - self._oldest)
            batch.append((number, item))
            if len(batch) == size:
                del buckets[key]
                return batch

    def _leftover(self, left: deque[list[tuple[int, Any]]]) -> list[tuple[int, Any]]:
        if not left:
            raise StopIteration
        return left.popleft()

    def close(self) -> None:
        self._buckets.clear()
        self._left = deque()
        super().close()


def _bucket_state(oldest: int, taken: int, held: int | None) -> list[Any] | None:
    """Return the value of a mark: which items of those before number `taken` are held."""
    text = None if held is None else packed(held)
    return None if text is None else [oldest, taken, text]


def _unhashable(key: Any, item: Any) -> TypeError:
    return TypeError(
        f"bucket_by: key gave {short(key)}, which has no hash by value, for the item {short(item)}; "
        "give a number, a string or a tuple of such (tensor.item(), tuple(list), ...)"
    )


@dataclass(frozen=True)
class BatchBy(Operator):
    """Batches of as many consecutive items as `max_cost` allows.

    A batch is returned when the next item would not fit, so one item is held back.

    Parameters
    ----------
    cost
        Function from an item to its cost, a number from 0 up, such as ``len`` for tokens.
    max_cost
        Maximum cost of a batch.
    drop_last
        True drops the items that are left at the end.
    padded
        False: a batch costs the sum of its items. True: it costs its largest item times the number of
        items, as sequences do that are padded to the longest.
    max_size
        Maximum number of items in a batch.
    collate_fn, memory
        See `Batch`; ``Pad()`` pads.
    oversize
        Treatment of an item that alone costs more than `max_cost`: ``"raise"`` a `ValueError` that names
        it; ``"skip"`` leaves it out, with one warning and an entry in `Run.skipped`; ``"alone"`` makes a
        batch of it. `TokenBudgetBatchSampler` has the same words.
    """

    cost: Callable[[Any], Any]
    max_cost: float
    _: KW_ONLY
    drop_last: bool = False
    padded: bool = False
    max_size: int | None = None
    collate_fn: CollateFn | None = None
    oversize: str = "raise"
    memory: Memory = DEFAULT_MEMORY

    begins_anew = marks_inputs = counts_errors = True

    def __post_init__(self) -> None:
        what = "a function that takes an item and returns a number, such as len"
        arguments.function(f"{self.name}: cost", self.cost, what)
        if not is_number(self.max_cost):
            raise TypeError(f"{self.name}: max_cost must be a number, not {short(self.max_cost)}")
        if not 0 < self.max_cost < math.inf:
            raise ValueError(
                f"{self.name}: max_cost must be above 0 and finite, not {self.max_cost}; give what the "
                "items of a batch may cost together"
            )
        check_flags(self, "drop_last", "padded")
        settle_whole(self, "max_size", 1, SIZE, optional=True)
        arguments.one_of(f"{self.name}: oversize", self.oversize, ("raise", "skip", "alone"))
        check_collation(self, self.collate_fn, self.memory)

    def open(self, items: Iterator[Any], context: Context) -> Iterator[Any]:
        collate = Collating(self.collate_fn, self.memory, context.locks)
        return BatchByIterator(items, self, collate, context)

    def length(self, upstream: Length) -> Length:
        return upstream if upstream in (0, INFINITE) else None


class BatchByIterator(OperatorIterator):
    """Iterator of `BatchBy`; calls `left_out` with items that alone cost more than the budget."""

    def __init__(
        self,
        items: Iterator[Any],
        rules: BatchBy,
        collate: Callable[[list[Any]], Any],
        context: Context,
    ) -> None:
        super().__init__(items)
        self._rules, self._collate, self._left_out = rules, collate, context.left_out
        self._mark = context.mark
        # All the mutable state:
        self._warned = False  # of what is skipped
        self._batch: list[Any] = []
        self._spent: Any = 0  # the sum of its costs, or the largest of them if it will be padded
        self._ended = False
        self._given, self._taken = context.start, context.first  # batches and errors; items
        self._oldest = self._taken  # number of the first item of the batch

    def __next__(self) -> Any:
        if self._ended:
            raise StopIteration
        try:
            batch = self._next_batch()
        except Exception as error:
            if counts_as_item(error) and not isinstance(error, StopIteration):
                self._note_given()
            raise
        self._note_given()
        return self._collate(batch)

    def _note_given(self) -> None:
        self._given += 1
        if not self._batch:
            self._oldest = self._taken
        # Behind an error, a batch that was begun before it would come twice with it.
        if len(self._batch) <= 1 and self._taken - self._oldest <= 1:
            self._mark(self._given, self._oldest)

    def _next_batch(self) -> list[Any]:
        rules, batch, pull = self._rules, self._batch, self._pull
        budget, padded, price = rules.max_cost, rules.padded, rules.cost
        while True:
            try:
                item = pull()
            except StopIteration:
                self._ended, self._batch = True, []
                if not batch or rules.drop_last:
                    raise
                return batch
            except Exception as error:
                self._taken += counts_as_item(error)
                raise
            self._taken += 1
            try:
                cost = price(item)
            except Exception as error:
                Raised(foreign(error, "batch_by: cost")).throw()
            if type(cost) is not int or cost < 0:
                cost = _number(cost, item)
            if cost > budget and not self._takes(item, cost):
                continue
            if padded:
                spent = cost if cost > self._spent else self._spent
                fits = spent * (len(batch) + 1) <= budget
            else:
                spent = self._spent + cost
                fits = spent <= budget
            if batch and not fits:
                self._batch, self._spent, self._oldest = [item], cost, self._taken - 1
                return batch
            if not batch:
                self._oldest = self._taken - 1
            batch.append(item)
            self._spent = spent
            if len(batch) == rules.max_size:
                self._batch, self._spent = [], 0
                return batch

    def _takes(self, item: Any, cost: Any) -> bool:
        """Return True if an item that no batch has room for is taken all the same."""
        rules = self._rules
        if rules.oversize == "alone":
            return True
        if rules.oversize == "raise":
            raise ValueError(
                f"batch_by: an item costs {cost}, more than max_cost={rules.max_cost}: {short(item)}; "
                "raise max_cost, or choose oversize='skip' or oversize='alone'"
            )
        self._left_out(item, ValueError(f"it costs {cost}, more than max_cost={rules.max_cost}"))
        if not self._warned:
            self._warned = True
            warn(
                f"batch_by skips items that cost more than max_cost={rules.max_cost}; the first costs "
                f"{cost}: {short(item)}. The run lists them: `skipped`",
                "oversize",
            )
        return False

    def close(self) -> None:
        self._ended, self._batch = True, []
        super().close()


def _number(cost: Any, item: Any) -> Any:
    """Return a cost as a number; also one in a tensor or array of no dimension."""
    if not is_number(cost) and attribute(cost, "ndim") == 0:
        cost = cost.item()
    if not is_number(cost):
        raise TypeError(
            f"batch_by: cost must give a number, not {short(cost)}, for the item {short(item)}"
        )
    if not cost >= 0:
        raise ValueError(
            f"batch_by: cost must give a number from 0 up, not {cost}, for the item {short(item)}"
        )
    return cost
