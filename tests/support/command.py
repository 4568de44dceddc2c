"""The command `hybridloader`, in this process."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import entry_points

BAD_INPUT = 2
"""Exit code for arguments with which the command can do nothing."""


def main(words: Sequence[str]) -> int:
    """Run the command that is installed, and return its exit code."""
    (script,) = entry_points(group="console_scripts", name="hybridloader")
    code: int = script.load()(words)
    return code
