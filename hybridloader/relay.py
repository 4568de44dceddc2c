"""A relay: pulls an iterator on a thread of its own into a bounded queue.

The only object that two threads touch. It knows nothing of what flows through it. What the iterator
raises comes out in its turn; when the consumer goes away the thread ends; when the thread ends, for
whatever reason, the consumer is told and never waits for it.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from hybridloader.errors import IteratorClosed

_PATIENCE = 2.0
"""Seconds that `close` waits for the thread."""


class _Belt:
    """What the thread and the consumer share; the thread holds this and never the relay."""

    def __init__(self, depth: int) -> None:
        self.depth = depth
        self.changed = threading.Condition(threading.RLock())
        self.items: deque[tuple[bool, Any]] = deque()  # (is a value, value or exception)
        self.closed = False

    def put(self, good: bool, item: Any) -> bool:
        with self.changed:
            while len(self.items) >= self.depth and not self.closed:
                self.changed.wait()
            if self.closed:
                return False
            self.items.append((good, item))
            self.changed.notify_all()
            return True

    def close(self) -> None:
        with self.changed:
            self.closed = True
            self.items.clear()
            self.changed.notify_all()


def _pull(belt: _Belt, source: Iterator[Any], prepare: Callable[[], None] | None) -> None:
    try:
        if prepare is not None:
            prepare()
        for item in source:
            if not belt.put(True, item):
                break
            del item
        else:
            belt.put(False, StopIteration())
    except BaseException as error:  # whatever it is, it is the consumer's to hear of
        belt.put(False, error)
    finally:
        close = getattr(source, "close", None)
        if close is not None:
            close()


class Relay(Iterator[Any]):
    """An iterator over `source` that is pulled on a named thread.

    Parameters
    ----------
    source
        What to pull; from now on it belongs to the thread, which also closes it if it can be.
    name
        The thread's name.
    depth
        How many items may wait, at least 1.
    prepare
        Called first on the thread, for instance to choose a device.
    """

    def __init__(
        self,
        source: Iterator[Any],
        name: str,
        *,
        depth: int = 2,
        prepare: Callable[[], None] | None = None,
    ) -> None:
        if depth < 1:
            raise ValueError(f"depth must be at least 1, got {depth}")
        self._belt = _Belt(depth)
        self._over = False
        self._thread = threading.Thread(
            target=_pull, args=(self._belt, source, prepare), name=name, daemon=True
        )
        self._thread.start()
        self._finalizer = weakref.finalize(self, self._belt.close)

    def __next__(self) -> Any:
        belt = self._belt
        with belt.changed:
            while not belt.items:
                if self._over:
                    raise StopIteration
                if belt.closed:
                    raise IteratorClosed(f"relay {self._thread.name!r} is closed")
                belt.changed.wait()
            good, item = belt.items.popleft()
            belt.changed.notify_all()
        if good:
            return item
        self._over = True
        raise item

    def close(self) -> None:
        """End the thread; waits for it at most 2 seconds. Idempotent."""
        self._finalizer()
        if self._thread is not threading.current_thread():
            self._thread.join(_PATIENCE)
