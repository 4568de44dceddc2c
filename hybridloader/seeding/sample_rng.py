"""Seeding of every call that makes a sample, in a worker under ``seeding="sample"``.

It wraps the calls of the fetchers: `dataset[index]`, `next` of a shard, `collate_fn`, the functions of
a stage. A worker with a process of its own, or one that has borrowed the global generators of its
process, seeds these; for workers on threads see `thread_sample_rng`. Nothing here imports numpy or
torch: a library that is not imported needs no seed, and is seeded when it is imported.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
import os
import random
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from hybridloader._support.import_hooks import when_imported
from hybridloader.seeding.sample_seeds import Origin, key_of, root, seeds

T = TypeVar("T")

SAMPLE = b"sample/"
BATCH = b"batch/"
COLLATE = b"collate/"
REPLACE = b"replace/"
OPEN = b"open/"

Key = bytes | Callable[[], bytes]
"""Key of a call, or a function that computes it: most samples on threads draw nothing."""

NUMPY = "numpy.random"
"""Module of numpy's generators. Since numpy 2 it is imported when it is first asked for, which takes 15
ms: a program that has numpy and draws nothing from it needs neither that nor seeds for it."""


class Generators:
    """Global generators of this process: those of the libraries that are imported."""

    def seed(self, python: int, array: int | list[int], tensor: int) -> None:
        """Seed them all. A library that is imported later is seeded then: see `SampleRng.prepare`."""
        random.seed(python)
        modules = sys.modules
        if NUMPY in modules:
            self.seed_numpy(array)
        if "torch" in modules:
            self.seed_torch(tensor)

    @staticmethod
    def seed_numpy(seed: int | list[int]) -> None:
        # Not `np.random`, which numpy does not have yet at the end of that module's import.
        from numpy.random import seed as seed_global

        seed_global(seed)

    @staticmethod
    def seed_torch(seed: int) -> None:
        import torch

        # Not torch.manual_seed, which goes round all devices: 1 us against 77.
        torch.default_generator.manual_seed(seed)


GLOBALS = Generators()


class Now(threading.local):
    """State of the sample that this thread makes."""

    digest: bytes | None = None  # hash of the sample's key; None outside of any sample
    own: Any = None  # generators that the sample has asked for: see `rng`
    item: bytes = b""  # number of the item that a stage works on
    first: Key | None = (
        None  # key of the first sample of the task in hand; None outside of any task
    )
    generators: Any = GLOBALS  # that code on this thread draws from: `GLOBALS`, or its own instead
    moved: set[str] | None = None  # libraries whose global generator was moved, if somebody looks


now = Now()


class SampleRng:
    """Seeds the global generators before each call; for a worker that has them to itself.

    The number of the `worker` belongs to the keys of a shard's samples; `number` is that of the seeded
    function in the stage.
    """

    by_function = True
    """True if each function of a stage is seeded by itself; else all of them draw for the item."""
    kept: Any = None
    """Generators of a worker on threads that it draws from in turn, of the libraries in `reseeded`."""

    def __init__(self, origin: Origin, worker: int, number: int = 0) -> None:
        self.worker, self._number = worker, number
        # All the mutable state:
        self._parts: dict[int, SampleRng] = {}  # by the number of their function
        self.begin(origin)

    def begin(self, origin: Origin) -> None:
        self.origin = origin
        self._next = 0  # number of the next item of this stage's input
        self._root = root(origin, origin.stages[self._number])
        for part in self._parts.values():
            part.begin(origin)

    def begin_at(self, item: int, epoch: int) -> None:
        """Number the next items from `item` on, in pass `epoch`."""
        if epoch != self.origin.epoch:
            self.begin(dataclasses.replace(self.origin, epoch=epoch))
        self._next = item

    def take(self, items: int) -> int:
        """Number the next `items` items; return the number of the first."""
        first = self._next
        self._next += items
        return first

    def for_function(self, number: int) -> SampleRng:
        if not self.by_function:
            return self
        if number not in self._parts:
            self._parts[number] = self._part(number)
        return self._parts[number]

    def key_of(self, index: Any) -> bytes:
        """Return the key of the sample that `index` names."""
        return key_of(index)

    def digest(self, kind: bytes, key: bytes) -> bytes:
        """Return the hash of a call."""
        found = self._root.copy()
        found.update(kind + key)
        digest: bytes = found.digest()
        return digest

    # -- differs where the generators are shared -------------------------------------------------------

    def prepare(self) -> None:
        """Begin, before the first call and after all else that seeds modules as they are imported.

        A library that is imported in the middle of a sample is seeded before anybody can use it.
        """
        for name in (NUMPY, "torch"):
            place = os.getpid(), name
            if name not in sys.modules and place not in _awaited:
                _awaited.add(place)
                when_imported(name, functools.partial(_seed_imported, name))

    def release(self) -> None:
        """End: no call will follow."""

    def info_rng(self, without: Any) -> Any:
        """Return `WorkerInfo.rng`, which would be `without` if samples were not seeded."""
        return without

    def _part(self, number: int) -> SampleRng:
        return SampleRng(self.origin, self.worker, number)

    def call(self, kind: bytes, key: Key, function: Callable[..., T], *arguments: Any) -> T:
        """Return ``function(*arguments)``, seeded by `kind` and `key`."""
        found = self._root.copy()  # `digest`, without the call
        found.update(kind + (key if isinstance(key, bytes) else key()))
        now.digest = digest = found.digest()
        now.own = None
        now.generators.seed(*seeds(digest))
        return function(*arguments)

    def enter(
        self, items: Sequence[Any], key: Callable[[int], bytes] | None = None
    ) -> Iterator[Any]:
        """Return an iterator over `items`. Code that draws, draws for the item that it returned last.

        ``key(place)`` names the sample of an item; without `key`, items are indices. Here, in a process,
        the wrappers below seed each sample, and nothing is done. `leave` ends it.
        """
        return iter(items)

    def leave(self) -> None:
        """End what `enter` began."""

    # -- seeded calls ----------------------------------------------------------------------------------

    def seeded(self, function: Callable[[Any], T], kind: bytes = SAMPLE) -> Callable[[Any], T]:
        call = self.call
        return lambda index: call(kind, self.key_of(index), function, index)

    def seeded_in_turn(self, dataset: Any) -> Any:
        """Return `dataset` as it is asked, index by index, between `enter` and `leave`."""
        return SeededDataset(self, dataset)

    def seeded_collate(self, collate_fn: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Return `collate_fn`, seeded by the first sample of the task in hand."""
        return lambda samples: self.call(COLLATE, now.first or b"", collate_fn, samples)

    def seeded_shard(
        self, make: Callable[[], Iterator[Any]], *, later: bool = False, entered: bool = False
    ) -> Iterator[Any]:
        """Return the iterator that `make` gives, each sample seeded by its number in this shard.

        It is made now, or `later`, by `SeededIterator.open`: by then its pass is known. `entered` says
        that it is read between `enter` and `leave`.
        """
        worker = b"%d/" % self.worker
        made = None if later else self.call(OPEN, worker, make)
        return SeededIterator(self, worker, made, make)

    def shard_key(self, position: int) -> bytes:
        return b"%d/%d" % (self.worker, position)

    def seeded_replacement(
        self, give: Callable[[Any, Exception], Any], key_of: Callable[[Any], bytes] | None = None
    ) -> Callable[[Any, Exception], Any]:
        """Return `give`, which makes a replacement for an index, seeded by that index."""
        key = key_of or self.key_of
        return lambda index, error: self.call(REPLACE, key(index), give, index, error)

    def seeded_by_item(self, kind: str, function: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Return `function` of an item, seeded by the number of the item in hand (`Now.item`).

        The items that a ``"flat_map"`` gives for one are seeded each, as they are asked for.
        """
        call = self.call
        if kind != "flat_map":
            return lambda item: call(SAMPLE, now.item, function, item)

        def several(item: Any) -> Iterator[Any]:
            key = now.item
            return SeededIterator(self, key + b"/", iter(call(SAMPLE, key, function, item)))

        return several

    def task(self, key: Callable[[Any], Key], function: Callable[[Any], T], index: Any) -> T:
        """Return ``function(index)``, the result of a task, collation seeded by ``key(index)``."""
        outer = now.digest, now.own, now.item, now.first  # a sample may have a loader of its own
        now.first = key(index)
        try:
            return function(index)
        finally:
            now.digest, now.own, now.item, now.first = outer


def numbered_item(pair: tuple[Any, int]) -> Any:
    """Return the item of a pair; its number is from now on that of the item in hand."""
    now.item = b"%d" % pair[1]
    return pair[0]


def item_key(_: Any) -> bytes:
    """Return the key of the item in hand, which seeds its replacement."""
    return now.item


class SeededDataset:
    """Dataset with each sample seeded; if `whole`, each batch that it makes in one go."""

    def __init__(self, rng: SampleRng, dataset: Any, *, whole: bool = False) -> None:
        self._one = rng.seeded(functools.partial(operator.getitem, dataset))
        if whole:
            self.__getitems__ = rng.seeded(dataset.__getitems__, BATCH)

    def __getitem__(self, index: Any) -> Any:
        return self._one(index)


class SeededIterator(Iterator[Any]):
    """Iterator of which every ``next()`` is seeded by its number."""

    def __init__(
        self,
        rng: SampleRng,
        prefix: bytes,
        wrapped: Iterator[Any] | None,
        make: Callable[[], Iterator[Any]] | None = None,
    ) -> None:
        self._rng, self._prefix, self._make = rng, prefix, make
        # All the mutable state:
        self.wrapped: Any = wrapped  # the user's iterator; None until `open` makes it
        self.number = 0  # of the next sample

    def __next__(self) -> Any:
        number = self.number
        self.number = number + 1
        return self._rng.call(SAMPLE, self._prefix + b"%d" % number, next, self.wrapped)

    def open(self) -> None:
        """Make the user's iterator, unless it is there."""
        if self.wrapped is None:
            assert self._make is not None
            self.wrapped = self._rng.call(OPEN, self._prefix, self._make)


def innermost(samples: Iterator[Any]) -> Any:
    """Return the user's iterator, without a `SeededIterator` around it."""
    if isinstance(samples, SeededIterator) and samples.wrapped is not None:
        return samples.wrapped
    return samples


_awaited: set[tuple[int, str]] = set()
"""Processes and modules that will be seeded when imported: a fork seeds its worker first."""


def _seed_imported(name: str) -> None:
    # In the middle of a sample. A thread's own generators are seeded at their first draw.
    if now.digest is not None and now.generators is GLOBALS:
        found = seeds(now.digest)
        if name == NUMPY:
            GLOBALS.seed_numpy(found.numpy)
        else:
            GLOBALS.seed_torch(found.torch)
