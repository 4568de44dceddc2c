"""Postmortem record of a worker process: which sample it is at, and where, when it is stuck or dies.

A record is a file without a name that parent and worker both have open. Its first bytes are numbers
that the worker keeps up to date by plain stores into mapped memory, so they outlive it however it
dies. After them come the stack dumps that faulthandler writes: by itself when the worker crashes,
and when the parent asks, by a signal. Neither needs the GIL nor the worker's cooperation. (On Windows
the file has a name, and a thread of the worker answers, which needs the GIL.) No work depends on the
record: where there can be none, everything runs the same without.

The report of a death also has the kernel's figures about memory (`OomWatch`).
"""

from __future__ import annotations

import ctypes
import faulthandler
import mmap
import os
import queue
import re
import secrets
import signal
import struct
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from hybridloader._support import system, text
from hybridloader._support.user_objects import described, traceback_of
from hybridloader.engine.messages import TaskContext
from hybridloader.memory.limits import memory_cgroups, number_in, text_of, whole_number
from hybridloader.memory.segments import nameless_file
from hybridloader.memory.shared_slots import ours

_NUMBERS = struct.Struct("=4q")
_SIGNAL, _PID, _TASK, _AT = range(4)
"""Order of the numbers: the signal that requests a stack dump (0: none yet), the worker's process, its
current task, and the sample within it (both -1: none, or unknown)."""

_BY_EVENT = -1  # in place of a signal: `system.request` requests the dump

_TEXT = 64  # offset of faulthandler's text, in bytes

_RAISED = "\nEnded by: "
"""Beginning of the text about an exception that ended the worker: the exception, and its traceback."""

_READ = 256 * 1024
"""Most bytes of text that are read: faulthandler stops after 100 threads of 100 frames each."""

_PATIENCE = 0.5  # seconds that a worker gets to write its stack

_LOOK = 0.005
_SETTLED = 0.02
"""Seconds between two checks of a growing dump, and seconds without growth after which it is
complete."""


def _status_of(pid: int) -> Mapping[str, str]:
    """Read the fields of /proc/PID/status; none where there is no such file."""
    lines = text_of(Path(system.PROC, str(pid), "status")).splitlines()
    return dict(line.split(":\t", 1) for line in lines if ":\t" in line)


def _has(status: Mapping[str, str], field: str, signum: int) -> bool:
    """True if `signum` is in one of the signal masks of `status`."""
    try:
        return bool(int(status.get(field, "0"), 16) >> (signum - 1) & 1)
    except ValueError:
        return False


