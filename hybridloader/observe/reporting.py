"""Reports while a loop runs: statistics for a function of the user's, now and then."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter

from hybridloader._support.arguments import function, seconds
from hybridloader._support.caller import warn
from hybridloader._support.errors import described
from hybridloader._support.text import short
from hybridloader.observe.stats import Stats


@dataclass(frozen=True)
class Observe:
    """Policy of `observe`: a function that is told the statistics while your loop runs.

    It is called on the thread of your loop, between two batches, and at the end of each epoch. What it
    takes is time of your loop. If it raises, a warning says so once, and the loop goes on.

    Parameters
    ----------
    on_stats
        Function of one `Stats`.
    every
        Seconds from one call to the next, at least.

    Raises
    ------
    TypeError, ValueError
        `on_stats` can't be called, or `every` is not above 0.

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
        function("on_stats", self.on_stats, "a function of one Stats")
        seconds("every", self.every, above=True)


def check_observe(value: Observe | None) -> None:
    """Check the `observe` of a run of a pipeline, which is measured in any case."""
    if value is not None and not isinstance(value, Observe):
        raise TypeError(
            f"observe must be Observe(on_stats, every=seconds) or None, not {short(value)}; a pipeline "
            "is always measured: run.stats()"
        )


class Reporter:
    """Calls a function with the result of `stats` when it is due. One thread uses it."""

    def __init__(self, policy: Observe, stats: Callable[[], Stats]) -> None:
        self._policy, self._stats = policy, stats
        # All the mutable state:
        self._warned = False
        self.begin()

    def begin(self) -> None:
        """Begin an epoch."""
        self._ended, self._due = False, perf_counter() + self._policy.every

    def look(self) -> None:
        """Call the function if it is due."""
        if perf_counter() >= self._due:
            self._call()

    def end(self) -> None:
        """Call the function a last time in this epoch."""
        if not self._ended:
            self._ended = True
            self._call()

    def _call(self) -> None:
        try:
            self._policy.on_stats(self._stats())
        except Exception as error:
            if not self._warned:
                self._warned = True
                warn(
                    f"on_stats raised {described(error)}. The loop goes on, and calls it "
                    f"again every {self._policy.every:g} s; this is not told again"
                )
        finally:
            self._due = perf_counter() + self._policy.every
