"""Every crew that runs, and who ends it: whoever holds it, its finalizer, or the end of the process."""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing.util  # its exit handler must be registered before ours, to run after it
import os
import threading
import weakref
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from hybridloader.engine.contract import Crew

assert multiprocessing.util is not None

T = TypeVar("T")

_crews: weakref.WeakKeyDictionary[Crew, int] = weakref.WeakKeyDictionary()
"""Every crew and the process that owns it."""


def ended_with(holder: Any, crew: Crew) -> weakref.finalize[[Crew, int], Any]:
    """Have `crew` closed when `holder` is let go, at exit, or by calling the result."""
    for chore in _chores:
        chore()
    owner = os.getpid()
    _crews[crew] = owner
    finalizer = weakref.finalize(holder, _close, crew, owner)
    finalizer.atexit = False  # _close_all does it, in the right order
    return finalizer


_chores: list[Callable[[], None]] = []


def before_each(chore: Callable[[], None]) -> Callable[[], None]:
    """Decorator: call `chore` whenever a crew is made, for work that was put off before."""
    _chores.append(chore)
    return chore


_runners: weakref.WeakSet[Any] = weakref.WeakSet()
"""Machines: what has threads that use crews."""

exiting = False


def closed_with(holder: Any, runner: Any) -> weakref.finalize[[], Any]:
    """Have `runner` closed when `holder` is let go, by calling the result, or at exit.

    At exit before any crew, because its threads use crews.
    """
    _runners.add(runner)
    finalizer = weakref.finalize(holder, runner.close)
    finalizer.atexit = False
    return finalizer


def park_at_exit() -> None:
    """Keep a daemon thread from a process that is ending: there is nobody left to tell anything."""
    if exiting and threading.current_thread() is not threading.main_thread():
        threading.Event().wait()


def _close_all() -> None:
    """Close all that there is, whichever of them raises; all that was raised is told at the end."""
    global exiting
    exiting = True
    with contextlib.ExitStack() as rest:
        rest.callback(_close_crews)  # called last: crews that runners have made meanwhile, too
        for runner in _all_of(_runners.copy):
            rest.callback(runner.close)


def _close_crews() -> None:
    with contextlib.ExitStack() as rest:
        for crew, owner in _all_of(_crews.items):
            rest.callback(_close, crew, owner)


def _all_of(look: Callable[[], Iterable[T]]) -> list[T]:
    """All that is in a weak collection, to which other threads may add while this one looks."""
    while True:
        try:
            return list(look())
        except RuntimeError:  # "changed size during iteration"
            continue


weakref.finalize(_crews, int).detach()  # weakref's own exit handler goes first, to run after ours
atexit.register(_close_all)


def _close(crew: Crew, owner: int) -> None:
    if os.getpid() == owner:  # in a fork of the owner the workers are somebody else's
        crew.close()
