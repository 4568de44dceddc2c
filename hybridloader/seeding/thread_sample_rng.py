"""``seeding="sample"`` for workers that share a process: each thread draws from its own generators.

A sample on a thread must not move the global generators, which belong to the training loop, and must
draw what it would draw in a process of its own. So while such workers run, `random`, `numpy.random` and
torch look at the thread first (see `thread_generators`). A function held by C code gets past that. Such
draws are looked for now and then, and reported once. A global generator's state is never changed.
"""

from __future__ import annotations

import random
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import cached_property
from typing import Any, TypeVar

from hybridloader.seeding.sample_rng import GLOBALS, NUMPY, Generators, SampleRng, now
from hybridloader.seeding.sample_seeds import Origin, SeedTriple, seeds
from hybridloader.seeding.thread_generators import installation, mode_class, shared_states

T = TypeVar("T")


class ThreadGenerators(Generators):
    """Generators of a thread in place of the global ones, for libraries that are imported."""

    def __init__(self) -> None:
        super().__init__(random.Random())
        self.array: Any = None  # a `numpy.random.RandomState`
        self.tensor: Any = None  # a `torch.Generator`
        self.mode: Any = nullcontext()  # in which torch's functions use `tensor`
        self.watched = False  # torch's functions are checked for draws from its default generator
        self.past: set[str] = set()  # libraries whose default generator was moved all the same

    def seed_numpy(self, seed: int | list[int]) -> None:
        if self.array is None:
            from numpy.random import RandomState

            self.array = RandomState()
        self.array.seed(seed)

    def seed_torch(self, seed: int) -> None:
        if self.tensor is None:
            import torch

            self.tensor = torch.Generator()
            self.mode = mode_class()(self)
        self.tensor.manual_seed(seed)

    @cached_property
    def generator(self) -> Any:
        """A `numpy.random.Generator` with the bit generator of `array`, so seeded with it."""
        from numpy.random import Generator

        return Generator(self.array._bit_generator)

    @contextmanager
    def in_place(self, found: SeedTriple) -> Iterator[None]:
        """Let this thread find these in place of the global ones, seeded with `found`."""
        import numpy.random  # noqa: F401
        import torch  # noqa: F401

        installation.take()
        outer, now.generators = now.generators, self
        try:
            self.seed(*found)
            with self.mode:
                yield
        finally:
            now.generators = outer
            installation.give_back()


class _Spare(threading.local):
    """Generators of a thread that no sample uses; a sample may make others meanwhile."""

    def __init__(self) -> None:
        self.found: list[ThreadGenerators] = []


_spare = _Spare()

_INFO = {"random_generator": "python", "torch_generator": "tensor", "numpy_generator": "generator"}


class _ThreadInfoRng:
    """`WorkerInfo.rng` on threads: the generators of the sample; `outside` of any, the worker's."""

    def __init__(self, outside: Any) -> None:
        self._outside = outside

    def __getattr__(self, name: str) -> Any:
        if name not in _INFO:
            raise AttributeError(name)
        mine = now.generators
        return getattr(self._outside, name) if mine is GLOBALS else getattr(mine, _INFO[name])


class ThreadSampleRng(SampleRng):
    """Gives each thread generators of its own while it makes a sample. See `SampleRng`."""

    def __init__(
        self,
        origin: Origin,
        worker: int,
        number: int = 0,
        *,
        stage: str = "",
        watch: _GlobalsWatch | None = None,
    ) -> None:
        self._end: Any = None
        self._watch = watch or _GlobalsWatch(stage)
        super().__init__(origin, worker, number)

    def prepare(self) -> None:
        if "numpy" in sys.modules:
            # Not in the middle of a sample: another thread may be in the middle of one, too.
            import numpy.random  # noqa: F401
        installation.take()
        self._end = weakref.finalize(self, installation.give_back)
        self._end.atexit = False
        super().prepare()

    def release(self) -> None:
        if self._end is not None:
            self._end()

    def info_rng(self, without: Any) -> Any:
        return None if without is None else _ThreadInfoRng(without)

    def _part(self, number: int) -> SampleRng:
        return ThreadSampleRng(self.origin, self.worker, number, watch=self._watch)

    def call(self, kind: bytes, key: bytes, function: Callable[..., T], *arguments: Any) -> T:
        digest = self.digest(kind, key)
        mine = _spare.found.pop() if _spare.found else ThreadGenerators()
        mine.seed(*seeds(digest))
        outer = now.digest, now.own, now.item, now.generators
        watch = self._watch
        watch.samples += 1
        looking = watch.samples >= watch.next
        before = watch.begin(mine) if looking else None
        now.digest, now.own, now.generators = digest, None, mine
        try:
            with mine.mode:
                return function(*arguments)
        finally:
            now.digest, now.own, now.item, now.generators = outer
            _spare.found.append(mine)
            if looking:
                watch.end(mine, before, key)


class _GlobalsWatch:
    """Looks for draws from the global generators while samples are made. One for each worker.

    A look takes 0.1 ms, so it looks at the samples that are number 1, 4, 16 and so on of its worker.
    """

    def __init__(self, stage: str) -> None:
        self._where = f" of stage {stage!r}" if stage else ""
        # All the mutable state:
        self.samples, self.next = 0, 1  # samples so far, and the number of the next look
        self._reported: set[str] = set()

    def begin(self, mine: ThreadGenerators) -> Any:
        self.next *= 4
        mine.watched = True
        return shared_states()

    def end(self, mine: ThreadGenerators, before: Any, key: bytes) -> None:
        mine.watched = False
        moved, mine.past = mine.past, set()
        after = shared_states()
        if before is not None and after is not None and before[1] == after[1]:
            moved |= {name for name, state in before[0].items() if after[0].get(name) != state}
        for generator in sorted(moved - self._reported):
            self._reported.add(generator)
            happened, advice = _MOVED[generator]
            text = key.decode("utf-8", "replace")
            sample = text[1:] if text[:1] in ("i", "s") else text
            warnings.warn(
                f"{happened} while a thread made sample {sample}{self._where}. If it was the "
                "sample, its numbers do not follow from its index and differ from those it has on "
                f"processes: {advice} If it was your loop, on another thread, nothing is "
                "wrong. (Told once for each worker and generator.)",
                RuntimeWarning,
                stacklevel=4,
            )


_MOVED = {
    "random": (
        "the generator of `random` was moved past hybridloader, as by a function that was imported on "
        "its own (`from random import random`),",
        "call it as `random.random()`, or use `hybridloader.rng().python`.",
    ),
    NUMPY: (
        "the generator of `numpy.random` was moved past hybridloader, as by a function that was "
        "imported on its own (`from numpy.random import rand`) or by an object that has kept "
        "`numpy.random.mtrand._rand`,",
        "call it as `numpy.random.rand()`, or use `hybridloader.rng().numpy`.",
    ),
    "torch": (
        "torch's default generator was moved by an operation that takes no generator, such as dropout,",
        "draw with `hybridloader.rng().torch`, or use a backend of processes.",
    ),
}
