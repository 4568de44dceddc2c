"""Waiting until nothing else uses the machine, and until it is as fast as it was.

Two looks: the part of all cores that others use while this run rests, and the time of a loop on all
cores at once beside its least time so far. A virtual machine may be slow although it sees no other
process.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass

import psutil

from benchmarks.datasets.plain import spin

BUSY = 0.1
"""Part of all cores that others may use."""

SLOW = 1.15
"""Time of the loop over its least time so far, at most."""

PAUSE = 0.2
"""Seconds for which this run rests while the load of others is read."""

LOOPS = 100_000
"""Turns of the loop: some 10 ms."""


def busy_share() -> float:
    """Part of all cores that is used during a pause, by other processes or by other machines."""
    before = psutil.cpu_times()
    time.sleep(PAUSE)
    after = psutil.cpu_times()
    spent = {name: getattr(after, name) - getattr(before, name) for name in after._fields}
    total = sum(spent.values())
    idle = spent["idle"] + spent.get("iowait", 0.0)
    return 1 - idle / total if total > 0 else 0.0


def loop_on_all_cores() -> float:
    """Seconds of a loop in as many processes as there are cores at once: that of the slowest."""
    reading, writing = os.pipe()
    pids = [_child(writing) for _ in os.sched_getaffinity(0)]
    os.close(writing)
    with os.fdopen(reading) as answers:
        seconds = [float(line) for line in answers]
    for pid in pids:
        os.waitpid(pid, 0)
    return max(seconds, default=0.0)


def _child(writing: int) -> int:
    pid = os.fork()
    if pid == 0:
        try:
            found = []
            for _ in range(3):
                began = time.perf_counter()
                spin(LOOPS)
                found.append(time.perf_counter() - began)
            os.write(writing, f"{min(found)}\n".encode())
        finally:
            os._exit(0)
    return pid


@dataclass
class Quiet:
    """Waiting for the machine.

    Attributes
    ----------
    limit
        Seconds to wait at most each time.
    budget
        Seconds to wait at most in all. When it is used up, there are looks but no waits.
    best
        Least time of the loop so far, in seconds.
    """

    limit: float = 60.0
    budget: float = 900.0
    best: float = math.inf
    share: Callable[[], float] = busy_share
    loop: Callable[[], float] = loop_on_all_cores
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep

    def wait(self, say: Callable[[str], None]) -> bool:
        """Wait until the machine is quiet; False if it is not within the limit.

        Parameters
        ----------
        say
            Called with the reason, once for each look that finds the machine not quiet.
        """
        since = self.clock()
        while (reason := self.look()) is not None:
            waited = self.clock() - since
            if waited >= min(self.limit, self.budget):
                self.budget -= waited
                return False
            say(
                f"waiting for quiet, {waited:.0f} of {min(self.limit, self.budget):.0f} s: {reason}"
            )
            self.sleep(1.0)
        self.budget -= self.clock() - since
        return True

    def look(self) -> str | None:
        """Reason why the machine is not quiet now, or None."""
        share, seconds = self.share(), self.loop()
        self.best = min(self.best, seconds)
        if share > BUSY:
            return f"others use {share:.0%} of the cores"
        if seconds > SLOW * self.best:
            return f"a loop takes {seconds / self.best:.2f} times as long as before"
        return None
