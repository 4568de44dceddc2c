"""Cores that this process may use, and how busy they are: by affinity, cgroup and /proc."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from hybridloader._support import system
from hybridloader.memory.limits import cgroups, ranks_here, text_of
from hybridloader.observe.figures import CoreUse

_CGROUPS = Path(system.ROOT, "sys/fs/cgroup")
_PROC = Path(system.PROC)


class Limit(NamedTuple):
    """Cores that this process may use, and the folder of the cgroup whose quota limits them, if any."""

    cores: float
    folder: Path | None = None


def limit(mounts: Path = _CGROUPS, proc: Path = _PROC) -> Limit:
    """Return the limit on this process's cores: its affinity, or a lower (maybe fractional) quota."""
    return _within_quotas(len(affinity()), mounts, proc)


def _within_quotas(cores: float, mounts: Path, proc: Path) -> Limit:
    found = Limit(float(cores))
    # In cgroup version 1 a controller has a separate tree, or shares one: "cpuacct,cpu".
    for folder, _ in cgroups("cpu", proc, mounts.joinpath):
        quota = _quota(folder)
        if quota is not None and quota < found.cores:
            found = Limit(quota, folder)
    return found


def available(mounts: Path = _CGROUPS, proc: Path = _PROC) -> float:
    """Return the number of cores that this process may use; a quota may make it a fraction."""
    return limit(mounts, proc).cores


def share(ranks: int, mounts: Path = _CGROUPS, proc: Path = _PROC) -> float:
    """Return this process's share of the cores of a machine with `ranks` ranks.

    The cores that the cgroups leave to the job are divided by `ranks`. A rank whose affinity is already
    narrower than that keeps all cores of its affinity.
    """
    own = available(mounts, proc)
    if ranks == 1:
        return own
    return min(own, _within_quotas(_cores_of_job(mounts, proc), mounts, proc).cores / ranks)


def _cores_of_job(mounts: Path, proc: Path) -> int:
    """Return the number of cores in the cpuset of this process's cgroup, else of the machine."""
    for folder, _ in cgroups("cpuset", proc, mounts.joinpath):
        for name in ("cpuset.cpus.effective", "cpuset.effective_cpus"):
            try:  # "0-3,8"
                parts = [part.split("-") for part in text_of(folder / name).split(",")]
                return sum(int(ends[-1]) - int(ends[0]) + 1 for ends in parts)
            except ValueError:
                continue
    return os.cpu_count() or 1


def affinity() -> set[int]:
    """Return the numbers of the cores that this process may run on."""
    try:
        return os.sched_getaffinity(0)
    except (AttributeError, OSError):  # not on macOS and Windows
        return set(range(os.cpu_count() or 1))


def _quota(folder: Path) -> float | None:
    """Return the quota of a cgroup in cores; None if it has none."""
    for names in (("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us")):
        try:
            quota, period = [word for name in names for word in text_of(folder / name).split()]
            if quota not in ("max", "-1") and float(period) > 0:
                return float(quota) / float(period)
        except ValueError:
            continue
    return None


class _Reading(NamedTuple):
    """Clock, busy seconds of the cores and of this process; quota periods, all and throttled ones."""

    time: float
    busy: float | None
    own: float
    periods: float = 0.0
    throttled: float = 0.0


def read(cores: Iterable[int], folder: Path | None = None, proc: Path = _PROC) -> _Reading:
    """Read the CPU clocks of the machine, or of the cgroup in `folder` if its quota is the limit.

    A container also sees cores that other containers of the host keep busy. Only the time of the
    container's cgroup counts against its quota.
    """
    now, own = time.perf_counter(), time.process_time()
    if folder is None:
        return _Reading(now, _busy(set(cores), proc), own)
    counts = _counts(folder / "cpu.stat")
    used = counts.get("usage_usec", 0.0) * 1e-6  # version 2
    used = used or _counts(folder / "cpuacct.usage", "ns").get("ns", 0.0) * 1e-9
    return _Reading(
        now, used or None, own, counts.get("nr_periods", 0.0), counts.get("nr_throttled", 0.0)
    )


def _counts(path: Path, name: str | None = None) -> dict[str, float]:
    """Return the numbers of a file by name; `name` is for a file that is one number without a name."""
    try:
        words = [*([] if name is None else [name]), *text_of(path).split()]
        return {words[i]: float(words[i + 1]) for i in range(0, len(words), 2)}
    except (ValueError, IndexError):
        return {}


def _busy(cores: set[int], proc: Path) -> float | None:
    """Return the busy seconds of `cores` since the machine started; None if unknown."""
    try:
        tick = os.sysconf("SC_CLK_TCK")
        total = 0
        for line in text_of(proc / "stat").splitlines():
            name, *words = line.split()
            if name.startswith("cpu") and name[3:].isdecimal() and int(name[3:]) in cores:
                # user, nice, system, idle, iowait, irq, softirq, steal
                user, nice, system, _, _, *rest = map(int, words[:8])
                total += user + nice + system + sum(rest)
        return total / tick if total else None
    except (AttributeError, OSError, ValueError):
        return None


class CoreUsage:
    """Use of the cores from the construction of this object until `end`."""

    def __init__(self) -> None:
        self._cores = affinity()
        self.available, self._folder = limit()
        ranks = ranks_here()
        self._share = None if ranks == 1 else share(ranks)
        # All the mutable state:
        self._before = self._read()
        self._after: _Reading | None = None

    def end(self) -> None:
        """Stop counting."""
        self._after = self._read()

    def _read(self) -> _Reading:
        return read(self._cores, self._folder)

    def use(self, workers: float = 0.0) -> CoreUse:
        """Return the use until now; `workers` are the CPU seconds of worker processes."""
        before, after = self._before, self._after or self._read()
        seconds = after.time - before.time
        if seconds < 0.05:  # /proc counts in hundredths
            return CoreUse(self.available, share=self._share)
        busy = None
        if before.busy is not None and after.busy is not None:
            # A cgroup may briefly exceed its quota, and the kernel counts ticks late.
            busy = min((after.busy - before.busy) / seconds, self.available)
        own = (after.own - before.own + workers) / seconds
        periods = after.periods - before.periods
        throttled = (after.throttled - before.throttled) / periods if periods > 0 else 0.0
        return CoreUse(self.available, busy, own, throttled, self._share)
