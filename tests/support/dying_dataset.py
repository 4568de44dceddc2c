"""Dataset whose workers end, and need no torch: a fresh process under Wine imports it in 6 s or more."""

from __future__ import annotations

import faulthandler
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil

LARGE = 50_000


class Dying:
    """The first worker process that reaches item 3 ends in one of several ways."""

    def __init__(self, mark: Path, how: str) -> None:
        self.mark, self.how = mark, how

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        if index == 3 and not self.mark.exists():
            self.mark.touch()
            if self.how == "exit":
                os._exit(3)
            if self.how == "kill":
                psutil.Process().kill()
            if self.how == "crash":
                faulthandler._read_null()  # type: ignore[attr-defined]
            time.sleep(600)  # longer than any wait for a process that is left
        return np.full((LARGE,), index)
