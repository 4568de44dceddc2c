"""Generators for the sample that is being made (`rng`), the same on every backend.

They are not the global ones, so no library, thread or order of imports interferes. Outside of a sample
under ``seeding="sample"`` there are none.
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
    """Generators of one sample, each made when it is first asked for."""

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
    """Return the generators of the sample that is being made; the same ones until the next sample.

    Returns
    -------
    SampleGenerators
        With the attributes `python`, `numpy` and `torch`.

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
            'rng() is for samples that are made under seeding="sample", and none is being made on '
            'this thread. Give DataLoader or the step of a Pipeline seeding="sample"; a thread of your '
            "own has to be handed the generators"
        )
    if mine.own is None:
        mine.own = SampleGenerators(digest)
    found: SampleGenerators = mine.own
    return found
