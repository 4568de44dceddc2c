"""Resources that a tree of processes holds: memory, descriptors, threads; and its CPU seconds.

Without Linux' /proc some of them are missing.
"""

from __future__ import annotations

import os
import resource
from pathlib import Path

import psutil


def tree(pid: int) -> list[psutil.Process]:
    """Return a process and all that descend from it and live."""
    try:
        process = psutil.Process(pid)
        return [process, *process.children(recursive=True)]
    except psutil.Error:
        return []


def memory_mb(pid: int, *, files: bool) -> float:
    """Return MB of PSS of a tree; with `files`, mapped files count, the code of libraries above all."""
    total = 0
    for process in tree(pid):
        try:
            lines = Path(f"/proc/{process.pid}/smaps_rollup").read_text().splitlines()[1:]
        except OSError:  # it has ended, or there is no /proc
            continue
        kb = {
            name: int(rest.split()[0]) for name, _, rest in (line.partition(":") for line in lines)
        }
        total += kb["Pss"] - (0 if files else kb.get("Pss_File", 0))
    return total * 1024 / 1e6


def holdings() -> dict[str, float]:
    """Return MB of PSS, descriptors, threads and processes of this process and all below it."""
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


class CpuMeter:
    """CPU seconds of this process and all below it, those that have ended included."""

    def __init__(self) -> None:
        self._before = 0.0

    def start(self) -> None:
        self._before = self._spent()

    def stop(self) -> float:
        return self._spent() - self._before

    def _spent(self) -> float:
        spent = 0.0
        for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN):
            usage = resource.getrusage(who)
            spent += usage.ru_utime + usage.ru_stime
        for process in tree(os.getpid())[1:]:
            try:
                times = process.cpu_times()
            except psutil.Error:
                continue
            spent += times.user + times.system
        return spent
