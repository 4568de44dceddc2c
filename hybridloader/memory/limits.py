"""Limits of the memory for batches: the user's policy, and the memory available to this process.

This module reads small files of the kernel, and allocates no memory for batches.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple

from hybridloader._support import system
from hybridloader._support.caller import warn
from hybridloader._support.cgroups import cgroups, number_in
from hybridloader._support.ranks import ranks_here
from hybridloader._support.text import short

SHARE = 0.5
"""Default share of this process's memory that slots may take."""


@dataclass(frozen=True)
class Memory:
    """Memory that a stage may take for the large tensors and arrays of its batches.

    Large results are made in *slots* that are reused, because a loader spends more time on fresh pages
    than on the bytes. A batch that the training code keeps also keeps its slot. Beyond the limit,
    batches are copied to ordinary memory, with one warning. No call waits for a slot.

    Parameters
    ----------
    limit
        Maximum number of bytes of all slots of one iterator (an int), or a share of the memory
        available to this process (a float above 0 and up to 1). None is a share of 0.5. The available
        memory is the smallest of the machine's memory and the limits of the process's cgroups (v1 and
        v2), as in containers. The ranks of a job on one machine divide it equally, if their launcher
        sets their number (torchrun's ``LOCAL_WORLD_SIZE``, MPI's, Slurm's).

    Raises
    ------
    ValueError
        A limit of 0 or below, a share above 1.
    """

    limit: int | float | None = None

    def __post_init__(self) -> None:
        limit = self.limit
        if limit is not None:
            if isinstance(limit, bool) or not isinstance(limit, (int, float)):
                raise TypeError(
                    f"Memory: limit is bytes (an int) or a share (a float up to 1), not {limit!r}"
                )
            if not limit > 0:
                raise ValueError(
                    f"Memory: limit={limit!r} leaves no memory for a batch; pass bytes or a share "
                    "above 0"
                )
            if isinstance(limit, float) and limit > 1:
                raise ValueError(
                    f"Memory: limit={limit!r}: a float is a share of this process's memory, up to 1.0; "
                    "pass bytes as an int"
                )

    def bytes(self) -> int:
        """Return the limit in bytes. The memory available to this process is read once."""
        if isinstance(self.limit, int):
            return self.limit
        return max(1, int(_own_limit() * (self.limit or SHARE) / ranks_here()))

    def __repr__(self) -> str:
        own = f"limit={self.limit}"
        if (ranks := ranks_here()) > 1 and not isinstance(self.limit, int):
            own += f", {self.bytes():,} bytes for each of {ranks} ranks"
        return f"Memory({own})"


DEFAULT_MEMORY = Memory()


def check_memory(name: str, memory: object) -> None:
    """Refuse a `memory=` of `name` that is no `Memory`."""
    if not isinstance(memory, Memory):
        raise TypeError(
            f"{name}: memory must be a hybridloader.Memory, not {short(memory)}; for a limit in bytes "
            "pass memory=Memory(limit=...)"
        )


@cache
def _own_limit() -> int:
    return process_limit()  # reading it takes 0.4 ms, more than all the rest of an `iter()`


def warn_of_overflow(reason: str) -> None:
    """Warn that batches are in ordinary memory from now on."""
    warn(
        f"batches are made in, or copied to, ordinary memory, which is slower: {reason}. Keep fewer "
        "batches, or allow more: Memory(limit=...) of the backend",
        "ordinary-memory",
    )


def process_limit(root: Path = Path(system.ROOT)) -> int:
    """Return the bytes available to this process: the machine's memory or the least cgroup limit."""
    limits = (number_in(group / names.limit) for group, names in memory_cgroups(root))
    return min([system.machine_memory(), *filter(None, limits)])


class Names(NamedTuple):
    """Names of the files of a memory cgroup."""

    limit: str  # no limit is a huge number in v1, "max" in v2
    used: str
    events: str


_V2 = Names("memory.max", "memory.current", "memory.events")
_V1 = Names("memory.limit_in_bytes", "memory.usage_in_bytes", "memory.oom_control")


def memory_cgroups(root: Path) -> Iterator[tuple[Path, Names]]:
    """Find the memory cgroups of this process, with the names of their files; see `cgroups`."""
    mounts = root / "sys/fs/cgroup"

    def mount(controllers: str) -> Path:
        return mounts / "memory" if controllers else mounts

    for folder, second in cgroups("memory", root / "proc", mount):
        yield folder, _V2 if second else _V1
