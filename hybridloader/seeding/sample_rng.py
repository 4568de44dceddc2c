"""What a worker does under ``seeding="sample"``: each call for a sample finds its generators seeded.

It wraps what the fetchers call: `dataset[index]`, `next` of a shard, `collate_fn`, the functions of a
stage. A worker with a process of its own, or one that has borrowed the global generators of its process,
seeds these; for workers on threads see `thread_draws`. Never imports numpy or torch: what is not there
needs no seed, and is seeded when it comes.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
import os
import random
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from hybridloader._support.import_hooks import when_imported
from hybridloader.seeding.sample_seeds import Origin, key_of, root, seeds

T = TypeVar("T")

SAMPLE = b"sample/"
BATCH = b"batch/"
COLLATE = b"collate/"
REPLACE = b"replace/"
OPEN = b"open/"


class Generators:
    """The generators that code draws from; those of them whose libraries are imported.

    Attributes
    ----------
    python
        The one of `random`, or the module for its global one.
    """

    def __init__(self, python: Any = random) -> None:
        self.python = python

    def seed(self, python: int, array: int | list[int], tensor: int) -> None:
        """Seed them all. What is imported later is seeded then: see `SampleRng.prepare`."""
        self.python.seed(python)
        modules = sys.modules
        if "numpy" in modules:
            self.seed_numpy(array)
        if "torch" in modules:
            self.seed_torch(tensor)

    def seed_numpy(self, seed: int | list[int]) -> None:
        import numpy as np

        np.random.seed(seed)

    def seed_torch(self, seed: int) -> None:
        import torch

        # Not torch.manual_seed, which goes round all devices: 1 us against 77.
        torch.default_generator.manual_seed(seed)


GLOBALS = Generators()


class Now(threading.local):
    """What is being made on this thread.

    Attributes
    ----------
    digest
        Of the sample; None outside of any.
    own
        The generators that it has asked for: see `rng`.
    item
        The number of the item that a stage works on, in bytes.
    generators
        What code on this thread draws from: `GLOBALS`, or generators of its own in their place.
    """

    digest: bytes | None = None
    own: Any = None
    item: bytes = b""
    generators: Any = GLOBALS


now = Now()


class SampleRng:
    """Seeds the global generators before each call; for a worker that has them to itself.

    Parameters
    ----------
    origin
        Of the stage.
    worker
        Its number, by which samples of a shard are known.
    number
        Of the function in the stage that is seeded by this.

    Attributes
    ----------
    first
        By what the collation of the task in hand is seeded.
    """

    def __init__(self, origin: Origin, worker: int, number: int = 0) -> None:
        self.worker, self._number = worker, number
        # All the mutable state:
        self._parts: dict[int, SampleRng] = {}
        self.first: bytes = b""
        self.begin(origin)

    def begin(self, origin: Origin) -> None:
        """A pass begins."""
        self.origin = origin
        self._next = 0  # the number of the next item of this stage's input
        self._root = root(origin, origin.stages[self._number])
        for part in self._parts.values():
            part.begin(origin)

    def begin_at(self, item: int, epoch: int) -> None:
        """The next items are those from that number on, of that pass."""
        if epoch != self.origin.epoch:
            self.begin(dataclasses.replace(self.origin, epoch=epoch))
        self._next = item

    def take(self, items: int) -> int:
        """So many items are worked on: the number of the first."""
        first = self._next
        self._next += items
        return first

    def for_function(self, number: int) -> SampleRng:
        """Those of function `number` of the stage."""
        if number not in self._parts:
            self._parts[number] = self._part(number)
        return self._parts[number]

    def digest(self, kind: bytes, key: bytes) -> bytes:
        found = self._root.copy()
        found.update(kind + key)
        digest: bytes = found.digest()
        return digest

    # -- what differs where the generators are shared --------------------------------------------------

    def prepare(self) -> None:
        """Before the first call, and behind what else seeds modules as they are imported.

        What is imported in the middle of a sample is seeded before anybody sees it.
        """
        for name in ("numpy", "torch"):
            place = os.getpid(), name
            if name not in sys.modules and place not in _awaited:
                _awaited.add(place)
                when_imported(name, functools.partial(_came, name))

    def release(self) -> None:
        """Nothing will be called any more."""

    def info_rng(self, without: Any) -> Any:
        """Return what `WorkerInfo.rng` is to be, in place of what it would be `without`."""
        return without

    def _part(self, number: int) -> SampleRng:
        return SampleRng(self.origin, self.worker, number)

    def call(self, kind: bytes, key: bytes, function: Callable[..., T], *arguments: Any) -> T:
        """``function(*arguments)`` as what draws the numbers of `key`."""
        found = self._root.copy()  # `digest`, without the call
        found.update(kind + key)
        now.digest = digest = found.digest()
        now.own = None
        now.generators.seed(*seeds(digest))
        return function(*arguments)

    # -- what is wrapped -------------------------------------------------------------------------------

    def seeded(self, function: Callable[[Any], T], kind: bytes = SAMPLE) -> Callable[[Any], T]:
        """`function` of an index, seeded by that index."""
        call = self.call
        return lambda index: call(kind, key_of(index), function, index)

    def seeded_collate(self, collate_fn: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """`collate_fn`, seeded by the first sample of the task in hand."""
        return lambda samples: self.call(COLLATE, self.first, collate_fn, samples)

    def seeded_shard(
        self, make: Callable[[], Iterator[Any]], *, later: bool = False
    ) -> SeededIterator:
        """The iterator that `make` gives, each of its samples seeded by its number in this shard.

        It is made now, or `later`, when it is first read: by then it is known which pass it is.
        """
        worker = b"%d/" % self.worker
        made = None if later else self.call(OPEN, worker, make)
        return SeededIterator(self, worker, made, make)

    def task(self, key: Callable[[Any], bytes], function: Callable[[Any], T], index: Any) -> T:
        """Return ``function(index)``, the result of a task, collation seeded by ``key(index)``."""
        outer = now.digest, now.own, now.item  # a sample may have a loader of its own
        self.first = key(index)
        try:
            return function(index)
        finally:
            now.digest, now.own, now.item = outer

    def seeded_dataset(self, dataset: Any, *, whole: bool) -> Any:
        """`dataset`, of which each sample is seeded; each batch, if it makes these in one go."""
        return _Seeded(self, dataset, whole=whole)

    def seeded_replacement(
        self, give: Callable[[Any, Exception], Any], key_of: Callable[[Any], bytes] = key_of
    ) -> Callable[[Any, Exception], Any]:
        """`give`, which makes a replacement of an index, seeded by that index."""
        return lambda index, error: self.call(REPLACE, key_of(index), give, index, error)

    def shard_key(self, position: int) -> bytes:
        """The key of a sample of this worker's shard."""
        return b"%d/%d" % (self.worker, position)


