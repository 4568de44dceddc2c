"""Dumps that faulthandler wrote of a worker, cut down for their reader: the user's frames first.

Text goes in, text comes out. It reads no file, and never fails: it keeps lines that it does not know.
"""

from __future__ import annotations

import os
import queue
import re
import threading
from collections.abc import Sequence
from typing import NamedTuple

from hybridloader._support import caller

MOST = 4000
"""Most characters: the text becomes part of an exception's message."""

_FIRST = 2400
"""Most characters of the most relevant thread."""

_LINES, _WIDTH = 4, 200
"""Number of lines before the first stack that are kept, and of characters of any line."""

_HEADING = re.compile(
    r"(?P<current>Current thread|Thread) (?P<ident>0x[0-9a-f]+)(?P<name>.*) \(most recent call first\):"
)
_ALONE = "Stack (most recent call first):"
"""Heading of the stack of the thread that crashed, where Python 3.14t shows no other."""

_OTHER_HEADING = re.compile(r".*\(most recent call first\):")  # e.g. the C stack of Python 3.14
_FRAME = re.compile(r'  File "(?P<path>.*)", line \S+ in (?P<function>.*)')
_FATAL = "Fatal Python error: "

_HERE = os.path.dirname(os.path.abspath(__file__))
_SUPPORT = os.path.dirname(os.path.abspath(caller.__file__))
_PACKAGES = ("_support", "devices", "engine", "fetching", "loader", "memory", "pipeline", "seeding")
_OURS = (
    os.path.join(os.path.dirname(_HERE), ""),
    *(os.path.join(os.path.dirname(_SUPPORT), package, "") for package in _PACKAGES),
)
_WAITING = (threading.__file__, queue.__file__)
"""Files in which this package's threads begin, and wait when they are idle."""

_LOOP = (os.path.join(_HERE, "child.py"), "main")
"""Frame of the worker's loop. Outer frames belong to the code that started the process: in a fork, to
the whole training script."""


class _Thread(NamedTuple):
    """One block of a dump."""

    heading: str
    ident: int | None  # None: not known, or no Python stack of a thread
    current: bool
    lines: list[str]  # innermost frame first


def of_dump(text: str, home: int) -> str:
    """Shorten the dump of a living worker, its thread `home` (`threading.get_ident`) first."""
    _, threads = _parsed(text)
    for at, thread in enumerate(threads):
        if thread.ident == home:
            heading = "The thread that does the tasks (most recent call first):"
            first = thread._replace(heading=heading)
            return _text_of([], first, threads[:at] + threads[at + 1 :])
    return _text_of([], None, threads)


def of_crash(text: str) -> str:
    """Shorten the dump of a worker that crashed, the crashing thread first; "" if there is no crash."""
    begin = text.rfind(_FATAL)  # the last one, as a fork of the worker may have crashed before
    if begin < 0:
        return ""
    preface, threads = _parsed(text[begin:])
    for at, thread in enumerate(threads):
        if thread.current:
            first = thread._replace(heading="The thread that crashed (most recent call first):")
            return _text_of(preface, first, threads[:at] + threads[at + 1 :])
    return _text_of(preface, None, threads)


def _parsed(text: str) -> tuple[list[str], list[_Thread]]:
    """Split a dump into the lines before the first stack, and the stacks."""
    preface: list[str] = []
    threads: list[_Thread] = []
    for whole in text.splitlines():
        line = whole if len(whole) <= _WIDTH else f"{whole[: _WIDTH - 3]}..."
        if not line.strip() or line.startswith("Extension modules:"):  # torch alone lists 30
            continue
        found = _HEADING.fullmatch(line)
        if found is not None:
            name, ident = found["name"], int(found["ident"], 16)
            heading = f"Another thread{name} (most recent call first):"
            threads.append(_Thread(heading, ident, found["current"] == "Current thread", []))
        elif _OTHER_HEADING.fullmatch(line):
            threads.append(_Thread(line, None, line == _ALONE, []))
        elif threads:
            threads[-1].lines.append(line)
        else:
            preface.append(line)
    return preface, threads


def _text_of(preface: Sequence[str], first: _Thread | None, others: Sequence[_Thread]) -> str:
    lines = list(preface[:_LINES])
    if first is not None:
        inside = _inside_the_loop(first.lines)
        lines += [first.heading, *_fitting(_users(inside) or inside, _FIRST)]
    ours = beyond = 0
    room = MOST - _size(lines) - _WIDTH  # room for the last line
    for thread in others:
        frames = _users(_inside_the_loop(thread.lines))
        if not frames:
            ours += 1
            continue
        block = [thread.heading, *_fitting(frames, max(room - len(thread.heading), 0))]
        if _size(block) > room:
            beyond += 1
            continue
        lines += block
        room -= _size(block)
    if beyond:
        lines.append(f"({beyond} more threads omitted for lack of room)")
    if first is None and not lines and ours:
        lines.append(f"({ours} threads, none of them in your code)")
    return "\n".join(lines)


def _inside_the_loop(lines: list[str]) -> list[str]:
    """Frames up to the worker's loop."""
    for at, line in enumerate(lines):
        frame = _FRAME.fullmatch(line)
        if frame is not None and (frame["path"], frame["function"]) == _LOOP:
            return lines[:at]
    return lines


def _users(lines: list[str]) -> list[str]:
    """Frames up to the outermost one that is the user's; none if all are the loader's own."""
    end = len(lines)
    while end and _is_ours(lines[end - 1]):
        end -= 1
    return lines[:end]


def _is_ours(line: str) -> bool:
    frame = _FRAME.fullmatch(line)
    if frame is None:
        return line.strip() == "<no Python frame>"
    return frame["path"].startswith(_OURS) or frame["path"] in _WAITING


def _fitting(lines: list[str], room: int) -> list[str]:
    """Keep as many as fit: two of the innermost for one of the outermost."""
    if _size(lines) <= room:
        return lines
    room -= 40  # for the line about the gap
    inner, outer = 0, len(lines)
    while inner < outer:
        take_inner = inner <= 2 * (len(lines) - outer)
        line = lines[inner] if take_inner else lines[outer - 1]
        room -= len(line) + 1
        if room < 0:
            break
        if take_inner:
            inner += 1
        else:
            outer -= 1
    return [*lines[:inner], f"  ... ({outer - inner} frames omitted)", *lines[outer:]]


def _size(lines: Sequence[str]) -> int:
    return sum(len(line) + 1 for line in lines)
