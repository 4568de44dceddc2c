"""Files of traces: Chrome's JSON, plain or compressed, as Perfetto and ``chrome://tracing`` read it.

Times in them are microseconds since `baseTimeNanoseconds`, as in the files of torch.profiler.
"""

from __future__ import annotations

import gzip
import json
import math
import os
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from hybridloader._support.text import brief

Track = tuple[int, str]
"""Process id, and a name for the thread that no other has in the trace."""

TAKEN = "open"
"""Name of the slice in which a result is opened by whoever takes it: there a task's arrow ends."""

LOOP = ("iter()", "next()")
"""Names of the slices in which a loop waits for an iterator, and for an item."""


class Event(NamedTuple):
    """Event of a trace; times are seconds of `time.perf_counter`."""

    kind: str
    """``"X"``: a slice, ``"i"``: an instant, ``"C"``: a counter."""
    track: Track
    name: str
    began: float
    ended: float
    told: dict[str, Any]
    """Details. Of a task and of its `TAKEN`, ``"flow"`` names both."""


class Recorded(NamedTuple):
    """All that a trace has recorded."""

    events: tuple[Event, ...]
    tracks: dict[Track, str]
    processes: dict[int, str]
    dropped: int
    """Number of older events for which there was no room."""
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
        "traceEvents": names + events + list(_flows(recorded.events, numbers)),
        "displayTimeUnit": "ms",
        "baseTimeNanoseconds": recorded.base,
        "otherData": {
            "made_by": "hybridloader",
            "dropped_events": recorded.dropped,
            "dropped_by_workers": recorded.dropped_by_workers,
        },
    }


def merged(ours: dict[str, Any], theirs: dict[str, Any]) -> dict[str, Any]:
    """Return `theirs` on our time line, with the events of `ours`, on tracks of their own.

    Torch's zero is so far away that a float has no nanoseconds left; ours is when the machine started.
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
            continue  # it is called as they call it
        event = dict(event)
        if "id" in event:
            event["id"] = f"hybridloader-{event['id']}"
        place = event["pid"], event["tid"]
        if place in taken and event["tid"] != 0:
            if place not in moved:
                free = 1 << 24  # above what a kernel gives
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
    """Return the number of each thread that has events, by process: threads with loops come first."""
    numbers: dict[int, dict[str, int]] = {pid: {} for pid in recorded.processes}
    present = {event.track for event in recorded.events if event.kind != "C"}
    loops = {event.track for event in recorded.events if event.name in LOOP}

    def order(track: Track) -> tuple[bool, str]:
        return track not in loops, recorded.tracks.get(track, "")

    for track in sorted(present, key=order):
        threads = numbers.setdefault(track[0], {})
        threads[track[1]] = len(threads) + 1
    return numbers


def _in_order(events: Iterable[Event]) -> list[Event]:
    """Return `events` by their begin, outer slices before those within them.

    Of slices with the same times, the outer one was added last.
    """
    made = list(events)
    made.reverse()
    return sorted(made, key=lambda event: (event.began, -event.ended))


def _nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)


def _microseconds(nanoseconds: int, more: float = 0.25) -> float:
    """Return microseconds that are these nanoseconds for readers that cut off the rest.

    Perfetto does (`CoerceToTs`), and ``69321924167.078 * 1000`` is less than the whole number. A
    nanosecond less would end an inner slice behind its outer one. So there is a part of one `more`.
    """
    return round((nanoseconds + more) / 1000, 5)


def _event(event: Event, numbers: dict[int, dict[str, int]]) -> dict[str, Any]:
    pid, thread = event.track
    began = _nanoseconds(event.began)
    made: dict[str, Any] = {"ph": event.kind, "name": event.name, "cat": "hybridloader"}
    made |= {"pid": pid, "tid": numbers[pid][thread] if event.kind != "C" else 0}
    made["ts"] = _microseconds(began)
    if event.kind == "X":
        # Of rounded ends, so that slices stay within one another.
        made["dur"] = _microseconds(_nanoseconds(event.ended) - began, 0.01)
    elif event.kind == "i":
        made["s"] = "t"
    told = {name: _plain(value) for name, value in event.told.items() if name != "flow"}
    if told:
        made["args"] = told
    return made


def _plain(value: Any) -> Any:
    """Return a detail as JSON has it: an index, or an error, may be any object of the user's."""
    if isinstance(value, (str, int, type(None))) or (
        isinstance(value, float) and math.isfinite(value)
    ):
        return value
    return brief(value)


def _flows(events: Iterable[Event], numbers: dict[int, dict[str, int]]) -> Iterator[dict[str, Any]]:
    """Yield arrows from tasks to where their results are taken, of which both ends are known."""
    begins: defaultdict[Any, list[Event]] = defaultdict(list)
    ends: defaultdict[Any, list[Event]] = defaultdict(list)
    for event in events:
        flow = event.told.get("flow")
        if flow is not None:
            (ends if event.name == TAKEN else begins)[flow].append(event)
    number = 0
    for flow, tasks in begins.items():
        taken = sorted(ends.get(flow, ()), key=lambda event: event.began)
        for task in sorted(tasks, key=lambda event: event.began, reverse=True):
            behind = [event for event in taken if event.began >= task.ended]
            if not behind:
                continue
            taken.remove(behind[0])
            number += 1
            head = {"cat": "hybridloader", "name": "result", "id": number}
            until = max(_nanoseconds(task.began), _nanoseconds(task.ended) - 1)
            for kind, event, when in (
                ("s", task, until),
                ("f", behind[0], _nanoseconds(behind[0].began)),
            ):
                pid, thread = event.track
                bound = {"bp": "e"} if kind == "f" else {}
                place = {"pid": pid, "tid": numbers[pid][thread], "ts": _microseconds(when)}
                yield {"ph": kind, **head, **place, **bound}


def _meta(what: str, pid: int, tid: int, **told: Any) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "args": told}


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
