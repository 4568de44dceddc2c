"""Fetchers that read a worker's own iterator, its shard of an iterable dataset, for one pass.

They can start behind samples that others have delivered, by reading them once more or from a state, and
never decide where that is. The rules are those of torch's `_IterableDatasetFetcher`.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from typing import Any

from hybridloader._support.state_copies import load_into
from hybridloader.engine.dataset_state import ShardStart
from hybridloader.engine.fetcher import Abandoned, EndOfShard, Fetcher, TaskContext
from hybridloader.fetching.outcome import short_batch
from hybridloader.fetching.samples import seeded_collate
from hybridloader.seeding.sample_rng import SeededIterator, innermost


class ShardReader(Fetcher):
    """Base of the fetchers that read an iterator."""

    def __init__(self, samples: Iterator[Any], context: TaskContext) -> None:
        self._samples, self._context = samples, context
        # All the mutable state:
        self.position = 0  # calls of next() that gave a sample or raised; the end does not count
        self.ended = False

    def skip(self, count: int) -> None:
        """Drop samples up to number `count`. Errors are dropped too: their first reader raised them."""
        while self.position < count and not (self.ended or self._context.cancelled):
            try:
                next(self._samples)
            except StopIteration:
                self.ended = True
                return
            except Exception:
                pass
            self.position += 1

    def close(self) -> None:
        """Let the iterator go, as torch's fetcher does.

        A generator that nobody else holds ends at this, its `finally` and `with` blocks too. One that
        the dataset keeps goes on with the next pass: `iter()` of a generator is that generator.
        """
        self._samples, self.ended = iter(()), True


class ShardFetcher(ShardReader):
    """Fetcher of an iterable dataset. See `IterableFetch` for the parameters."""

    def __init__(
        self,
        samples: Iterator[Any],
        context: TaskContext,
        collate_fn: Callable[[Any], Any],
        *,
        batched: bool,
        drop_last: bool = False,
        join: bool = False,
    ) -> None:
        super().__init__(samples, context)
        self._batched, self._join, self._drop_last = batched, join, drop_last and not join
        self._rng = context.rng  # an inline crew has one context for all workers
        self._collate_fn = seeded_collate(collate_fn, context)

    def fetch(self, indices: Any) -> Any:
        if self.ended:
            raise EndOfShard
        batch: list[Any] = []
        samples, context, rng = self._samples, self._context, self._rng
        asked = indices if self._batched else (None,)
        if rng is not None:
            first = self.position
            asked = rng.enter(list(asked), lambda place: rng.shard_key(first + place))
        try:
            for _ in asked:
                batch.append(next(samples))
                if context.cancelled:
                    raise Abandoned
        except StopIteration:
            self.ended = True
        except Exception:
            self.position += 1
            raise
        finally:
            self.position += len(batch)
            if rng is not None:
                rng.leave()
            del samples  # an error of `collate_fn` holds this frame, and must not hold the iterator
        if not self._batched:
            if not batch:
                raise EndOfShard
            return self._collate_fn(batch[0])
        if not batch or (self._drop_last and len(batch) < len(indices)):
            raise EndOfShard
        if self._join and len(batch) < len(indices):
            numbers = list(range(self.position - len(batch), self.position))
            value, outcome = short_batch(numbers, batch, [], len(indices))
            self._context.add("outcome", outcome)
            return value
        return self._collate_fn(batch)

    def key(self, index: Any) -> bytes:
        return b"" if self._rng is None else self._rng.shard_key(self.position)

    def resume(self, start: ShardStart) -> None:
        if start.iterator is not None:
            users = innermost(self._samples)
            load_into(users, pickle.loads(start.iterator.kept), "the iterator over the dataset")
        self.position, self.ended = start.position, start.ended
        if isinstance(self._samples, SeededIterator):
            self._samples.number = start.position
        self.skip(start.skip)
