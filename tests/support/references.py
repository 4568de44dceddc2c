"""Deaths of objects that several threads have referred to."""

from __future__ import annotations

import gc

from support.platforms import GIL


def merge_references() -> None:
    """Let objects of other threads die that nobody refers to.

    In a free-threaded Python the thread that made an object counts the references to it. If another
    thread drops the last one, the object dies when the first thread runs again, or in a collection.
    """
    if not GIL:
        gc.collect()
