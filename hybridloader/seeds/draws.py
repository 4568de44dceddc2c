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
import random
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from hybridloader.faults.on_error import Replace, Retry
from hybridloader.late import when_imported
from hybridloader.seeds.sample_seeds import Origin, key_of, root, seeds

T = TypeVar("T")

SAMPLE = b"sample/"
BATCH = b"batch/"
COLLATE = b"collate/"
REPLACE = b"replace/"
OPEN = b"open/"


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
    stand_ins
        What its thread has in place of the global generators, if it is one of several.
    """

    digest: bytes | None = None
    own: Any = None
    item: bytes = b""
    stand_ins: Any = None


now = Now()


class Draws:
    """Seeds the global generators before each call; for a worker that has them to itself.

    Parameters
    ----------
    origin
        Of the stage.
    worker
        Its number, by which samples of a shard are known.
    number
        Of the function in the stage that is seeded by this.
    base
        The one of the whole stage, if this is of one of its functions.

    Attributes
    ----------
    first
        By what the collation of the task in hand is seeded.
    """

    def __init__(
        self, origin: Origin, worker: int, number: int = 0, base: Draws | None = None
    ) -> None:
        self.origin, self.worker, self._number = origin, worker, number
        self._parts: weakref.WeakSet[Draws] = weakref.WeakSet()
        # All the mutable state:
        self.first: bytes = b""
        self._next = 0  # the number of the next item of this stage's input
        self._root = root(origin, origin.stages[number])

    def prepare(self) -> None:
        """Before the first call, and behind what else seeds modules as they are imported.

        What is imported in the middle of a sample is seeded before anybody sees it.
        """
        for name, seed in (("numpy", _seed_numpy_now), ("torch", _seed_torch_now)):
            if name not in sys.modules:
                when_imported(name, seed)

    def of(self, number: int) -> Draws:
        """Those of function `number` of the stage."""
        part = type(self)(self.origin, self.worker, number, self)
        self._parts.add(part)
        return part

    def begin(self, origin: Origin) -> None:
        """A pass begins."""
        self.origin, self._next = origin, 0
        self._root = root(origin, origin.stages[self._number])
        for part in self._parts:
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

    def digest(self, kind: bytes, key: bytes) -> bytes:
        found = self._root.copy()
        found.update(kind)
        found.update(key)
        digest: bytes = found.digest()
        return digest

    # -- what differs where the generators are shared --------------------------------------------------

    def call(self, kind: bytes, key: bytes, function: Callable[..., T], *arguments: Any) -> T:
        """``function(*arguments)`` as what draws the numbers of `key`."""
        digest = self.digest(kind, key)
        now.digest, now.own = digest, None
        seed_imported(digest)
        return function(*arguments)

    def release(self) -> None:
        """Nothing will be called any more."""

    def rng(self) -> Any:
        """What `WorkerInfo.rng` is to be; None: as without."""
        return None

    # -- what is wrapped -------------------------------------------------------------------------------

    def seeded(self, function: Callable[[Any], T], kind: bytes = SAMPLE) -> Callable[[Any], T]:
        """`function` of an index, seeded by that index."""
        call = self.call
        return lambda index: call(kind, key_of(index), function, index)

    def collating(self, collate_fn: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """`collate_fn`, seeded by the first sample of the task in hand."""
        return lambda samples: self.call(COLLATE, self.first, collate_fn, samples)

    def later(self, make: Callable[[], Iterator[Any]]) -> SeededIterator:
        """The same as `shard`, but made when it is first read: by then it is known which pass it is."""
        return self.shard(lambda: _Later(make))

    def shard(self, make: Callable[[], Iterator[Any]]) -> SeededIterator:
        """The iterator that `make` gives, each of its samples seeded by its number in this shard."""
        worker = b"%d/" % self.worker
        return SeededIterator(self, worker, self.call(OPEN, worker, make))

    def task(self, key: Callable[[Any], bytes], function: Callable[[Any], T], index: Any) -> T:
        """Return ``function(index)``, the result of a task, collation seeded by ``key(index)``."""
        outer = now.digest, now.own  # a sample may have a loader of its own
        self.first = key(index)
        try:
            return function(index)
        finally:
            now.digest, now.own = outer

    def view(self, dataset: Any, *, whole: bool) -> Any:
        """`dataset`, of which each sample is seeded; each batch, if it makes these in one go."""
        return _Whole(self, dataset) if whole else _OneByOne(self, dataset)

    def policy(self, policy: Any, key_of: Callable[[Any], bytes] = key_of) -> Any:
        """`policy`, whose replacements are seeded by what they replace."""
        if isinstance(policy, Retry):
            return dataclasses.replace(policy, then=self.policy(policy.then, key_of))
        if not isinstance(policy, Replace):
            return policy
        give = policy.fn

        def replacement(index: Any, error: Exception) -> Any:
            return self.call(REPLACE, key_of(index), give, index, error)

        return dataclasses.replace(policy, fn=replacement)

    def at(self, position: int) -> bytes:
        """The key of a sample of this worker's shard."""
        return b"%d/%d" % (self.worker, position)


