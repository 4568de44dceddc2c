"""Place of an error in a stream of items: in the place of one item, beside the items, or unknown.

An error is raised where its item would have been returned, so code that counts items counts it too.
The functions here tell such errors from others. The mark is an attribute of the exception, because
nothing else goes with it through threads and the steps of users.
"""

from __future__ import annotations

from hybridloader._support.errors import (
    HybridLoaderError,
    IteratorClosed,
    NotReady,
    ShardLost,
    StateError,
    WorkerDied,
    WorkerTimeout,
    described,
    is_a,
    part,
    set_part,
)
from hybridloader._support.failure import twin


class LeftOut(HybridLoaderError):
    """Place of an item that `on_error` left out, for the `zip` that drops its row.

    The failure has been recorded. No user ever gets this error.
    """


_MARK = "_hybridloader_place"

_NOWHERE = (NotReady, WorkerTimeout, IteratorClosed, WorkerDied, StateError)
"""Errors that are raised instead of an answer: the same item may still come, or none at all."""


def takes_a_place(error: Exception) -> bool:
    """Return True if `error` was raised where an item would have been returned."""
    return not is_a(error, _NOWHERE) and part(error, "__dict__").get(_MARK) != "beside"


def goes_astray(error: Exception) -> bool:
    """Return True if the number of items that `error` stands for is unknown."""
    return is_a(error, ShardLost) or part(error, "__dict__").get(_MARK) == "astray"


def beside(error: Exception) -> Exception:
    """Return another exception like `error` that takes no item's place."""
    return _marked(error, "beside")


def astray(error: Exception) -> Exception:
    """Return another exception like `error`, after which items can't be numbered any more."""
    return _marked(error, "astray")


def rest_is_lost(which: str, error: Exception) -> ShardLost:
    """Return the error that follows `error`, which `which`, a generator, has raised."""
    return ShardLost(
        f"{which} raised {described(error)}. The iterator is a generator, which is over "
        "after an error, so the rest of the shard is lost. Catch the error inside the generator, or "
        "write an iterator class with __next__, which can go on"
    )


def alike(error: Exception) -> Exception:
    """Return another exception like `error`, to be raised elsewhere.

    Its traceback lacks the last frame, that of the function that caught `error` and keeps the copy.
    """
    other, frames = twin(error), part(error, "__traceback__")
    set_part(other, "__traceback__", frames and frames.tb_next)
    return other


def _marked(error: Exception, mark: str) -> Exception:
    other = alike(error)  # the same object may be raised again elsewhere, and mean something else
    part(other, "__dict__")[_MARK] = mark
    return other
