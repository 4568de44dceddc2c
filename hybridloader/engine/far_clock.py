"""Clock of a worker on another machine, told apart from ours by the shortest of some round trips."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from time import perf_counter
from typing import Any

from hybridloader.engine.meter import MEASURES

TRIPS = 3
"""Round trips at a time: of these the shortest counts, as the others have waited for something."""

EVERY = 30.0
"""Seconds from one look at the other clock to the next. Clocks of two machines part by some 50 us a
second at most: 1.5 ms meanwhile, about what a busy network adds to a round trip."""


class FarClock:
    """Offset of another machine's clock.

    Parameters
    ----------
    ask
        Asks for the time there; the future has it in seconds of `time.perf_counter`.
    """

    def __init__(
        self, ask: Callable[[], Future[float]], clock: Callable[[], float] = perf_counter
    ) -> None:
        self._ask, self._clock = ask, clock
        # All the mutable state:
        self.offset: float | None = None  # seconds to take off a time there; None: not known yet
        self._shortest = float("inf")
        self._left = 0  # round trips
        self._due = float("inf")  # time of the next look

    def look(self) -> None:
        """Begin to measure the offset."""
        self._left, self._shortest, self._due = TRIPS, float("inf"), self._clock() + EVERY
        self._trip()

    def _trip(self) -> None:
        self._left -= 1
        sent = self._clock()
        self._ask().add_done_callback(partial(self._answered, sent))

    def _answered(self, sent: float, told: Future[float]) -> None:
        now = self._clock()
        try:
            there = told.result()
        except Exception:  # it has died
            return
        if now - sent < self._shortest:
            self._shortest = now - sent
            self.offset = there - (sent + now) / 2
        if self._left > 0:
            self._trip()

    def translate(self, extras: dict[str, Any]) -> None:
        """Turn the times of measures into ours; take those out that came before the first answer."""
        if MEASURES not in extras:
            return
        if self.offset is None:
            del extras[MEASURES]
        else:
            extras[MEASURES] = extras[MEASURES].moved(-self.offset)
        if self._clock() >= self._due:
            self.look()
