"""Seeds of workers, as in torch: worker ``i`` gets ``base_seed + i`` on every backend.

- A process worker seeds the global generators of its process.
- A thread shares the global generators with the training code, so it gets separate generators. While
  its `init_fn` runs, `random`, `numpy.random` and torch use these on that thread.
- An inline worker simulates a process: it sets the states of the global generators before it works and
  restores the caller's states afterwards.
- With ``num_workers=0`` the caller does the work with its own generators, as in torch.

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

from hybridloader._support import system
from hybridloader._support.torch_env import initialized, modules, when_imported
from hybridloader.seeding.sample_rng import GLOBALS, NUMPY, Kind, SampleRng, SeedTriple, now

if TYPE_CHECKING:
    from hybridloader._support.installed_torch import WorkerGenerators
    from hybridloader.seeding.thread_generators import ThreadGenerators


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


def _seed_torch(seed: int) -> None:
    """Seed torch in a worker process, with the generators of all devices, as torch's worker does.

    For each kind of device that is not in use yet, torch keeps the stack of the seeding call as text.
    A fork's stack includes the program's, which took 6 ms of the 18 ms of a short-lived worker. So
    the stack is limited to 0 frames here.
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
    """Seeding of one worker. This base class does nothing, as with ``num_workers=0``."""

    method: ClassVar[str] = "caller"
    """Name of the method in `WorkerInfo.worker_method`."""
    working: Callable[[], AbstractContextManager[None]] | None = None
    """Context of the worker's work after `initializing`; None: no context is needed."""

    def generators(self, base_seed: int, worker: int) -> WorkerGenerators | None:
        """Return the worker's own generators, for `WorkerInfo.rng`."""
        return None

    def initializing(self, base_seed: int, worker: int) -> AbstractContextManager[None]:
        """Return the context of `init_fn` and of the opening of the first fetcher."""
        return nullcontext() if self.working is None else self.working()

    def keep_for(self, rng: SampleRng, base_seed: int, worker: int) -> None:
        """Let `rng` use the worker's generators for the libraries that are not seeded by sample."""


class ProcessSeeds(WorkerSeeds):
    """Seeding of a worker that is a process."""

    method = "multiprocessing"

    def initializing(self, base_seed: int, worker: int) -> AbstractContextManager[None]:
        # numpy and torch are seeded when they are imported: a worker may need neither. Since
        # numpy 2, `numpy.random` is imported on first access, which takes 15 ms.
        random.seed(base_seed + worker)
        when_imported(NUMPY, lambda: GLOBALS.seed_numpy(numpy_seed(base_seed, worker)))
        when_imported("torch", lambda: _seed_torch(base_seed + worker))
        return nullcontext()


class ThreadSeeds(WorkerSeeds):
    """Seeding of a thread, which leaves the training code's global generators unchanged.

    The object is made on the thread that starts the worker. That thread must wait while `init_fn`
    runs, because changes to the global generators are undone afterwards. With `borrows`, for a worker
    that has an `init_fn`, the worker borrows the global generators meanwhile. `init_fn` then draws
    the numbers that it would draw in a process.
    """

    method = "thread"

    def __init__(self, *, borrows: bool) -> None:
        self._borrows = borrows
        self.made: ThreadGenerators | None = None
        """Generators that replaced the global ones while `init_fn` ran."""
        self._starter = threading.get_ident()

    def generators(self, base_seed: int, worker: int) -> WorkerGenerators | None:
        import numpy as np
        import torch

        from hybridloader._support.installed_torch import WorkerGenerators

        return WorkerGenerators(
            random_generator=random.Random(base_seed + worker),
            torch_generator=torch.Generator().manual_seed(base_seed + worker),
            numpy_generator=np.random.default_rng(numpy_seed(base_seed, worker)),
        )

    @contextmanager
    def initializing(self, base_seed: int, worker: int) -> Iterator[None]:
        if not self._borrows:
            yield
            return
        from hybridloader.seeding.thread_generators import ThreadGenerators

        self.made = ThreadGenerators()
        with lent.together(self._starter), self.made.in_place(_seeds(base_seed, worker)):
            yield

    def keep_for(self, rng: SampleRng, base_seed: int, worker: int) -> None:
        made, kind = self.made, rng.origin.kind
        if kind is Kind.WORKER:
            from hybridloader.seeding.thread_generators import LIBRARIES, ThreadGenerators

            if made is None:
                made = ThreadGenerators()
                made.seed(*_seeds(base_seed, worker))
            made.reseeded.update(LIBRARIES)
        if made is not None and made.reseeded and kind is not Kind.SAMPLE:
            rng.kept = made


class InlineSeeds(WorkerSeeds):
    """Seeding of an inline worker: the global generators have its states while it works."""

    method = "inline"

    def __init__(self) -> None:
        self._mine: Globals | None = None

    @contextmanager
    def initializing(self, base_seed: int, worker: int) -> Iterator[None]:
        import torch  # noqa: F401

        found = _seeds(base_seed, worker)
        with lent.alone(devices=True):
            # Not `torch.manual_seed`, which also seeds the generators of all devices.
            now.generators.seed(*found)
            try:
                yield
            finally:
                self._mine = Globals()

    @contextmanager
    def working(self) -> Iterator[None]:
        with lent.alone():
            if self._mine is not None:
                self._mine.restore()
            try:
                yield
            finally:
                self._mine = Globals()