class PostmortemRecord:
    """The parent's side of a record: one for each worker process, never used again for the next."""

    def __init__(
        self,
        fd: int,  # descriptor of the file, at its end; owned by the record from now on
        path: str | None = None,  # by which the worker opens it; None: it gets a duplicate of `fd`
    ) -> None:
        # A duplicate comes to the worker with its first frame, unless there is a path; -1 once closed.
        self.fd, self.path = fd, path
        ours.add(fd)

    @classmethod
    def make(cls) -> PostmortemRecord | None:
        """Make the file, its numbers written, with a descriptor that programs do not inherit."""
        path, fd = None, -1
        try:
            if system.TEMPORARY:
                path = os.path.join(
                    tempfile.gettempdir(), f"hl-{os.getpid()}-{secrets.token_hex(8)}"
                )
                fd = _open(path, os.O_CREAT | os.O_EXCL)
            else:
                fd = nameless_file()
            # This write allocates the page, so that the worker's stores can't fail for lack of memory.
            # It also leaves the offset after the numbers. Parent, worker and their forks share one
            # offset, so each appends after the others' text. No process seeks; reads are by `pread`.
            os.write(fd, _NUMBERS.pack(0, 0, -1, -1).ljust(_TEXT, b"\0"))
        except OSError:  # no memory, descriptor or room; data is loaded without a record
            if fd >= 0:
                os.close(fd)
            return None
        return cls(fd, path)

    @property
    def task(self) -> int | None:  # `Task.seq`; None: no task, or unknown
        task = self._numbers()[_TASK]
        return None if task < 0 else task

    @property
    def at(self) -> int | None:  # number of the sample within that task, from 0; None: unknown
        at = self._numbers()[_AT]
        return None if at < 0 else at

    @property
    def begun(self) -> bool:
        """True once the process has opened the record."""
        return self._numbers()[_PID] != 0

    def stack(self, pid: int, send: Callable[[int], None]) -> tuple[str, str]:
        """Ask the living worker, to which `send` sends a signal, for a stack dump of its threads.

        Return `MOST` characters of it at most, and the reason if there are none, as a clause. This
        interrupts one system call of the worker, as signals do: Python's own are repeated, but a `sleep`
        or `poll` in native code may return early. So it is for workers that are overdue, not for those
        that do well.
        """
        try:
            return self._stack(pid, send)
        except OSError:  # another thread has closed the crew and this record in the meantime
            if self.fd >= 0:
                raise
            return "", "it was ended meanwhile"

    def _stack(self, pid: int, send: Callable[[int], None]) -> tuple[str, str]:
        numbers = self._numbers()
        signum = numbers[_SIGNAL]
        if not signum or numbers[_PID] != pid:
            return "", "it has not yet started far enough to report its stack"
        before = os.fstat(self.fd).st_size
        try:
            if signum == _BY_EVENT:
                system.request(_event(pid))
            else:
                send(signum)
        except ProcessLookupError:
            return "", "it has ended"
        except OSError as error:
            return "", f"the signal for its stack could not be sent: {error}"
        self._await_dump(pid, signum, before)
        text = self._text(before)
        if signum == _BY_EVENT:
            text = _main_thread_as_current(text)
        text = shortened(text, "The thread that does the tasks")
        if text:
            return text, ""
        # In the kernel's words: "T (stopped)".
        state = _status_of(pid).get("State", "unknown")
        return "", f"it did not answer within {_PATIENCE:g} seconds; its state is {state}"

    def end(self) -> tuple[str, str]:
        """Return the exception that ended the worker, and its traceback; or "" and the stack of a crash.

        faulthandler wrote that stack when a signal such as SIGSEGV ended the worker. Only meaningful
        once the worker is gone: a fork that the worker's code has made writes here as well.
        """
        if self.fd < 0:
            return "", ""
        text = self._text(max(_TEXT, os.fstat(self.fd).st_size - _READ))
        _, raised, ending = text.rpartition(_RAISED)
        if raised:
            exception, _, trace = ending.partition("\n")
            return exception, trace[-MOST:]
        # The last one, as a fork of the worker may have crashed before.
        begin = max(text.rfind(_FATAL), text.rfind(WINDOWS_FATAL))
        return "", "" if begin < 0 else shortened(text[begin:], "The thread that crashed")

    def close(self) -> None:
        """Close the parent's end; the worker continues without. Idempotent."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            ours.discard(fd)
            os.close(fd)

    def _numbers(self) -> tuple[int, ...]:
        if self.fd < 0:
            return (0, 0, -1, -1)
        return _NUMBERS.unpack(self._read(_NUMBERS.size, 0))

    def _text(self, start: int) -> str:
        return self._read(_READ, start).decode("utf-8", "backslashreplace")

    def _read(self, size: int, start: int) -> bytes:
        if self.path is None:
            return os.pread(self.fd, size, start)
        os.lseek(self.fd, start, os.SEEK_SET)  # the worker's descriptor has an offset of its own
        return os.read(self.fd, size)

    def _await_dump(self, pid: int, signum: int, before: int) -> None:
        """Wait until a dump is whole, or patience is at its end.

        Nothing marks the end of a dump. It is taken for whole when it has not grown for a while and,
        where that can be seen, the thread is out of the handler, in which the signal is blocked: on
        a machine with more to do than cores a thread may well rest for that long in between.
        """
        size, since = before, time.monotonic()
        deadline = since + _PATIENCE
        while (now := time.monotonic()) < deadline:
            time.sleep(_LOOK)
            grown = os.fstat(self.fd).st_size
            if grown != size:
                size, since = grown, now
            elif size > before and now - since >= _SETTLED:
                if not _has(_status_of(pid), "SigBlk", signum):
                    return
                since = now


def _open(path: str, flags: int = os.O_APPEND) -> int:
    """Open the file of a record by its path. By default, each write appends to it."""
    return os.open(path, os.O_RDWR | system.BINARY | system.TEMPORARY | flags)


def _event(pid: int) -> str:
    return f"hybridloader-stack-{pid}"


class PostmortemContext(TaskContext):
    """Context of a task whose `at` outlives its process."""

    __slots__ = ("_cell",)

    def __init__(self, cell: Any) -> None:
        # A `ctypes.c_int64` in a record's memory: set a little faster than an array's item.
        self._cell = cell
        super().__init__(tracked=True)

    @property
    def at(self) -> int:
        return self._cell.value  # type: ignore[no-any-return]

    @at.setter
    def at(self, number: int) -> None:
        self._cell.value = number


class PostmortemWriter:
    """The worker's side of a record; lives as long as the process.

    The file stays open, at `fd`: faulthandler writes to it. Later calls of faulthandler by the user's
    code take precedence, for instance `faulthandler.enable()` in `worker_init_fn`.
    """

    def __init__(self, fd: int) -> None:
        os.set_inheritable(fd, False)  # descriptors from a socket are inheritable
        self.fd = fd
        self._mapping = mmap.mmap(fd, _TEXT)
        self._cells = [ctypes.c_int64.from_buffer(self._mapping, 8 * i) for i in range(_AT + 1)]
        self._cells[_PID].value = os.getpid()
        # If faulthandler is enabled, as in a fork of pytest, `enable` changes the file but not the
        # handlers. Others may be in their place by now, for example torch's for its own workers.
        faulthandler.disable()
        faulthandler.enable(fd, all_threads=True)
        if not hasattr(faulthandler, "register"):  # Windows
            system.on_request(_event(os.getpid()), partial(faulthandler.dump_traceback, fd))
            self._cells[_SIGNAL].value = _BY_EVENT
            return
        signum = free_signal()
        if signum is None:
            return
        try:
            faulthandler.register(signum, fd, all_threads=True, chain=False)
        except (OSError, RuntimeError):  # a signal that the system reserves
            return
        self._cells[_SIGNAL].value = signum  # from now on the parent may send it

    def close(self) -> None:
        """Let go of the file, in a fork of the process that the record is about."""
        faulthandler.disable()
        if signum := self._cells[_SIGNAL].value:
            faulthandler.unregister(signum)
        os.close(self.fd)
        self._cells.clear()
        self._mapping.close()

    @classmethod
    def open(cls, record: int | str) -> PostmortemWriter | None:
        """Take over a descriptor, or open a path; None if it can't be used, and then the worker does
        without."""
        try:
            fd = _open(record) if isinstance(record, str) else record
        except OSError:
            return None
        try:
            return cls(fd)
        except (OSError, RuntimeError, ValueError):
            with suppress(OSError):
                os.close(fd)
            return None

    def ended_by(self, error: BaseException) -> None:
        """Record an exception that is about to end the process, unless this is a fork of it."""
        if os.getpid() != self._cells[_PID].value:
            return
        line, _, _ = described(error).partition("\n")
        text = f"{_RAISED}{line}\n{traceback_of(error)}"
        with suppress(OSError):  # no room
            os.write(self.fd, text.encode("utf-8", "backslashreplace"))

    def context(self) -> PostmortemContext:
        return PostmortemContext(self._cells[_AT])

    def begin(self, task: int) -> None:
        self._cells[_AT].value = -1
        self._cells[_TASK].value = task

    def end(self) -> None:
        self._cells[_TASK].value = -1


def free_signal() -> int | None:
    """Find a signal that is not caught, ignored or waited for in this process; None if there is none."""
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    status = _status_of(os.getpid())  # includes handlers of native code
    for signum in system.spare_signals():
        used = signum in blocked or signal.getsignal(signum) != signal.SIG_DFL
        if not (used or _has(status, "SigCgt", signum) or _has(status, "SigIgn", signum)):
            return signum
    return None


# -- dumps as text, for their reader: the user's frames first

MOST = 4000  # most characters: the text becomes part of an exception's message

_WIDTH = 160
_LINES, _INNER = 4, 20
"""Most characters of a line; most lines before the first stack; innermost frames of a stack.
Together they are less than `MOST`, so that no frame of the first stack is cut."""

_FATAL, WINDOWS_FATAL = "Fatal Python error: ", "Windows fatal exception: "
_HEADING, _REVERSED = " (most recent call first):", " (most recent call last):"
"""End of a heading by faulthandler, and of ours: stacks have the order of Python's tracebacks."""
_CURRENT = re.compile(r"Current thread 0x[0-9a-f]+|Stack(?= \(most)")
"""Beginning of the heading of the thread that crashed or handles the signal, which is the main thread.
Python 3.14t writes ``Stack``, and shows no other."""

