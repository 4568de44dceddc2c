"""Policy for workers that die: the numbers of restarts, and of attempts at a sample that kills them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hybridloader._support.arguments import policy, seconds, whole


@dataclass(frozen=True)
class RestartPolicy:
    """Policy to restart workers that die, and to send their tasks to the restarted ones.

    A worker that dies before it is ready is restarted too. If no worker becomes ready (the dataset's
    import ends it, for instance), restarts continue until `max_restarts`; then an error is raised.

    Parameters
    ----------
    max_restarts
        Number of restarts in one stage within `window_seconds`; the next death raises. Workers that end
        together, with the process that forks them or with their machine, count as one restart.
    window_seconds
        Seconds that a restart counts.
    deaths_per_sample
        Number of deaths at the same sample after which it is given up: an error replaces it, which
        `on_error` may skip or replace. If the sample within the task is unknown, the whole task is given
        up.
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
        """Return the policy that `on_worker_death` names; None: a death is raised.

        Raises `ValueError` if it names none.
        """
        if value is None:
            return None
        choices = '"raise", "restart" or a RestartPolicy'
        return policy(name, value, {"raise": None, "restart": cls}, (cls,), choices)
