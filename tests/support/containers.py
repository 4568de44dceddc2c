"""Values, programs and forks for the tests of SharedList and SharedDict."""

from __future__ import annotations

import gc
import math
import os
import pickle
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import settings
from hypothesis import strategies as st

from hybridloader.records import shared_buffer
from hybridloader.records.shared_buffer import BufferGone
from support import programs

__all__ = ["BufferGone", "shared_buffer"]

linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")


class Text(str):
    """A user's own kind of str."""


class Point(NamedTuple):
    x: int
    y: int


def same(a: Any, b: Any) -> bool:
    """Tell whether type and value are equal, NaN and the sign of zero included."""
    if type(a) is not type(b):
        return False
    if isinstance(a, float):
        return math.copysign(1, a) == math.copysign(1, b) and (a == b or (a != a and b != b))
    if isinstance(a, (tuple, list)):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


def output(code: str, given: bytes = b"", **environment: str) -> str:
    """Run `code`, which reads a pickle as `READ` does; return what it prints."""
    return programs.output("-c", code, given=given.hex(), cwd="/", **environment).strip()


def forked(work: Callable[[], Any]) -> Any:
    """Return the result of `work` in a forked child, which collects garbage and ends by `_exit`."""
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # 3.12: threads and fork
        pid = os.fork()
    if pid == 0:
        try:
            with open(writing, "wb") as file:
                pickle.dump(work(), file)
            gc.collect()
        finally:
            os._exit(0)
    os.close(writing)
    with open(reading, "rb") as file:
        data = file.read()
    os.waitpid(pid, 0)
    return pickle.loads(data)


def mappings() -> int:
    return Path("/proc/self/maps").read_text().count("memfd:hybridloader")


def segments(pid: int | None = None) -> set[str]:
    """Names of the segments of one process; other tests may run on this machine."""
    return {name for name in os.listdir("/dev/shm") if name.startswith(f"hl-{pid or os.getpid()}-")}


texts = st.text(st.characters(), max_size=12)  # lone surrogates too
ints = st.integers() | st.sampled_from([2**63 - 1, 2**63, -(2**63), -(2**63) - 1])
scalars = st.none() | st.booleans() | ints | st.floats() | texts | st.binary(max_size=12)
values = scalars | st.tuples(scalars, scalars) | st.lists(scalars, max_size=3)
lists = st.one_of(*(st.lists(kind, max_size=20) for kind in (ints, st.floats(), texts, values)))
few = settings(max_examples=60, deadline=None)


READ = """
import pickle
shared = pickle.loads(bytes.fromhex(input()))
"""


MAKE = """
import pickle, sys
from hybridloader.records import shared_buffer
shared_buffer.nameless_usable = lambda: {nameless}
from hybridloader.records import SharedDict, SharedList
shared = SharedList(['a', 'b', 'c'])
sys.stdout.buffer.write(pickle.dumps(shared))
sys.stdout.flush()
"""


def owner(memory: str, rest: str = "sys.stdin.read()") -> subprocess.Popen[bytes]:
    """A process that has made a list and sent its pickle, and then does the `rest`."""
    code = MAKE.format(nameless=memory == "nameless") + rest
    return subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd="/",
    )


def read_pickle(stream: Any) -> bytes:
    """One pickle from a pipe that stays open."""
    data = b""
    while True:
        data += os.read(stream.fileno(), 1 << 16)
        try:
            pickle.loads(data)
        except (EOFError, pickle.UnpicklingError):
            continue
        return data
