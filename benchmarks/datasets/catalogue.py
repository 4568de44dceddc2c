"""Datasets by the name that a case gives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from benchmarks.datasets.plain import ENDLESS, Dying, Ints, Numbers, Paths, Spinning, path_strings
from benchmarks.datasets.remote import Remote, server_of
from benchmarks.datasets.small_tensors import Keys, Ragged, SmallTensors, Texts
from benchmarks.datasets.tensors import Blocks, DyingTensors, Images, Jpegs, PathTensors, table
from benchmarks.datasets.waiting import SlowSamples


def paths(count: int, container: str = "list") -> Paths:
    """Names of files, in a list or in hybridloader's `SharedList`."""
    names = path_strings(count)
    if container == "list":
        return Paths(names)
    from hybridloader.records import SharedList

    return Paths(SharedList(names))


def path_tensors(count: int, container: str = "list") -> PathTensors:
    """Names of files as in `paths`, and samples that need torch."""
    return PathTensors(paths(count, container).paths)


def remote(width: int, loops: int, delay_ms: float) -> Remote:
    """Images behind a server that this process starts."""
    return Remote(server_of(width).port, delay_ms, loops, ENDLESS)


DATASETS: dict[str, Callable[..., Any]] = {
    "ints": Ints,
    "images": Images,
    "blocks": Blocks,
    "jpegs": Jpegs,
    "table": table,
    "numbers": Numbers,
    "paths": paths,
    "path tensors": path_tensors,
    "dying": Dying,
    "dying tensors": DyingTensors,
    "remote": remote,
    "spinning": Spinning,
    "keys": Keys,
    "small tensors": SmallTensors,
    "ragged": Ragged,
    "texts": Texts,
    "slow samples": SlowSamples,
}
