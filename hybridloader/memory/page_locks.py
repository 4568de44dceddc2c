"""Slots whose pages are locked for a device, and are used again only after the device has read them.

A batch is collated into such a slot, or mapped as a worker process has filled it, and the device reads
it right there: the host never copies it again. A consumer that pins gives its `PageLocks` to a crew
(`Crew.page_lock`). Nothing here waits for the device, and nothing here knows of slots or batches.

Each iterator that pins makes one before any worker starts, if its accelerator `locks_pages`, and calls
`PageLocks.wait_for` with the current stream, on the thread that uses the batches, before each batch is
handed out. A stage that collates in the thread that pulls it asks by `PrivateSlots.page_lock`.

When the last view of a batch's memory dies, on any thread, a mark is put behind all that is queued by
then on the current stream of that thread, and on every stream that `wait_for` was told of. The memory
is filled again, or given back, when all these marks have passed; until then it counts as in use. So
everything is safe that is safe with torch's loader, except a copy on a stream of the user's own for
which none of these streams waits, and a copy to another device than the one that the loader pins for.
No call tells which streams have read memory that torch has not allocated. docs/devices.md says what a
user does then ("Your part"), docs/decisions/0018 what else was looked into.
"""

from __future__ import annotations

import errno
import os
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from hybridloader._support.caller import warn

if TYPE_CHECKING:
    from hybridloader.memory.accelerator import Accelerator, StreamMark
    from hybridloader.memory.segments import Mapping

_LOOKS = 64
"""Pieces of memory that one `collect` looks at: each is a call to the driver, and `collect` is called
for each message to a worker. The others have their turn with the next."""

_UNKNOWN = object()
"""Stream of a device that can't tell its current one any more: nothing ever passes on it."""


class _Waiting:
    """Memory that the device may still read, and the function to call once it does not.

    `points` are the streams that it waits for, each with its mark. The mark is None as long as none can
    be made, or asked, on that stream: one that is being captured in a graph takes none.
    """

    __slots__ = ("locks", "points", "then")

    def __init__(
        self, locks: PageLocks, streams: Iterable[Any], then: Callable[[], object]
    ) -> None:
        self.locks, self.then = locks, then
        self.points: list[tuple[Any, StreamMark | None]] = [(stream, None) for stream in streams]

    def over(self) -> bool:
        """True if the device is done with it, as far as can be told. Never waits."""
        left = []
        for stream, mark in self.points:
            try:
                if mark is None:
                    mark = self.locks.accelerator.mark(stream)
                elif mark.query():
                    continue
            except Exception:
                mark = None
            left.append((stream, mark))
        self.points = left
        return not left


# One for the whole process, because a crew may be closed before the device is done.
_waiting: deque[_Waiting] = deque()  # filled from any thread
_inherited: list[_Waiting] = []  # entries of the process that was forked; never looked at
_made: weakref.WeakSet[PageLocks] = weakref.WeakSet()


def locked_bytes() -> int:
    """Bytes of slots that are page-locked in this process now, for all consumers."""
    return sum(locks.size for locks in list(_made) if locks.here)


class PageLocks:
    """Locks pages of slots for one device, counts them, and tells when the device is done with one.

    All methods may be called from any thread; `after_device` and its functions also from finalizers.
    In a fork it does nothing: the device is the parent's.
    """

    def __init__(self, accelerator: Accelerator) -> None:
        self.accelerator = accelerator  # the device that reads the batches
        self._owner = os.getpid()
        # All the mutable state; only by operations that are atomic:
        self.refusal: str | None = None  # why the last pages that were to be locked are not
        self._full = False  # because no more can be locked
        self._locked: dict[int, int] = {}  # bytes, by address
        self._streams: dict[Any, None] = {}  # in the order of `wait_for`
        self._warned = False
        _made.add(self)

    def __repr__(self) -> str:
        return f"PageLocks({self.accelerator.name!r}, {self.size:,} bytes)"

    @property
    def size(self) -> int:
        """Bytes that are page-locked now, those that the device has yet to read included."""
        return sum(list(self._locked.values()))

    @property
    def here(self) -> bool:  # False in a fork of the process that it was made in
        return os.getpid() == self._owner

    def enter(self) -> None:
        """Make the device the current one of this thread, for good; for threads of ours alone.

        Otherwise their calls to the driver would open a context on device 0.
        """
        try:
            self.accelerator.enter()
        except Exception as error:
            self._refuse(f"{self.accelerator.name} can't be used from a worker's thread: {error}")

    def lock(self, mapping: Mapping) -> bool:
        """Lock the pages of `mapping` until it goes. False if they are not; `refusal` says why."""
        if not self.here:
            return False
        try:
            self.accelerator.page_lock(mapping.address, mapping.size)
        except (OSError, RuntimeError) as error:
            full = getattr(error, "errno", None) == errno.ENOMEM
            self._refuse(str(getattr(error, "strerror", None) or error), full=full)
            return False
        self._locked[mapping.address] = mapping.size
        mapping.at_end(self.unlock, mapping.address)
        return True

    def _refuse(self, reason: str, *, full: bool = False) -> None:
        self.refusal, self._full = reason, full

    def unlock(self, address: int) -> None:
        """Unlock the pages at `address`. Nobody may be looking at them."""
        if not self.here or self._locked.pop(address, None) is None:
            return
        try:
            self.accelerator.page_unlock(address)
        except Exception:  # in a finalizer there is nobody to tell
            pass

    def wait_for(self, stream: Any) -> None:
        """Have memory that dies from now on wait for `stream`, too."""
        self._streams[stream] = None

    def after_device(self, then: Callable[[], object]) -> None:
        """Call `then` from some `collect`, once the device has done the work that is queued by now.

        For finalizers: it never raises and never waits. `then` must hold the memory.
        """
        if not self.here:
            return
        try:
            streams = dict.fromkeys((self.accelerator.current_stream(), *list(self._streams)))
        except Exception:
            streams = {_UNKNOWN: None}
        waiting = _Waiting(self, streams, then)
        waiting.over()
        _waiting.append(waiting)

    def collect(self) -> None:
        """Look at some of the memory of this process, and free what the device is done with."""
        for _ in range(min(len(_waiting), _LOOKS)):
            try:
                waiting = _waiting.popleft()
            except IndexError:  # another thread was faster
                return
            if not waiting.locks.here:
                _inherited.append(waiting)
                continue
            try:
                over = waiting.over()
            except BaseException:  # Ctrl-C: the device may be reading all the same
                _waiting.append(waiting)
                raise
            if over:
                waiting.then()
            else:
                _waiting.append(waiting)

    def warn(self) -> None:
        """Warn, once, that pages could not be locked. On the thread that pulls."""
        if self.refusal is None or self._warned:
            return
        self._warned = True
        where = advice = ""
        if self._full:
            where = f" ({self.size:,} bytes are locked already{_limit()})"
            advice = (
                ". Raise the limit, keep fewer batches, or let slots take less: Memory(limit=...) of "
                "the backend"
            )
        warn(
            f"a slot of memory for batches is not page-locked: {self.refusal}{where}. Batches in it are "
            f"copied once more where they are pinned{advice}",
        )


def _limit() -> str:
    """Limit of this process's locked memory, in words; empty where it is not known."""
    try:
        import resource
    except ImportError:  # Windows
        return ""
    if not hasattr(resource, "RLIMIT_MEMLOCK"):
        return ""
    soft = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    return "" if soft == resource.RLIM_INFINITY else f"; ulimit -l allows {soft:,} bytes"