class _Seeded:
    """A dataset that is asked for single samples; for batches too, all indices of one in order."""

    def __init__(self, rng: SampleRng, dataset: Any, *, whole: bool) -> None:
        self._one = rng.seeded(functools.partial(operator.getitem, dataset))
        if whole:
            self.__getitems__ = rng.seeded(dataset.__getitems__, BATCH)

    def __getitem__(self, index: Any) -> Any:
        return self._one(index)


class SeededIterator(Iterator[Any]):
    """An iterator of which every ``next()`` is seeded by its number.

    Attributes
    ----------
    wrapped
        The iterator itself; None: it is made when it is first read.
    number
        Of the next sample.
    """

    def __init__(
        self,
        rng: SampleRng,
        prefix: bytes,
        wrapped: Iterator[Any] | None,
        make: Callable[[], Iterator[Any]] | None = None,
    ) -> None:
        self._rng, self._prefix, self._make = rng, prefix, make
        # All the mutable state:
        self.wrapped: Any = wrapped
        self.number = 0

    def __next__(self) -> Any:
        number = self.number
        self.number = number + 1
        return self._rng.call(SAMPLE, self._prefix + b"%d" % number, self._pull)

    def _pull(self) -> Any:
        if self.wrapped is None:
            assert self._make is not None
            self.wrapped = self._make()
        return next(self.wrapped)


def innermost(samples: Iterator[Any]) -> Any:
    """The iterator itself, without what was wrapped around it here."""
    if isinstance(samples, SeededIterator) and samples.wrapped is not None:
        return samples.wrapped
    return samples


_awaited: set[tuple[int, str]] = set()
"""Modules that will be seeded when imported, by process: a fork seeds them for its worker first."""


def _came(name: str) -> None:
    """A library was imported, perhaps in the middle of a sample."""
    if now.digest is not None:
        _, array, tensor = seeds(now.digest)
        mine = now.generators
        if name == "numpy":
            mine.seed_numpy(array)
        else:
            mine.seed_torch(tensor)
