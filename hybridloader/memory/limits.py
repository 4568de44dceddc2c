"""Limits of the memory for batches: the user's policy, and the memory available to this process.

This module reads small files of the kernel, and allocates no memory for batches.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple

from hybridloader._support import system
from hybridloader._support.text import short, warn

SHARE = 0.5  # default share of this process's memory that slots may take


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
        return max(1, int(process_limit() * (self.limit or SHARE) / ranks_here()))


DEFAULT_MEMORY = Memory()


def check_memory(name: str, memory: object) -> None:
    """Refuse a `memory=` of `name` that is no `Memory`."""
    if not isinstance(memory, Memory):
        raise TypeError(
            f"{name}: memory must be a hybridloader.Memory, not {short(memory)}; for a limit in bytes "
            "pass memory=Memory(limit=...)"
        )


def warn_of_overflow(reason: str) -> None:
    """Warn that batches are in ordinary memory from now on."""
    warn(
        f"batches are made in, or copied to, ordinary memory, which is slower: {reason}. Keep fewer "
        "batches, or allow more: Memory(limit=...) of the backend",
        "ordinary-memory",
    )


@cache  # reading it takes 0.4 ms, more than all the rest of an `iter()`
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


def memory_cgroups(root: Path) -> list[tuple[Path, Names]]:
    """Find the memory cgroups of this process, with the names of their files; see `cgroups`."""
    mounts = root / "sys/fs/cgroup"
    found = cgroups("memory", root / "proc", lambda names: mounts / "memory" if names else mounts)
    return [(folder, _V2 if second else _V1) for folder, second in found]


# -- cgroups of this process, and the kernel's small files; a file that can't be read is empty, or None


def cgroups(
    controller: str,  # of the resource: "memory", "cpu"
    proc: Path,  # /proc
    mount: Callable[[str], Path],  # gives the mount point of a tree, by its controllers
) -> list[tuple[Path, bool]]:
    """Find the cgroups of this process that may limit a resource, the innermost first.

    Returns each folder, and True if it is of version 2. Its parent folders up to the mount follow: in a
    container the path in /proc may not exist, because the mounted cgroup is that of the container.

    The controllers of a tree are as /proc lists them. In version 1 several may share a tree, such as
    ``"cpu,cpuacct"``. Version 2 has one tree, and its controllers are ``""``.
    """
    found = []
    for line in text_of(proc / "self/cgroup").splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        second = number == "0" and not controllers
        if second or controller in controllers.split(","):
            inner, tree = Path(path.strip("/")), mount(controllers)
            found += [(tree / place, second) for place in (inner, *inner.parents)]
    return found


def text_of(path: Path) -> str:
    """Return the text of a small kernel file; empty if it can't be read."""
    try:
        with open(path, "rb", buffering=0) as file:  # buffers cost more than the read
            return os.fsdecode(file.readall())
    except (OSError, ValueError):  # ValueError: a path with a NUL
        return ""


def number_in(path: Path) -> int | None:
    return whole_number(text_of(path).strip())


def whole_number(word: str) -> int | None:
    """Return `word` as an int; None if it is no number, or longer than any count of the kernel."""
    return int(word) if word.isascii() and word.isdigit() and len(word) <= 20 else None


# -- ranks of a job that share this machine, by the environment variables of their launcher
#
# A default that counts cores or memory of the machine is divided by them: each rank has a process, with
# loaders and workers, that takes the same.

_NAMES = (
    "LOCAL_WORLD_SIZE",  # torchrun
    "OMPI_COMM_WORLD_LOCAL_SIZE",  # mpirun of Open MPI
    "MPI_LOCALNRANKS",  # mpiexec of MPICH and of Intel MPI
    "SLURM_STEP_TASKS_PER_NODE",  # srun: "8", or "8(x2)" on two nodes
)
"""Variables of launchers, first those of launchers that others may start.

Slurm's ``SLURM_NTASKS_PER_NODE`` describes the job: it is also set for a single process of it.
"""


_NUMBERS = ("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "SLURM_LOCALID")
"""Variables with the number of this rank on its machine."""


def local_rank(environ: Mapping[str, str] = os.environ) -> int:
    """Return the number of this rank on this machine; 0 without a variable.

    Lightning's launcher, for one, sets it without the number of ranks.
    """
    return _first_of(_NUMBERS, environ) or 0


def ranks_here(environ: Mapping[str, str] = os.environ) -> int:
    """Return the number of ranks on this machine, this process among them; 1 without a variable.

    A value that is no integer of 1 or more is ignored.
    """
    return _first_of(_NAMES, environ) or 1


def _first_of(names: tuple[str, ...], environ: Mapping[str, str]) -> int | None:
    """Return the first of these variables that is an integer of 1 or more; None if none is."""
    for name in names:
        if name in environ and (number := whole_number(environ[name].partition("(")[0].strip())):
            return number
    return None
