"""Operators that make batches of items, and items of batches.

They group in the order in which items come and never look further ahead than the batch they are
about to give. Collation is done in the thread that pulls; for collation in workers, map the
collate function over batches made with ``collate_fn=list``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import KW_ONLY, dataclass
from itertools import islice
from typing import Any

from hybridloader._support import arguments
from hybridloader._support.error_handling import Raised, counts_as_item, foreign
from hybridloader.memory.limits import DEFAULT_MEMORY, Memory, check_memory
from hybridloader.pipeline.operators.collating import SIZE, CollateFn, Collating, check_collation
from hybridloader.pipeline.operators.fields import samples_of
from hybridloader.pipeline.operators.padding import Pad
from hybridloader.pipeline.operators.parameters import check_flags, settle_whole
from hybridloader.running.operator import (
    INFINITE,
    Context,
    Length,
    Operator,
    OperatorIterator,
)


class _OfSize(Operator):
    """Batches of one size."""

    batch_size: int
    drop_last: bool

    begins_anew = True
    marks_inputs = counts_errors = True  # marks where errors shifted the result of `seek`

    def seek(self, n: int) -> int:
        return n * self.batch_size

    def length(self, upstream: Length) -> Length:
        if upstream is None or upstream == INFINITE:
            return upstream
        full, rest = divmod(int(upstream), self.batch_size)
        return full + (rest > 0 and not self.drop_last)


@dataclass(frozen=True)
class Batch(_OfSize):
    """Every `batch_size` items as one batch.

    Parameters
    ----------
    batch_size
        Items in a batch.
    drop_last
        True drops the last batch if it is not full.
    collate_fn
        Function from a list of samples to a batch; None is torch's `default_collate`. With ``list`` a
        batch is the plain list.
    memory
        Limit of the recycled slots in which large tensors are collated.
    """

    batch_size: int
    _: KW_ONLY
    drop_last: bool = False
    collate_fn: CollateFn | None = None
    memory: Memory = DEFAULT_MEMORY

    def __post_init__(self) -> None:
        settle_whole(self, "batch_size", 1, SIZE)
        check_flags(self, "drop_last")
        check_collation(self, self.collate_fn, self.memory)

    def open(self, items: Iterator[Any], context: Context) -> Iterator[Any]:
        collate = Collating(self.collate_fn, self.memory, context.locks)
        return BatchIterator(items, self.batch_size, self.drop_last, collate, context)


@dataclass(frozen=True)
class PaddedBatch(_OfSize):
    """Every `batch_size` items as one batch, padded where their lengths differ. See `Pad` for the rules.

    Parameters
    ----------
    padding_value
        Value to fill up with.
    lengths
        True returns ``(batch, lengths)``.
    batch_size, drop_last, memory
        See `Batch`.
    """

    batch_size: int
    _: KW_ONLY
    padding_value: float = 0
    drop_last: bool = False
    lengths: bool = False
    memory: Memory = DEFAULT_MEMORY

    def __post_init__(self) -> None:
        settle_whole(self, "batch_size", 1, SIZE)
        check_flags(self, "drop_last", "lengths")
        check_memory(self.name, self.memory)
        try:
            Pad(self.padding_value)
        except TypeError as error:
            raise TypeError(f"{self.name}: {error}") from None

    def open(self, items: Iterator[Any], context: Context) -> Iterator[Any]:
        collate = Collating(Pad(self.padding_value, self.lengths), self.memory, context.locks)
        return BatchIterator(items, self.batch_size, self.drop_last, collate, context)


class BatchIterator(OperatorIterator):
    """Iterator of `Batch` and `PaddedBatch`."""

    def __init__(
        self,
        items: Iterator[Any],
        size: int,
        drop_last: bool,
        collate: Callable[[list[Any]], Any],
        context: Context,
    ) -> None:
        super().__init__(items)
        self._size, self._drop_last, self._collate = size, drop_last, collate
        self._mark = context.mark
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

    def close(self) -> None:
        self._ended = True
        self._batch = []
        super().close()


@dataclass(frozen=True)
class Unbatch(Operator):
    """The samples of every batch, one by one.

    Tensors and arrays are split along their first dimension. Mappings, namedtuples and dataclasses
    are split field by field, and each sample has the same structure. A list or tuple of batched
    columns, as `default_collate` makes of tuples, becomes tuples; any other becomes its elements.
    Collated numbers become tensors of no dimension, because their types are not known.

    Parameters
    ----------
    columns
        Contents of lists and tuples, also of those in fields. True: columns. False: one element for
        each sample. None decides by the elements. Without an array they are samples. Arrays that differ
        in dtype or in number of dimensions are columns, and so are arrays mixed with other objects.
        Arrays of one kind could be either, and raise an error.
    split
        Function from a batch to an iterable of its samples, instead of these rules.
    """

    columns: bool | None = None
    _: KW_ONLY
    split: Callable[[Any], Any] | None = None

    begins_anew = makes_several = marks_inputs = counts_errors = True

    def __post_init__(self) -> None:
        if self.columns is not None:
            check_flags(self, "columns")
        if self.split is not None:
            what = "a function from a batch to an iterable of samples"
            arguments.function(f"{self.name}: split", self.split, what)
            if self.columns is not None:
                raise ValueError(
                    f"{self.name}: columns={self.columns} is a rule for splitting, and split= takes "
                    "the place of all rules; leave one of them out"
                )

    def open(self, items: Iterator[Any], context: Context) -> Iterator[Any]:
        return UnbatchIterator(items, self.columns, self.split, context)

    def length(self, upstream: Length) -> Length:
        return 0 if upstream == 0 else None


class UnbatchIterator(OperatorIterator):
    """Iterator of `Unbatch`."""

    def __init__(
        self,
        items: Iterator[Any],
        columns: bool | None,
        split: Callable[[Any], Any] | None,
        context: Context,
    ) -> None:
        super().__init__(items)
        self._columns, self._split, self._mark = columns, split, context.mark
        # All the mutable state:
        self._samples: Iterator[Any] = iter(())  # what is left of the batch
        self._given, self._taken = context.start, context.first  # samples and errors; batches

    def __next__(self) -> Any:
        try:
            while True:
                for sample in self._samples:
                    self._given += 1
                    return sample
                self._mark(self._given, self._taken)
                batch = self._next_batch()
                if self._split is None:
                    self._samples = iter(samples_of(batch, self._columns))
                else:
                    try:
                        self._samples = iter(self._split(batch))
                    except Exception as error:
                        Raised(foreign(error, "unbatch: split")).throw()
        except Exception as error:
            self._given += counts_as_item(error) and not isinstance(error, StopIteration)
            raise

    def _next_batch(self) -> Any:
        try:
            batch = super().__next__()
        except Exception as error:
            self._taken += counts_as_item(error)
            raise
        self._taken += 1
        return batch

    def close(self) -> None:
        self._samples = iter(())
        super().close()
