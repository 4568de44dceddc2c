"""Crews that run, each ended by its holder, the holder's finalizer, or the end of the process."""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing.util  # its exit handler must be registered before ours, to run after it
import os
import threading
import weakref
from collections.abc import Callable
from typing import Any

from hybridloader._support.threads import snapshot
from hybridloader.engine.contract import Crew

assert multiprocessing.util is not None

_crews: weakref.WeakKeyDictionary[Crew, int] = weakref.WeakKeyDictionary()
"""Crews, each with the process that owns it."""


def ended_with(holder: Any, crew: Crew) -> weakref.finalize[[Crew, int], Any]:
    """Close `crew` when `holder` is collected, at exit, or when the result is called."""
    for chore in _chores:
        chore()
    owner = os.getpid()
    _crews[crew] = owner
    finalizer = weakref.finalize(holder, _close, crew, owner)
    finalizer.atexit = False  # _close_all does it, in the right order
    return finalizer


_chores: list[Callable[[], None]] = []


def before_each(chore: Callable[[], None]) -> Callable[[], None]:
    """Decorate a function to be called whenever a crew is made, for work that was put off."""
    _chores.append(chore)
    return chore


_runners: weakref.WeakSet[Any] = weakref.WeakSet()  # objects whose threads use crews

exiting = False


def closed_with(holder: Any, runner: Any) -> weakref.finalize[[], Any]:
    """Close `runner` when `holder` is collected, when the result is called, or at exit.

    At exit it is closed before any crew, because its threads use crews.
    """
    _runners.add(runner)
    finalizer = weakref.finalize(holder, runner.close)
    finalizer.atexit = False
    return finalizer


def close_once(holder: Any, runner: Any) -> None:
    """Close `runner` by the `_finalizer` of `holder`, and have another one if that was interrupted.

    If several threads call it, one closes the runner, and the others return at once.
    """
    try:
        holder._finalizer()
    except BaseException:
        holder._finalizer = closed_with(holder, runner)
        raise


def park_at_exit() -> None:
    """Stop a daemon thread for good in a process that is ending."""
    if exiting and threading.current_thread() is not threading.main_thread():
        threading.Event().wait()


def _close_all() -> None:
    """Close all runners, then all crews, whichever of them raises; the errors are raised at the end.

    An interrupt ends the wait for one of them and nothing else: the program is ending already.
    """
    global exiting
    exiting = True
    with contextlib.suppress(KeyboardInterrupt), contextlib.ExitStack() as rest:
        # Called last, so that it includes crews that runners make in the meantime.
        rest.callback(_close_crews)
        for runner in snapshot(_runners):
            rest.callback(runner.close)


def _close_crews() -> None:
    with contextlib.ExitStack() as rest:
        for crew in snapshot(_crews):
            rest.callback(_close, crew, _crews[crew])


weakref.finalize(_crews, int).detach()  # weakref's own exit handler goes first, to run after ours
atexit.register(_close_all)


def _close(crew: Crew, owner: int) -> None:
    if os.getpid() == owner:  # in a fork, the workers belong to the parent
        crew.close()
