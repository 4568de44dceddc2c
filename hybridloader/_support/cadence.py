"""Times at which a state is taken: after every step if that is cheap, else rarely.

When the user asks for a state, the sampler and the workers have already prefetched beyond the result
that the loop received last. So states are taken during the epoch. A resumed epoch starts from the last
state and repeats the few steps after it. These took at most `SHARE` times as long as taking the state.
"""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter

SHARE = 50  # reciprocal of the share of time that may be spent on states: 1/50, or 2 %
FREE = 50e-6  # seconds; a state that takes no longer is taken after every step

ASKED = 2e-3
"""Seconds; replaces `FREE` where the user chose how often a state is taken, and so accepts the cost."""

_COLD = 1e-3
"""Seconds; after a first state that took less, the next step is measured too: caches were cold."""


class Cadence:
    """Decides when the state of one object is taken: with the first step, then `every` steps at most.

    A state that takes no more than `free` seconds is taken whenever `every` allows it. One slow call
    at most doubles the estimated cost of a state, so a pause of the process does not make a small
    state seem expensive.
    """

    def __init__(
        self, clock: Callable[[], float] = perf_counter, *, every: int = 1, free: float = FREE
    ) -> None:
        self._clock, self._every, self._free = clock, every, free
        # All the mutable state:
        self._left = 0  # number of steps until a state may be due
        self._began = 0.0
        self._cost = -1.0  # estimated seconds for one state; negative: none was taken yet
        self._next = 0.0  # time at which the next state is due

    def due(self) -> bool:
        """Return True if the state is to be taken now. If so, a call of `taken` must follow."""
        if self._left:
            self._left -= 1
            return False
        self._began = self._clock()
        return self._began >= self._next

    def taken(self) -> None:
        """Record that the state was taken, or that taking it failed."""
        self._left = self._every - 1
        now, before = self._clock(), self._cost
        first, cost = before < 0, now - self._began
        self._cost = cost if first else min(cost, max(2 * before, self._free / 2))
        dear = self._cost > (max(_COLD, self._free) if first else self._free)
        self._next = now + (SHARE - 1) * self._cost if dear else 0.0

    def go_on(self, since: int) -> None:
        """Count `since` steps that an earlier process did after its last state."""
        self._left = max(0, self._every - 1 - since)
