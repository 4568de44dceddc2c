"""Exceptions that hybridloader raises, and what is done with an exception within a process."""

from __future__ import annotations

from typing import NoReturn

from hybridloader._support.attributes import attribute


class HybridLoaderError(Exception):
    """Base class of all errors of this package."""


class BackendUnavailable(HybridLoaderError, ValueError):
    """The backend is unknown, is not installed, or can't serve on this machine or in this process."""


class ForkUnsafe(BackendUnavailable):
    """A fork that was asked for by name would harm a library that is in use."""


class ShippingError(HybridLoaderError, TypeError):
    """Something that must be sent to a worker can't be pickled; the message names the attribute."""


class CacheError(HybridLoaderError, ValueError):
    """A cache file is damaged, or is not of this pipeline; the message says what to do."""


class StateError(HybridLoaderError, ValueError):
    """The state of a run can't be taken, or is not of this pipeline; the message names the field."""


class SourceError(HybridLoaderError, ValueError):
    """The data of a source are bad, and will be when asked again; the message names file and member."""


class StoreError(HybridLoaderError, OSError):
    """A store of files did not serve a request, which may pass; the message names the file."""


class DamagedMessage(HybridLoaderError, ValueError):
    """A message from another process can't have been written by it; nothing of it was used."""


class ResultNotSendable(HybridLoaderError, TypeError):
    """A worker made a result that can't be pickled, so that it can't be sent back."""


class WorkerDied(HybridLoaderError, RuntimeError):
    """A worker ended without being asked to. A `RuntimeError`, as with torch's loader."""


class WorkerTimeout(HybridLoaderError, RuntimeError, TimeoutError):
    """No result came within `timeout` seconds. A `RuntimeError`, as with torch's loader.

    The iterator stays usable: calling ``next()`` again goes on waiting for the same batch.
    """


class TaskTimeout(WorkerTimeout):
    """A worker took longer than `task_timeout` seconds for one task. The iterator is closed by it."""


class TooManyErrors(HybridLoaderError, RuntimeError):
    """More samples failed than the budget of `on_error` allows; the message ends with a table of them.

    The iterator stays usable, and raises this again at the next sample that fails.
    """


class ShardLost(HybridLoaderError, RuntimeError):
    """The iterator over an iterable source ended with an error: the rest of its shard is lost."""


class IteratorClosed(HybridLoaderError, RuntimeError):
    """The iterator was closed while, or before, it was asked for its next item."""


class NotReady(HybridLoaderError):
    """There is no item yet, and the call was not to wait. Ask again."""


class IllegalTransition(HybridLoaderError, RuntimeError):
    """A state machine was asked for a transition that its table does not hold. Nothing was changed."""


def add_note(exception: BaseException, note: str) -> None:
    """Call ``exception.add_note(note)``, also on Python 3.10, and only once for the same note."""
    notes = attribute(exception, "__notes__")
    if notes is None:
        try:
            exception.__notes__ = [note]  # type: ignore[attr-defined]
        except (AttributeError, TypeError):  # an exception class with __slots__ or a frozen one
            pass
    elif note not in notes:
        notes.append(note)


class Raised:
    """Error in a queue, in the place of an item."""

    __slots__ = ("error",)

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def throw(self) -> NoReturn:
        """Raise the error, once, and drop it: in a frame of its own traceback it would make a cycle."""
        error = self.error
        del self.error
        try:
            raise error
        finally:
            del error


def no_stop(error: Exception, what: str = "the dataset, or a function,") -> Exception:
    """Return `error`; a `RuntimeError` for a `StopIteration`, which would end a loop (PEP 479)."""
    if not isinstance(error, StopIteration):
        return error
    leak = RuntimeError(f"{what} raised StopIteration")
    leak.__cause__ = error
    return leak.with_traceback(error.__traceback__)
