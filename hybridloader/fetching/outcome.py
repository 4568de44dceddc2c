"""Metadata of the value of a task under a policy of `on_error`: what has failed on the way to it.

Plain tuples, by reference or by pickle between worker and parent; nothing is decided here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from hybridloader._support.errors import Failure
from hybridloader.engine.fetcher import TaskContext


class FailureRecord(NamedTuple):
    """A sample that failed, on its way from the worker.

    Attributes
    ----------
    index
        What it was asked for by.
    position
        Number of good ones before it in its task.
    failure
        The exception. That of a batch is shared by all its samples.
    replaced
        Whether another was put in its place.
    """

    index: Any
    position: int
    failure: Failure
    replaced: bool = False


class Note(NamedTuple):
    """Failures to be told between two results of a task of a pipeline.

    Attributes
    ----------
    position
        Number of results before it.
    attempted
        Samples to be counted, those of `failures` among them.
    failures
        Those that failed.
    item
        If the one of them stands in the place of a result, to be raised or left out there: its item, in
        short. None: they are only counted.
    """

    position: int
    attempted: int
    failures: Sequence[FailureRecord]
    item: str | None = None


class Outcome(NamedTuple):
    """Metadata of the value of a task of a loader: what was attempted for it, and what has failed.

    Attributes
    ----------
    attempted
        Samples that were attempted for it.
    failures
        Those of them that failed.
    short
        None if the value is whole. Else it is the list of the samples that are left of a batch, not
        collated, and these are their indices.
    wanted
        Samples that such a batch should have had.
    """

    attempted: int
    failures: Sequence[FailureRecord] = ()
    short: Sequence[Any] | None = None
    wanted: int = 0


Attempt = tuple[Any, Outcome]
"""The value of a task, and what became of its samples."""


def short(
    indices: Sequence[Any], samples: list[Any], failures: Sequence[FailureRecord], wanted: int
) -> Attempt:
    """Return what is left of a batch of which samples failed."""
    return samples, Outcome(len(samples) + len(failures), failures, indices, wanted)


def all_lost(
    indices: Sequence[Any], error: Exception, failures: Sequence[FailureRecord], wanted: int
) -> Attempt:
    """Return what is told of a batch that can't be had, because of `error`.

    Parameters
    ----------
    indices
        Of the samples that were good.
    failures
        Those that were lost before.
    wanted
        Samples that it should have had.
    """
    batch = [FailureRecord(index, place, Failure(error)) for place, index in enumerate(indices)]
    return short([], [], sorted([*failures, *batch], key=lambda failed: failed.position), wanted)


def outcome_of(context: TaskContext) -> Outcome:
    """Return the outcome of the samples of the task in hand."""
    assert context.extras is not None
    outcome: Outcome = context.extras["outcome"]
    return outcome
