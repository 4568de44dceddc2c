"""Operators that group items: batches of all kinds, padding and collation."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import reduce
from itertools import islice
from typing import TYPE_CHECKING, Any

from hybridloader._support import text
from hybridloader._support.text import function, is_number, short
from hybridloader._support.user_objects import (
    Raised,
    add_note,
    attribute,
    counts_as_item,
    foreign,
    has,
)
from hybridloader.devices.pinning import like
from hybridloader.fetching.collate import is_default_collate, slot_for, teach_torch
from hybridloader.fetching.shards import numbers_in
from hybridloader.memory.limits import DEFAULT_MEMORY, Memory, check_memory
from hybridloader.memory.slots import PrivateSlots, set_slots
from hybridloader.pipeline.order import packed, unpacked
from hybridloader.running.operator import (
    INFINITE,
    Context,
    Length,
    Needed,
    NotingIterator,
    Operator,
    OperatorIterator,
    check_flags,
    settle_whole,
)

if TYPE_CHECKING:
    import torch


# -- collation in the thread that pulls: samples become a batch, large ones in recycled slots
#
# The same collation and the same slots as in workers; see `hybridloader.fetching.collate` and
# `hybridloader.memory.slots`. torch is imported only if its `default_collate` collates.

CollateFn = Callable[[list[Any]], Any]

SIZE = "give the number of samples in a batch"  # request in errors about a size


def check_collation(operator: Operator, collate_fn: Any, memory: Any) -> None:
    """Refuse a wrong collate function or limit of memory."""
    if collate_fn is not None:
        what = "a function from a list of samples to a batch (list keeps them as they are)"
        function(f"{operator.name}: collate_fn", collate_fn, what)
    check_memory(operator.name, memory)


# -- operators that make batches of items
#
# They group in the order in which items come and never look further ahead than the batch they are
# about to give. Collation is done in the thread that pulls; for collation in workers, map the
# collate function over batches made with ``collate_fn=list``.


class _CollatingIterator(OperatorIterator):
    """Base of the iterators that collate items by the rules of their operator."""

    def __init__(
        self, items: Iterator[Any], rules: Batch | BucketBy | BatchBy, context: Context
    ) -> None:
        super().__init__(items)
        collate_fn = rules.collate_fn
        if collate_fn is None:
            from torch.utils.data import default_collate

            collate_fn = default_collate
        if is_default_collate(collate_fn):
            teach_torch()
        self._stage, self._collate_fn = rules.name, collate_fn
        self._number = 0  # of batches that were made
        self._slots = PrivateSlots(rules.memory.bytes())

    def _collate(self, samples: list[Any]) -> Any:
        before = set_slots(self._slots)
        self._number += 1
        try:
            batch = self._collate_fn(samples)
        except Exception as error:
            raised = foreign(error, "a collate_fn")
            place = f"collating batch {self._number} of this run ({len(samples)} items)"
            add_note(raised, f"In stage {self._stage!r}, the calling thread, {place}.")
            Raised(raised).throw()
        finally:
            set_slots(before)
        if self._slots.refusal is not None:
            self._slots.warn()
        return batch


@dataclass(frozen=True)
class Batch(Operator):
    """Every `batch_size` items as one batch.

    Parameters
    ----------
    batch_size
        Items in a batch.
    drop_last
        True drops the last batch if it is not full.
    collate_fn
        Function from a list of samples to a batch; None is torch's `default_collate`. With ``list`` a
        batch is the plain list; `hybridloader.pipeline.Pad` pads samples to the longest.
    memory
        Limit of the recycled slots in which large tensors are collated.
    """

    batch_size: int
    _: KW_ONLY
    drop_last: bool = False
    collate_fn: CollateFn | None = None
    memory: Memory = DEFAULT_MEMORY

    begins_anew = True
    marks_inputs = counts_errors = True  # marks where errors shifted the result of `seek`

    def __post_init__(self) -> None:
        settle_whole(self, "batch_size", 1, SIZE)
        check_flags(self, "drop_last")
        check_collation(self, self.collate_fn, self.memory)

    def open(self, items: Iterator[Any], context: Context) -> Iterator[Any]:
        return BatchIterator(items, self, context)

    def seek(self, n: int) -> int:
        return n * self.batch_size

    def length(self, upstream: Length) -> Length:
        if upstream is None or upstream == INFINITE:
            return upstream
        full, rest = divmod(int(upstream), self.batch_size)
        return full + (rest > 0 and not self.drop_last)


class BatchIterator(_CollatingIterator):
    """Iterator of `Batch`."""

    def __init__(self, items: Iterator[Any], rules: Batch, context: Context) -> None:
        super().__init__(items, rules, context)
        self._size, self._drop_last, self._mark = rules.batch_size, rules.drop_last, context.mark
        # All the mutable state:
        self._batch: list[Any] = []
        self._ended = False
        self._given, self._taken = context.start, context.first  # batches and errors; items
        self._shifted = context.saved is not None  # an error has come, so a batch is marked

    def __next__(self) -> Any:
        if self._ended:
            raise StopIteration
        batch = self._batch
        # What came before an exception stays in the list: `extend` takes items one by one.
        try:
            batch.extend(islice(self._items, self._size - len(batch)))
        except Exception as error:
            self._shift(error)
            raise
        self._batch = []
        self._given += 1
        self._taken += len(batch)
        if self._shifted:
            self._mark(self._given, self._taken)
        if len(batch) < self._size:
            self._ended = True
            if not batch or self._drop_last:
                raise StopIteration
        return self._collate(batch)

    def _shift(self, error: Exception) -> None:
        if counts_as_item(error):
            if not self._shifted:
                self._shifted = True
                self._mark(self._given, self._taken)
            self._given += 1
            self._taken += 1


# -- padding: samples of different lengths become one batch, filled up with a padding value
#
# Samples of one shape give the batch of `default_collate`, with one difference: a list of numbers is
# one sequence, not one field for each number. Nothing is truncated, and no number is changed: a dtype
# that can't hold the padding value is an error.


@dataclass(frozen=True)
class Pad:
    """A collate function that pads; for any operator that takes a ``collate_fn``.

    Tensors, arrays and lists of numbers are padded, at the end, to the longest of the batch in every
    dimension, and stacked; a list goes through ``torch.tensor``. Mappings, tuples and namedtuples are
    padded field by field and have the structure that `default_collate` gives them: a tuple becomes a
    list. Numbers and strings are collated as by `default_collate`.

    Parameters
    ----------
    padding_value
        Value to fill up with.
    lengths
        True gives ``(batch, lengths)``: `lengths` has the structure of the batch, with an int64 tensor
        of the sizes of the first dimension for tensors that have one, and None for the rest.

    Raises
    ------
    TypeError
        `padding_value` is not a number.

    Examples
    --------
    >>> Pad()([[1, 2, 3], [4]]).tolist()
    [[1, 2, 3], [4, 0, 0]]
    """

    padding_value: float = 0
    lengths: bool = False

    def __post_init__(self) -> None:
        if not is_number(self.padding_value):
            raise TypeError(
                f"padding_value must be a number, not {short(self.padding_value)}; numbers differing "
                "by field are for a collate_fn of your own"
            )

    def __call__(self, samples: list[Any]) -> Any:
        batch, lengths = self._field(samples, "")
        return (batch, lengths) if self.lengths else batch

    def _field(self, samples: Sequence[Any], place: str) -> tuple[Any, Any]:
        """Return one field of all samples, and its lengths; `place` names it in errors."""
        import torch

        first = samples[0]
        if {*map(type, samples)} == {torch.Tensor} or all(map(_is_sequence, samples)):
            return self._sequences(samples, place)
        if isinstance(first, Mapping):
            keys = list(first)
            for sample in samples:
                if not isinstance(sample, Mapping) or sample.keys() != first.keys():
                    raise _unlike(place, first, sample)
            columns = [[sample[key] for sample in samples] for key in keys]
            batches, lengths = self._fields(columns, keys, place)
            return (
                like(first, dict(zip(keys, batches, strict=True))),
                like(first, dict(zip(keys, lengths, strict=True))),
            )
        if isinstance(first, (tuple, list)):
            for sample in samples:
                if not isinstance(sample, (tuple, list)) or len(sample) != len(first):
                    raise _unlike(place, first, sample)
            batches, lengths = self._fields(zip(*samples, strict=True), range(len(first)), place)
            if has(first, "_fields"):  # a namedtuple
                return type(first)(*batches), type(first)(*lengths)
            return batches, lengths
        from torch.utils.data import default_collate

        return default_collate(list(samples)), None

    def _fields(
        self, columns: Iterable[Sequence[Any]], names: Iterable[Any], place: str
    ) -> tuple[list[Any], list[Any]]:
        found = [
            self._field(column, f"{place}[{name!r}]")
            for name, column in zip(names, columns, strict=True)
        ]
        return [batch for batch, _ in found], [lengths for _, lengths in found]

    def _sequences(self, samples: Sequence[Any], place: str) -> tuple[Any, Any]:
        import torch

        tensors = _tensors(samples)
        shapes = [tuple(tensor.shape) for tensor in tensors]
        if len({*map(len, shapes)}) != 1:
            raise ValueError(
                f"samples{place} differ in their number of dimensions, they are of shapes "
                f"{short(shapes)}; padding makes a dimension longer, it adds none"
            )
        batch = self._stack(tensors, shapes, place)
        if not self.lengths or not shapes[0]:
            return batch, None
        return batch, torch.tensor([shape[0] for shape in shapes], device="cpu")

    def _stack(
        self, tensors: list[torch.Tensor], shapes: list[tuple[int, ...]], place: str
    ) -> torch.Tensor:
        import torch

        first = tensors[0]
        dtypes = {tensor.dtype for tensor in tensors}
        dtype = reduce(torch.promote_types, dtypes)
        shape = tuple(map(max, zip(*shapes, strict=True)))
        ragged = len({*shapes}) > 1
        if ragged:
            self._check(dtype, place)
        out: torch.Tensor | None = None
        if first.device.type == "cpu" and not any(tensor.requires_grad for tensor in tensors):
            out = slot_for((len(tensors), *shape), dtype)
        if not ragged and len(dtypes) == 1:
            return torch.stack(tensors, out=out)
        if out is None:
            if len(dtypes) == 1 and len({one[1:] for one in shapes}) == 1:
                value = self.padding_value
                return torch.nn.utils.rnn.pad_sequence(tensors, True, value)
            out = torch.empty((len(tensors), *shape), dtype=dtype, device=first.device)
        if ragged:
            out.fill_(self.padding_value)
        for row, tensor in enumerate(tensors):
            covered: Any = (row, *map(slice, shapes[row]))
            out[covered].copy_(tensor)
        return out

    def _check(self, dtype: torch.dtype, place: str) -> None:
        import torch

        value = self.padding_value
        if dtype.is_floating_point or dtype.is_complex:
            return
        if dtype is torch.bool:
            fits = value in (0, 1)
        else:
            limits = torch.iinfo(dtype)
            fits = limits.min <= value <= limits.max and value == int(value)
        if not fits:
            raise ValueError(
                f"samples{place} are of {dtype}, which can't hold padding_value={value!r}; give "
                "another value, or convert the samples first"
            )


def _is_sequence(sample: Any) -> bool:
    """Return True if it is a tensor, an array, or a list of numbers, also a nested one."""
    if type(sample) is list:
        while type(sample) is list:
            if not sample:
                return True
            sample = sample[0]
        if isinstance(sample, (int, float, complex)):
            return True
        import numpy as np

        return isinstance(sample, (np.number, np.bool_))
    import numpy as np
    import torch

    return isinstance(sample, (torch.Tensor, np.ndarray))


def _tensors(samples: Sequence[Any]) -> list[torch.Tensor]:
    """Return the samples as tensors; an empty list is of the others' dtype and dimensions."""
    import torch

    if {*map(type, samples)} == {torch.Tensor}:
        return list(samples)
    found = [_tensor(sample) for sample in samples]
    empty = [type(s) is list and not t.numel() for s, t in zip(samples, found, strict=True)]
    if any(empty) and not all(empty):
        others = [tensor for tensor, nothing in zip(found, empty, strict=True) if not nothing]
        dtype = reduce(torch.promote_types, (tensor.dtype for tensor in others))
        for number, nothing in enumerate(empty):
            if nothing:
                tensor = found[number].to(dtype)
                flat = tensor.dim() == 1 and others[0].dim() > 1
                found[number] = tensor.new_empty((0,) * others[0].dim()) if flat else tensor
    return found


