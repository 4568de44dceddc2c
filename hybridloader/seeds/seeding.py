"""Seeds exactly as torch's: worker ``i`` gets ``base_seed + i``, whatever kind of worker it is.

A process worker owns the global generators of its process and seeds them. A thread shares them with
the training code, so it gets generators of its own. While its `init_fn` runs, `random`,
`numpy.random` and torch use these on that thread. An inline worker plays a process: it swaps the
states of the global generators in before it works and out again afterwards. The fourth kind is no
worker at all: with ``num_workers=0`` the caller does the work, with its own generators, as torch does.

The rules are torch's `_worker_loop` (torch/utils/data/_utils/worker.py, 2.13); numpy's seed there is
a copy of `numpy.random.SeedSequence`, so numpy's own is used here.
"""

from __future__ import annotations

import importlib
import random
import sys
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from hybridloader.late import when_imported
from hybridloader.seeds.borrowing import Globals, lent
from hybridloader.seeds.draws import now

if TYPE_CHECKING:
    from torch.utils.data._utils.worker import _RNG

_NOTHING: AbstractContextManager[None] = nullcontext()


def numpy_seed(base_seed: int, worker: int) -> list[int]:
    """The four 32-bit words that torch seeds numpy with in worker number `worker`."""
    words = [worker, base_seed & 0xFFFFFFFF, base_seed >> 32, 0]
    state: list[int] = _numpy_random().SeedSequence(words).generate_state(4).tolist()
    return state


def _numpy_random() -> Any:
    """The module; not as an attribute of numpy, which it is not yet while its import is being ended."""
    return importlib.import_module("numpy.random")


def seed_globals(base_seed: int, worker: int) -> None:
    """Seed `random`, `torch` and `numpy.random` as torch does in worker number `worker`.

    Not by `torch.manual_seed`, which seeds the generators of all devices too: within the training
    process these are the training code's, and nobody could restore them.
    """
    import torch

    random.seed(base_seed + worker)
    mine = now.stand_ins  # of a thread that plays a worker within its own
    default = torch.default_generator if mine is None or mine.tensor is None else mine.tensor
    default.manual_seed(base_seed + worker)
    _seed_numpy(base_seed, worker)


def _seed_numpy(base_seed: int, worker: int) -> None:
    _numpy_random().seed(numpy_seed(base_seed, worker))


def _seed_torch(seed: int) -> None:
    """In a process of its own: with the generators of all devices, as torch's worker does.

    For each kind of device that is not in use yet, torch keeps the stack of who has seeded it, as text.
    In a fork that is the whole program's, and took 6 ms of the 18 that a short-lived worker cost.
    """
    import torch

    limit = getattr(sys, "tracebacklimit", None)
    sys.tracebacklimit = 0
    try:
        torch.manual_seed(seed)
    finally:
        if limit is None:
            del sys.tracebacklimit
        else:
            sys.tracebacklimit = limit


class Seeds(Protocol):
    """How one worker comes to its random numbers."""

    method: ClassVar[str]
    """What `WorkerInfo.worker_method` says."""

    def generators(self, base_seed: int, worker: int) -> _RNG | None:
        """The worker's own generators, for `WorkerInfo.rng`."""

    def initialising(self, base_seed: int, worker: int) -> AbstractContextManager[None]:
        """Around `init_fn` and the opening of the first fetcher."""

    def working(self) -> AbstractContextManager[None]:
        """Around everything that the worker does later."""


class ProcessSeeds:
    """For a worker with a process of its own."""

    method: ClassVar[str] = "multiprocessing"

    def generators(self, base_seed: int, worker: int) -> _RNG | None:
        return None

    def initialising(self, base_seed: int, worker: int) -> AbstractContextManager[None]:
        # Whoever imports numpy or torch later gets it seeded: a worker need not have either. Since
        # numpy 2, `numpy.random` is imported when it is first asked for, which takes 15 ms.
        random.seed(base_seed + worker)
        when_imported("numpy.random", lambda: _seed_numpy(base_seed, worker))
        when_imported("torch", lambda: _seed_torch(base_seed + worker))
        return _NOTHING

    def working(self) -> AbstractContextManager[None]:
        return _NOTHING


