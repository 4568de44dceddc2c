"""The machine that a run was made on, by name. Nothing large is imported to find out versions."""

from __future__ import annotations

import datetime
import hashlib
import importlib.metadata
import os
import platform
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent

_SHOWING = ("__main__.py", "display.py", "plot.py", "report.py", "targets.py", "recording.py")
"""Modules of the benchmarks that no figure of a run depends on; nor on the long run's."""

PACKAGES = ("hybridloader", "torch", "numpy", "pillow", "torchdata", "spdl-core", "grain")


def about(**more: Any) -> dict[str, Any]:
    """CPU, cores, memory, system, versions and the day; a package that is missing has None."""
    return {
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30),
        "os": _system(),
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in PACKAGES},
        "date": datetime.date.today().isoformat(),
        "load": round(os.getloadavg()[0], 1),
        "revision": revision(),
        **more,
    }


def revision(root: Path = ROOT) -> str:
    """Hash of all code that a figure depends on: of the library, its backends and the benchmarks."""
    found = hashlib.blake2b(digest_size=8)
    for package in ("hybridloader", "backends", "benchmarks"):
        for file in sorted((root / package).rglob("*.py")):
            apart = file.name in _SHOWING or file.parent.name == "long_run"
            if package != "benchmarks" or not apart:
                found.update(f"{file.relative_to(root)}\n".encode())
                found.update(file.read_bytes())
    return found.hexdigest()


def sentence(about: dict[str, Any]) -> str:
    """One sentence about the machine of a run."""
    versions = ", ".join(f"{k} {v}" for k, v in about["versions"].items() if v)
    return (
        f"{about['cpu']}, {about['cores']} cores, {about['memory_gb']} GB, {about['os']}, "
        f"Python {about['python']}; {versions}; {about['date']}, {about['rounds']} rounds"
    )


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cpu() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return " ".join(line.partition(":")[2].split())
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _system() -> str:
    try:
        name = platform.freedesktop_os_release()["PRETTY_NAME"]
    except OSError:
        name = platform.system()
    return f"{name} ({platform.system()} {platform.release()})"
