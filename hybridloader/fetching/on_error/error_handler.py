"""An error policy as one worker applies it: retries and replacements of single calls.

Only an `Exception` is caught. Nothing is counted here, because a worker sees only its own part.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from hybridloader._support.errors import add_note, foreign, is_a, part, set_part
from hybridloader.engine.fetcher import Abandoned, GivenUp, TaskContext
from hybridloader.fetching.on_error.policies import Policy, Replace, Retry, Skip, final
from hybridloader.seeding.sample_rng import SampleRng

_SLICE = 0.02  # seconds between two looks at the context while waiting for a retry


def seeded(policy: Any, rng: SampleRng | None, key: Callable[[Any], bytes] | None = None) -> Any:
    """Return `policy` with replacements that are seeded by the `key` of the failed sample.

    None takes the key of its index.
    """
    if rng is not None and isinstance(policy, Retry):
        return replace(policy, then=seeded(policy.then, rng, key))
    if rng is not None and isinstance(policy, Replace):
        return replace(policy, fn=rng.seeded_replacement(policy.fn, key))
    return policy


class ErrorHandler:
    """Retries calls that failed, or replaces their result."""

    def __init__(
        self,
        policy: Policy | None,  # None: every error is raised again
        context: TaskContext,  # ends a wait when it is cancelled
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._retry = policy if isinstance(policy, Retry) else None
        last = final(policy)
        self._replace = last if isinstance(last, Replace) else None
        self.skips = isinstance(last, Skip)
        self.acts = self._retry is not None or self._replace is not None
        self._context, self._sleep = context, sleep

    def rescue(
        self, function: Callable[[Any], Any], argument: Any, index: Any, error: Exception
    ) -> tuple[Any, Exception | None]:
        """Retry ``function(argument)``, which has raised `error`; a `GivenUp` is not retried.

        Return the value, and the error that it replaces (None if a retry gave it); or raise the last
        error, if the policy does not replace it.
        """
        try:
            if self._retry is not None and type(argument) is not GivenUp:
                wait = min(self._retry.backoff, self._retry.longest)
                for _ in range(self._retry.times):
                    if not is_a(error, self._retry.on):
                        break
                    self._pause(wait)
                    wait = min(2 * wait, self._retry.longest)
                    self._context.retried += 1
                    try:
                        return function(argument), None
                    except Exception as raised:
                        error = foreign(raised)
            if self._replace is None:
                raise error
            try:
                return self._replace.fn(index, error), error
            except Exception as raised:
                failed = foreign(raised)
            add_note(failed, "Raised by the function of Replace, for a sample that had failed.")
            # It may raise the same again.
            if part(failed, "__cause__") is None and failed is not error:
                set_part(failed, "__cause__", error)
            try:
                raise failed
            finally:
                del failed
        finally:
            del error  # its traceback has this frame

    def _pause(self, seconds: float) -> None:
        while seconds > 0 and not self._context.cancelled:
            self._sleep(min(seconds, _SLICE))
            seconds -= _SLICE
        if self._context.cancelled:
            raise Abandoned
