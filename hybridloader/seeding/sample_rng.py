"""Seeding of every call that makes a sample, in a worker under ``seeding="sample"``.

The wrapped calls are those of the fetchers: `dataset[index]`, `next` of a shard, `collate_fn` and the
functions of a stage. They seed the global generators. The worker must be a process or must have borrowed
the generators; for workers on threads see `thread_generators`. This module imports numpy and torch only
once the program has done so: until then they need no seed, and their import seeds them.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import operator
import os
import pathlib
import random
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from hybridloader._support.system import cached_property
from hybridloader._support.text import policy, whole
from hybridloader._support.torch_env import when_imported
from hybridloader._support.user_objects import attribute

if TYPE_CHECKING:
    import numpy as np
    import torch as _torch


# -- Seeds of samples under ``seeding="sample"``: hashes of (seed, epoch, stage, sample).
#
# A seed does not depend on where or when its sample is made. This module draws nothing and touches no
# generator. It does not use Python's `hash`, because each process salts it differently.


@dataclass(frozen=True)
class SampleSeeding:
    """Seeding by which a sample's random numbers depend only on seed, epoch, stage and sample.

    Parameters
    ----------
    seed
        Seed of all samples. None: the seed is drawn where torch draws the seed of its workers, so
        ``torch.manual_seed`` determines it.

    Examples
    --------
    >>> from hybridloader import DataLoader, SampleSeeding
    >>> loader = DataLoader(range(4), seeding=SampleSeeding(seed=7))
    """

    seed: int | None = None

    def __post_init__(self) -> None:
        if self.seed is not None:
            instead = "torch takes -2**63 to 2**64 - 1"
            whole("SampleSeeding: seed", self.seed, -(2**63), 2**64 - 1, instead)


def parse_seeding(value: Any, name: str = "seeding") -> SampleSeeding | str | None:
    """Check a value of `seeding`; return a policy, ``"worker"``, ``"shared"`` or None.

    Raises `ValueError` for other values.
    """
    if value is None or (isinstance(value, str) and value in ("worker", "shared")):
        return value
    choices = 'None (by place), "worker" (as torch), "sample", "shared" or a SampleSeeding'
    hint = f"; for a seed write SampleSeeding(seed={value})" if type(value) is int else ""
    words = {"sample": SampleSeeding}
    return policy(name, value, words, (SampleSeeding,), choices, hint)


class Kind(enum.Enum):
    """Kind of seeding of a stage that does not simply draw from the generators of its process."""

    SAMPLE = "sample"
    """The user asked for seeding by sample. Each function of a stage is seeded separately too."""
    PLACE = "place"
    """Each sample is seeded because the stage is on threads. `worker_init_fn` may seed instead."""
    WORKER = "worker"
    """Each worker on threads is seeded once, as torch seeds its processes."""


@dataclass(frozen=True)
class Origin:
    """Origin of the seeds of all samples of a running stage; sent to its workers."""

    seed: int  # of the loader or of the run
    epoch: int = 0  # number of the epoch
    stages: tuple[str, ...] = ("",)  # one name for each function of the stage, which seeds it
    any_thread: bool = False  # an inline worker may run on any thread, so it borrows no generators
    kind: Kind = Kind.SAMPLE


def origin_of(
    chosen: SampleSeeding | str | None,  # result of `parse_seeding`
    seed: int,  # for a policy without one
    *,
    threads: bool,  # workers are threads of one process
    several: bool = False,  # several threads of a worker make samples
    stages: tuple[str, ...] = ("",),
    epoch: int = 0,
    any_thread: bool = False,
) -> Origin | None:
    """Return the origin of a stage's seeds; None if its samples draw from the global generators."""
    if isinstance(chosen, SampleSeeding):
        seed = seed if chosen.seed is None else chosen.seed
        return Origin(seed, epoch, stages, any_thread)
    if chosen is None and (threads or several):
        return Origin(seed, epoch, stages, any_thread, Kind.PLACE)
    if chosen == "worker" and threads and not several:
        return Origin(seed, epoch, stages, any_thread, Kind.WORKER)
    return None


class SeedTriple(NamedTuple):
    """Seeds of one sample."""

    python: int  # 128 bits, for `random`
    numpy: int | list[int]  # 32 bits: more take numpy 11 us, not 2, most of it to check the array
    torch: int  # 63 bits, of which torch's generator for the CPU uses the lowest 32


def seeds(digest: bytes) -> SeedTriple:
    number = int.from_bytes
    python, numpy = number(digest[:16], "little"), number(digest[16:20], "little")
    # Not SeedTriple(...), which takes as long as the rest of this function.
    return tuple.__new__(SeedTriple, (python, numpy, number(digest[24:], "little") >> 1))


