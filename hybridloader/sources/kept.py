"""Files that are kept for the next time: lists of files, and indices of archives."""

from __future__ import annotations

import os
from contextlib import suppress
from typing import Any

from hybridloader._support import system

MANIFEST = "_pack.json"
"""Name of the file that describes the pack in a folder of shards."""


def write_whole(path: str, data: Any) -> None:
    """Write a local file at once or not at all; a link at `path` is replaced, not written through.

    Parameters
    ----------
    data
        Bytes, or a buffer of them.
    """
    beside = f"{path}.{os.urandom(6).hex()}"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | system.BINARY
    try:
        with open(os.open(beside, flags, 0o666), "wb") as file:
            file.write(data)
        os.replace(beside, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(beside)
        raise
