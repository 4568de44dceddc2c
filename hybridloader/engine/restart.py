"""When a worker that died is replaced, and when a task is given up that kills its workers."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass
from typing import Any

from hybridloader._support.arguments import policy, seconds, whole


@dataclass(frozen=True)
class RestartPolicy:
    """Replace workers that die, and send what they had in hand to the new ones.

    A worker that dies before it has got ready is replaced too. Where none ever gets ready (the dataset's
    import ends it, for instance), that goes on until `max_restarts`, and the error says so.

    Parameters
    ----------
    max_restarts
        How many workers of one stage may be replaced within `window_seconds`; the next death raises.
    window_seconds
        Seconds that a restart counts.
    deaths_per_sample
        After how many deaths of a worker at the same sample this sample is given up: its place is taken
        by an error, which `on_error` may skip or replace. Where it is not known which sample of its
        task the worker was at, it is the whole task that is given up.
    """

    max_restarts: int = 10
    window_seconds: float = 600.0
    deaths_per_sample: int = 2

    def __post_init__(self) -> None:
        for name in ("max_restarts", "deaths_per_sample"):
            whole(f"RestartPolicy: {name}", getattr(self, name), 1)
        seconds("RestartPolicy: window_seconds", self.window_seconds, above=True)

    @classmethod
    def of(cls, value: Any, name: str = "on_worker_death") -> RestartPolicy | None:
        """The policy that `on_worker_death` names; None: a death is raised.

        Raises
        ------
        ValueError
            It names none.
        """
        if value is None:
            return None
        told = '"raise", "restart" or a RestartPolicy'
        words = {"raise": None, "restart": cls}
        found: RestartPolicy | None = policy(name, value, words, (cls,), told)
        return found


class Deaths:
    """What the workers of one stage have died of until now, for its policy."""

    def __init__(self, policy: RestartPolicy) -> None:
        self.policy = policy
        # All the mutable state:
        self._restarts: deque[float] = deque()
        self._at: Counter[tuple[int, int | None]] = Counter()  # by task and sample in it

    def may_restart(self, now: float) -> bool:
        """Count another restart, unless there were too many of late."""
        while self._restarts and self._restarts[0] <= now - self.policy.window_seconds:
            self._restarts.popleft()
        if len(self._restarts) >= self.policy.max_restarts:
            return False
        self._restarts.append(now)
        return True

    def count(self, seq: int, at: int | None) -> int:
        """Count a death at sample `at` of task `seq`; how many there were of it."""
        self._at[seq, at] += 1
        return self._at[seq, at]

    def forget(self) -> None:
        """A new epoch: its tasks have other numbers."""
        self._at.clear()
