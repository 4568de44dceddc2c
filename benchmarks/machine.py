"""The machine and the commit of a run. Nothing large is imported to find out versions."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent

LIBRARY = ("hybridloader", "backends")
"""Folders whose commits make a result older."""

PACKAGES = ("hybridloader", "torch", "numpy", "pillow", "torchdata", "spdl-core", "grain")
PACKAGES += ("webdataset", "litdata", "pyarrow")


def about() -> dict[str, Any]:
    """Return CPU, cores, memory, system, Python, versions, the day, and the commit."""
    return {
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30),
        "os": platform.platform(terse=True),
        "python": platform.python_version(),
        "versions": ", ".join(filter(None, map(_version, PACKAGES))),
        "date": datetime.date.today().isoformat(),
        "commit": commit(),
    }


def commit() -> str:
    """Return the commit of the library, with a + if it was changed since; "" without git."""
    head = git("log", "-1", "--format=%h", "--abbrev=12", "--", *LIBRARY)
    return head + ("+" if head and git("status", "--porcelain", "--", *LIBRARY) else "")


def commits_since(commit: str) -> int | None:
    """Return the number of library commits after `commit`; None without git or its whole history.

    Raises ValueError if the history has no such commit, or the library was not as in it.
    """
    if git("rev-parse", "--is-shallow-repository") != "false":
        return None
    found = git("rev-list", "--count", f"{commit}..HEAD", "--", *LIBRARY)
    if not found:
        raise ValueError(f"{commit!r} is no commit of this history")
    return int(found)


def git(*arguments: str) -> str:
    """Return what git prints; "" if it fails, or there is no git."""
    command = ["git", "-C", str(ROOT), *arguments]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def _version(name: str) -> str:
    try:
        return f"{name} {importlib.metadata.version(name)}"
    except importlib.metadata.PackageNotFoundError:
        return ""


def _cpu() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return " ".join(line.partition(":")[2].split())
    except OSError:
        pass
    return platform.processor() or platform.machine()
