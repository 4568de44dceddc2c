"""One call of a user's function under a policy of `on_error`, in the worker: again, or something else.

Only what is an `Exception` is caught. Nothing is counted here, because a worker sees only its own part.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from hybridloader.errors import Failure, add_note, no_stop
from hybridloader.faults.on_error import Policy, Replace, Retry, Skip, final
from hybridloader.faults.tried import Miss
from hybridloader.fetch import GivenUp
from hybridloader.fetcher import Abandoned, TaskContext

_SLICE = 0.02
"""Seconds between two looks at the flag while waiting to try again."""


class Swapped:
    """A value that takes the place of one that could not be had, because of `error`."""

    __slots__ = ("error", "value")

    def __init__(self, value: Any, error: Exception) -> None:
        self.value, self.error = value, error


class Guard:
    """Calls functions for single samples, again if need be.

    Parameters
    ----------
    policy
        None does nothing but raise.
    context
        Ends a wait.
    sleep
        Seconds.
    """

    def __init__(
        self,
        policy: Policy | None,
        context: TaskContext,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._retry = policy if isinstance(policy, Retry) else None
        last = final(policy)
        self._replace = last if isinstance(last, Replace) else None
        self.skips = isinstance(last, Skip)
        self.acts = self._retry is not None or self._replace is not None
        self._context, self._sleep = context, sleep

    def __call__(self, function: Callable[[Any], Any], argument: Any) -> Any:
        """``function(argument)``, or something `Swapped`. Raises what can't be helped."""
        if type(argument) is GivenUp:
            return self.give_up(argument.index, argument.error())
        try:
            return function(argument)
        except Exception as raised:
            error = no_stop(raised)
        try:
            return self.rescue(function, argument, argument, error)
        finally:
            del error

    def rescue(
        self, function: Callable[[Any], Any], argument: Any, index: Any, error: Exception
    ) -> Any:
        """What to do of ``function(argument)``, which has raised `error`."""
        try:
            if self._retry is not None:
                wait = min(self._retry.backoff, self._retry.longest)
                for _ in range(self._retry.times):
                    if not isinstance(error, self._retry.on):
                        break
                    self._pause(wait)
                    wait = min(2 * wait, self._retry.longest)
                    try:
                        return function(argument)
                    except Exception as raised:
                        error = no_stop(raised)
            return self.give_up(index, error)
        finally:
            del error  # its traceback has this frame

    def give_up(self, index: Any, error: Exception) -> Any:
        """The last that can be done: something `Swapped`, or `error` is raised."""
        if self._replace is None:
            try:
                raise error
            finally:
                del error
        try:
            return Swapped(self._replace.fn(index, error), error)
        except Exception as raised:
            failed = no_stop(raised)
            add_note(failed, "Raised by the function of Replace, for a sample that had failed.")
            if failed.__cause__ is None and failed is not error:  # it may raise the same again
                failed.__cause__ = error
            try:
                raise failed
            finally:
                del failed
        finally:
            del error

    def _pause(self, seconds: float) -> None:
        while seconds > 0 and not self._context.cancelled:
            self._sleep(min(seconds, _SLICE))
            seconds -= _SLICE
        if self._context.cancelled:
            raise Abandoned


def miss_of(index: Any, position: int, error: Exception, *, replaced: bool = False) -> Miss:
    """What is told of a sample that failed."""
    if type(index) is GivenUp:
        index = index.index
    return Miss(index, position, Failure(error), replaced)
