"""Random generators that are as before after a measurement."""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def untouched_generators(*holders: Any) -> Iterator[None]:
    """Restore the generators of this process afterwards, and those that `holders` have as attributes.

    They are those of `random`, of NumPy and of torch on the CPU. Samplers within samplers count, too.
    """
    import torch

    found: dict[int, torch.Generator] = {}
    met: set[int] = set()
    todo = list(holders)
    while todo:
        one = todo.pop()
        if one is None or id(one) in met:
            continue
        met.add(id(one))
        if isinstance(one, torch.Generator):
            found[id(one)] = one
            continue
        for name in ("generator", "sampler", "batch_sampler"):
            with contextlib.suppress(Exception):
                todo.append(getattr(one, name))
    states = [(generator, generator.get_state()) for generator in found.values()]
    torchs, pythons = torch.get_rng_state(), random.getstate()
    numpy: Any = sys.modules.get("numpy")
    numpys = None if numpy is None else numpy.random.get_state()
    try:
        yield
    finally:
        for generator, state in states:
            generator.set_state(state)
        torch.set_rng_state(torchs)
        random.setstate(pythons)
        if numpy is not None:
            numpy.random.set_state(numpys)
