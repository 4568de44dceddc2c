"""Resources that a tree of processes holds; without Linux' /proc some of them are missing."""

from __future__ import annotations

import os
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
