"""One backend's part of the long run, in a separate process: cycles of work, and a look after each."""

from __future__ import annotations

import gc
import json
import os
import sys
import time
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

from benchmarks.long_run.work import cycle
from benchmarks.usage import holdings

COLUMNS = ("memory_mb", "descriptors", "threads", "processes", "segments")
REST = 0.4
"""Seconds of rest for a second of work: other work on the machine shall not be disturbed."""


def part(backend: str, seconds: float, seed: int) -> dict[str, Any]:
    """Work on `backend` for so long; return the looks by column, and what was done."""
    warnings.simplefilter("ignore")  # more workers than cores, workers that die
    tally: Counter[str] = Counter()
    looks: dict[str, list[float]] = {name: [] for name in COLUMNS}
    until, number = time.monotonic() + seconds, 0
    while number == 0 or time.monotonic() < until:
        began = time.monotonic()
        cycle(backend, seed, number, tally)
        gc.collect()
        found = holdings() | {"segments": segments(Path("/dev/shm"), os.getpid())}
        for name in COLUMNS:
            looks[name].append(round(found[name], 3))
        time.sleep(REST * (time.monotonic() - began))
        number += 1
    return {"looks": looks, "tally": dict(tally)}


def segments(folder: Path, pid: int) -> int:
    """Return the number of segments that have a name and were made by, or for, process `pid`."""
    return len(list(folder.glob(f"hl-{pid}-*")))


def main() -> None:
    """Answer one question of `runner.Process`."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    asked = json.loads(sys.stdin.readline())
    try:
        answer = part(asked["loader"], **asked["spec"])
    except Exception as error:
        answer = {"failed": f"{type(error).__name__}: {error}"}
    print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