def own_seeds(digest: bytes) -> SeedTriple:
    """Return the seeds of the generators of `rng`; the global generators get other seeds."""
    return seeds(blake2b(digest, digest_size=32, person=b"hybridloader-rng").digest())


def key_of(index: Any) -> bytes:
    """Return bytes that identify `index` and are the same in every process.

    Equal ints of any type have equal keys (``np.int64(3)``, ``torch.tensor(3)``). Raises `TypeError`
    for types without such bytes.
    """
    if type(index) is int:
        return b"i%d" % index
    if isinstance(index, str) and not isinstance(index, enum.Enum):
        return b"s" + index.encode("utf-8", "surrogatepass")
    return _other_key(index)


def _other_key(index: Any) -> bytes:
    for kinds, key in _KEYS:
        if isinstance(index, kinds):
            return key(index)
    if dataclasses.is_dataclass(index) and not isinstance(index, type):
        fields = [getattr(index, field.name) for field in dataclasses.fields(index)]
        return b"D" + _framed((type(index).__qualname__, *fields))
    try:
        return b"i%d" % operator.index(index)
    except TypeError:
        pass
    listed = attribute(index, "tolist")  # an array, or a tensor
    if callable(listed) and not isinstance(index, type):
        return b"a" + key_of(listed())
    raise TypeError(
        f'seeding="sample" seeds a sample by its index, and a {type(index).__qualname__} has nothing '
        f"that would be the same in every process ({index!r}). Give ints, str, bytes, tuples or "
        "dataclasses of these as indices"
    )


_KEYS: tuple[tuple[Any, Callable[[Any], bytes]], ...] = (
    (enum.Enum, lambda index: b"e" + _framed((type(index).__qualname__, index.name))),
    ((bool, type(None), type(Ellipsis)), lambda index: b"c" + repr(index).encode()),
    ((bytes, bytearray), lambda index: b"b" + bytes(index)),
    (float, lambda index: b"f" + float(index).hex().encode()),
    (complex, lambda index: b"z" + repr(complex(index)).encode()),
    (tuple, lambda index: b"t" + _framed(index)),
    (list, lambda index: b"l" + _framed(index)),
    (slice, lambda index: b"S" + _framed((index.start, index.stop, index.step))),
    ((set, frozenset), lambda index: b"u" + _joined(sorted(map(key_of, index)))),
    (dict, lambda index: b"d" + _framed(index.items())),
    (pathlib.PurePath, lambda index: b"p" + str(index).encode("utf-8", "surrogatepass")),
)
"""Keys of indices by their types, the first that fits."""


def _framed(parts: Any) -> bytes:
    return _joined(map(key_of, parts))


def _joined(keys: Any) -> bytes:
    return b"".join(b"%d:%b" % (len(key), key) for key in keys)


T = TypeVar("T")

SAMPLE = b"sample/"
BATCH = b"batch/"
COLLATE = b"collate/"
REPLACE = b"replace/"
OPEN = b"open/"

Key = bytes | Callable[[], bytes]
"""Key of a call, or a function that computes it on demand: most samples on threads draw nothing."""

NUMPY = "numpy.random"
"""Module of numpy's generators. Since numpy 2 it is imported on first access, which takes 15 ms. A
program that uses numpy without drawing from it is spared the import and the seeds."""


class Generators:
    """Global generators of the libraries that this process has imported."""

    def seed(self, python: int, array: int | list[int], tensor: int) -> None:
        """Seed all of them. `SampleRng.prepare` arranges the seeding of later imports."""
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

        # Not torch.manual_seed, which visits all devices: 1 us instead of 77.
        torch.default_generator.manual_seed(seed)


GLOBALS = Generators()


class Now(threading.local):
    """State of the sample that this thread makes."""

    digest: bytes | None = None  # hash of the sample's key; None outside of any sample
    own: Any = None  # generators that the sample got from `rng`
    item: bytes = b""  # number of the item that a stage works on
    first: Key | None = None  # key of the current task's first sample; None outside of any task
    generators: Any = GLOBALS  # that code on this thread draws from: `GLOBALS` or the thread's

    def __init__(self) -> None:
        self.spare: list[Any] = []  # a thread's generators for reuse; nested samples need several


now = Now()


