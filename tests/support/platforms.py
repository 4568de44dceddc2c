"""Marks of tests for some platforms only, and the folder of the package."""

from __future__ import annotations

from pathlib import Path

import pytest

import hybridloader
from hybridloader._support import system

posix = pytest.mark.skipif(
    not system.UNIX_SOCKETS, reason="signals, sockets, descriptors and permissions of POSIX"
)
needs_fork = pytest.mark.skipif(not system.FORK, reason="needs fork")

PACKAGE = str(Path(hybridloader.__file__).parents[1])
"""Folder in which other processes find the package. `.ci/windows` copies it out of the checkout."""
