"""Which backend the workers of a loader live on, given what was asked for and what the loader says.

Starts nothing. What torch's own loader would do counts where nothing was asked for.
"""

from __future__ import annotations

import functools
import multiprocessing
import warnings
from dataclasses import replace
from typing import Any

from hybridloader.buffers.memory import DEFAULT_MEMORY
from hybridloader.caller import stacklevel
from hybridloader.contract import Backend
from hybridloader.fallback import usable
from hybridloader.registry import get_backend


def backend_for(loader: Any, asked: str | Backend | None) -> Backend:
    """The backend to use now for `loader`, of which `asked` is wanted; None: what torch would take."""
    from hybridloader.backends.inline import Inline
    from hybridloader.backends.shared_memory import AsTorch, SharedMemory

    backend = None if asked is None else get_backend(asked)
    if loader.num_workers == 0:
        if isinstance(backend, Inline):
            return backend
        return Inline(memory=getattr(backend, "memory", DEFAULT_MEMORY))
    context = loader.multiprocessing_context
    if backend is None:
        backend = AsTorch(None if context is None else context.get_start_method())
    elif context is not None and isinstance(backend, SharedMemory) and backend.start_method is None:
        backend = replace(backend, start_method=context.get_start_method())
    return usable(backend)


def contradiction(loader: Any, asked: str | Backend | None) -> str | None:
    """Why the loader's `multiprocessing_context` and the backend can't both be had, if they can't."""
    context = loader.multiprocessing_context
    if context is None or asked is None:
        return None
    method, chosen = context.get_start_method(), get_backend(asked)
    if chosen.in_process:
        return (
            f"backend={chosen.name!r} starts no process, so it contradicts "
            f"multiprocessing_context={method!r}; leave one of them out"
        )
    own = getattr(chosen, "start_method", chosen.name)
    if own is None or own == method:
        return None
    known = method in ("loky", *multiprocessing.get_all_start_methods())
    hint = f", or say SharedMemory(start_method={method!r})" if known else ""
    return (
        f"backend {chosen!r} contradicts multiprocessing_context={method!r}; "
        f"leave one of them out{hint}"
    )


def is_foreign(context: Any) -> bool:
    """Tell whether a `multiprocessing_context` starts processes in a way that is not known here.

    MONAI's, for one, starts threads. Naming its start method would not do the same.
    """
    method = None if context is None else context.get_start_method()
    if method in (None, "loky"):
        return False
    if method not in multiprocessing.get_all_start_methods():
        return True
    ordinary = multiprocessing.Process, multiprocessing.get_context(method).Process
    return context.Process not in ordinary


def warn_idle(loader: Any, asked: str | Backend | None) -> None:
    """Warn once of a backend that `loader` has no workers for."""
    if asked is not None and loader.num_workers == 0:
        name = get_backend(asked).name
        if name != "inline":
            _warn_idle(name)


@functools.cache
def _warn_idle(name: str) -> None:
    warnings.warn(
        f"backend={name!r} has no workers with num_workers=0: the caller does the work. "
        "Give num_workers to use it.",
        stacklevel=stacklevel(),
    )
