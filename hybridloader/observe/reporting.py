"""Reports while a loop runs: the user's function is called with statistics at intervals."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter
from typing import Protocol

from hybridloader._support.arguments import flag, function, seconds
from hybridloader._support.text import warn
from hybridloader._support.user_objects import described
from hybridloader.observe.stats import Stats
from hybridloader.observe.thread_times import LoopWaits


@dataclass(frozen=True)
class Observe:
    """Policy of `observe`: a function that receives the statistics while your loop runs.

    The thread of your loop calls it between two batches and at the end of each epoch, so its time adds
    to the loop's. If it raises, one warning reports the first error and the loop continues.

    Parameters
    ----------
    on_stats
        Function of one `Stats`.
    every
        Minimum number of seconds between two calls.

    Raises
    ------
    TypeError, ValueError
        `on_stats` is not callable, or `every` is not above 0.

    Examples
    --------
    >>> from hybridloader import DataLoader, Observe
    >>> seen = []
    >>> loader = DataLoader(range(6), 2, observe=Observe(seen.append, every=10.0))
    >>> for batch in loader:
    ...     pass
    >>> seen[-1].items
    3
    """

    on_stats: Callable[[Stats], object]
    every: float = 10.0

    def __post_init__(self) -> None:
        function("on_stats", self.on_stats, "a function that takes one Stats")
        seconds("every", self.every, above=True)


def check_observe(value: bool | Observe) -> None:
    """Check the `observe` of a loader or a pipeline. Raises `TypeError`."""
    if not isinstance(value, Observe):
        flag("observe", value)


class Follower(Protocol):
    """Follower of the epochs of one observation: reports, or a row of a watch.

    Only the loop's thread calls it; any thread may call `end` of an epoch that is left.
    """

    def begin(self, loop: LoopWaits, stats: Callable[[], Stats]) -> None:
        """Begin an epoch. `stats` returns its statistics until now, on any thread."""

    def due(self) -> None:
        """Act between two items: the time ``loop.due`` has come."""

    def end(self, *, finished: bool) -> None:
        """End the epoch; `finished` if it has returned all its items."""


class Reporter(Follower):
    """Calls a function with statistics while the loop runs."""

    def __init__(self, policy: Observe) -> None:
        self._policy = policy
        # All the mutable state:
        self._warned = False
        self._loop: LoopWaits | None = None  # `due`: time of the next call; inf after the end
        self._stats: Callable[[], Stats]

    def begin(self, loop: LoopWaits, stats: Callable[[], Stats]) -> None:
        self._loop, self._stats = loop, stats
        loop.due = perf_counter() + self._policy.every

    def end(self, *, finished: bool) -> None:
        """Call the function a last time in this epoch, if it has returned all its items."""
        loop = self._loop
        if finished and loop is not None and loop.due < math.inf:
            try:
                self.due()
            finally:
                loop.due = math.inf

    def due(self) -> None:
        try:
            self._policy.on_stats(self._stats())
        except Exception as error:
            if not self._warned:
                self._warned = True
                warn(
                    f"on_stats raised {described(error)}. The loop continues and still calls it "
                    f"every {self._policy.every:g} s; later errors are not reported",
                    "on-stats",
                )
        finally:
            if self._loop is not None:
                self._loop.due = perf_counter() + self._policy.every
