"""Which line a warning is about: the first one up the stack that is neither ours nor torch's loader's.

Warnings of ours come from under `iter(loader)` and from under `pipe.run()`, at different depths. It
never warns itself.
"""

from __future__ import annotations

import os
import sys

_OURS = os.path.dirname(os.path.abspath(__file__)) + os.sep
_BACKENDS = os.path.join(os.path.dirname(os.path.dirname(_OURS)), "backends") + os.sep
_TORCHS = os.path.join("torch", "utils", "data") + os.sep


def stacklevel() -> int:
    """What to pass to `warnings.warn` for the line that called this package.

    Python 3.12 has `skip_file_prefixes` for this; we serve 3.10.
    """
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and _within(frame.f_code.co_filename):
        frame, level = frame.f_back, level + 1
    return level


def _within(path: str) -> bool:
    return path.startswith((_OURS, _BACKENDS)) or _TORCHS in path
