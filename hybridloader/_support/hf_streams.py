"""Streams of Hugging Face's datasets, recognised by the names of their classes without an import."""

from __future__ import annotations

from typing import Any

from hybridloader._support.attributes import attribute
from hybridloader._support.caller import warn_once


def is_stream(dataset: Any) -> bool:
    """Return True for an `IterableDataset` of the package datasets."""
    return any(
        kind.__name__ == "IterableDataset" and kind.__module__.partition(".")[0] == "datasets"
        for kind in type(dataset).__mro__
    )


def has_buffer(dataset: Any) -> bool:
    """Return True for a stream that is shuffled within a buffer: its state omits the buffered samples.

    Resuming from such a state loses these samples, and in a worker raises IndexError (datasets 5.2).
    """
    return is_stream(dataset) and any(
        type(part).__name__ == "BufferShuffledExamplesIterable"
        for part in _parts(attribute(dataset, "_ex_iterable"))
    )


def _parts(examples: Any) -> list[Any]:
    """Return the steps of a stream, from the last one back to its sources."""
    found, todo = [], [examples]
    while todo:
        part = todo.pop()
        if part is not None:
            found.append(part)
            todo.append(attribute(part, "ex_iterable"))
            todo += attribute(part, "ex_iterables") or ()
    return found


def warn_of_few_shards(dataset: Any, workers: int, stage: str) -> None:
    """Warn once if a stream has too few shards for the workers of this rank, or for the ranks."""
    if not is_stream(dataset):
        return
    # Older versions have `n_shards` alone.
    shards = attribute(dataset, "num_shards", attribute(dataset, "n_shards"))
    split = attribute(dataset, "_distributed")
    if not isinstance(shards, int):
        return
    if workers > shards:
        warn_once(
            f"stage {stage!r}: the dataset has {shards} shards for {workers} workers of this rank, so "
            f"{workers - shards} of them have nothing to read; use num_workers={shards}, or split the "
            "data into more shards",
            "few-shards",
        )
    ranks = attribute(split, "world_size", 1)
    total = attribute(attribute(dataset, "_ex_iterable"), "num_shards", shards)
    by_shards = attribute(split, "strategy", "auto") == "shards" or total % ranks == 0
    if ranks > 1 and not by_shards:
        warn_once(
            f"stage {stage!r}: {total} shards can't be divided evenly among {ranks} ranks, so each rank "
            f"reads all of the data and drops the samples of the others; split the data into a multiple "
            f"of {ranks} shards",
            "uneven-shards",
        )
