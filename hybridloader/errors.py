"""Errors that hybridloader raises. All are subclasses of `HybridLoaderError`."""

from __future__ import annotations

import re
from typing import ClassVar

HELP = "hybridloader explain"
"""Command that prints a section of docs/troubleshooting.md. An installed package has no other link that
its user can open."""

_LINK = re.compile(rf"\nSee: {HELP} [\w-]+")


def linked(text: str, anchor: str) -> str:
    """Return `text` with a last line that names the command for an anchor of the troubleshooting page.

    Messages often quote another error of this package. The line of that error is removed.
    """
    return f"{_LINK.sub('', text)}\nSee: {HELP} {anchor}"


class HybridLoaderError(Exception):
    """Base class of all errors of this package.

    The text of an error ends with the command that prints its section of the troubleshooting page.
    This line is not part of ``args``. A subclass has the section of its base class unless it sets
    another `anchor`.
    """

    anchor: ClassVar[str] = ""
    """Section of the troubleshooting page; empty: the text names none."""

    def __str__(self) -> str:
        text = super().__str__()
        return linked(text, self.anchor) if self.anchor else text


class BackendUnavailable(HybridLoaderError, ValueError):
    """The backend is unknown, not installed, or unusable on this machine or in this process."""

    anchor = "backendunavailable"


class ForkUnsafe(BackendUnavailable):
    """The user asked for a fork by name, and it would harm a library that is in use."""

    anchor = "forkunsafe"


class WorkerPicklingError(HybridLoaderError, TypeError):
    """Something that must be sent to a worker can't be pickled; the message names the attribute."""

    anchor = "workerpicklingerror"


class CacheError(HybridLoaderError, ValueError):
    """A cache file is damaged, or belongs to another pipeline; the message names the remedy."""

    anchor = "cacheerror"


class StateError(HybridLoaderError, ValueError):
    """A state can't be taken, or belongs to another pipeline or loader; the message names the field."""

    anchor = "stateerror"


class SourceError(HybridLoaderError, ValueError):
    """The data of a source are bad, so a retry can't help; the message names the file and the member."""

    anchor = "sourceerror"


class StoreError(HybridLoaderError, OSError):
    """A store of files failed to serve a request, so a retry may help; the message names the file."""

    anchor = "storeerror"


class DamagedMessage(HybridLoaderError, ValueError):
    """A message is not one that the other process can have written; no part of it was used."""

    anchor = "damagedmessage"


class ResultPicklingError(HybridLoaderError, TypeError):
    """A worker made a result that can't be pickled, so it can't be sent to the loader."""

    anchor = "resultpicklingerror"


class WorkerDied(HybridLoaderError, RuntimeError):
    """A worker ended without being asked to. A `RuntimeError`, as with torch's loader."""

    anchor = "workerdied"


class WorkerTimeout(HybridLoaderError, RuntimeError, TimeoutError):
    """No result came within `timeout` seconds. A `RuntimeError`, as with torch's loader.

    The iterator stays usable: another ``next()`` continues to wait for the same batch.
    """

    anchor = "workertimeout"


class TaskTimeout(WorkerTimeout):
    """A worker took longer than `task_timeout` seconds for one task. This closes the iterator."""

    anchor = "tasktimeout"


class TooManyErrors(HybridLoaderError, RuntimeError):
    """More samples failed than the budget of `on_error` allows; the message ends with a table of them.

    The iterator stays usable, and raises this again at the next sample that fails.
    """

    anchor = "toomanyerrors"


class ShardLost(HybridLoaderError, RuntimeError):
    """The iterator over an iterable source ended with an error: the rest of its shard is lost."""

    anchor = "shardlost"


class IteratorClosed(HybridLoaderError, RuntimeError):
    """The iterator was closed before or during a call of ``next()``."""

    anchor = "iteratorclosed"


class NotReady(HybridLoaderError):
    """A call that does not wait found no item yet. Call again later."""


class IllegalTransition(HybridLoaderError, RuntimeError):
    """The table of a state machine does not contain the requested transition. Nothing was changed."""

    anchor = "illegaltransition"