def _tensor(sample: Any) -> torch.Tensor:
    import numpy as np
    import torch

    if isinstance(sample, np.ndarray):
        # Torch has no tensors that can't be written to, and none of negative strides.
        if not sample.flags.writeable or min(sample.strides, default=0) < 0:
            sample = sample.copy()
        return torch.from_numpy(sample)
    return sample if isinstance(sample, torch.Tensor) else torch.tensor(sample)


def _unlike(place: str, first: Any, sample: Any) -> ValueError:
    return ValueError(f"samples{place} differ in structure: {short(first)} and {short(sample)}")


# -- batches of items by a key, such as their length, or by a budget, such as a number of tokens
#
# Items in a batch stay in order; batches come in the order in which they are filled. A key or cost is
# computed once for each item, in the thread that pulls.


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
        Items in a batch: a number, or a function from a key to one, such as the `get` of a dict.
    drop_last
        True drops the batches that are not full.
    collate_fn, memory
        See `Batch`.
    """

    key: Callable[[Any], Any]
    batch_size: int | Callable[[Any], int]
    _: KW_ONLY
    drop_last: bool = False
    collate_fn: CollateFn | None = None
    memory: Memory = DEFAULT_MEMORY

    begins_anew = marks_inputs = counts_errors = True

    def __post_init__(self) -> None:
        text.function(
            f"{self.name}: key", self.key, "a function from an item to something hashable"
        )
        if not callable(self.batch_size):
            settle_whole(self, "batch_size", 1, f"{SIZE}, or a function from a key to it")
        check_flags(self, "drop_last")
        check_collation(self, self.collate_fn, self.memory)

    def open(self, items: Iterator[Any], context: Context) -> Iterator[Any]:
        return BucketByIterator(items, self, context)

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
        try:
            size = self.batch_size(key)
        except Exception as error:
            Raised(foreign(error, "bucket_by: batch_size")).throw()
        return text.whole(f"{self.name}: batch_size({key!r})", size, 1, instead=SIZE)


_LONGEST = 50_000
"""Items that a state can distinguish after the oldest one in a bucket: one bit each, 8 kB at most. If
more come before that bucket is full, the steps before are run again from the beginning."""


class BucketByIterator(_CollatingIterator, NotingIterator):
    """Iterator of `BucketBy`."""

    def __init__(self, items: Iterator[Any], rules: BucketBy, context: Context) -> None:
        super().__init__(items, rules, context)
        self._rules = rules
        # All the mutable state:
        self._buckets: dict[Any, tuple[int, list[tuple[int, Any]]]] = {}
        """Size, and the items with their numbers, of each key."""
        self._taken = self._oldest = (
            0  # items; the number of the first one that is held, or of the next
        )
        self._held = 0  # bit k: whether item `_oldest` + k is held
        self._again = 0  # number of the first item that did not come before the state was taken
        if context.saved is not None and context.needed is not None:
            self._oldest, self._again, text = context.saved.value
            self._held, self._taken = unpacked(text, rules.name), self._oldest
        self._given = context.start  # batches and errors
        self._log = context.log(self._entry(), _bucket_state)

    def _entry(self) -> tuple[int, int, int, int | None]:
        held = self._held if self._taken - self._oldest <= _LONGEST else None
        return self._given, self._oldest, max(self._taken, self._again), held

    def _note(self) -> None:
        held = self._held
        past = (held & -held).bit_length() - 1 if held else self._taken - self._oldest
        self._held >>= past
        self._oldest += past
        self._given += 1
        self._log(self._entry())

    def _make(self) -> Any:
        rules, buckets = self._rules, self._buckets
        while True:
            number = self._taken
            try:
                item = self._pull()
            except StopIteration:
                self._end()
                if rules.drop_last:
                    buckets.clear()
                if not buckets:
                    raise
                _, batch = buckets.pop(next(iter(buckets)))
                break
            except Exception as error:
                self._taken += counts_as_item(error)
                if number < self._again and counts_as_item(error):
                    continue  # it was raised before, or is not needed again
                raise
            self._taken += 1
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
                break
        for number, _ in batch:
            self._held &= ~(1 << (number - self._oldest))
        return self._collate([item for _, item in batch])


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

    Notes
    -----
    An item that alone costs more than `max_cost` is a `ValueError` that names it. A `filter` before
    leaves such items out; a `cost` of at most `max_cost` makes a batch of each.
    """

    cost: Callable[[Any], Any]
    max_cost: float
    _: KW_ONLY
    drop_last: bool = False
    padded: bool = False
    max_size: int | None = None
    collate_fn: CollateFn | None = None
    memory: Memory = DEFAULT_MEMORY

    begins_anew = marks_inputs = counts_errors = True

    def __post_init__(self) -> None:
        what = "a function that takes an item and returns a number, such as len"
        text.function(f"{self.name}: cost", self.cost, what)
        if not is_number(self.max_cost):
            raise TypeError(f"{self.name}: max_cost must be a number, not {short(self.max_cost)}")
        if not 0 < self.max_cost < math.inf:
            raise ValueError(
                f"{self.name}: max_cost must be above 0 and finite, not {self.max_cost}; give what the "
                "items of a batch may cost together"
            )
        check_flags(self, "drop_last", "padded")
        settle_whole(self, "max_size", 1, SIZE, optional=True)
        check_collation(self, self.collate_fn, self.memory)

    def open(self, items: Iterator[Any], context: Context) -> Iterator[Any]:
        return BatchByIterator(items, self, context)

    def length(self, upstream: Length) -> Length:
        return upstream if upstream in (0, INFINITE) else None


