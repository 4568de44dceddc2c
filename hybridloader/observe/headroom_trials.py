"""Headroom: how much faster a loop could be if loading cost nothing.

`headroom` times a training step with loading, then on batches that are already in memory. ``hybridloader
run --headroom`` does it for an unchanged script: its loaders return a few of their batches again and
again. An iterator checks for that once, by `Reuse.running`, when it is made.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, TextIO

from hybridloader._support.text import Shown, function, short, whole
from hybridloader._support.text import time as shown
from hybridloader._support.torch_env import device_in_use
from hybridloader._support.user_objects import attribute, close, length_of
from hybridloader.observe.figures import CoreUse
from hybridloader.observe.measures import CoreUsage
from hybridloader.observe.tracing import ProgramBlock, numbered

WARM_UP = 4  # first steps, which are not timed: workers start, kernels are compiled


@dataclass(frozen=True)
class Headroom(Shown):
    """Speed of a loop with loading, and on batches that are already in memory.

    Attributes
    ----------
    loading
        Mean seconds per step with loading.
    ready
        Mean seconds per step on batches that are already in memory.
    steps
        Number of steps timed each way.
    batches
        Number of batches that were reused.
    others
        Number of cores that other programs kept busy during the steps on batches in memory; 0 if it is
        less than a quarter of the cores, or unknown. torch's threads wait for each other, so they are
        many times slower then.
    """

    loading: float
    ready: float
    steps: int
    batches: int
    others: float = 0.0

    @property
    def speedup(self) -> float:
        """Upper bound of the speedup if loading cost nothing; 1 or more."""
        return max(1.0, self.loading / self.ready) if self.ready > 0 else 1.0

    @property
    def share(self) -> float:
        """Share of a step's time that loading takes, from 0 to 1."""
        return 1 - 1 / self.speedup

    def to_dict(self) -> dict[str, Any]:
        """Return the attributes and the properties as a dict of JSON types."""
        return asdict(self) | {"speedup": self.speedup, "share": self.share}

    @property
    def summary(self) -> str:
        """Both speeds, as a sentence."""
        busy = (
            f" Other programs kept {self.others:.1f} cores busy, so the step may be faster than this: "
            "measure again without them, or call torch.set_num_threads(1) first."
        )
        return (
            f"{_rate(self.loading)} batches/s with loading ({shown(self.loading)} a step), "
            f"{_rate(self.ready)} on batches in memory ({shown(self.ready)}): "
            f"at most {self.speedup:.2f} times as fast if loading cost nothing."
            f"{busy if self.others else ''}"
        )

    def __str__(self) -> str:
        return f"{self.summary} {self.steps} steps of each, on {self.batches} batches."

    def _tables(self) -> list[list[list[str]]]:
        times = ("with loading", self.loading), ("batches in memory", self.ready)
        rows = [[name, shown(seconds), _rate(seconds)] for name, seconds in times]
        return [[["", "a step", "batches/s"], *rows]]

    def _lines(self) -> list[str]:
        return [str(self)]


def headroom(
    loader: Iterable[Any],
    step: Callable[[Any], object],
    *,
    steps: int = 100,
    batches: int = 4,
) -> Headroom:
    """Measure how much faster a training loop could be at most, if loading cost nothing.

    The loop is timed with loading first. Then the loader is closed, and `step` is timed on a few of its
    batches, again and again. Each measurement begins and ends by waiting for the device. `step` has its
    usual effects: a model is trained further, and a batch that `step` changes in place stays changed.

    Parameters
    ----------
    loader
        Loader, pipeline, or other iterable of batches. It is iterated once, until enough steps were
        timed or it ends.
    step
        Function of one batch: the body of your loop, such as forward, backward and ``optimizer.step()``.
        Copying the batch to the device counts if `step` does it.
    steps
        Maximum number of steps to time each way; fewer if `loader` is shorter. The first 4 steps, or
        half of them if there are fewer than 8, are not timed.
    batches
        Number of batches to keep and reuse. They stay in memory meanwhile.

    Returns
    -------
    Headroom
        Seconds per step, and `speedup`.

    Raises
    ------
    TypeError
        `loader` can't be iterated, or `step` can't be called.
    ValueError
        `steps` or `batches` is below 1, or `loader` returned fewer than 2 batches.

    Examples
    --------
    >>> from hybridloader import DataLoader
    >>> from hybridloader.observe import headroom
    >>> found = headroom(DataLoader(range(400), 4), lambda batch: batch.sum())
    >>> found.steps, found.batches, found.speedup >= 1
    (96, 4, True)
    """
    return measure(loader, step, steps, batches, time.perf_counter, synchronize)


def synchronize() -> None:
    """Wait until the device has finished its work, if torch uses one."""
    torch = sys.modules.get("torch")
    if torch is not None and device_in_use() is not None:  # else it would make a context
        torch.accelerator.synchronize()


