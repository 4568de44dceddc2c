"""The memory of SharedList and SharedDict: one copy for all processes, and nothing left behind."""

from __future__ import annotations

import gc
import os
import pickle
import re
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from support.containers import (
    READ,
    BufferGone,
    forked,
    linux,
    mappings,
    output,
    owner,
    read_pickle,
    segments,
)
from support.platforms import posix

from hybridloader.records import SharedDict, SharedList


@linux
def test_the_memory_goes_with_the_last_view(shared_kind: str) -> None:
    gc.collect()  # of tests before this one
    names, maps, descriptors = segments(), mappings(), len(os.listdir("/proc/self/fd"))
    shared: Any = SharedList(str(i) for i in range(1000))
    assert len(os.listdir("/proc/self/fd")) == descriptors + 1
    assert mappings() == maps + (shared_kind == "nameless")
    assert len(segments() - names) == (shared_kind == "named")
    part = shared[10:20][::3]
    iterator = iter(part)
    del shared
    assert list(part) == ["10", "13", "16", "19"]
    del part
    assert next(iterator) == "10"
    assert len(os.listdir("/proc/self/fd")) == descriptors + 1
    del iterator
    gc.collect()
    assert mappings() == maps
    assert segments() == names
    assert len(os.listdir("/proc/self/fd")) == descriptors


def test_the_interpreter_ends_in_silence_and_leaves_nothing(shared_kind: str) -> None:
    rest = (
        "kept = [shared, SharedDict({1: shared[0]}), shared[1:]]\n"
        "cycle = [shared]; cycle.append(cycle)\n"
        "iterator = iter(shared); next(iterator)\n"
        "sys.stdin.read()\n"
    )
    with owner(shared_kind, rest) as process:
        assert process.stdout is not None
        read_pickle(process.stdout)
        assert bool(segments(process.pid)) == (
            shared_kind == "named" and hasattr(os, "fork")
        )  # in /dev/shm
        _, errors = process.communicate()
    assert (process.returncode, errors) == (0, b"")
    assert not segments(process.pid)


@posix  # /dev/shm
def test_a_killed_owner_of_a_name_leaves_none() -> None:
    with owner("named") as process:
        assert process.stdout is not None
        pickled = read_pickle(process.stdout)
        assert len(segments(process.pid)) == 1
        process.send_signal(signal.SIGKILL)
        process.communicate()  # also waits for the resource tracker, which has the same stderr
    assert not segments(process.pid)
    with pytest.raises(BufferGone, match="has ended"):
        pickle.loads(pickled)


def test_who_attaches_does_not_take_the_name_away() -> None:
    with owner("named") as process:
        assert process.stdout is not None
        pickled = read_pickle(process.stdout)
        for _ in range(2):  # the first one's end must not concern the second
            assert output(READ + "print(shared[0])", pickled) == "a"
        _, errors = process.communicate()
    assert errors == b""


@linux
def test_without_memory_it_is_a_memory_error_and_nothing_is_left(shared_kind: str) -> None:
    import resource

    before = segments(), len(os.listdir("/proc/self/fd"))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, limits[1]))
    try:
        for make in (
            lambda: SharedList(bytes(1000) for _ in range(3000)),
            lambda: SharedDict((i, bytes(1000)) for i in range(3000)),
        ):
            with pytest.raises(MemoryError, match=r"a Shared\w+ needs [\d,]{6,} bytes.*too large"):
                make()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    gc.collect()
    assert (segments(), len(os.listdir("/proc/self/fd"))) == before


def private_bytes() -> int:
    text = Path("/proc/self/smaps_rollup").read_text()
    return 1024 * sum(int(n) for n in re.findall(r"Private_\w+:\s+(\d+) kB", text))


def grown(sequence: Any) -> int:
    """Return the private bytes that a child gains by reading every element."""
    gc.disable()
    before = private_bytes()
    for element in sequence:
        _ = element
    for place in range(0, len(sequence), 3):
        _ = sequence[place]
    return private_bytes() - before


@linux
def test_children_that_read_all_of_it_copy_nothing(shared_kind: str) -> None:
    paths = [f"/data/train/class {i % 1000:04}/image {i:07}.jpeg" for i in range(200_000)]
    shared = SharedList(paths)
    assert sum(1 for _ in shared) == len(paths)  # a page that only one process maps is its own
    # The measure itself: a Python list is copied, at least 40 bytes of every 100.
    assert forked(lambda: grown(paths)) > 0.4 * sum(map(sys.getsizeof, paths))
    for _ in range(2):
        assert forked(lambda: grown(shared)) < 0.2 * shared.nbytes
