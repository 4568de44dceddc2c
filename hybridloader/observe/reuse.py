"""Reuse of batches: loaders of a program that give a few of their batches again and again.

For ``hybridloader run --headroom``. An iterator asks for it once, by `running_reuse`.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any, TextIO

from hybridloader._support.attributes import length_of
from hybridloader.observe.headroom import WARM_UP, Headroom, synchronize
from hybridloader.observe.program_block import ProgramBlock, numbered

LOADED, KEPT = 36, 4
"""Batches of a loader that are loaded at most, and those of them that are given again."""

WAITS = 8
"""Steps without loading from one wait for the device to the next: what was launched is not yet done."""

LEAST = 2
"""Batches to load, at least: one before the steps that are timed, and one of these."""


class LoopTimes:
    """Times of the loop over one loader, with loading and without. One thread writes them."""

    def __init__(
        self,
        name: str,
        length: int | None,  # batches of an epoch; None: nobody knows
        clock: Callable[[], float] = time.perf_counter,
        wait: Callable[[], None] = synchronize,  # until the device is done
    ) -> None:
        self.name, self.length = name, length
        half = min(LOADED, (length or 0) // 2)
        self.loads = half if half >= LEAST else 0  # batches to load; 0: all, as ever
        self.warm = min(WARM_UP, self.loads // 2)
        self._clock, self._wait = clock, wait
        # All the mutable state:
        self._mark = 0.0
        self.loading = self.ready = 0.0  # seconds
        self.steps = 0  # without loading, which the device has done
        self._launched = 0  # others

    def mark(self) -> None:
        """Begin to measure."""
        self._launched = 0
        self._wait()
        self._mark = self._clock()

    def loaded(self) -> None:
        """Note the end of the steps with loading."""
        self._wait()
        self.loading = self._clock() - self._mark

    def step(self, *, last: bool) -> None:
        """Note a step on a batch that was there already; now and then, wait for the device."""
        self._launched += 1
        if not last and self._launched < WAITS:
            return
        self._wait()
        now = self._clock()
        self.ready += now - self._mark
        self._mark = now
        self.steps += self._launched
        self._launched = 0

    def __str__(self) -> str:
        if self.length is None:
            return f"{self.name} loaded all its batches, because it has no len()."
        if not self.steps:
            return (
                f"{self.name} loaded all its batches, because no epoch had more than "
                f"{self.loads or 2 * LEAST - 1}."
            )
        timed, kept = self.loads - self.warm, min(KEPT, self.loads)
        found = Headroom(self.loading / timed, self.ready / self.steps, self.steps, kept)
        steps = f"{timed} steps with loading, {self.steps} on {kept} batches."
        return f"{self.name}: {found.summary} {steps}"


class KeptBatches:
    """First batches of one loader, and the order in which they are given again."""

    def __init__(self, times: LoopTimes) -> None:
        self.times = times
        # All the mutable state:
        self._kept: list[Any] = []
        self._loaded = self._given = 0  # in this epoch

    def begin(self) -> None:
        """Begin an epoch: load anew, unless enough was loaded in the one before."""
        self._given = 0
        if not self.enough:
            self._loaded = 0
            self._kept.clear()

    @property
    def enough(self) -> bool:
        """True if no batch more is loaded."""
        return self.times.steps > 0 or 0 < self.times.loads <= self._loaded

    def keep(self, batch: Any) -> bool:
        """Note a batch that was loaded; return True if it was the last one."""
        if self.times.loads and len(self._kept) < KEPT:
            self._kept.append(batch)
        self._loaded += 1
        self._given += 1
        if self._loaded == self.times.warm:
            self.times.mark()
        if self._loaded == self.times.loads:
            self.times.loaded()
        return self.enough

    def again(self) -> Any:
        """Return a batch that is there already; raise `StopIteration` at the end of the epoch."""
        last = self._given >= (self.times.length or 0)
        if self._given:
            self.times.step(last=last)
        else:
            self.times.mark()
        if last:
            raise StopIteration
        self._given += 1
        return self._kept[self._given % len(self._kept)]


class Reuse(ProgramBlock):
    """Reuse of batches by all loaders whose iterators are made while it runs; for one use.

    At its end it writes what was measured, a line for each loader.
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        super().__init__()
        self._stream = stream
        # All the mutable state:
        self.times: list[LoopTimes] = []

    def _end(self, error: BaseException | None) -> None:
        stream = sys.stderr if self._stream is None else self._stream
        for times in self.times:
            print(f"hybridloader: {times}", file=stream)
        if any(times.steps for times in self.times):
            print(
                "hybridloader: most steps had the same few batches; what was trained is of no use",
                file=stream,
            )

    def batches_of(self, loader: Any) -> KeptBatches:
        """Return an empty store for the batches of `loader`."""
        times = LoopTimes(numbered("DataLoader", len(self.times) + 1), length_of(loader))
        self.times.append(times)
        return KeptBatches(times)


def running_reuse() -> Reuse | None:
    """Return the reuse that runs in this process, if any."""
    return Reuse.running()
