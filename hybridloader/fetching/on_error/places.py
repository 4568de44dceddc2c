"""Place of an error in a stream of items: in the place of one item, beside the items, or unknown.

An error is raised where its item would have been returned, so code that counts items counts it too. The
functions here distinguish such errors from others. The mark is an attribute of the exception, because
nothing else goes with it through threads and the steps of users.
"""

from __future__ import annotations

from hybridloader._support.error_handling import described, mark, place_of
from hybridloader._support.failure import twin
from hybridloader.errors import HybridLoaderError, ShardLost


class LeftOut(HybridLoaderError):
    """Place of an item that left out by `on_error`, for the `zip` that drops its row, or `not_needed`.

    A failure has been recorded. No user ever gets this error.
    """


def goes_astray(error: BaseException) -> bool:
    """Return True if the number of items that `error` stands for is unknown."""
    return place_of(error) == "astray"


def beside(error: Exception) -> Exception:
    """Return another exception like `error` that takes no item's place."""
    return _marked(error, "beside")


def astray(error: Exception) -> Exception:
    """Return another exception like `error`, after which items can't be numbered any more."""
    return _marked(error, "astray")


def not_needed() -> LeftOut:
    """Return the place of an item that a resumed run does not make again: see `Operator.needed`."""
    place = LeftOut()
    mark(place, "not needed")
    return place


def rest_is_lost(which: str, error: Exception) -> ShardLost:
    """Return the error that follows `error`, which `which`, a generator, has raised."""
    lost = ShardLost(
        f"{which} raised {described(error)}. The iterator is a generator, which ends at an error, so "
        "the rest of the shard is lost. Catch the error inside the generator, or write an iterator "
        "class with __next__, which can return more items after an error"
    )
    mark(lost, "astray")
    return lost


def alike(error: Exception) -> Exception:
    """Return another exception like `error`, to be raised elsewhere.

    Its traceback lacks the last frame, that of the function that caught `error` and keeps the copy.
    """
    other, frames = twin(error), error.__traceback__
    BaseException.__setattr__(other, "__traceback__", frames and frames.tb_next)
    return other


def _marked(error: Exception, place: str) -> Exception:
    other = alike(error)  # a copy: the same object may be raised elsewhere with another meaning
    mark(other, place)
    return other
