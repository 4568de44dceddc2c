"""Errors that hybridloader raises. All are subclasses of `HybridLoaderError`."""

from __future__ import annotations


class HybridLoaderError(Exception):
    """Base class of all errors of this package."""


class BackendUnavailable(HybridLoaderError, ValueError):
    """The backend is unknown, not installed, or unusable on this machine or in this process."""


class ForkUnsafe(BackendUnavailable):
    """The user asked for a fork by name, and it would harm a library that is in use."""


class WorkerPicklingError(HybridLoaderError, TypeError):
    """Something that must be sent to a worker can't be pickled; the message names the attribute."""


class CacheError(HybridLoaderError, ValueError):
    """A cache file is damaged, or belongs to another pipeline; the message names the remedy."""


class StateError(HybridLoaderError, ValueError):
    """A state can't be taken, or belongs to another pipeline or loader; the message names the field."""


class SourceError(HybridLoaderError, ValueError):
    """The data of a source are bad, so a retry can't help; the message names the file and the member."""


class StoreError(HybridLoaderError, OSError):
    """A store of files failed to serve a request, so a retry may help; the message names the file."""


class DamagedMessage(HybridLoaderError, ValueError):
    """A message is not one that the other process can have written; no part of it was used."""


class ResultPicklingError(HybridLoaderError, TypeError):
    """A worker made a result that can't be pickled, so it can't be sent to the loader."""


class WorkerDied(HybridLoaderError, RuntimeError):
    """A worker ended without being asked to. A `RuntimeError`, as with torch's loader."""


class WorkerTimeout(HybridLoaderError, RuntimeError, TimeoutError):
    """No result came within `timeout` seconds. A `RuntimeError`, as with torch's loader.

    The iterator stays usable: another ``next()`` continues to wait for the same batch.
    """


class TaskTimeout(WorkerTimeout):
    """A worker took longer than `task_timeout` seconds for one task. This closes the iterator."""


class TooManyErrors(HybridLoaderError, RuntimeError):
    """More samples failed than the budget of `on_error` allows; the message ends with a table of them.

    The iterator stays usable, and raises this again at the next sample that fails.
    """


class ShardLost(HybridLoaderError, RuntimeError):
    """The iterator over an iterable source ended with an error: the rest of its shard is lost."""


class IteratorClosed(HybridLoaderError, RuntimeError):
    """The iterator was closed before or during a call of ``next()``."""


class NotReady(HybridLoaderError):
    """A call that does not wait found no item yet. Call again later."""


class IllegalTransition(HybridLoaderError, RuntimeError):
    """The table of a state machine does not contain the requested transition. Nothing was changed."""
