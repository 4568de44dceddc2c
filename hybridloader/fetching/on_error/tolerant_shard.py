"""Reading an iterable source under an error policy, in the worker: of a dataset or of a pipeline.

An iterator may raise and go on. A generator does not, and that is never taken for the end of its shard.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import GeneratorType
from typing import Any

from hybridloader._support.errors import ShardLost, foreign, is_a
from hybridloader.engine.fetcher import Abandoned, EndOfShard, GivenUp, TaskContext
from hybridloader.fetching.on_error.error_handler import ErrorHandler, seeded
from hybridloader.fetching.on_error.places import rest_is_lost
from hybridloader.fetching.on_error.policies import Policy
from hybridloader.fetching.on_error.task_results import TaskResults
from hybridloader.fetching.outcome import Attempt, FailureRecord, Outcome, all_failed, short_batch
from hybridloader.fetching.shard import ShardFetcher, ShardReader
from hybridloader.seeding.sample_rng import innermost


class TolerantReader(ShardReader):
    """Base of readers whose iterator may raise and go on."""

    _is_over = False

    def read(self, results: TaskResults) -> None:
        """Add the next sample to `results`, or a note on it, and count it in `position`.

        Raises `StopIteration` if there is none, and `ShardLost` after an error of a generator. The
        iterator can be asked again after an error that `results` does not take, which is raised too.
        """
        if self._is_over:
            raise StopIteration
        number = self.position
        try:
            results.values.append(self.next_sample())
            return
        except StopIteration:
            raise
        except Exception as raised:
            error = raised
        try:
            if isinstance(innermost(self._samples), GeneratorType):
                raise rest_is_lost(f"sample {number} of this worker's shard", error) from error
            try:
                found = results.rescue(self._retry, None, number, error)
            except _Ended:  # behind the sample that failed
                self._is_over = True
                found = results.rescue(self._retry, GivenUp(number, ""), number, error)
            results.values.extend(found)
        finally:
            del error

    def next_sample(self) -> Any:
        """Return the next sample and count it, or the error in its place."""
        try:
            sample = next(self._samples)
        except Exception as error:
            self.position += not is_a(error, StopIteration)
            raise
        self.position += 1
        return sample

    def _retry(self, _: None) -> Any:
        try:
            return (self.next_sample(),)
        except StopIteration:
            raise _Ended from None


class TolerantShardFetcher(TolerantReader, ShardFetcher):
    """Fetcher of an iterable dataset that puts an `Outcome` beside each value.

    The index of a sample is its number in the shard.
    """

    def __init__(
        self,
        policy: Policy,
        samples: Iterator[Any],
        context: TaskContext,
        *args: Any,
        **options: Any,
    ) -> None:
        super().__init__(samples, context, *args, **options)
        self._handler = ErrorHandler(seeded(policy, context.rng), context)
        # All the mutable state: the numbers of the last task's samples, and why no more will come.
        self._numbers: list[int] = []
        self._lost: ShardLost | None = None

    def fetch(self, indices: Any) -> Any:
        value, outcome = self._attempt(indices)
        self._context.add("outcome", outcome)
        return value

    def _attempt(self, indices: Any) -> Attempt:
        if self.ended:
            return self._nothing([])
        wanted = len(indices) if self._batched else 1
        results = TaskResults(self._handler, batch=True)
        numbers: list[int] = []
        samples = results.values
        self._numbers, before = numbers, self.position
        while len(samples) < wanted and not self.ended:
            if self._context.cancelled:
                raise Abandoned
            number = self.position
            try:
                self.read(results)
            except StopIteration:
                self.ended = True
            except ShardLost as error:  # comes out behind the samples before it
                self.ended, self._lost = True, error
            if len(samples) > len(numbers):
                numbers.append(number)
        failures, attempted = results.failures, self.position - before
        if not samples or (self._drop_last and len(samples) < wanted):
            return self._nothing(failures)
        if self._join and self._batched and len(samples) < wanted:
            return short_batch(numbers, samples, failures, wanted)
        try:
            data = self._collate_fn(samples if self._batched else samples[0])
        except Exception as error:
            if not self._handler.skips:
                raise
            return all_failed(numbers, foreign(error), failures, 0)
        return data, Outcome(attempted, failures)

    def _nothing(self, failures: list[FailureRecord]) -> Attempt:
        if failures:
            return short_batch([], [], failures, 0)
        if self._lost is not None:
            error, self._lost = self._lost, None
            raise error
        raise EndOfShard

    def mend(self, value: Any, error: Exception, check: Callable[[Any], Any]) -> Any:
        assert self._context.extras is not None
        outcome: Outcome = self._context.extras["outcome"]
        if not self._handler.skips or outcome.short is not None:
            super().mend(value, error, check)  # of a short batch, the samples were sent as they are
        value, outcome = all_failed(self._numbers, error, outcome.failures, 0)
        self._context.add("outcome", outcome)
        return value


class _Ended(BaseException):
    """End of the iterator during a retry: no error of it. Past every ``except Exception``."""
