"""Functions to be called at the end of a worker, in the worker.

They are registered from within it, on any of its threads: by what was opened there.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from hybridloader._support.errors import show
from hybridloader.engine.worker_info import get_worker_info

_functions: dict[int, list[Callable[[], Any]]] = {}
"""By the identity of the worker's info. In a process there is one worker, whose info may be replaced."""

if hasattr(os, "register_at_fork"):  # what workers of the parent registered is theirs
    os.register_at_fork(after_in_child=_functions.clear)


def at_end_of_worker(function: Callable[[], Any]) -> bool:
    """Have `function` called when the worker that runs this code ends; False if there is none.

    What the function raises is printed. It may be called on another thread of the worker.
    """
    info = get_worker_info()
    if info is None:
        return False
    _functions.setdefault(id(info), []).append(function)
    return True


def end_worker(info: Any) -> None:
    """Call the functions that were registered in the worker with this info, the last one first."""
    keys = [*_functions] if info.worker_method == "multiprocessing" else [id(info)]
    for key in keys:
        for function in reversed(_functions.pop(key, ())):
            try:
                function()
            except Exception as error:  # a worker ends whatever it had open does
                show(error)
