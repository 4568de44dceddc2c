"""Checks that a process may fork workers from itself.

For a zygote: no thread, no device, no file that it has opened. These checks look at the process, by
/proc, and do not guess by imported modules. For the user's process: no library in use whose threads a
fork would lose, so that a forked worker which uses it hangs or fails.
"""

from __future__ import annotations

import os
import stat
import sys
import threading
import time
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from hybridloader._support import system
from hybridloader._support.text import first_few
from hybridloader._support.torch_env import device_in_use

_PROCESS = Path(system.PROC, "self")

_SETTLING = 0.1
"""Seconds that joined threads get to disappear: the kernel lists a thread for some microseconds after
it was joined."""

_HARMLESS = frozenset(["jemalloc_bg_thd"])
"""Names of native threads beside which a process can be forked. jemalloc, which pyarrow includes, holds
its locks over a fork, and the child continues without the thread (`background_thread_postfork_child` in
jemalloc's src/background_thread.c)."""

_MEMORY_DEVICES = 1
"""Major number of /dev/null, /dev/zero, /dev/random and /dev/urandom, which have no position."""


def available() -> bool:
    """True if this platform forks, lists the threads and files of a process, and has pidfds."""
    if not (system.FORK and system.PIDFD and tells_threads()):
        return False
    try:
        os.close(os.pidfd_open(os.getpid()))  # missing in old kernels and in some sandboxes
    except OSError:
        return False
    return True


def tells_threads() -> bool:
    """True if this platform lists the threads that Python does not know."""
    return (_PROCESS / "task").exists()


def open_descriptors() -> set[int]:  # of this process
    found = set()
    for name in os.listdir(_PROCESS / "fd"):
        with suppress(OSError):  # the descriptor of the listing itself is closed by now
            os.fstat(int(name))
            found.add(int(name))
    return found


def refusal(before: Collection[int]) -> str:  # as for `open_files`
    """Return why a fork of this process could hang or fail, as a predicate; "" if it may fork."""
    device = device_in_use()
    if device is not None:
        return f"uses {device}, which does not survive a fork"
    deadline = time.monotonic() + _SETTLING
    while (names := other_threads()) and time.monotonic() < deadline:
        time.sleep(_SETTLING / 100)
    if names:
        return f"has started threads ({first_few(names)}), which would be missing after a fork"
    files = open_files(before)
    if files:
        return (
            f"has opened {first_few(files)}, and after a fork all workers would share its position"
        )
    return ""


def other_threads() -> list[str]:
    """Return the names of all threads but this one, those that Python knows nothing of included."""
    known = {thread.native_id: thread.name for thread in threading.enumerate()}
    found = []
    for task in (_PROCESS / "task").iterdir():
        ident = int(task.name)
        if ident != threading.get_native_id():
            with suppress(OSError):  # it has just ended
                found.append(known.get(ident) or (task / "comm").read_text().strip())
    return [name for name in found if name not in _HARMLESS]


def open_files(before: Collection[int]) -> list[str]:
    """Return the names of the files that forks could not share.

    Those open `before`, when the work had yet to be loaded, do not count. They can share objects without
    a position: memory, and files that are mapped and not locked, such as those of `numpy.memmap`.
    """
    found = []
    mapped = (_PROCESS / "maps").read_text()
    for fd in sorted(open_descriptors().difference(before)):
        with suppress(OSError):  # closed in the meantime
            about = os.stat(fd)
            name = os.readlink(_PROCESS / "fd" / str(fd))
            if stat.S_ISCHR(about.st_mode) and os.major(about.st_rdev) == _MEMORY_DEVICES:
                continue
            if stat.S_ISREG(about.st_mode) and (
                name.startswith("/memfd:")
                or (
                    f" {name}\n" in mapped
                    and "lock:" not in (_PROCESS / "fdinfo" / str(fd)).read_text()
                )
            ):
                continue
            found.append(name)
    return found


class Hazard(NamedTuple):
    """Library that does not survive a fork."""

    library: str  # name of the imported module
    threads: str  # prefix of the names of its threads
    reason: str  # reason, as a predicate of the library
    source: str  # address of its authors' statement

    @property
    def runs(self) -> str:
        return f"{self.library} is in use here and {self.reason} ({self.source})"


HAZARDS = (
    Hazard(
        "polars",  # 2.1.0: the next query hangs
        "polars-",
        "waits in a forked process for its threads, which a fork does not copy",
        "https://docs.pola.rs/user-guide/misc/multiprocessing",
    ),
    Hazard(
        "lance",  # 14.0.2 survived; its authors document it as not fork-safe
        "lance",
        "may wait in a forked process for its threads, which a fork does not copy",
        "https://github.com/lance-format/lance/issues/3640",
    ),
    Hazard(
        "av",  # 18.1.0: a decoder that the parent has opened hangs
        "av:",
        "has decoders open, whose threads a fork does not copy",
        "https://github.com/PyAV-Org/PyAV/issues/1962",
    ),
    Hazard(
        "fsspec",  # 2026.9.0: RuntimeError("This class is not fork-safe"); s3fs and gcsfs also wait
        "fsspecIO",
        "runs an event loop on a thread, which a fork does not copy, so its file systems fail or hang",
        "https://github.com/fsspec/filesystem_spec/issues/835",
    ),
)
"""Table of the libraries that do not survive a fork, with the observation and the tested version.

A library counts when it is imported and its threads run: before that, a fork loses no state of it. The
table leaves out libraries that renew their threads in a fork, such as zarr since 3.0.3, and pyarrow's
own pools: all of 496 forks beside a busy scan continued to read. Only a pyarrow reader that is open
during the fork hangs, and no thread shows that.
"""


def fork_hazard() -> Hazard | None:
    """Return a library that runs threads in this process and does not survive a fork; None if none."""
    imported = [hazard for hazard in HAZARDS if hazard.library in sys.modules]
    if not imported:
        return None
    names = {thread.name for thread in threading.enumerate()}
    if tells_threads():
        names.update(other_threads())
    for hazard in imported:
        if any(name.startswith(hazard.threads) for name in names):
            return hazard
    return None
