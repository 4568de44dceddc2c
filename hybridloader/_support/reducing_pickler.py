"""Pickler with a reducer function per instance.

Its class is made once. A class made for each call would stay in memory until the garbage collector
runs. On Python 3.13t it would stay forever: classes are immortal there once a thread has started.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any


@functools.cache
def reducing_pickler(base: Any) -> Any:
    """Return a subclass of `base` whose instances take a function ``reduce`` after the file.

    ``reduce`` returns the reduction of an object, as `reducer_override` does, or None to leave the
    object to `base`.
    """
    otherwise = getattr(base, "reducer_override", lambda pickler, obj: NotImplemented)

    class Reducing(base):  # type: ignore[misc]
        def __init__(self, file: Any, reduce: Callable[[Any], Any], **options: Any) -> None:
            super().__init__(file, **options)
            self._reduce = reduce

        def reducer_override(self, obj: Any) -> Any:
            found = self._reduce(obj)
            return otherwise(self, obj) if found is None else found

    return Reducing
