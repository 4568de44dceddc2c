"""The fetcher of an iterable dataset, in the worker: one pass over what this worker reads.

It can start behind samples that others have delivered, by reading them once more or from a state, and
never decides where that is.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from hybridloader.engine.dataset_state import ShardStart, load_iterator
from hybridloader.engine.fetcher import Abandoned, EndOfShard, Fetcher, TaskContext
from hybridloader.fetching.fetch import IterableFetch, end, skip
from hybridloader.fetching.outcome import short
from hybridloader.seeding.sample_rng import innermost


class ShardFetcher(Fetcher):
    """The fetcher of an iterable dataset: one pass of one worker over its part.

    Attributes
    ----------
    position
        How often the iterator was asked for a sample and had not ended; also where it has raised.
    ended
        Whether the iterator has.
    """

    def __init__(self, fetch: IterableFetch, samples: Iterator[Any], context: TaskContext) -> None:
        self._samples, self._context = samples, context
        self._collate_fn, self._join = fetch.collate_fn, fetch.join
        self._drop_last = fetch.drop_last and not fetch.join
        self._batched = fetch.batched
        self._rng = context.rng  # an inline crew has one context for all workers
        self._seeded: Any = None
        if self._rng is not None:
            self._seeded, self._collate_fn = samples, self._rng.seeded_collate(self._collate_fn)
        # All the mutable state:
        self.position = 0
        self.ended = False

    def fetch(self, indices: Any) -> Any:
        if self.ended:
            raise EndOfShard
        if not self._batched:
            return self._collate_fn(self._one())
        batch: list[Any] = []
        samples, context = self._samples, self._context
        try:
            for _ in indices:
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
        if not batch or (self._drop_last and len(batch) < len(indices)):
            raise EndOfShard
        if self._join and len(batch) < len(indices):
            numbers = list(range(self.position - len(batch), self.position))
            value, outcome = short(numbers, batch, [], len(indices))
            self._context.add("outcome", outcome)
            return value
        return self._collate_fn(batch)

    def key(self, index: Any) -> bytes:
        return b"" if self._rng is None else self._rng.shard_key(self.position)

    def _one(self) -> Any:
        try:
            sample = next(self._samples)
        except StopIteration:
            self.ended = True
            raise EndOfShard from None
        except Exception:
            self.position += 1
            raise
        self.position += 1
        return sample

    def close(self) -> None:
        """End the iterator: nothing more will be read."""
        samples, self._samples, self._seeded, self.ended = self._samples, iter(()), None, True
        end(innermost(samples))

    def resume(self, start: ShardStart) -> None:
        """Go on where another run had come to."""
        if start.iterator is not None:
            load_iterator(self._samples, start.iterator)
        self.position, self.ended = start.position, start.ended
        if self._seeded is not None:
            self._seeded.number = start.position
        self.skip(start.skip)

    def skip(self, count: int) -> None:
        """Go on behind `count` samples, which others have delivered. What they raise is known."""
        more = max(0, count - self.position)
        if more and not self.ended:
            done, self.ended = skip(self._samples, more, self._context)
            self.position += done
