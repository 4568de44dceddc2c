"""Fallback of a loader inside a daemonic process: threads instead of processes.

multiprocessing forbids daemonic processes to have children, and every loader's workers are daemonic;
torch raises an AssertionError there. The fallback replaces only backends that set `children`. A program
that opens such a backend directly gets `BackendUnavailable` instead.
"""

from __future__ import annotations

import multiprocessing

from hybridloader._support.text import INFO, log, warn_once
from hybridloader.engine.contract import Backend


def usable(backend: Backend) -> Backend:
    """Return `backend`, or in a daemonic process threads in its place, with one warning per process.

    Datasets that every worker must own (iterable ones, data pipes, readers) are copied for each thread,
    as ever; a map-style dataset is shared by the threads, because an inner loader's dataset was made for
    the very worker that it lives in.
    """
    if not backend.children or not multiprocessing.current_process().daemon:
        return backend
    from hybridloader.backends.threads import Threads

    name = multiprocessing.current_process().name
    log(INFO, "process %r is daemonic: using threads, not %s", name, type(backend).__name__)
    warn_once(
        f"process {name!r} is daemonic, as a loader's workers are, so it can't have child processes: a "
        "loader in it uses threads instead. They share a map-style dataset, and the GIL if there is "
        "one. Set backend='threads' or num_workers=0 there to silence this. For processes, make the "
        "loader in a process that is not daemonic, or give the outer loader more workers",
        "daemonic",
    )
    return Threads(memory=backend.memory)
