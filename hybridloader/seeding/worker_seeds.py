"""Seeds of workers, as torch's: worker ``i`` gets ``base_seed + i``, whatever kind of worker it is.

A process worker owns the global generators of its process and seeds them. A thread shares them with
the training code, so it gets generators of its own. While its `init_fn` runs, `random`,
`numpy.random` and torch use these on that thread. An inline worker plays a process: it swaps the
states of the global generators in before it works and out again afterwards. With ``num_workers=0``
the caller does the work, with its own generators, as torch does.

The rules are torch's `_worker_loop` (torch/utils/data/_utils/worker.py, 2.13); numpy's seed there is
a copy of `numpy.random.SeedSequence`, so numpy's own is used here.
"""

from __future__ import annotations

import importlib
import random
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, ClassVar

from hybridloader._support.import_hooks import when_imported
from hybridloader.seeding.global_generators import Globals, kept, lent
from hybridloader.seeding.sample_rng import SampleRng, now
from hybridloader.seeding.sample_seeds import Kind, SeedTriple

if TYPE_CHECKING:
    from torch.utils.data._utils.worker import _RNG

    from hybridloader.seeding.thread_sample_rng import ThreadGenerators


def numpy_seed(base_seed: int, worker: int) -> list[int]:
    """Return the four 32-bit words that torch seeds numpy with in worker number `worker`."""
    words = [worker, base_seed & 0xFFFFFFFF, base_seed >> 32, 0]
    # Not `numpy.random`, which numpy does not have yet at the end of that module's import.
    numpy_random: Any = importlib.import_module("numpy.random")
    state: list[int] = numpy_random.SeedSequence(words).generate_state(4).tolist()
    return state


def _seeds(base_seed: int, worker: int) -> SeedTriple:
    """Return the seeds of `random`, numpy and torch that torch takes in worker number `worker`."""
    return SeedTriple(base_seed + worker, numpy_seed(base_seed, worker), base_seed + worker)


def _seed_numpy(base_seed: int, worker: int) -> None:
    importlib.import_module("numpy.random").seed(numpy_seed(base_seed, worker))


def _seed_torch(seed: int) -> None:
    """Seed torch in a process of its own, with the generators of all devices, as torch's worker does.

    For each kind of device that is not in use yet, torch keeps the stack of the seeding call, as text.
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


class WorkerSeeds:
    """Seeding of one worker. This one seeds nothing and swaps nothing."""

    method: ClassVar[str] = "caller"
    """Name of the method in `WorkerInfo.worker_method`."""
    working: Callable[[], AbstractContextManager[None]] | None = None
    """Context of all that the worker does after `initialising`; None: it needs none."""

    def generators(self, base_seed: int, worker: int) -> _RNG | None:
        """Return the worker's own generators, for `WorkerInfo.rng`."""
        return None

    def initialising(self, base_seed: int, worker: int) -> AbstractContextManager[None]:
        """Return the context of `init_fn` and of the opening of the first fetcher."""
        return nullcontext() if self.working is None else self.working()

    def keep_for(self, rng: SampleRng, base_seed: int, worker: int) -> None:
        """Have `rng` draw from the worker's generators what is not seeded for each sample."""


class CallerSeeds(WorkerSeeds):
    """Seeding for ``num_workers=0``: the caller has its own generators."""


class ProcessSeeds(WorkerSeeds):
    """Seeding of a worker with a process of its own."""

    method = "multiprocessing"

    def initialising(self, base_seed: int, worker: int) -> AbstractContextManager[None]:
        # A worker need not have numpy or torch: they are seeded when they are imported. Since
        # numpy 2, `numpy.random` is imported when it is first asked for, which takes 15 ms.
        random.seed(base_seed + worker)
        when_imported("numpy.random", lambda: _seed_numpy(base_seed, worker))
        when_imported("torch", lambda: _seed_torch(base_seed + worker))
        return nullcontext()


class ThreadSeeds(WorkerSeeds):
    """Seeding of a thread: the global generators belong to the training code and stay as they are.

    The object is made on the thread that starts the worker. That thread must wait while `init_fn`
    runs: changes to other generators than the worker's own are undone afterwards. The worker `borrows`
    the global ones if it has an `init_fn`, which draws as if it had a process of its own.
    """

    method = "thread"

    def __init__(self, *, borrows: bool) -> None:
        self._borrows = borrows
        self.made: ThreadGenerators | None = None
        """Generators that `init_fn` found in place of the global ones."""
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
        from hybridloader.seeding.thread_sample_rng import ThreadGenerators

        self.made = ThreadGenerators()
        with lent.together(self._starter), self.made.in_place(_seeds(base_seed, worker)):
            yield

    def keep_for(self, rng: SampleRng, base_seed: int, worker: int) -> None:
        made, kind = self.made, rng.origin.kind
        if kind is Kind.WORKER:
            from hybridloader.seeding.thread_sample_rng import LIBRARIES, ThreadGenerators

            if made is None:
                made = ThreadGenerators()
                made.seed(*_seeds(base_seed, worker))
            made.reseeded |= LIBRARIES
        if made is not None and made.reseeded and kind is not Kind.SAMPLE:
            rng.kept = made


class InlineSeeds(WorkerSeeds):
    """Seeding of a worker that the caller plays: its states are swapped in while it works."""

    method = "inline"

    def __init__(self) -> None:
        self._mine: Globals | None = None

    @contextmanager
    def initialising(self, base_seed: int, worker: int) -> Iterator[None]:
        import torch  # noqa: F401

        found = _seeds(base_seed, worker)
        with lent.alone(), kept(devices=True):
            # Not by `torch.manual_seed`, which seeds the generators of all devices too.
            now.generators.seed(*found)
            try:
                yield
            finally:
                self._mine = Globals()

    @contextmanager
    def working(self) -> Iterator[None]:
        with lent.alone(), kept():
            if self._mine is not None:
                self._mine.restore()
            try:
                yield
            finally:
                self._mine = Globals()


def seeds_by_sample(seeds: WorkerSeeds, *, any_thread: bool) -> WorkerSeeds:
    """Return `seeds` of a worker, adapted to ``seeding="sample"``.

    If the caller plays it, also with ``num_workers=0``, it has the global generators while it works, and
    seeds them for every sample. They are restored after every task, not every sample: that takes some
    0.1 ms, most of it numpy's. If any thread may play it, it borrows them for `init_fn` alone.
    """
    if isinstance(seeds, (CallerSeeds, InlineSeeds)):
        seeds.working = None if any_thread else _borrowed  # type: ignore[method-assign]
    return seeds


@contextmanager
def _borrowed() -> Iterator[None]:
    with lent.alone(), kept():
        yield
