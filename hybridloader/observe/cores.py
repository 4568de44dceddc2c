"""Cores that this process may use, and how busy they are: by affinity, cgroup and /proc."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from hybridloader.observe.recording import CoreUse

_CGROUPS = Path("/sys/fs/cgroup")
_PROC = Path("/proc")


def available(cgroups: Path = _CGROUPS, proc: Path = _PROC) -> float:
    """Return the number of cores that this process may use, a fraction if a quota says so."""
    cores = float(len(affinity()))
    for folder in _folders(cgroups, proc):
        quota = _quota(folder)
        if quota is not None:
            cores = min(cores, quota)
    return cores


def affinity() -> set[int]:
    """Return the numbers of the cores that this process may run on."""
    try:
        return os.sched_getaffinity(0)
    except (AttributeError, OSError):  # not on macOS and Windows
        return set(range(os.cpu_count() or 1))


def _folders(cgroups: Path, proc: Path) -> Iterator[Path]:
    """Yield the folders of this process's cgroup and of those around it."""
    try:
        lines = (proc / "self" / "cgroup").read_text().splitlines()
    except (OSError, UnicodeDecodeError):
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers in ("", "cpu", "cpu,cpuacct"):
            # With version 1 each controller has a tree of its own.
            root = cgroups / controllers if controllers else cgroups
            inner = root / path.lstrip("/")
            yield inner
            yield from (outer for outer in inner.parents if outer.is_relative_to(root))


def _quota(folder: Path) -> float | None:
    """Return the quota of a cgroup in cores; None if it has none."""
    for names in (("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us")):
        try:
            words = [word for name in names for word in (folder / name).read_text().split()]
            quota, period = words
            if quota not in ("max", "-1") and float(period) > 0:
                return float(quota) / float(period)
        except (OSError, ValueError):
            continue
    return None


class _Reading(NamedTuple):
    """Seconds on the clock, of all cores that were busy, of this process, and throttled."""

    time: float
    busy: float | None
    own: float
    throttled: float


def read(cores: Iterable[int], cgroups: Path = _CGROUPS, proc: Path = _PROC) -> _Reading:
    """Look at the clocks of the machine."""
    throttled = 0.0
    for folder in _folders(cgroups, proc):
        try:
            fields = dict(line.split() for line in (folder / "cpu.stat").read_text().splitlines())
            throttled = float(fields.get("throttled_usec", 0)) * 1e-6
            throttled = throttled or float(fields.get("throttled_time", 0)) * 1e-9
            break  # the innermost
        except (OSError, ValueError):
            continue
    return _Reading(time.perf_counter(), _busy(set(cores), proc), time.process_time(), throttled)


def _busy(cores: set[int], proc: Path) -> float | None:
    """Return the seconds that `cores` have been busy since the machine started; None if not known."""
    try:
        tick = os.sysconf("SC_CLK_TCK")
        total = 0
        for line in (proc / "stat").read_text().splitlines():
            name, *words = line.split()
            if name.startswith("cpu") and name[3:].isdecimal() and int(name[3:]) in cores:
                # User, nice, system, idle, waiting for a disk, interrupts, stolen by others.
                user, nice, system, _, _, *rest = map(int, words[:8])
                total += user + nice + system + sum(rest)
        return total / tick if total else None
    except (AttributeError, OSError, ValueError):
        return None


class CoreUsage:
    """Use of the cores from when this is made until its end."""

    def __init__(self) -> None:
        self._cores, self.available = affinity(), available()
        # All the mutable state:
        self._before = read(self._cores)
        self._after: _Reading | None = None

    def end(self) -> None:
        """Count no further."""
        self._after = read(self._cores)

    def use(self, workers: float = 0.0) -> CoreUse:
        """Return the use until now; `workers` are the CPU seconds of worker processes."""
        before, after = self._before, self._after or read(self._cores)
        seconds = after.time - before.time
        if seconds < 0.05:  # /proc counts in hundredths
            return CoreUse(self.available)
        busy = None
        if before.busy is not None and after.busy is not None:
            busy = min((after.busy - before.busy) / seconds, float(len(self._cores)))
        own = (after.own - before.own + workers) / seconds
        throttled = min(1.0, (after.throttled - before.throttled) / seconds)
        return CoreUse(self.available, busy, own, throttled)
