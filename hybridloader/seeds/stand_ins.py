"""What a thread has in place of the global generators, and for how long libraries look for it.

A thread has them while it makes samples under ``seeding="sample"``, and while it runs an `init_fn`.
How libraries look for them is in `by_thread`. That is installed as long as somebody needs it; then
everything is as it was before. Nothing here changes the state of a global generator. But the memory
of two of them is read, to notice draws that did not find the stand-ins.
"""

from __future__ import annotations

import ctypes
import functools
import os
import random
import struct
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from hybridloader.late import when_imported
from hybridloader.seeds.by_thread import (
    HIDDEN,
    Patches,
    install_numpy,
    install_random,
    install_torch,
    mode_class,
    moves,
)
from hybridloader.seeds.draws import now
from hybridloader.seeds.sample_seeds import seeds


class StandIns:
    """The generators of one thread, in place of the global ones; those of libraries that are there.

    Attributes
    ----------
    python, array, tensor
        A `random.Random`, a `numpy.random.RandomState`, a `torch.Generator`.
    mode
        Gives torch's functions that generator, while it is entered.
    past
        Which global generators were seen to move all the same.
    """

    def __init__(self) -> None:
        self.python = random.Random()
        self.array: Any = None
        self.tensor: Any = None
        self.mode: Any = None
        self.past: set[str] = set()
        self._rng: Any = None

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Let this thread find these in place of the global ones, even if no other thread does."""
        installation.take()
        outer, now.stand_ins = now.stand_ins, self
        try:
            self._make()
            with self.mode:
                yield
        finally:
            now.stand_ins = outer
            installation.give_back()

    def seed(self, digest: bytes) -> None:
        self.seed_with(*seeds(digest))

    def seed_with(self, python: int, array: int | list[int], tensor: int) -> None:
        self.python.seed(python)
        if "numpy" in sys.modules:
            self._seed_array(array)
        if "torch" in sys.modules:
            self._seed_tensor(tensor)

    def _seed_array(self, seed: int | list[int]) -> None:
        import numpy as np

        if self.array is None:
            self.array = np.random.RandomState()
        self.array.seed(seed)

    def _seed_tensor(self, seed: int) -> None:
        if self.tensor is None:
            import torch

            self.tensor = torch.Generator()
            self.mode = mode_class()(self)
        self.tensor.manual_seed(seed)

    def came(self, name: str) -> None:
        """A library was imported in the middle of a sample."""
        if now.digest is None:
            return
        _, array, tensor = seeds(now.digest)
        if name == "numpy":
            self._seed_array(array)
        else:
            self._seed_tensor(tensor)

    def as_rng(self) -> Any:
        """As `WorkerInfo.rng` has it: the very generators, so they are seeded with them."""
        if self._rng is None:
            import numpy as np
            from torch.utils.data._utils.worker import _RNG

            self._make()
            # The same bit generator as the RandomState's, so seeded with it.
            generator = np.random.Generator(self.array._bit_generator)
            self._rng = _RNG(self.python, self.tensor, generator)
        return self._rng

    def _make(self) -> None:
        """Make the missing generators; this may import their libraries."""
        import numpy as np
        import torch

        if self.array is None:
            self.array = np.random.RandomState()
        if self.tensor is None:
            self.tensor = torch.Generator()
            self.mode = mode_class()(self)


# -- all of them -------------------------------------------------------------------------------------

_INSTALL = {"numpy": install_numpy, "torch": install_torch}

Fingerprints = tuple[bytes, bytes, int, int]


class _Installation:
    """Counts who needs it."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._count = 0
        self._patches = Patches()
        self._done: set[str] = set()
        self._awaited: set[str] = set()
        self._look_at_random: Any = None
        self._look_at_numpy: Any = None
        self._bits: Any = None  # whose memory is looked at

    def take(self) -> None:
        with self._lock:
            self._count += 1
            if self._count > 1:
                return
            install_random(self._patches)
            self._look_at_random = _memory_of_random()
            for name in _INSTALL:
                if name in sys.modules:
                    self._install(name)
                elif name not in self._awaited:
                    self._awaited.add(name)
                    when_imported(name, functools.partial(self._came, name))

    def give_back(self) -> None:
        with self._lock:
            self._count -= 1
            if self._count:
                return
            self._patches.undo()
            HIDDEN.__class__ = random.Random
            self._done.clear()
            self._look_at_numpy = self._look_at_random = self._bits = None

    def _came(self, name: str) -> None:
        with self._lock:
            self._awaited.discard(name)
            if self._count and name not in self._done:
                self._install(name)
        if now.stand_ins is not None:
            now.stand_ins.came(name)

    def _install(self, name: str) -> None:
        _INSTALL[name](self._patches)
        self._done.add(name)
        if name == "numpy":
            self._look_at_numpy, self._bits = _memory_of_numpy()

    def forked(self) -> None:
        """This process was forked: other threads may have held the lock, and are not here."""
        self._lock = threading.RLock()
        moves.drawing.clear()

    # -- whether somebody got past it ------------------------------------------------------------------

    def fingerprints(self) -> Fingerprints:
        """Of the two global generators that threads share, and how often others have moved them."""
        python, array, others = self._look_at_random, self._look_at_numpy, moves.others
        return (
            b"" if python is None else python.raw,
            b"" if array is None or moves.drawing else array.raw,
            others["random"],
            others["numpy"],
        )

    def moved(self, before: Fingerprints) -> set[str]:
        """Those that have moved since without anybody having said so."""
        after = self.fingerprints()
        if after == before:
            return set()
        found = set()
        if after[0] != before[0] and after[2] == before[2] and before[0] and after[0]:
            found.add("random")
        if after[1] != before[1] and after[3] == before[3] and before[1] and after[1]:
            found.add("numpy")
        return found


def _memory_of_random() -> Any:
    """Where the hidden instance has its place in its state and the first words of that; None: unknown.

    `random.getstate` would tell the same in 7 us. This takes 0.1, and is used only if it agrees.
    """
    if sys.implementation.name != "cpython":
        return None
    memory = (ctypes.c_char * 12).from_address(id(HIDDEN) + object.__basicsize__)
    place, *words = struct.unpack("=iII", memory.raw)
    state = random.Random.getstate(HIDDEN)[1]
    return memory if (place, words) == (state[-1], list(state[:2])) else None


def _memory_of_numpy() -> tuple[Any, Any]:
    """The last word of the state of numpy's global generator and the place in it; and its owner."""
    import numpy as np

    bits: Any = np.random.mtrand._rand._bit_generator
    if type(bits) is not np.random.MT19937:
        return None, None
    memory = (ctypes.c_char * 8).from_address(bits.ctypes.state_address + 4 * 623)
    state = bits.state["state"]
    agrees = struct.unpack("=Ii", memory.raw) == (int(state["key"][623]), int(state["pos"]))
    return (memory, bits) if agrees else (None, None)


installation = _Installation()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=installation.forked)
