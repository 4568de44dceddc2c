"""Pickler that asks a function first, for one call.

Its class is made once. A class that is made for each call, over what it pickles, is garbage until a
collection, and on Python 3.13t for ever: there, classes are immortal as soon as a thread has begun.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any


@functools.cache
def reducing_pickler(base: Any) -> Any:
    """Return a class of `base` whose instances take a function ``reduce`` after the file.

    It returns how to pickle an object, as `reducer_override` does, or None to leave that to `base`.
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