def measure(
    loader: Iterable[Any],
    step: Callable[[Any], object],
    steps: int,
    batches: int,
    clock: Callable[[], float],
    wait: Callable[[], None],  # until the device is done
) -> Headroom:
    """Implement `headroom` with this clock and this device."""
    function("step", step, "a function that takes one batch")
    steps, batches = whole("steps", steps, 1), whole("batches", batches, 1)
    try:
        iterator = iter(loader)
    except TypeError as error:
        if hasattr(loader, "__iter__"):
            raise  # raised inside the loader's __iter__
        raise TypeError(
            f"headroom() takes a loader or a pipeline as `loader`, not {short(loader)}: {error}"
        ) from None
    now = partial(_since, clock, wait)
    kept, taken, length = list[Any](), 0, length_of(loader)
    warm = WARM_UP if length is None else min(WARM_UP, length // 2)
    began = now()
    try:
        for batch in iterator:
            if len(kept) < batches:
                kept.append(batch)
            step(batch)
            taken += 1
            if taken == warm:
                began = now()
            if taken == warm + steps:
                break
        ended = now()
    finally:
        batch = None
        if not attribute(loader, "persistent_workers"):
            close(iterator)
        del iterator
    timed = taken - warm
    if timed < 1:
        raise ValueError(
            f"headroom() needs at least {warm + 1} batches, but the loader returned {taken}; use more "
            "data or smaller batches"
        )
    loading = (ended - began) / timed
    cores = CoreUsage()
    began = now()
    for number in range(timed):
        step(kept[number % len(kept)])
    ready = (now() - began) / timed
    return Headroom(loading, ready, timed, len(kept), _others(cores.use()))


def _others(use: CoreUse) -> float:
    """Return the cores that other programs kept busy, if they are enough to matter."""
    from hybridloader.observe.verdict import OTHERS  # most loaders need no verdict

    others = 0.0 if use.busy is None or use.own is None else use.busy - use.own
    return others if others >= OTHERS * use.cores else 0.0


def _since(clock: Callable[[], float], wait: Callable[[], None]) -> float:
    wait()
    return clock()


def _rate(seconds: float) -> str:
    return f"{1 / seconds:,.1f}" if seconds > 0 else "infinite"


LOADED, KEPT = 36, 4  # most batches of a loader that are loaded, and how many of these are reused

WAITS = 8
"""Steps without loading between two waits for the device. Launched kernels may still run meanwhile."""

LEAST = 2  # fewest batches to load: one that is not timed and one that is


class KeptBatches:
    """First batches of one loader, returned again and again, and the times of the loop over it.

    One thread uses it: that of the loop.
    """

    def __init__(
        self,
        name: str,
        length: int | None,  # batches of an epoch; None: unknown
        clock: Callable[[], float] = time.perf_counter,
        wait: Callable[[], None] = synchronize,  # until the device is done
    ) -> None:
        self.name, self.length = name, length
        half = min(LOADED, (length or 0) // 2)
        self.loads = half if half >= LEAST else 0  # batches to load; 0: all, without reuse
        self.warm = min(WARM_UP, self.loads // 2)
        self._now = partial(_since, clock, wait)
        # All the mutable state:
        self.loading = self.ready = 0.0  # seconds with loading and without
        self.steps = 0  # without loading, finished by the device
        self._mark = 0.0
        self._cores: CoreUsage | None = None  # since the last batch was loaded
        self._kept: list[Any] = []
        self._loaded = self._given = 0  # in this epoch
        self._launched = 0  # steps without loading, not yet waited for

    def begin(self) -> None:
        """Begin an epoch: load again, unless the previous epoch loaded enough."""
        self._given = 0
        if not self.enough:
            self._loaded = 0
            self._kept.clear()

    @property
    def enough(self) -> bool:
        """True if no further batch is to be loaded."""
        return self.steps > 0 or 0 < self.loads <= self._loaded

    def keep(self, batch: Any) -> bool:
        """Note a loaded batch; return True if it was the last one to load."""
        if self.loads and len(self._kept) < KEPT:
            self._kept.append(batch)
        self._loaded += 1
        self._given += 1
        if self._loaded == self.warm:
            self.mark()
        if self._loaded == self.loads:
            self.loading = self._now() - self._mark
            self._cores = CoreUsage()
        return self.enough

    def mark(self) -> None:
        """Start a measurement."""
        self._launched = 0
        self._mark = self._now()

    def again(self) -> Any:
        """Return a kept batch; raise `StopIteration` at the end of the epoch."""
        last = self._given >= (self.length or 0)
        if self._given:
            self._launched += 1
            if last or self._launched == WAITS:
                self.steps += self._launched
                before = self._mark
                self.mark()
                self.ready += self._mark - before
        else:
            self.mark()
        if last:
            raise StopIteration
        self._given += 1
        return self._kept[self._given % len(self._kept)]

    def __str__(self) -> str:
        if self.length is None:
            return f"{self.name} loaded all its batches, because it has no len()."
        if not self.steps:
            return (
                f"{self.name} loaded all its batches, because no epoch had more than "
                f"{self.loads or 2 * LEAST - 1}."
            )
        timed, kept = self.loads - self.warm, min(KEPT, self.loads)
        others = 0.0 if self._cores is None else _others(self._cores.use())
        found = Headroom(self.loading / timed, self.ready / self.steps, self.steps, kept, others)
        steps = f"{timed} steps with loading, {self.steps} on {kept} batches."
        return f"{self.name}: {found.summary} {steps}"


class Reuse(ProgramBlock):
    """Reuse of batches by all loaders whose iterators are made while it runs; for one use.

    Its end writes a line of measurements for each loader.
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        super().__init__()
        self._stream = stream
        # All the mutable state:
        self.loaders: list[KeptBatches] = []

    def _end(self, error: BaseException | None) -> None:
        stream = sys.stderr if self._stream is None else self._stream
        if not self.loaders:
            print("hybridloader: no loop took batches of a DataLoader: no headroom", file=stream)
        for kept in self.loaders:
            print(f"hybridloader: {kept}", file=stream)
        if any(kept.steps for kept in self.loaders):
            print(
                "hybridloader: most steps used the same few batches; discard the trained weights",
                file=stream,
            )

    def batches_of(self, loader: Any) -> KeptBatches:
        """Return an empty store for the batches of `loader`."""
        kept = KeptBatches(numbered("DataLoader", len(self.loaders) + 1), length_of(loader))
        self.loaders.append(kept)
        return kept
