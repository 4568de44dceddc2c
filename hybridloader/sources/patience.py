"""Requests that are made again after a failure, with pauses that grow and differ between callers."""

from __future__ import annotations

import random
from collections.abc import Callable
from time import monotonic, sleep
from typing import TypeVar

from hybridloader._support.user_objects import attribute

R = TypeVar("R")

RETRY = 60.0
"""Seconds from the first failure of a request in which it is retried."""

_FIRST, _LONGEST = 0.1, 4.0
"""Seconds of the first and of the longest pause, at most; each pause is twice the one before."""

_PASSING = {408, 425, 429, 500, 502, 503, 504}
"""HTTP status codes after which a retry may succeed."""

_jitter = random.SystemRandom()
"""Shared with no fork. It leaves the state of `random` unchanged."""


def patiently(seconds: float, call: Callable[[], R], may_pass: Callable[[Exception], bool]) -> R:
    """Return the result of `call`, and call it again after errors that `may_pass`.

    The pauses are random ("full jitter"), so that workers which failed together do not come back
    together. No pause begins that would end more than `seconds` after the first failure; then the last
    error is raised.
    """
    longest, until = _FIRST, None
    while True:
        try:
            return call()
        except Exception as error:
            now = monotonic()
            until = now + seconds if until is None else until
            pause = _jitter.uniform(longest / 10, longest)
            if now + pause > until or not may_pass(error):
                raise
        sleep(pause)
        longest = min(2 * longest, _LONGEST)


def status_may_pass(error: BaseException) -> bool:
    """Return False if an answer of HTTP implies that the next request would be answered alike."""
    for one in (error, attribute(error, "__cause__")):
        status = attribute(one, "status")
        if isinstance(status, int):
            return status in _PASSING
    return True
