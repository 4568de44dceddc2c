"""Policy for workers that die: how often they are replaced, and a sample that kills them is tried."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hybridloader._support.arguments import policy, seconds, whole


@dataclass(frozen=True)
class RestartPolicy:
    """Policy to replace workers that die, and to send their tasks to the new ones.

    A worker that dies before it has got ready is replaced too. If none ever gets ready (the dataset's
    import ends it, for instance), that goes on until `max_restarts`, and the error says so.

    Parameters
    ----------
    max_restarts
        Number of restarts in one stage within `window_seconds`; the next death raises. Workers that end
        together, with the process that forks them or with their machine, count as one restart.
    window_seconds
        Seconds that a restart counts.
    deaths_per_sample
        Number of deaths at the same sample after which it is given up: an error takes its place, which
        `on_error` may skip or replace. If it is not known which sample of its task the worker was at,
        the whole task is given up.
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
        told = '"raise", "restart" or a RestartPolicy'
        return policy(name, value, {"raise": None, "restart": cls}, (cls,), told)
