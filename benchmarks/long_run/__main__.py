"""``python -m benchmarks.long_run``: mixed work with faults on each backend, and a verdict on each.

A cycle of work has loaders of many kinds, skipped and retried samples, epochs left early, resumed
states, a pipeline, and a storm of workers that die and hang. Every sample must come once. Nothing may
grow.
"""

from __future__ import annotations

import argparse
import contextlib
import signal
import statistics
import sys
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.runner import Failed, Process

BACKENDS = ("inline", "threads", "fork", "spawn", "shared-memory")
MEMORY_MB = 8.0
"""Growth in MB that passes: the allocator's arenas come and go, as do a few slots."""

ONE_ARENA = ("env", "MALLOC_ARENA_MAX=1")
"""Prefix of a part: glibc gives threads arenas, each of which keeps megabytes that were freed. With one
arena, what grows is held by the program."""

PATIENCE = 300.0
"""Seconds beyond its time after which a part counts as a hang."""


def main(arguments: Sequence[str] | None = None, make: Callable[[float], Any] | None = None) -> int:
    """Do a part for each backend. Return 1 if one failed or something grew."""
    made = argparse.ArgumentParser(prog="python -m benchmarks.long_run", description=__doc__)
    made.add_argument("--minutes", type=float, default=24.0, help="for each backend (24)")
    made.add_argument("--backends", nargs="+", default=BACKENDS, choices=BACKENDS)
    made.add_argument("--seed", type=int, default=0)
    options = made.parse_args(arguments)
    seconds, worst = 60 * options.minutes, 0
    for backend in options.backends:
        with contextlib.closing((make or _process)(seconds + PATIENCE)) as process:
            try:
                spec = {"seconds": seconds, "seed": options.seed}
                answer = process.ask("part", backend, spec, False)
                grown, tally = changes(answer["looks"]), answer["tally"]
                done = ", ".join(f"{count:,} {name}" for name, count in sorted(tally.items()))
                verdict = f"more at the end: {'; '.join(grown)}" if grown else "as at the beginning"
            except Failed as error:
                grown, done, verdict = ["failed"], "", f"failed: {error}"
        print(f"{backend}: {verdict} ({done})", flush=True)
        worst |= bool(grown)
    return worst


def _process(timeout: float) -> Process:
    return Process("benchmarks.long_run.part", ONE_ARENA, timeout)


def changes(looks: dict[str, list[float]]) -> list[str]:
    """Return what has grown: medians of the last tenth of the looks beside those of the second tenth."""
    grown: list[Any] = []
    for name, values in looks.items():
        begun, end = (statistics.median(tenth(values, which)) for which in (1, 9))
        if end - begun > (MEMORY_MB if name == "memory_mb" else 0):
            grown.append(f"{name} {begun:g} -> {end:g}")
    return grown


def tenth(values: list[float], which: int) -> list[float]:
    """Return the values of one tenth of the run, the first being 0; of a short run at least one."""
    start = which * len(values) // 10
    return values[start : max(start + 1, (which + 1) * len(values) // 10)]


if __name__ == "__main__":
    # Ended from outside, it still ends its processes.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    sys.exit(main())
