"""Observer of a stage: the one protocol for statistics, traces, watches and reports."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from hybridloader.engine.messages import Result
    from hybridloader.engine.meter import Metering


class Observer(Protocol):
    """Observer of a stage: statistics, and a trace. A stage has one only if somebody asked for it.

    All methods are called on the thread that pulls the stage.
    """

    each: bool
    """True if it follows each task: results, waits and idle workers, in addition to meters'
    measures."""
    opens_slowly: bool
    """True if it follows the opening of each result, because the last one was slow to open."""

    @property
    def metering(self) -> Metering | None:
        """Specification of the meters of the stage's workers; None: they have no meters."""

    def idle(self, workers: int, *, starved: bool) -> None:
        """Note that `workers` are idle from now on: nothing came in (`starved`), or nothing went out."""

    def waited_for(self, began: float, ended: float) -> None:
        """Note that the thread that pulls the stage waited for events."""

    def came(self, event: Result, since: float) -> None:
        """Record a result, and remove the `Measures` from its extras.

        `since` is the time from which the consumer has waited for a result; infinity if it does not
        wait.
        """

    def opened(self, seq: int, began: float, ended: float) -> None:
        """Note how long it took to open a result, one that came with measures or any."""

    def replaced(self, worker: int, cause: str | None) -> None:
        """Note that another worker took the place of one that had died of `cause`."""

    def raised(self, worker: int, seq: int, error: BaseException) -> None:
        """Note that the error of a task is raised."""
