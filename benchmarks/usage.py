"""Resources that a tree of processes uses: CPU time, memory, descriptors, threads.

Without Linux' /proc some of them are missing.
"""

from __future__ import annotations

import os
import resource
import time
from pathlib import Path

import psutil

MB = 1e6


def tree(pid: int) -> list[psutil.Process]:
    """A process and all that descend from it and live."""
    try:
        process = psutil.Process(pid)
        return [process, *process.children(recursive=True)]
    except psutil.Error:
        return []


def _cpu_of(process: psutil.Process) -> float:
    """CPU seconds of a living process. The kernel's clock for it counts nanoseconds, psutil 1/100 s."""
    try:
        return time.clock_gettime((~process.pid << 3) | 2)  # CPUCLOCK_SCHED of that process
    except (OSError, AttributeError):
        pass
    try:
        times = process.cpu_times()
    except psutil.Error:
        return 0.0
    return float(times.user + times.system)


def _own_cpu() -> float:
    """CPU seconds of this process and of its children that have ended."""
    spent = 0.0
    for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN):
        usage = resource.getrusage(who)
        spent += usage.ru_utime + usage.ru_stime
    return spent


class CpuMeter:
    """CPU seconds of this process and all below it, without those of the meter."""

    def __init__(self) -> None:
        self._before = 0.0

    def start(self) -> None:
        children = tree(os.getpid())[1:]
        self._before = sum(map(_cpu_of, children)) + _own_cpu()

    def stop(self) -> float:
        own = _own_cpu()
        return own + sum(map(_cpu_of, tree(os.getpid())[1:])) - self._before


def memory_mb(pid: int, *, files: bool) -> float:
    """PSS of a tree in MB.

    Parameters
    ----------
    files
        True to count mapped files, the code of libraries above all. Other benchmark processes map
        the same files, so a process's share of them says how many of those there are.
    """
    total = 0.0
    for process in tree(pid):
        rollup = _rollup(process.pid)
        if rollup:
            total += rollup["Pss"] - (0 if files else rollup.get("Pss_File", 0))
    return total * 1024 / MB


def _rollup(pid: int) -> dict[str, int]:
    """kB by name; empty for a process that has gone, or without /proc."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
    except OSError:
        return {}
    return {name: int(rest.split()[0]) for name, _, rest in (line.partition(":") for line in lines)}


def rss_mb() -> float:
    """Resident memory of this process alone, in MB."""
    return float(psutil.Process().memory_info().rss) / MB


def holdings() -> dict[str, float]:
    """MB of PSS, descriptors, threads and processes of this process and all below it."""
    processes = tree(os.getpid())
    descriptors = threads = 0
    for process in processes:
        try:
            descriptors += process.num_fds()
            threads += process.num_threads()
        except psutil.Error:
            pass
    return {
        "memory_mb": memory_mb(os.getpid(), files=False),
        "descriptors": descriptors,
        "threads": threads,
        "processes": len(processes),
    }