class ThreadSeeds:
    """For a thread: the global generators belong to the training code and stay as they are.

    The object is made on the thread that starts the worker. That thread must wait while `init_fn`
    runs: changes to other generators than the worker's own are undone afterwards.

    Parameters
    ----------
    borrows
        Whether there is an `init_fn`, which reseeds and draws as if it had a process of its own.
    """

    method: ClassVar[str] = "thread"

    def __init__(self, *, borrows: bool) -> None:
        self._borrows = borrows
        self._starter = threading.get_ident()

    def generators(self, base_seed: int, worker: int) -> _RNG | None:
        import numpy as np
        import torch
        from torch.utils.data._utils.worker import _RNG  # its three fields are torch 2.13's

        return _RNG(
            random_generator=random.Random(base_seed + worker),
            torch_generator=torch.Generator().manual_seed(base_seed + worker),
            numpy_generator=np.random.default_rng(numpy_seed(base_seed, worker)),
        )

    @contextmanager
    def initialising(self, base_seed: int, worker: int) -> Iterator[None]:
        if not self._borrows:
            yield
            return
        from hybridloader.seeds.stand_ins import StandIns

        seed = base_seed + worker
        mine = StandIns()
        with lent.together(self._starter), mine.in_place():
            mine.seed_with(seed, numpy_seed(base_seed, worker), seed)
            yield

    def working(self) -> AbstractContextManager[None]:
        return _NOTHING


class InlineSeeds:
    """For a worker played by the caller: its states are swapped in while it works."""

    method: ClassVar[str] = "inline"

    def __init__(self) -> None:
        self._mine: Globals | None = None

    def generators(self, base_seed: int, worker: int) -> _RNG | None:
        return None

    @contextmanager
    def initialising(self, base_seed: int, worker: int) -> Iterator[None]:
        with lent.alone():
            before = Globals(devices=True)
            seed_globals(base_seed, worker)
            try:
                yield
            finally:
                self._mine = Globals()
                before.restore()

    @contextmanager
    def working(self) -> Iterator[None]:
        with lent.alone():
            before = Globals()
            if self._mine is not None:
                self._mine.restore()
            try:
                yield
            finally:
                self._mine = Globals()
                before.restore()


class LentSeeds:
    """For a worker played by the caller under ``seeding="sample"``, also with ``num_workers=0``.

    It has the global generators while it works, and seeds them for every sample; what they were before
    is put back behind every task, not every sample: that takes some 0.1 ms, most of it numpy's.

    Parameters
    ----------
    seeds
        What it would be without.
    """

    method: ClassVar[str] = "inline"

    def __init__(self, seeds: Seeds) -> None:
        self._seeds = seeds

    def generators(self, base_seed: int, worker: int) -> _RNG | None:
        return None

    @contextmanager
    def initialising(self, base_seed: int, worker: int) -> Iterator[None]:
        with self._seeds.initialising(base_seed, worker), self.working():
            yield

    @contextmanager
    def working(self) -> Iterator[None]:
        with lent.alone(), kept():
            yield


class StrangerSeeds(InlineSeeds):
    """For one that any thread may play: it borrows the global generators for `init_fn` alone."""

    @contextmanager
    def working(self) -> Iterator[None]:
        yield


def seeds_by_sample(seeds: Seeds, *, any_thread: bool) -> Seeds:
    """What a worker with `seeds` does under ``seeding="sample"``."""
    if isinstance(seeds, (ProcessSeeds, ThreadSeeds)):
        return seeds
    return StrangerSeeds() if any_thread else LentSeeds(seeds)


@contextmanager
def kept() -> Iterator[None]:
    """Leave the global generators of what is imported as they are now, and the sample of `rng`."""
    outer = now.digest, now.own
    python = random.getstate()
    array, tensor = sys.modules.get("numpy"), sys.modules.get("torch")
    states = None if array is None else array.random.get_state()
    default = None if tensor is None else tensor.get_rng_state()
    try:
        yield
    finally:
        now.digest, now.own = outer
        random.setstate(python)
        numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
        if array is not None:
            array.random.set_state(states)
        elif numpy is not None:  # imported meanwhile, and seeded for some sample
            numpy.random.seed()
        if tensor is not None:
            tensor.set_rng_state(default)
        elif torch is not None:
            torch.default_generator.seed()


class CallerSeeds:
    """For ``num_workers=0``: nothing is seeded, nothing is swapped."""

    method: ClassVar[str] = "caller"

    def generators(self, base_seed: int, worker: int) -> _RNG | None:
        return None

    def initialising(self, base_seed: int, worker: int) -> AbstractContextManager[None]:
        return _NOTHING

    def working(self) -> AbstractContextManager[None]:
        return _NOTHING
