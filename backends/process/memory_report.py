"""Report of the kernel's figures about memory, for the error about a worker that was killed.

It reads a few small files below a root folder and puts them into words. A figure that is not there is
None. It never raises, never limits anything, and keeps nothing but one count to compare with later.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from hybridloader._support import system
from hybridloader._support.cgroups import number_in, text_of, whole_number
from hybridloader.memory.limits import memory_cgroups

_ROOT = Path(system.ROOT)

_TIGHT = 0.9
"""Fraction of a limit from which a lack of memory most likely killed the worker."""


@dataclass(frozen=True)
class MemoryReport:
    """Figures of the kernel, in bytes except for the kills by its OOM killer; None if unknown."""

    limit: int | None = None  # of the tightest cgroup among the parents
    used: int | None = None  # in that cgroup, including its caches
    cgroup_kills: int | None = None  # processes of this cgroup, by any limit
    machine_kills: int | None = None  # on the whole machine, including other containers
    shm_size: int | None = None  # of /dev/shm
    shm_free: int | None = None
    available: int | None = None  # bytes that the machine has without swapping (MemAvailable)
    address_space: int | None = None  # RLIMIT_AS

    @property
    def cgroup_full(self) -> bool:
        return bool(self.limit and self.used is not None and self.used >= _TIGHT * self.limit)

    @property
    def shm_full(self) -> bool:
        return bool(self.shm_size and self.shm_free is not None) and (
            (self.shm_free or 0) <= (1 - _TIGHT) * (self.shm_size or 0)
        )


def read(root: Path = _ROOT) -> MemoryReport:  # folder that contains /proc, /sys and /dev
    limit, used, cgroup_kills = _cgroup(root)
    shm_size, shm_free = _shm(root)
    return MemoryReport(
        limit=limit,
        used=used,
        cgroup_kills=cgroup_kills,
        machine_kills=_field(root / "proc/vmstat", "oom_kill"),  # since Linux 4.13
        shm_size=shm_size,
        shm_free=shm_free,
        available=_field(root / "proc/meminfo", "MemAvailable:", 1024),
        address_space=_address_space(root),
    )


class OomWatch:
    """Watch that compares with how often the OOM killer had struck when it was made."""

    def __init__(self, root: Path = _ROOT) -> None:
        self._root = root
        self._before = read(root)

    def describe(self, signal: str = "SIGKILL") -> str:
        """Name the likely cause of a death by `signal`, and the memory there is, in two lines at most.

        The first is for ``"SIGKILL"``, which the OOM killer sends, and ``"SIGBUS"``, of shared memory
        that could not be had.
        """
        now, cause = read(self._root), ""
        if signal == "SIGKILL":
            cause = self._cause(now)
        elif signal == "SIGBUS":
            cause = _cause_of_sigbus(now)
        lines = (cause, _in_words(now, shm=signal == "SIGBUS" or now.shm_full))
        return "\n".join(line for line in lines if line)

    def _rise(self, now: MemoryReport) -> tuple[str, int, int] | None:
        for whose, before, after in (
            ("cgroup", self._before.cgroup_kills, now.cgroup_kills),
            ("machine", self._before.machine_kills, now.machine_kills),
        ):
            if before is not None and after is not None and after > before:
                return whose, before, after
        return None

    def _cause(self, now: MemoryReport) -> str:
        rise = self._rise(now)
        if rise is not None:
            whose, before, after = rise
            counted = f"oom_kill rose from {before} to {after}"
            if whose == "cgroup":
                if now.limit is not None:
                    counted += f"; limit {_size(now.limit)}"
                    counted += "" if now.used is None else f", in use {_size(now.used)}"
                return f"Likely cause: the cgroup's OOM killer struck ({counted})."
            if now.cgroup_kills is None:
                return f"Likely cause: the machine's OOM killer struck ({counted} in /proc/vmstat)."
            return (
                f"An OOM killer struck on this machine ({counted} in /proc/vmstat), but in another "
                "cgroup: likely another program or a person sent the signal."
            )
        if now.cgroup_full:
            return (
                f"No OOM kill was counted, but the cgroup has {_size(now.used)} of {_size(now.limit)} "
                "in use: likely a program that watches it (a job scheduler, systemd-oomd) sent the "
                "signal."
            )
        if now.cgroup_kills is None and now.machine_kills is None:
            return "This platform does not report whether the system ran out of memory."
        return (
            "No OOM kill was counted: another program or a person sent the signal (a job scheduler, a "
            "container runtime, systemd-oomd)."
        )


def _cause_of_sigbus(now: MemoryReport) -> str:
    if now.shm_full:
        return "Likely cause: /dev/shm is full."
    if now.cgroup_full:
        return "Likely cause: the cgroup's limit; shared memory counts towards it."
    return "Likely cause: a mapped file has become shorter, or shared memory was full at that time."


def _in_words(state: MemoryReport, *, shm: bool) -> str:
    parts = []
    if state.limit is not None and state.used is not None:
        parts.append(f"cgroup {_size(state.used)} of {_size(state.limit)} in use")
    if state.available is not None:
        parts.append(f"machine {_size(state.available)} available")
    if shm and state.shm_size is not None and state.shm_free is not None:
        parts.append(f"/dev/shm {_size(state.shm_free)} of {_size(state.shm_size)} free")
    if state.address_space is not None:
        parts.append(f"ulimit -v {_size(state.address_space)}")
    return f"Memory now: {', '.join(parts)}." if parts else ""


def _size(count: int | None) -> str:
    """Format bytes as ``"1.98 GiB"``: three digits, so that 1.98 of 2.00 differs from 2 of 2."""
    count = count or 0
    power = min((max(count, 1).bit_length() - 1) // 10, len(_UNITS) - 1)
    return f"{count} B" if power == 0 else f"{count / 1024**power:.2f} {_UNITS[power]}"


_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def _cgroup(root: Path) -> tuple[int | None, int | None, int | None]:
    """Read limit and usage of the tightest group, and the kills of this process's own."""
    limit: int | None = None
    used: int | None = None
    kills: int | None = None
    for group, names in memory_cgroups(root):
        own = number_in(group / names.limit)
        if own and own < _NO_LIMIT and (limit is None or own < limit):
            limit, used = own, number_in(group / names.used)
        if kills is None:  # v2 counts at the victim's group and all above, v1 only there
            kills = _field(group / names.events, "oom_kill")
    return limit, used, kills


_NO_LIMIT = 1 << 60
"""Limit that means none: v1 reports the largest number of whole pages, just below 2**63."""


def _shm(root: Path) -> tuple[int | None, int | None]:
    try:
        found = os.statvfs(root / "dev/shm")
    except (AttributeError, OSError):  # missing on Windows
        return None, None
    return found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize


def _address_space(root: Path) -> int | None:
    for line in text_of(root / "proc/self/limits").splitlines():
        if line.startswith("Max address space"):
            soft = line.removeprefix("Max address space").split()[:1]
            return whole_number(soft[0]) if soft else None
    return None


def _field(path: Path, name: str, unit: int = 1) -> int | None:
    """Read the number after `name` at the beginning of a line, times `unit`."""
    for line in text_of(path).splitlines():
        words = line.split()
        if len(words) >= 2 and words[0] == name:
            number = whole_number(words[1])
            return None if number is None else unit * number
    return None
