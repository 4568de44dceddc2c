"""Seeding of samples for workers that share a process: each thread draws from separate generators.

A sample on a thread must draw the numbers that it would draw in a process. It must not move the global
generators, which belong to the training loop. While such workers run, `random`, `numpy.random` and
torch therefore use the generators of the calling thread (see `thread_generators`). A generator is
seeded when a sample first draws from it, so a sample that draws nothing is not slowed by seeding.

A function that C code holds still draws from the global generators. This module never changes the
state of a global generator.
"""

from __future__ import annotations

import pickle
import random
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

from hybridloader.seeding.sample_rng import (
    COLLATE,
    GLOBALS,
    NUMPY,
    OPEN,
    SAMPLE,
    Key,
    Kind,
    Origin,
    SampleRng,
    SeedTriple,
    key_of,
    now,
    seeds,
)
from hybridloader.seeding.thread_generators import installation, mode_class

T = TypeVar("T")

LIBRARIES = {"random", NUMPY, "torch"}


class ThreadGenerators:
    """Generators of one thread that replace the global ones.

    A generator is made, and seeded for the current sample, on first access. The current sample is the
    one that `kind` and `key` name or, with `walk`, the item that this iterator returned last.
    """

    def __init__(self) -> None:
        # Libraries that user code has seeded or given a state:
        self.reseeded: set[str] = set()
        # Mode in which torch's functions use `tensor`; None: torch is not imported.
        self.mode: Any = None
        self._made: dict[str, Any] = {}  # generators, by library
        # All the other mutable state: the generators that these replace, ...
        self.outer: Any = GLOBALS
        # ... and that of the current sample:
        self.rng: ThreadSampleRng | None = None
        self.kind = b""
        self.key: Any = (
            None  # of one sample; with `walk`, a function of the place, or None: items are indices
        )
        self.walk: Any = None  # iterator over `items`, each of which is a sample
        self.items: Any = ()
        self.place = 0  # of the current sample; -1: not looked up yet
        self.own: Any = None  # generators of `rng()`
        self._digest: bytes | None = None
        self._seeds: SeedTriple | None = None
        self._seeded: set[str] = set()  # libraries whose generator is seeded for this sample

    # -- the current sample -----------------------------------------------------------------------------

    def seed(self, python: int, array: int | list[int], tensor: int) -> None:
        """Seed all generators; valid until the next sample begins."""
        self._look()
        self._forget()
        self._seeds = SeedTriple(python, array, tensor)

    def _forget(self) -> None:
        self.own = self._digest = self._seeds = None
        self._seeded.clear()

    def _look(self) -> None:
        """Begin the next sample if the iterator has advanced. Only draws call this."""
        walk, place = self.walk, 0
        if walk is not None:
            place = max(0, len(self.items) - 1 - walk.__length_hint__())
        if place != self.place:
            self.place = place
            self._forget()

    @property
    def digest(self) -> bytes | None:
        """Hash of the current sample; None if the user did not ask for seeds by sample."""
        rng = self.rng
        return self._hash() if rng is not None and rng.origin.kind is Kind.SAMPLE else None

    def _hash(self) -> bytes:
        self._look()
        if self._digest is None:
            rng, key = self.rng, self.key
            assert rng is not None
            if self.walk is not None:
                key = rng.key_of(self.items[self.place]) if key is None else key(self.place)
            elif not isinstance(key, bytes):
                key = key()
            self._digest = rng.digest(self.kind, key)
        return self._digest

    def _generator(self, library: str, make: Callable[[], Any], seed: Callable[..., Any]) -> Any:
        self._look()
        rng = self.rng
        if rng is not None and rng.kept is not None and library in rng.kept.reseeded:
            return rng.kept._generator(library, make, seed)
        if library not in self._seeded:
            self._seeded.add(library)
            if library not in self._made:
                self._made[library] = make()
            if self._seeds is None:
                self._seeds = seeds(self._hash())
            seed(self._made[library], self._seeds)
        return self._made[library]

    # -- generators ------------------------------------------------------------------------------------

    @property
    def python(self) -> Any:
        """A `random.Random`."""
        return self._generator("random", random.Random, lambda made, seed: made.seed(seed.python))

    @property
    def array(self) -> Any:
        """A `numpy.random.RandomState`."""
        return self._generator(NUMPY, _random_state, lambda made, seed: made.seed(seed.numpy))

    @property
    def tensor(self) -> Any:
        """A `torch.Generator`, for the CPU."""
        return self._generator("torch", _generator, lambda made, seed: made.manual_seed(seed.torch))

    @property
    def generator(self) -> Any:
        """A `numpy.random.Generator` on the bit generator of `array`, and so with the same seed."""
        from numpy.random import Generator

        return Generator(self.array._bit_generator)

    # -- in place of the global ones -------------------------------------------------------------------

    def put(self) -> None:
        """Replace the generators that this thread uses by these."""
        mode = self.mode
        if mode is None and "torch" in sys.modules:
            self.mode = mode = mode_class()(self)
        self.outer, now.generators = now.generators, self
        if mode is not None:
            mode.begin()

    def take_away(self) -> None:
        """Undo `put`."""
        if self.mode is not None:
            self.mode.end()
        now.generators = self.outer

    @contextmanager
    def in_place(self, found: SeedTriple) -> Iterator[None]:
        """Replace the global generators on this thread during the block, seeded with `found`."""
        installation.take()
        self.put()
        try:
            self.seed(*found)
            yield
        finally:
            self.take_away()
            installation.give_back()