class SampleRng:
    """Seeds the global generators before each call, in a worker that uses them alone.

    `worker` is the worker's number, a part of the keys of a shard's samples. `number` is the position of
    the seeded function in the stage.
    """

    by_function = True
    """True: each function of a stage is seeded separately. False: all of them share the item's seed."""
    seeds_in_turn = False
    """True: a dataset needs no wrapper between `enter` and `leave`."""
    kept: Any = None
    """Generators of a worker on threads that samples don't reseed, for the libraries in `reseeded`."""

    def __init__(self, origin: Origin, worker: int, number: int = 0) -> None:
        self.origin, self.worker, self._number = origin, worker, number
        # All the mutable state:
        self.first_item = 0  # number of the first item of the current task
        self._parts: dict[int, SampleRng] = {}  # by the number of their function
        self._epoch = origin.epoch
        self._root: Any = None

    def begin(self, epoch: int) -> None:
        """Begin an epoch. Its hash is made at the first draw: most workers on threads draw nothing."""
        self._epoch, self._root = epoch, None
        for part in self._parts.values():
            part.begin(epoch)

    def _new_root(self) -> Any:
        """Hash seed, epoch and stage. blake2b mixes keys of any length, in under 1 us."""
        parts = _framed((self.origin.seed, self._epoch, self.origin.stages[self._number]))
        self._root = blake2b(parts, digest_size=32, person=b"hybridloader-1")
        return self._root

    def for_function(self, number: int) -> SampleRng:
        if not self.by_function:
            return self
        if number not in self._parts:
            part = self._parts[number] = type(self)(self.origin, self.worker, number)
            part.by_function = True
            part.begin(self._epoch)
        return self._parts[number]

    def key_of(self, index: Any) -> bytes:
        """Return the key of the sample that `index` names."""
        return key_of(index)

    def digest(self, kind: bytes, key: bytes) -> bytes:
        """Return the hash of a call."""
        found = (self._root or self._new_root()).copy()
        found.update(kind + key)
        digest: bytes = found.digest()
        return digest

    # -- differs where the generators are shared -------------------------------------------------------

    def prepare(self) -> None:
        """Arrange that a library imported during a sample is seeded before it can be used.

        Call this before the first call, and after other code that seeds modules on import.
        """
        for name in (NUMPY, "torch"):
            place = os.getpid(), name
            if name not in sys.modules and place not in _awaited:
                _awaited.add(place)
                when_imported(name, functools.partial(_seed_imported, name))

    def release(self) -> None:
        """Clean up; no call follows."""

    def info_rng(self, without: Any) -> Any:
        """Return `WorkerInfo.rng`; `without` is its value when samples are not seeded."""
        return without

    def call(self, kind: bytes, key: Key, function: Callable[..., T], *arguments: Any) -> T:
        """Return ``function(*arguments)``, seeded by `kind` and `key`."""
        found = (self._root or self._new_root()).copy()  # `digest`, inlined
        found.update(kind + (key if isinstance(key, bytes) else key()))
        now.digest = digest = found.digest()
        now.own = None
        now.generators.seed(*seeds(digest))
        return function(*arguments)

    def enter(
        self, items: Sequence[Any], key: Callable[[int], bytes] | None = None
    ) -> Iterator[Any]:
        """Return an iterator over `items`; draws until `leave` belong to the item it returned last.

        ``key(place)`` returns the key of an item's sample; without `key`, the items are indices. This
        class seeds nothing here, because its wrappers below seed each sample.
        """
        return iter(items)

    def leave(self) -> None:
        """End the draws of the items of `enter`."""

    # -- seeded calls ----------------------------------------------------------------------------------

    def seeded(self, function: Callable[[Any], T], kind: bytes = SAMPLE) -> Callable[[Any], T]:
        call = self.call
        return lambda index: call(kind, self.key_of(index), function, index)

    def seeded_collate(self, collate_fn: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Return `collate_fn`, seeded by the first sample of the current task."""
        return lambda samples: self.call(COLLATE, now.first or b"", collate_fn, samples)

    def seeded_shard(
        self, make: Callable[[], Iterator[Any]], *, entered: bool = False
    ) -> Iterator[Any]:
        """Return the iterator that `make` returns, with each sample seeded by its number in this shard.

        `entered` is true if the iterator is read between `enter` and `leave`.
        """
        worker = b"%d/" % self.worker
        return SeededIterator(self, worker, self.call(OPEN, worker, make))

    def shard_key(self, position: int) -> bytes:
        return b"%d/%d" % (self.worker, position)

    def seeded_replacement(
        self, give: Callable[[Any, Exception], Any], key_of: Callable[[Any], bytes] | None = None
    ) -> Callable[[Any, Exception], Any]:
        """Return `give`, which makes the replacement of an index's sample, seeded by that index."""
        key = key_of or self.key_of
        return lambda index, error: self.call(REPLACE, key(index), give, index, error)

    def seeded_by_item(self, kind: str, function: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Return `function`, seeded by the number of the current item (`Now.item`).

        Each item that a ``"flat_map"`` makes of one is seeded when it is made.
        """
        call = self.call
        if kind != "flat_map":
            return lambda item: call(SAMPLE, now.item, function, item)

        def several(item: Any) -> Iterator[Any]:
            key = now.item
            return SeededIterator(self, key + b"/", iter(call(SAMPLE, key, function, item)))

        return several

    def task(self, key: Callable[[Any], Key], function: Callable[[Any], T], index: Any) -> T:
        """Return ``function(index)``, the result of a task whose collation ``key(index)`` seeds."""
        outer = now.digest, now.own, now.item, now.first  # a sample may run a loader
        now.first = key(index)
        try:
            return function(index)
        finally:
            now.digest, now.own, now.item, now.first = outer


def numbered_item(pair: tuple[Any, int]) -> Any:
    """Return the item of a pair, and set its number as that of the current item."""
    now.item = b"%d" % pair[1]
    return pair[0]


def item_key(_: Any) -> bytes:
    """Return the key of the current item, which seeds its replacement."""
    return now.item


class SeededDataset:
    """Dataset that seeds each sample; with `whole`, also each batch of one `__getitems__` call."""

    def __init__(self, rng: SampleRng, dataset: Any, *, whole: bool = False) -> None:
        self._one = rng.seeded(functools.partial(operator.getitem, dataset))
        if whole:
            self.__getitems__ = rng.seeded(dataset.__getitems__, BATCH)

    def __getitem__(self, index: Any) -> Any:
        return self._one(index)


class SeededIterator(Iterator[Any]):
    """Iterator that seeds each ``next()`` by its number."""

    def __init__(self, rng: SampleRng, prefix: bytes, wrapped: Iterator[Any]) -> None:
        self._rng, self._prefix = rng, prefix
        self.wrapped = wrapped  # the user's iterator
        self.number = 0  # of the next sample; all the mutable state

    def __next__(self) -> Any:
        number = self.number
        self.number = number + 1
        return self._rng.call(SAMPLE, self._prefix + b"%d" % number, next, self.wrapped)


def innermost(samples: Iterator[Any]) -> Any:
    """Return the user's iterator, without a `SeededIterator` around it."""
    return samples.wrapped if isinstance(samples, SeededIterator) else samples


_awaited: set[tuple[int, str]] = set()
"""Process and module of each pending seeding on import. A fork needs its own."""


def _seed_imported(name: str) -> None:
    # Only during a sample. A thread's own generators are seeded at their first draw.
    if now.digest is not None and now.generators is GLOBALS:
        found = seeds(now.digest)
        if name == NUMPY:
            GLOBALS.seed_numpy(found.numpy)
        else:
            GLOBALS.seed_torch(found.torch)


# -- generators for the current sample (`rng`), which draw the same numbers on every backend
#
# They are separate from the global generators, so libraries, threads and the order of imports don't
# affect them. They exist only while a sample is made under ``seeding="sample"``.


class SampleGenerators:
    """Generators of one sample, each created on first access."""

    def __init__(self, digest: bytes) -> None:
        self._seeds = own_seeds(digest)

    @cached_property
    def python(self) -> random.Random:
        """Generator of Python's `random`."""
        return random.Random(self._seeds.python)

    @cached_property
    def numpy(self) -> np.random.Generator:
        """Generator of numpy."""
        import numpy

        return numpy.random.Generator(numpy.random.PCG64(self._seeds.python))

    @cached_property
    def torch(self) -> _torch.Generator:
        """Generator of torch, for the CPU."""
        import torch

        return torch.Generator().manual_seed(self._seeds.torch)


def rng() -> SampleGenerators:
    """Return the random generators of the current sample, the same ones until the next sample.

    Returns
    -------
    SampleGenerators
        Generators `python`, `numpy` and `torch`.

    Raises
    ------
    RuntimeError
        No sample is being made on this thread, or not under ``seeding="sample"``.

    Examples
    --------
    In ``dataset[index]``, on any backend::

        crop = hybridloader.rng().python.randrange(8)
        noise = torch.randn(3, 8, 8, generator=hybridloader.rng().torch)
    """
    mine = now if now.generators is GLOBALS else now.generators
    digest = mine.digest
    if digest is None:
        raise RuntimeError(
            'rng() works only while a sample is made under seeding="sample", and this thread is not '
            'making one. Pass seeding="sample" to DataLoader or to the step of a Pipeline. If you '
            "start a thread in a sample, pass the generators to it"
        )
    if mine.own is None:
        mine.own = SampleGenerators(digest)
    found: SampleGenerators = mine.own
    return found