def seeds_by_sample(seeds: WorkerSeeds, *, any_thread: bool) -> WorkerSeeds:
    """Return `seeds` of a worker, adapted to ``seeding="sample"``.

    A worker on the caller's thread (inline or ``num_workers=0``) borrows the global generators while
    it works and seeds them for each sample. Their states are restored after each task, not each
    sample, because that takes about 0.1 ms, most of it in numpy. With `any_thread`, the worker borrows
    them only for `init_fn`.
    """
    if seeds.method in ("caller", "inline"):
        seeds.working = None if any_thread else lent.alone
    return seeds


# -- exclusive and shared use of the global generators of this process, with their states restored after
#
# An inline worker borrows the generators alone and sets its own states. Threads that run an `init_fn`
# borrow them together. Each of these threads draws from its own replacements (see `thread_generators`).
# Some generators, such as those of devices, have no replacement; their states are restored after the
# last thread. This module seeds nothing itself, except a library imported during a loan.


class Globals:
    """States of the global generators of `random`, numpy and torch, if the library is imported.

    With `devices`, also of the devices in use, which ``torch.manual_seed`` seeds too.
    """

    def __init__(self, *, devices: bool = False) -> None:
        array, tensor = sys.modules.get(NUMPY), sys.modules.get("torch")
        self._python = random.getstate()
        self._array = None if array is None else array.get_state()
        # The CPU generator only: torch.get_rng_state and set_rng_state leave the devices alone.
        self._tensor = None if tensor is None else tensor.get_rng_state()
        self._devices = _device_states() if devices else []

    def restore(self) -> None:
        """Restore the states, and seed the libraries that were imported since they were saved."""
        random.setstate(self._python)
        array, tensor = sys.modules.get(NUMPY), sys.modules.get("torch")
        if self._array is not None:
            array.set_state(self._array)  # type: ignore[union-attr]
        elif array is not None:
            array.seed()
        if self._tensor is not None:
            tensor.set_rng_state(self._tensor)  # type: ignore[union-attr]
        elif tensor is not None:
            tensor.default_generator.seed()
        for module, number, state in self._devices:
            module.set_rng_state(state, number)


@contextmanager
def kept(*, devices: bool = False) -> Iterator[None]:
    """Restore the global generators and the sample of `rng` after the block."""
    outer = now.digest, now.own
    before = Globals(devices=devices)
    try:
        yield
    finally:
        now.digest, now.own = outer
        before.restore()


def _device_states() -> list[tuple[Any, int, Any]]:
    """Return module, number and generator state of all devices that this process uses.

    A module that does not report whether its device is in use counts as in use. Modules that this
    process can't use are left out, as in a fork of a process that has used the device.
    """
    return [
        (module, number, module.get_rng_state(number))
        for module in modules().values()
        if initialized(module) is not False
        and hasattr(module, "get_rng_state")
        and not getattr(module, "_is_in_bad_fork", bool)()
        for number in range(module.device_count())
    ]


class _Lent:
    """Lock on the global generators for one thread alone, or for any number of threads together.

    A thread that draws from its own replacements already does not need the lock.
    """

    def __init__(self) -> None:
        self._free = threading.Condition()
        # All the mutable state:
        self._owner: int | None = None  # the thread that holds them alone
        self._inside: set[int] = set()  # the threads that share them
        self._before: Globals | None = None

    @contextmanager
    def alone(self, *, devices: bool = False) -> Iterator[None]:
        """Borrow the generators alone, `kept`. A nested call, also within `together`, does not wait."""
        me = threading.get_ident()
        nested = now.generators is not GLOBALS or self._owner == me
        if not nested:
            with self._free:
                self._free.wait_for(lambda: self._owner is None and not self._inside)
                self._owner = me
        try:
            with kept(devices=devices):
                yield
        finally:
            if not nested:
                with self._free:
                    self._owner = None
                    self._free.notify_all()

    @contextmanager
    def together(self, starter: int) -> Iterator[None]:
        """Borrow the generators with other threads; the last thread to leave restores their states.

        Thread `starter` started this thread and waits for it, so `starter` may hold them alone.
        """
        me = threading.get_ident()
        with self._free:
            self._free.wait_for(lambda: self._owner in (None, starter))
            if not self._inside:
                self._before = Globals(devices=True)
            self._inside.add(me)
        try:
            yield
        finally:
            with self._free:
                self._inside.discard(me)
                if not self._inside:
                    before, self._before = self._before, None
                    assert before is not None
                    before.restore()
                    self._free.notify_all()

    def forked(self) -> None:
        """Drop, in the child of a fork, the lock and the threads that exist only in the parent."""
        me = threading.get_ident()
        self._free = threading.Condition()
        if self._owner != me:
            self._owner = None
        self._inside &= {me}


lent = _Lent()
system.at_fork(after_in_child=lent.forked)
