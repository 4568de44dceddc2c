"""The result of a task as whoever pulls a stage gets it: its value, or what was raised instead of it."""

from __future__ import annotations

from typing import Any

from hybridloader.errors import add_note
from hybridloader.messages import Done, Result
from hybridloader.roster import Roster


def hand_out(result: Result, roster: Roster, *, sealed: bool) -> Any:
    """Give the value, or raise the error, of a task that is no longer under way.

    Parameters
    ----------
    sealed
        Whether a result that can be sent on to another process is given unopened, as its payload.
    """
    passed_on = result.seq not in roster.indices  # an error of the feed's: it says where it was
    index = roster.indices.pop(result.seq, None)
    if isinstance(result, Done):
        payload = result.payload
        if sealed and getattr(payload, "count", None) is not None:
            return payload
        try:
            return payload.open()
        except Exception as error:
            add_note(error, roster.place(result.worker, index, "loading the result of"))
            roster.failed = index
            raise
    roster.failed = None if passed_on else index
    if passed_on:
        exception = result.failure.exception
        del result.failure.exception
    else:
        exception = result.failure.to_exception(roster.place(result.worker, index, "fetching"))
    del result
    try:
        raise exception
    finally:
        del exception  # a traceback whose frame holds its own exception is a cycle
