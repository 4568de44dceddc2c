"""Files of traces: Chrome's JSON, plain or compressed by gzip."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path
from typing import Any

from hybridloader.observe.trace_format import merged

_ENDINGS = (".json", ".json.gz")


def check_path(path: str | os.PathLike[str], *, writable: bool = False) -> str:
    """Return the path of a trace as text.

    Raises `ValueError` if its ending is none of a trace, and `OSError` if it is to be `writable` and
    is not.
    """
    text = os.fspath(path)
    if not isinstance(text, str) or not text.endswith(_ENDINGS):
        raise ValueError(f"a trace is a file .json or .json.gz, not {path!r}")
    if writable:
        there = os.path.exists(text)
        try:
            open(text, "ab").close()
        except OSError as error:
            told = f"the trace can't be written: {error.strerror}"
            raise type(error)(error.errno, told, text) from None
        if not there:
            os.remove(text)
    return text


def write(path: str, trace: dict[str, Any]) -> None:
    data = json.dumps(trace, separators=(",", ":"), default=str).encode()
    Path(path).write_bytes(gzip.compress(data, 6) if path.endswith(".gz") else data)


def read(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the trace in a file. Raises `ValueError` if there is none in it."""
    text = os.fspath(path)
    data = Path(text).read_bytes()
    try:
        found = json.loads(gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data)
    except (ValueError, OSError, EOFError) as error:
        raise ValueError(f"{text}: no JSON, so no trace: {error}") from None
    if not isinstance(found, dict) or not isinstance(found.get("traceEvents"), list):
        raise ValueError(f"{text}: no trace in Chrome's JSON form: it has no list 'traceEvents'")
    if not isinstance(found.get("baseTimeNanoseconds"), int):
        raise ValueError(
            f"{text}: no 'baseTimeNanoseconds', so nobody knows when it was; torch.profiler writes it "
            "since torch 2.4"
        )
    return found


def merge(
    ours: str | os.PathLike[str], theirs: str | os.PathLike[str], out: str | os.PathLike[str]
) -> None:
    """Join a trace of `hybridloader.trace` to one of torch.profiler of the same run, on one time line.

    Parameters
    ----------
    ours
        File that `hybridloader.trace` has written.
    theirs
        File that ``torch.profiler.profile.export_chrome_trace`` has written.
    out
        File to write, ``.json`` or ``.json.gz``.

    Raises
    ------
    ValueError
        One of the files is no trace, or does not tell its time.
    OSError
        A file can't be read or written.
    """
    path = check_path(out, writable=True)
    write(path, merged(read(ours), read(theirs)))
