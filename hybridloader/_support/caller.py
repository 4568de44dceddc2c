"""Warnings at the user's line: the first up the stack that is neither ours nor torch's loader's."""

from __future__ import annotations

import functools
import os
import sys
import warnings

from hybridloader.errors import linked

_OURS = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_BACKENDS = os.path.join(os.path.dirname(os.path.dirname(_OURS)), "backends") + os.sep
"""Next to the package in a checkout, within it in an installation."""
_TORCHS = os.path.join("torch", "utils", "data") + os.sep


def warn(message: str, anchor: str) -> None:
    """Warn at the line that called this package, with a link to the troubleshooting page."""
    warnings.warn(linked(message, anchor), stacklevel=_stacklevel())


@functools.lru_cache(maxsize=256)
def warn_once(message: str, anchor: str) -> None:
    """Warn at that line, once in a process for each message."""
    warnings.warn(linked(message, anchor), stacklevel=_stacklevel())


def _stacklevel() -> int:
    """Return the `stacklevel` to pass to `warnings.warn`.

    Python 3.12 has `skip_file_prefixes` for this; we serve 3.10.
    """
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and _within(frame.f_code.co_filename):
        frame, level = frame.f_back, level + 1
    return level


def _within(path: str) -> bool:
    return path.startswith((_OURS, _BACKENDS)) or _TORCHS in path
