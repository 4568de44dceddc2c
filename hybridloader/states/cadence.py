"""When a state is taken: with every step while that is cheap, and else at most for a share of the time.

Nobody knows ahead whether a state will be asked for, and once it is, whatever has it has run on: a
sampler and a worker are always ahead of what was handed out. So states are taken on the way, and
between two of them what was done is done again by whoever goes on: from the last state that was taken
there are only a few steps, which took no longer than `SHARE` times as long as taking it.
"""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter

SHARE = 50
"""Reciprocal of the share of time that taking states may take: 1/50, or 2 %."""

FREE = 50e-6
"""Seconds; a state that takes no longer is taken with every step."""

ASKED = 2e-3
"""Seconds; replaces `FREE` where the user has chosen how often a state is taken, and so pays."""

_COLD = 1e-3
"""Seconds; a first state that took less is taken a second time at once, for nothing was warm yet."""


class Cadence:
    """When the state of one thing is taken.

    One long step does not count: what a state is thought to take at most doubles, so that a process that
    was not run for a while does not make a small state dear.

    Parameters
    ----------
    clock
        Gives seconds.
    every
        Steps from one state to the next at least; the first is taken with the first step.
    free
        Seconds; what takes no longer is taken whenever `every` allows it.
    """

    __slots__ = ("_began", "_clock", "_cost", "_every", "_free", "_left", "_next")

    def __init__(
        self, clock: Callable[[], float] = perf_counter, *, every: int = 1, free: float = FREE
    ) -> None:
        self._clock, self._every, self._free = clock, every, free
        # All the mutable state:
        self._left = 0  # steps before which none is due
        self._began = 0.0
        self._cost = -1.0  # of taking one; negative: none was taken yet
        self._next = 0.0  # when the next one is due

    def due(self) -> bool:
        """Tell whether the state is to be taken now. If so, a call of `taken` must follow."""
        if self._left:
            self._left -= 1
            return False
        self._began = self._clock()
        return self._began >= self._next

    def taken(self) -> None:
        """It was, or could not be."""
        self._left = self._every - 1
        now, before = self._clock(), self._cost
        first, cost = before < 0, now - self._began
        self._cost = cost if first else min(cost, max(2 * before, self._free / 2))
        dear = self._cost > (max(_COLD, self._free) if first else self._free)
        self._next = now + (SHARE - 1) * self._cost if dear else 0.0

    def go_on(self, since: int) -> None:
        """So many steps were done since the state was taken last, by whoever was here before."""
        self._left = max(0, self._every - 1 - since)
