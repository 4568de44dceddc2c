"""Batches of items that have something in common, such as their length.

Items with the same key stay in order; batches come in the order in which they are filled.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from hybridloader._support import arguments
from hybridloader._support.errors import no_stop
from hybridloader._support.text import short
from hybridloader.memory.limits import DEFAULT_MEMORY, Memory
from hybridloader.pipeline.operators.base import INFINITE, Context, Length, Operator
from hybridloader.pipeline.operators.collating import SIZE, CollateFn, Collating, check_collation
from hybridloader.pipeline.operators.iterators import OperatorIterator
from hybridloader.pipeline.operators.parameters import check_flags, settle_whole


@dataclass(frozen=True)
class BucketBy(Operator):
    """Batches of items that have the same key.

    A batch is given when its bucket is full. At the end come those that are not full, the one whose
    first item came first first. Everything in the buckets is held in memory: keys that hardly any two
    items share hold all of them.

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
    drop_last: bool = False
    collate_fn: CollateFn | None = None
    memory: Memory = DEFAULT_MEMORY

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
        return BucketByIterator(items, self, Collating(self.collate_fn, self.memory, context.locks))

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
        except StopIteration as error:
            raise no_stop(error, "bucket_by: batch_size") from error
        return arguments.whole(f"{self.name}: batch_size({key!r})", size, 1, instead=SIZE)


class BucketByIterator(OperatorIterator):
    """Iterator of `BucketBy`."""

    def __init__(
        self, items: Iterator[Any], rules: BucketBy, collate: Callable[[list[Any]], Any]
    ) -> None:
        super().__init__(items)
        self._rules, self._collate = rules, collate
        # All the mutable state:
        self._buckets: dict[Any, tuple[int, list[Any]]] = {}  # by key: size and items
        self._left: deque[list[Any]] | None = None  # after the end: what is still to be given

    def __next__(self) -> Any:
        if self._left is not None:
            return self._leftover(self._left)
        rules, buckets, pull = self._rules, self._buckets, self._pull
        while True:
            try:
                item = pull()
            except StopIteration:
                self._left = deque(() if rules.drop_last else (b for _, b in buckets.values()))
                buckets.clear()
                return self._leftover(self._left)
            try:
                key = rules.key(item)
            except StopIteration as error:
                raise no_stop(error, "bucket_by: key") from error
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
            batch.append(item)
            if len(batch) == size:
                del buckets[key]
                return self._collate(batch)

    def _leftover(self, left: deque[list[Any]]) -> Any:
        if not left:
            raise StopIteration
        return self._collate(left.popleft())

    def close(self) -> None:
        self._buckets.clear()
        self._left = deque()
        super().close()


def _unhashable(key: Any, item: Any) -> TypeError:
    return TypeError(
        f"bucket_by: key gave {short(key)}, which has no hash by value, for the item {short(item)}; "
        "give a number, a string or a tuple of such (tensor.item(), tuple(list), ...)"
    )
