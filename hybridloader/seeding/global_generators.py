"""Loans of the global generators of this process, which are given back with their states restored.

An inline worker borrows them alone and puts its own states in. Threads that run an `init_fn` borrow
them together: each thread finds generators of its own in their place (see `thread_sample_rng`), but
for some, such as those of devices, whose states are restored after the last thread. Nothing is seeded
here.
"""

from __future__ import annotations

import os
import random
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from hybridloader._support.devices_in_use import initialised, modules
from hybridloader.seeding.sample_rng import GLOBALS, NUMPY, now


class Globals:
    """States of the three global generators, as far as their libraries are imported.

    With `devices`, those of devices in use too, which ``torch.manual_seed`` sets as well.
    """

    def __init__(self, *, devices: bool = False) -> None:
        array, tensor = sys.modules.get(NUMPY), sys.modules.get("torch")
        self._python = random.getstate()
        self._array = None if array is None else array.get_state()
        # The CPU generator only: torch.get_rng_state and set_rng_state leave the devices alone.
        self._tensor = None if tensor is None else tensor.get_rng_state()
        self._devices = _device_states() if devices else []

    def restore(self) -> None:
        """Restore the states. A library that was imported meanwhile is seeded afresh."""
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
    """Restore the global generators after the block, and the sample of `rng`."""
    outer = now.digest, now.own
    before = Globals(devices=devices)
    try:
        yield
    finally:
        now.digest, now.own = outer
        before.restore()


def _device_states() -> list[tuple[Any, int, Any]]:
    """Return module, number and generator state of all devices that this process uses.

    A module that can't tell whether its device is in use is read too, unless this process can't use
    the device, as in a fork of a process that has used it.
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
    """Lock for one thread alone, or for any number of threads together.

    A thread with generators of its own in their place borrows nothing.
    """

    def __init__(self) -> None:
        self._free = threading.Condition()
        # All the mutable state:
        self._owner: int | None = None  # the thread that has them alone
        self._inside: set[int] = set()  # the threads that have them together
        self._before: Globals | None = None

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Borrow them alone. On the same thread again, or beneath `together`, it does nothing."""
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
        """Borrow them with other threads. After the last one they are as before the first.

        Thread `starter` started this one and waits for it; it may have borrowed them alone.
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
        """Forget, in the child of a fork, threads that exist only in the parent, and their lock."""
        me = threading.get_ident()
        self._free = threading.Condition()
        if self._owner != me:
            self._owner = None
        self._inside &= {me}


lent = _Lent()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=lent.forked)