class _OneByOne:
    """A dataset that is asked for single samples."""

    def __init__(self, draws: Draws, dataset: Any) -> None:
        self._one = draws.seeded(functools.partial(operator.getitem, dataset))

    def __getitem__(self, index: Any) -> Any:
        return self._one(index)


class _Whole(_OneByOne):
    """A dataset that is asked for batches: all indices of one, in order, seed it."""

    def __init__(self, draws: Draws, dataset: Any) -> None:
        super().__init__(draws, dataset)
        self._many = draws.seeded(dataset.__getitems__, BATCH)

    def __getitems__(self, indices: Any) -> Any:
        return self._many(indices)


class SeededIterator(Iterator[Any]):
    """An iterator of which every ``next()`` is seeded by its number.

    Attributes
    ----------
    wrapped
        The iterator itself.
    number
        Of the next sample.
    """

    def __init__(self, draws: Draws, prefix: bytes, wrapped: Iterator[Any]) -> None:
        self._draws, self._prefix, self.wrapped = draws, prefix, wrapped
        # All the mutable state:
        self.number = 0

    def __next__(self) -> Any:
        number = self.number
        self.number = number + 1
        return self._draws.call(SAMPLE, self._prefix + b"%d" % number, next, self.wrapped)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self.wrapped, name)


def innermost(samples: Iterator[Any]) -> Any:
    """The iterator itself, without what was wrapped around it here."""
    while isinstance(samples, (SeededIterator, _Later)) and samples.wrapped is not None:
        samples = samples.wrapped
    return samples


class _Later(Iterator[Any]):
    """The iterator that a function makes when it is asked for the first item."""

    def __init__(self, make: Callable[[], Iterator[Any]]) -> None:
        self._make = make
        # All the mutable state:
        self._made: Iterator[Any] | None = None

    def __next__(self) -> Any:
        if self._made is None:
            self._made = self._make()
        return next(self._made)

    @property
    def wrapped(self) -> Iterator[Any] | None:
        return self._made


def seed_imported(digest: bytes) -> None:
    """Seed those of the global generators that there are, or what this thread has in their place."""
    if now.stand_ins is not None:
        now.stand_ins.seed(digest)
        return
    python, array, tensor = seeds(digest)
    random.seed(python)
    modules = sys.modules
    if "numpy" in modules:
        _seed_numpy(array)
    if "torch" in modules:
        _seed_torch(tensor)


def _seed_numpy(seed: int) -> None:
    import numpy as np

    np.random.seed(seed)


def _seed_torch(seed: int) -> None:
    import torch

    # Not torch.manual_seed, which goes round all devices: 1 us against 77.
    torch.default_generator.manual_seed(seed)


def _seed_numpy_now() -> None:
    if now.digest is not None and now.stand_ins is None:
        _seed_numpy(seeds(now.digest).numpy)


def _seed_torch_now() -> None:
    if now.digest is not None and now.stand_ins is None:
        _seed_torch(seeds(now.digest).torch)
