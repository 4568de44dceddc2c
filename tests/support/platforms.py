"""Marks of tests for some platforms only, the folder of the package, and how long tests wait."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

import hybridloader

FORK = hasattr(os, "fork")
POSIX = os.name == "posix"
GIL = getattr(sys, "_is_gil_enabled", lambda: True)()
ROOT = Path("/" if sys.platform == "linux" else os.devnull)
"""Folder of the kernel's files: proc, dev/shm. Elsewhere nothing is below it."""

posix = pytest.mark.skipif(
    not POSIX, reason="signals, sockets, descriptors and permissions of POSIX"
)
needs_fork = pytest.mark.skipif(not FORK, reason="needs fork")
needs_zygote = pytest.mark.skipif(
    sys.platform != "linux" or not hasattr(os, "pidfd_open"), reason="needs fork, /proc and pidfds"
)
"""Of fresh workers that are forked from one fresh process."""

DEADLINE = 60.0
"""Seconds after which a test gives up; never reached when all is well."""

REPOSITORY = Path(__file__).parents[2]

PACKAGE = str(Path(hybridloader.__file__).parents[1])
"""Folder in which other processes find the package. `.ci/windows` copies it out of the checkout."""
