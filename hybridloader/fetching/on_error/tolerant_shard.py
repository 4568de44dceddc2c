"""What reads iterable sources under a policy of `on_error`, in the worker: of datasets and of pipelines.

An iterator may raise and go on. A generator does not, and that is never taken for the end of its shard.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import GeneratorType
from typing import Any

from hybridloader._support.errors import ShardLost, no_stop
from hybridloader.engine.fetcher import Abandoned, EndOfShard, GivenUp, TaskContext
from hybridloader.fetching.fetch import IterableFetch
from hybridloader.fetching.on_error.error_handler import ErrorHandler, seeded
from hybridloader.fetching.on_error.places import rest_is_lost
from hybridloader.fetching.on_error.policies import Policy
from hybridloader.fetching.on_error.task_results import TaskResults
from hybridloader.fetching.outcome import (
    Attempt,
    FailureRecord,
    Outcome,
    all_lost,
    outcome_of,
    short,
)
from hybridloader.fetching.shard import ShardFetcher
from hybridloader.seeding.sample_rng import innermost


class TolerantShardFetcher(ShardFetcher):
    """The fetcher of an `IterableFetch` under a policy. A sample is known by its number."""

    def __init__(
        self, fetch: IterableFetch, policy: Policy, samples: Iterator[Any], context: TaskContext
    ) -> None:
        super().__init__(fetch, samples, context)
        policy = seeded(policy, context.rng)
        self._source = TolerantIterator(samples, policy, context, self)
        # All the mutable state: what the last task gave, and why there will be no more.
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
        results = TaskResults(self._source.handler, batch=True)
        numbers: list[int] = []
        samples = results.values
        self._numbers, before = numbers, self.position
        while len(samples) < wanted and not self.ended:
            if self._context.cancelled:
                raise Abandoned
            number = self.position
            try:
                self._source.draw(results)
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
            return short(numbers, samples, failures, wanted)
        try:
            data = self._collate_fn(samples if self._batched else samples[0])
        except Exception as error:
            if not self._source.handler.skips:
                raise
            return all_lost(numbers, no_stop(error), failures, 0)
        return data, Outcome(attempted, failures)

    def close(self) -> None:
        super().close()
        self._source.close()

    def _nothing(self, failures: list[FailureRecord]) -> Attempt:
        if failures:
            return short([], [], failures, 0)
        if self._lost is not None:
            error, self._lost = self._lost, None
            raise error
        raise EndOfShard

    def mend(self, value: Any, error: Exception, check: Callable[[Any], Any]) -> Any:
        """Leave out the batch that can't be sent; see `Fetcher.mend`."""
        numbers, outcome = self._numbers, outcome_of(self._context)
        if not self._source.handler.skips or outcome.short is not None:
            super().mend(value, error, check)  # of a short batch, the samples were sent as they are
        value, outcome = all_lost(numbers, error, outcome.failures, 0)
        self._context.add("outcome", outcome)
        return value


class TolerantIterator:
    """Draws from an iterator that may raise and go on, which a generator does not.

    Parameters
    ----------
    samples
        The iterator.
    policy
        Of whoever draws.
    context
        Ends a wait.
    place
        Its `position` is counted up with every call of ``next()`` that was not the end: who comes after
        makes as many.
    """

    def __init__(
        self, samples: Iterator[Any], policy: Policy | None, context: TaskContext, place: Any
    ) -> None:
        self._samples, self._place = samples, place
        self.handler = ErrorHandler(policy, context)
        self._is_over = False

    def draw(self, results: TaskResults) -> None:
        """Add the next sample to `results`, or a note on it.

        Raises
        ------
        StopIteration
            There is none.
        ShardLost
            The iterator was a generator.
        Exception
            What `results` does not take; it can be asked again.
        """
        if self._is_over:
            raise StopIteration
        number = self._place.position
        try:
            results.values.append(self._again())
            return
        except (StopIteration, ShardLost):
            raise
        except Exception as raised:
            error = raised
        try:
            if isinstance(innermost(self._samples), GeneratorType):
                raise rest_is_lost(f"sample {number} of this worker's shard", error) from error
            try:
                found = results.rescue(self._several, None, number, error)
            except _Ended:  # behind what failed
                self._is_over = True
                found = results.rescue(self._several, GivenUp(number, ""), number, error)
            results.values.extend(found)
        finally:
            del error

    def close(self) -> None:
        """Let go of the iterator; its maker has closed it."""
        self._samples, self._is_over = iter(()), True

    def _again(self) -> Any:
        try:
            sample = next(self._samples)
        except StopIteration:
            raise
        except Exception:
            self._place.position += 1
            raise
        self._place.position += 1
        return sample

    def _several(self, _: None) -> Any:
        try:
            return (self._again(),)
        except StopIteration:
            raise _Ended from None


class _Ended(BaseException):
    """The iterator, attempted again, has ended: no error of it. Past every ``except Exception``."""
