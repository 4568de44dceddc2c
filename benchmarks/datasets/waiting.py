"""A dataset whose samples wait, as for a server, some of them much longer than most."""

from __future__ import annotations

import random
from time import sleep

USUAL, FACTOR, ONE_IN = 3e-3, 20, 16
"""Seconds of a usual sample; one in so many takes that many times as long."""

SIGMA = 1.5
"""Spread of the lognormal times: with 1,600 samples the median is a third of the mean, the longest 23
times the mean."""


def few_slow(length: int) -> list[float]:
    """Seconds of samples of which exactly one in 16, at random, takes 20 times the others' time."""
    slow = set(random.Random(0).sample(range(length), length // ONE_IN))
    return [USUAL * (FACTOR if index in slow else 1) for index in range(length)]


def heavy_tail(length: int) -> list[float]:
    """Lognormal seconds of samples, which sum up to those of `few_slow`."""
    chance = random.Random(0)
    drawn = [chance.lognormvariate(0, SIGMA) for _ in range(length)]
    scale = sum(few_slow(length)) / sum(drawn)
    return [scale * value for value in drawn]


SPREADS = {"few": few_slow, "tail": heavy_tail}


class SlowSamples:
    """Samples that sleep and are their own index.

    Parameters
    ----------
    spread
        "few" for `few_slow`, "tail" for `heavy_tail`.

    Attributes
    ----------
    total
        Seconds that all samples take together.
    """

    def __init__(self, length: int, spread: str) -> None:
        self.seconds = SPREADS[spread](length)
        self.total = sum(self.seconds)

    def __len__(self) -> int:
        return len(self.seconds)

    def __getitem__(self, index: int) -> int:
        sleep(self.seconds[index])
        return index
