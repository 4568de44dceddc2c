"""Files of traces: Chrome's JSON, plain or compressed, as Perfetto and ``chrome://tracing`` read it.

Times in them are microseconds since `baseTimeNanoseconds`, as in the files of torch.profiler.
"""

from __future__ import annotations

import gzip
import json
import math
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from hybridloader._support.text import brief

Track = tuple[int, str]
"""Process id, and a name for the thread that no other has in the trace."""

LOOP = ("iter()", "next()")
"""Names of the slices in which a loop waits for an iterator and for an item."""


class Event(NamedTuple):
    """Event of a trace; times are seconds of `time.perf_counter`."""

    kind: str
    """``"X"``: a slice, ``"i"``: an instant."""
    track: Track
    name: str
    began: float
    ended: float
    details: dict[str, Any]


class Recorded(NamedTuple):
    """Contents of a trace."""

    events: tuple[Event, ...]
    tracks: dict[Track, str]
    processes: dict[int, str]
    dropped: int
    """Number of older events that were dropped for lack of room."""
    dropped_by_workers: int
    base: int
    """Nanoseconds from 1970 until the zero of the clock."""


def chrome_trace(recorded: Recorded) -> dict[str, Any]:
    """Return the trace as JSON values."""
    numbers = _numbers(recorded)
    names = [
        _meta("process_name", pid, 0, name=name) for pid, name in recorded.processes.items()
    ] + [_meta("process_sort_index", pid, 0, sort_index=at) for at, pid in enumerate(numbers)]
    for (pid, thread), name in recorded.tracks.items():
        if (number := numbers[pid].get(thread)) is not None:
            names.append(_meta("thread_name", pid, number, name=name))
            names.append(_meta("thread_sort_index", pid, number, sort_index=number))
    events = [_event(event, numbers) for event in _in_order(recorded.events)]
    return {
        "traceEvents": names + events,
        "displayTimeUnit": "ms",
        "baseTimeNanoseconds": recorded.base,
        "otherData": {
            "made_by": "hybridloader",
            "dropped_events": recorded.dropped,
            "dropped_by_workers": recorded.dropped_by_workers,
        },
    }


def merged(ours: dict[str, Any], theirs: dict[str, Any]) -> dict[str, Any]:
    """Return `theirs` on the time line of `ours`, with the events of `ours` on separate tracks.

    Torch's zero is so long ago that a float can't resolve nanoseconds; ours is the start of the machine.
    """
    shift = (theirs["baseTimeNanoseconds"] - ours["baseTimeNanoseconds"]) / 1000
    taken = {(event.get("pid"), event.get("tid")) for event in theirs["traceEvents"]}
    named = {
        event.get("pid")
        for event in theirs["traceEvents"]
        if event["ph"] == "M" and event["name"].startswith("process_")
    }
    moved: dict[tuple[Any, Any], int] = {}
    events: list[dict[str, Any]] = []
    for event in ours["traceEvents"]:
        of_process = event["ph"] == "M" and event["name"].startswith("process_")
        if of_process and event["pid"] in named:
            continue  # the process keeps the name that torch gave it
        event = dict(event)
        place = event["pid"], event["tid"]
        if place in taken and event["tid"] != 0:
            if place not in moved:
                free = 1 << 24  # above the thread ids of the kernel
                while (event["pid"], free) in taken:
                    free += 1
                taken.add((event["pid"], free))
                moved[place] = free
            event["tid"] = moved[place]
        events.append(event)
    torchs = (
        {**event, "ts": round(event["ts"] + shift, 3)} if "ts" in event else event
        for event in theirs["traceEvents"]
    )
    return {
        **theirs,
        "baseTimeNanoseconds": ours["baseTimeNanoseconds"],
        "traceEvents": [*torchs, *events],
        "otherData": {**ours.get("otherData", {}), **theirs.get("otherData", {})},
    }


def _numbers(recorded: Recorded) -> dict[int, dict[str, int]]:
    """Return the numbers of the threads with events, by process; threads with loops come first."""
    numbers: dict[int, dict[str, int]] = {pid: {} for pid in recorded.processes}
    present = {event.track for event in recorded.events}
    loops = {event.track for event in recorded.events if event.name in LOOP}

    def order(track: Track) -> tuple[bool, str]:
        return track not in loops, recorded.tracks.get(track, "")

    for track in sorted(present, key=order):
        threads = numbers.setdefault(track[0], {})
        threads[track[1]] = len(threads) + 1
    return numbers