def _random_state() -> Any:
    from numpy.random import RandomState

    return RandomState()


def _generator() -> Any:
    import torch

    return torch.Generator()


class _Spare(threading.local):
    """Generators of a thread that are free for reuse; nested samples need several."""

    def __init__(self) -> None:
        self.found: list[ThreadGenerators] = []


_spare = _Spare()

_INFO = {"random_generator": "python", "torch_generator": "tensor", "numpy_generator": "generator"}


class _ThreadInfoRng:
    """`WorkerInfo.rng` on threads: the sample's generators; between samples, those of `outside`."""

    def __init__(self, outside: Any) -> None:
        self._outside = outside

    def __getattr__(self, name: str) -> Any:
        if name not in _INFO:
            raise AttributeError(name)
        mine = now.generators
        return getattr(self._outside, name) if mine is GLOBALS else getattr(mine, _INFO[name])


class ThreadSampleRng(SampleRng):
    """Gives each thread separate generators while it makes a sample. See `SampleRng`."""

    def __init__(self, origin: Origin, worker: int, number: int = 0) -> None:
        self._end: Any = None
        self.by_function = origin.kind is Kind.SAMPLE
        super().__init__(origin, worker, number)

    def prepare(self) -> None:
        installation.take()
        self._end = weakref.finalize(self, installation.give_back)
        self._end.atexit = False

    def release(self) -> None:
        if self._end is not None:
            self._end()

    def info_rng(self, without: Any) -> Any:
        in_turn = without is None or self.origin.kind is Kind.WORKER
        return without if in_turn else _ThreadInfoRng(without)

    def _part(self, number: int) -> SampleRng:
        part = ThreadSampleRng(self.origin, self.worker, number)
        part.by_function = True
        return part

    def key_of(self, index: Any) -> bytes:
        try:
            return key_of(index)
        except TypeError:
            if self.origin.kind is Kind.SAMPLE:
                raise
            return b"p" + pickle.dumps(index)  # seeds were not asked for: accept any index

    # -- seeded calls ----------------------------------------------------------------------------------

    def call(self, kind: bytes, key: Key, function: Callable[..., T], *arguments: Any) -> T:
        spare = _spare.found
        mine = spare.pop() if spare else ThreadGenerators()
        mine.rng, mine.kind, mine.key, mine.place = self, kind, key, -1
        item = now.item
        if mine.mode is None:
            mine.put()
        else:  # `put`, inlined
            mine.outer, now.generators = now.generators, mine
            mine.mode.begin()
        try:
            return function(*arguments)
        finally:
            if mine.mode is not None:
                mine.mode.end()
            now.generators, now.item = mine.outer, item
            mine.rng = mine.own = mine.key = None
            spare.append(mine)

    def enter(
        self, items: Sequence[Any], key: Callable[[int], bytes] | None = None
    ) -> Iterator[Any]:
        if type(items) not in (list, tuple):
            items = list(items)
        if (
            key is None
            and self.origin.kind is Kind.SAMPLE
            and not {*map(type, items)} <= {int, str}
        ):
            deque(
                map(key_of, items), maxlen=0
            )  # raises for an index without a key, as in a process
        spare = _spare.found
        mine = spare.pop() if spare else ThreadGenerators()
        mine.rng, mine.kind, mine.key, mine.items, mine.place = self, SAMPLE, key, items, -1
        mine.walk = walk = iter(items)
        if mine.mode is None:
            mine.put()
        else:  # `put`, inlined: saves a call per batch
            mine.outer, now.generators = now.generators, mine
            mine.mode.begin()
        return walk

    def leave(self) -> None:
        mine = now.generators
        if mine.mode is not None:
            mine.mode.end()
        now.generators = mine.outer
        mine.rng = mine.walk = mine.own = mine.key = mine.items = None
        _spare.found.append(mine)

    def seeded_in_turn(self, dataset: Any) -> Any:
        return dataset

    def task(self, key: Callable[[Any], Key], function: Callable[[Any], T], index: Any) -> T:
        outer = now.first
        now.first = key(index)
        try:
            return function(index)
        finally:
            now.first = outer

    def seeded(self, function: Callable[[Any], T], kind: bytes = SAMPLE) -> Callable[[Any], T]:
        call, key = self.call, self.key_of
        return lambda index: call(kind, partial(key, index), function, index)

    def seeded_collate(self, collate_fn: Callable[[Any], Any]) -> Callable[[Any], Any]:
        call = self.call

        def collate(samples: Any) -> Any:
            return call(COLLATE, now.first or b"", collate_fn, samples)

        return collate

    def seeded_shard(
        self, make: Callable[[], Iterator[Any]], *, later: bool = False, entered: bool = False
    ) -> Iterator[Any]:
        if entered:
            return self.call(OPEN, b"%d/" % self.worker, make)
        return super().seeded_shard(make, later=later)
