"""Exclusive and shared use of the global generators of this process, with their states restored after.

An inline worker borrows the generators alone and sets its own states. Threads that run an `init_fn`
borrow them together. Each of these threads draws from its own replacements (see `thread_sample_rng`).
Some generators, such as those of devices, have no replacement; their states are restored after the
last thread. This module seeds nothing itself, except a library imported during a loan.
"""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from hybridloader._support import system
from hybridloader._support.torch_env import initialised, modules
from hybridloader.seeding.sample_rng import GLOBALS, NUMPY, now


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
        if initialised(module) is not False
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
    def alone(self) -> Iterator[None]:
        """Borrow the generators alone. A nested call, also within `together`, does nothing."""
        me = threading.get_ident()
        if now.generators is not GLOBALS or self._owner == me:
            yield
            return
        with self._free:
            self._free.wait_for(lambda: self._owner is None and not self._inside)
            self._owner = me
        try:
            yield
        finally:
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