_FRAME = re.compile(r'  File "(?P<path>.*)", line \S+ in (?P<function>.*)')

_HERE = os.path.dirname(os.path.abspath(__file__))
_SUPPORT = os.path.dirname(os.path.abspath(text.__file__))
_PACKAGES = ("_support", "devices", "engine", "fetching", "loader", "memory", "pipeline", "seeding")
_OURS = (
    os.path.join(os.path.dirname(_HERE), ""),
    *(os.path.join(os.path.dirname(_SUPPORT), package, "") for package in _PACKAGES),
    # Where this package's threads begin, and wait when they are idle. An embedded Python, whose
    # standard library is in an archive, names these files otherwise than `__file__` does.
    threading.Thread.run.__code__.co_filename,
    queue.Queue.get.__code__.co_filename,
)
_LOOP = (os.path.join(_HERE, "child.py"), "main")
"""Frame of the worker's loop. Outer frames belong to the code that started the process: in a fork, to
the whole training script."""


def _main_thread_as_current(text: str) -> str:
    """Mark the main thread, which faulthandler writes last, in a dump that another thread requested."""
    others, heading, main = text.replace("Current thread", "Thread").rpartition("Thread 0x")
    return f"{others}Current thread 0x{main}" if heading else text


def shortened(text: str, current: str) -> str:
    """Shorten a dump of faulthandler: the thread called `current` first, then others in user's code."""
    stacks: list[list[str]] = [[]]
    for line in text.splitlines():
        if line.endswith(_HEADING):
            stacks.append([])
        if line.strip() and not line.startswith("Extension modules:"):  # torch alone lists 30
            stacks[-1].append(line[:_WIDTH])
    lines = stacks.pop(0)[:_LINES]
    for stack in sorted(stacks, key=lambda stack: _CURRENT.match(stack[0]) is None):
        heading, frames = stack[0], _inside_the_loop(stack[1:])
        if _CURRENT.match(heading):
            lines += [current + _REVERSED, *_innermost(_users(frames) or frames)]
        elif frames := _users(frames):
            heading = re.sub(r"^Thread 0x[0-9a-f]+", "Another thread", heading)
            lines += [heading.replace(_HEADING, _REVERSED), *_innermost(frames)]
    return "\n".join(lines)[:MOST]


