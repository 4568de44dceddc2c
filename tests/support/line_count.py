"""Cost of a call in lines of Python, which a busy machine does not change."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from typing import Any


def lines_run(call: Callable[[], object]) -> int:
    """Return the number of lines of Python that `call` runs."""
    count = 0

    def trace(frame: Any, event: str, argument: Any) -> Any:
        nonlocal count
        count += event == "line"
        return trace

    before, collects = sys.gettrace(), gc.isenabled()
    gc.disable()  # a collection may call finalizers
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
        if collects:
            gc.enable()
    return count
