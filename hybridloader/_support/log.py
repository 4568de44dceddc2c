"""Log of rare events: starts, ends and deaths of workers, restarts, fallbacks and resumes.

The logger is ``hybridloader``. Its messages have the levels DEBUG and INFO, so nothing is printed unless
the program configures `logging`. A program that has not imported `logging` gets no message, and this
module does not import it: a worker may need neither.
"""

from __future__ import annotations

import sys
from typing import Any

DEBUG, INFO = 10, 20
"""Levels, as in `logging`."""


def log(level: int, message: str, *arguments: object) -> None:
    """Log `message`, into which `logging` puts the arguments by ``%``."""
    logging: Any = sys.modules.get("logging")
    if logging is not None:
        logging.getLogger("hybridloader").log(level, message, *arguments)
