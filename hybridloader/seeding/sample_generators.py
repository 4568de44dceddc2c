"""Generators for the current sample (`rng`), which draw the same numbers on every backend.

They are separate from the global generators, so libraries, threads and the order of imports don't
affect them. They exist only while a sample is made under ``seeding="sample"``.
"""

from __future__ import annotations

import random
from functools import cached_property
from typing import TYPE_CHECKING

from hybridloader.seeding.sample_rng import GLOBALS, now
from hybridloader.seeding.sample_seeds import own_seeds

if TYPE_CHECKING:
    import numpy as np
    import torch as _torch


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
