"""Forks of this process, as the user's own code would make them."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable


def in_a_fork(act: Callable[[], object], seconds: int = 30) -> int:
    """The exit code of a fork that does `act`: 0, or 1 if that raised, which it then shows.

    Negative: the signal that ended it, SIGALRM if it was stuck for so many seconds.
    """
    child = os.fork()
    if child == 0:
        signal.alarm(seconds)
        code = 1
        try:
            act()
            code = 0
        except BaseException:
            sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
