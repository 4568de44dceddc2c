"""Failures of samples, as they travel beside the value of a task from a worker to the parent.

Plain tuples, by reference or by pickle; nothing is decided here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from hybridloader._support.user_objects import Failure


class FailureRecord(NamedTuple):
    """Record of a sample that failed, made by its worker."""

    index: Any  # index that the loader requested
    position: int  # number of good samples before it in its task
    failure: Failure  # samples of a batch that failed as a whole share it
    replaced: bool = False  # another sample was put in its place


class Note(NamedTuple):
    """Failures to be counted, raised or left out between two results of a pipeline's task."""

    position: int  # number of results before it
    attempted: int  # samples that count, those of `failures` included
    failures: Sequence[FailureRecord]
    item: str | None = None  # short repr, if the failure replaces this item; None: only counted


class Outcome(NamedTuple):
    """Metadata of the value of a loader's task: a batch, or the samples that are left of one."""

    attempted: int  # samples, those of `failures` included
    failures: Sequence[FailureRecord] = ()
    short: Sequence[Any] | None = None  # indices of samples not collated; None: a batch
    wanted: int = 0  # samples of a full batch


Attempt = tuple[Any, Outcome]  # value of a task, and the outcome of its samples


def short_batch(
    indices: Sequence[Any], samples: list[Any], failures: Sequence[FailureRecord], wanted: int
) -> Attempt:
    """Return the samples that are left of a batch."""
    return samples, Outcome(len(samples) + len(failures), failures, indices, wanted)


def all_failed(
    indices: Sequence[Any], error: Exception, failures: Sequence[FailureRecord], wanted: int
) -> Attempt:
    """Return the attempt at a batch whose good samples fail as a whole; `failures` came before."""
    batch = [FailureRecord(index, place, Failure(error)) for place, index in enumerate(indices)]
    return short_batch(
        [], [], sorted([*failures, *batch], key=lambda failed: failed.position), wanted
    )