class BatchByIterator(_CollatingIterator, NotingIterator):
    """Iterator of `BatchBy`."""

    def __init__(self, items: Iterator[Any], rules: BatchBy, context: Context) -> None:
        super().__init__(items, rules, context)
        self._rules, self._mark = rules, context.mark
        # All the mutable state:
        self._batch: list[Any] = []
        self._spent: Any = 0  # the sum of its costs, or the largest of them if it will be padded
        self._given, self._taken = context.start, context.first  # batches and errors; items
        self._oldest = self._taken  # number of the first item of the batch

    def _note(self) -> None:
        self._given += 1
        if not self._batch:
            self._oldest = self._taken
        # Behind an error, a batch that was begun before it would come twice with it.
        if len(self._batch) <= 1 and self._taken - self._oldest <= 1:
            self._mark(self._given, self._oldest)

    def _make(self) -> Any:
        rules, batch, pull = self._rules, self._batch, self._pull
        budget, padded, price = rules.max_cost, rules.padded, rules.cost
        while True:
            try:
                item = pull()
            except StopIteration:
                self._end()
                self._batch = []
                if not batch or rules.drop_last:
                    raise
                break
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
            if cost > budget:
                raise ValueError(
                    f"batch_by: an item costs {cost}, more than max_cost={budget}: {short(item)}; raise "
                    "max_cost, or leave such items out by a filter() before"
                )
            if padded:
                spent = cost if cost > self._spent else self._spent
                fits = spent * (len(batch) + 1) <= budget
            else:
                spent = self._spent + cost
                fits = spent <= budget
            if batch and not fits:
                self._batch, self._spent, self._oldest = [item], cost, self._taken - 1
                break
            if not batch:
                self._oldest = self._taken - 1
            batch.append(item)
            self._spent = spent
            if len(batch) == rules.max_size:
                self._batch, self._spent = [], 0
                break
        return self._collate(batch)


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
