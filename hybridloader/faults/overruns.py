"""Tasks that take longer than they may are found, and their workers killed where others replace them."""

from __future__ import annotations

from dataclasses import replace

from hybridloader.errors import TaskTimeout
from hybridloader.messages import Exited
from hybridloader.roster import START, Roster
from hybridloader.scheduler import Work


class Overruns:
    """Watches the tasks of one stage.

    A task's time counts from when its worker can have begun with it: when it was sent, or when the task
    before it was answered, as far as the stage has heard. So nobody is blamed for a consumer that was
    away for long. A worker that does not get ready runs over, too, after `START` seconds more.

    Parameters
    ----------
    timeout
        Seconds that a worker may take for one task.
    threads
        Whether the workers are threads, which can't be killed.
    replaced
        Whether another takes the place of a worker that dies.
    """

    def __init__(self, roster: Roster, timeout: float, *, threads: bool, replaced: bool) -> None:
        self._roster, self._timeout = roster, timeout
        self._threads, self._replaced = threads, replaced
        self._killed: dict[int, tuple[str, str]] = {}
        """Workers that were killed and have not exited yet: why, and where they were."""

    def sooner(self, remaining: float | None) -> float | None:
        """`remaining` seconds, or less if a task runs over before."""
        longest = self._roster.longest()
        if longest is None:
            return remaining
        left = max(0.0, self._timeout - longest[0])
        return left if remaining is None else min(remaining, left)

    def look(self) -> None:
        """Kill a worker whose task has run over.

        Raises
        ------
        TaskTimeout
            It can't be replaced.
        """
        longest = self._roster.longest()
        if longest is None or longest[0] < self._timeout:
            return
        seconds, worker = longest
        stack = self._roster.crew.stack(worker)
        if self._threads or not self._replaced:
            told = self._roster.overrun(worker, seconds, self._timeout, stack, thread=self._threads)
            raise TaskTimeout(told)
        what = "its task ran over"
        if self._roster.scheduler.workers[worker] is not Work.READY:
            what = f"it was not ready after {START:g} seconds more than"
        why = f"was killed because {what} task_timeout={self._timeout:g} seconds"
        self._killed[worker] = why, stack
        self._roster.since[worker] = self._roster.clock()  # it is not killed again for it
        self._roster.crew.kill(worker)

    def explained(self, death: Exited) -> Exited:
        """The death of a worker, with the reason why, if it was killed from here."""
        why, stack = self._killed.pop(death.worker, (death.cause, death.evidence))
        if death.cause is None or why == death.cause:
            return death
        return replace(death, cause=why, evidence=stack, memory="", slots=None)
