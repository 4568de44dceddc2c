"""Failures of samples, as they travel beside the value of a task from a worker to the parent.

Plain tuples, by reference or by pickle; nothing is decided here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from hybridloader._support.errors import Failure


class FailureRecord(NamedTuple):
    """Record of a sample that failed, made by its worker.

    Attributes
    ----------
    index
        Index that was asked for.
    position
        Number of good samples before it in its task.
    failure
        The exception; samples of a batch that failed as a whole share it.
    replaced
        Whether another sample was put in its place.
    """

    index: Any
    position: int
    failure: Failure
    replaced: bool = False


class Note(NamedTuple):
    """Failures to be counted, raised or left out between two results of a pipeline's task.

    Attributes
    ----------
    position
        Number of results before it.
    attempted
        Samples to be counted, those of `failures` among them.
    failures
        Records of the samples that failed.
    item
        Short text of the item whose place the one failure takes; None: failures are only counted.
    """

    position: int
    attempted: int
    failures: Sequence[FailureRecord]
    item: str | None = None


class Outcome(NamedTuple):
    """Metadata of the value of a loader's task.

    Attributes
    ----------
    attempted
        Samples that were attempted for it.
    failures
        Records of those that failed.
    short
        None if the value is whole. Else the value is the list of the samples that are left of a batch,
        not collated, and these are their indices.
    wanted
        Samples that such a batch should have had.
    """

    attempted: int
    failures: Sequence[FailureRecord] = ()
    short: Sequence[Any] | None = None
    wanted: int = 0


Attempt = tuple[Any, Outcome]
"""Value of a task, and the outcome of its samples."""


def short(
    indices: Sequence[Any], samples: list[Any], failures: Sequence[FailureRecord], wanted: int
) -> Attempt:
    """Return the samples that are left of a batch."""
    return samples, Outcome(len(samples) + len(failures), failures, indices, wanted)


def all_failed(
    indices: Sequence[Any], error: Exception, failures: Sequence[FailureRecord], wanted: int
) -> Attempt:
    """Return the attempt at a batch that can't be made because of `error`.

    Parameters
    ----------
    indices
        Indices of its good samples.
    failures
        Records of samples that had failed before.
    wanted
        Samples that it should have had.
    """
    batch = [FailureRecord(index, place, Failure(error)) for place, index in enumerate(indices)]
    return short([], [], sorted([*failures, *batch], key=lambda failed: failed.position), wanted)