def _inside_the_loop(frames: list[str]) -> list[str]:
    for at, line in enumerate(frames):
        frame = _FRAME.fullmatch(line)
        if frame is not None and (frame["path"], frame["function"]) == _LOOP:
            return frames[:at]
    return frames


def _users(frames: list[str]) -> list[str]:
    """Frames up to the outermost one that is the user's; none if all are the loader's own."""
    end = len(frames)
    while end and _is_ours(frames[end - 1]):
        end -= 1
    return frames[:end]


def _is_ours(line: str) -> bool:
    frame = _FRAME.fullmatch(line)
    if frame is None:
        return line.strip() == "<no Python frame>"
    return frame["path"].startswith(_OURS)


def _innermost(frames: list[str]) -> list[str]:
    """Return the inner frames, the innermost last."""
    omitted = len(frames) - _INNER
    more = [f"  ... ({omitted} frames omitted)"] if omitted > 0 else []
    return [*more, *frames[:_INNER][::-1]]


# -- the kernel's figures about memory

_LESS = "Try fewer workers, or backend='threads', which shares one copy of the dataset."

_NO_LIMIT = 1 << 60
"""Limit that means none: v1 reports the largest number of whole pages, just below 2**63."""


class OomWatch:
    """Watch that compares with how often the OOM killer had struck when it was made. It never raises."""

    def __init__(self, root: Path = Path(system.ROOT)) -> None:  # with /proc and /sys
        self._root = root
        self._before = _oom_kills(root)

    def describe(self) -> str:
        """Name the likely cause of a SIGKILL, and the memory in use, in two lines at most."""
        whose, kills = _oom_kills(self._root)
        limit, used = _cgroup(self._root)
        if not whose:
            cause = f"This platform does not report a lack of memory. If there was one: {_LESS}"
        elif self._before[0] == whose and kills > self._before[1]:
            counted = f"oom_kill rose from {self._before[1]} to {kills}"
            cause = f"Likely cause: the {whose}'s OOM killer struck ({counted}). {_LESS}"
        else:
            cause = (
                "No OOM kill was counted: another program or a person sent the signal (a job scheduler, "
                "a container runtime, systemd-oomd)."
            )
        in_use = f"\nMemory now: cgroup {_size(used)} of {_size(limit)} in use."
        return f"{cause}{in_use}" if limit else cause


def _oom_kills(root: Path) -> tuple[str, int]:
    """Count the OOM killer's kills in this process's cgroup, or else on the machine; ``""``: unknown."""
    # v2 counts at the victim's group and all above, v1 only there
    places = [("cgroup", group / names.events) for group, names in memory_cgroups(root)]
    for whose, path in (*places, ("machine", root / "proc/vmstat")):
        for line in text_of(path).splitlines():
            name, _, count = line.partition(" ")
            kills = whole_number(count)
            if name == "oom_kill" and kills is not None:
                return whose, kills
    return "", 0


def _cgroup(root: Path) -> tuple[int, int]:
    """Read limit and usage, in bytes, of the tightest cgroup; 0 if there is no limit."""
    found = [(0, 0)]
    for group, names in memory_cgroups(root):
        limit, used = number_in(group / names.limit), number_in(group / names.used)
        if limit and limit < _NO_LIMIT and used is not None:
            found.append((limit, used))
    return min(found[1:] or found)


def _size(count: int) -> str:
    """Format bytes as ``"1.98 GiB"``: three digits, so that 1.98 of 2.00 differs from 2 of 2."""
    power = min((max(count, 1).bit_length() - 1) // 10, 4)
    return f"{count / 1024**power:.2f} {('B', 'KiB', 'MiB', 'GiB', 'TiB')[power]}"