def _in_order(events: Iterable[Event]) -> list[Event]:
    """Return `events` sorted by begin, outer slices before inner ones.

    If slices have the same times, the outer one was added last.
    """
    made = list(events)
    made.reverse()
    return sorted(made, key=lambda event: (event.began, -event.ended))


def _nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)


def _microseconds(nanoseconds: int, more: float = 0.25) -> float:
    """Return microseconds from which a reader that truncates gets exactly these nanoseconds.

    Perfetto truncates (`CoerceToTs`), and ``69321924167.078 * 1000`` is less than the whole number. With
    a nanosecond lost, an inner slice could end after its outer one. So `more`, a fraction of a
    nanosecond, is added.
    """
    return round((nanoseconds + more) / 1000, 5)


def _event(event: Event, numbers: dict[int, dict[str, int]]) -> dict[str, Any]:
    pid, thread = event.track
    began = _nanoseconds(event.began)
    made: dict[str, Any] = {"ph": event.kind, "name": event.name, "cat": "hybridloader"}
    made |= {"pid": pid, "tid": numbers[pid][thread], "ts": _microseconds(began)}
    if event.kind == "X":
        # The difference of rounded times, so that slices stay nested.
        made["dur"] = _microseconds(_nanoseconds(event.ended) - began, 0.01)
    elif event.kind == "i":
        made["s"] = "t"
    if event.details:
        made["args"] = {name: _plain(value) for name, value in event.details.items()}
    return made


def _plain(value: Any) -> Any:
    """Return a detail as a JSON value; an index or an error may be any object of the user."""
    if isinstance(value, (str, int, type(None))) or (
        isinstance(value, float) and math.isfinite(value)
    ):
        return value
    return brief(value)


def _meta(kind: str, pid: int, tid: int, **details: Any) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": details}


_ENDINGS = (".json", ".json.gz")


def check_path(path: str | os.PathLike[str], *, writable: bool = False) -> str:
    """Return the path of a trace as text.

    Raises `ValueError` if its extension is not that of a trace, and `OSError` if it must be `writable`
    and is not.
    """
    text = os.fspath(path)
    if not isinstance(text, str) or not text.endswith(_ENDINGS):
        raise ValueError(f"the path of a trace must end in .json or .json.gz, not be {path!r}")
    if writable:
        there = os.path.exists(text)
        try:
            open(text, "ab").close()
        except OSError as error:
            message = f"the trace can't be written: {error.strerror}"
            raise type(error)(error.errno, message, text) from None
        if not there:
            os.remove(text)
    return text


def write(path: str, trace: dict[str, Any]) -> None:
    data = json.dumps(trace, separators=(",", ":"), default=str).encode()
    Path(path).write_bytes(gzip.compress(data, 6) if path.endswith(".gz") else data)


def read(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the trace in a file. Raises `ValueError` if the file is not a trace."""
    text = os.fspath(path)
    data = Path(text).read_bytes()
    try:
        found = json.loads(gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data)
    except (ValueError, OSError, EOFError) as error:
        raise ValueError(f"{text}: not a trace: the file is not JSON: {error}") from None
    if not isinstance(found, dict) or not isinstance(found.get("traceEvents"), list):
        raise ValueError(f"{text}: not a trace in Chrome's JSON form: it has no list 'traceEvents'")
    if not isinstance(found.get("baseTimeNanoseconds"), int):
        raise ValueError(
            f"{text}: the trace has no 'baseTimeNanoseconds', so its time is unknown; torch.profiler "
            "writes it since torch 2.4"
        )
    return found


def merge(
    ours: str | os.PathLike[str], theirs: str | os.PathLike[str], out: str | os.PathLike[str]
) -> None:
    """Join a trace of this package to one of torch.profiler of the same run, on one time line.

    Parameters
    ----------
    ours
        File written by `hybridloader.observe.trace`.
    theirs
        File written by ``torch.profiler.profile.export_chrome_trace``.
    out
        File to write, ``.json`` or ``.json.gz``.

    Raises
    ------
    ValueError
        A file is not a trace, or has no absolute time.
    OSError
        A file can't be read or written.
    """
    path = check_path(out, writable=True)
    write(path, merged(read(ours), read(theirs)))
