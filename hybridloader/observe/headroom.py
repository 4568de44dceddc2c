"""Headroom: speed of a training step on batches that are there already.

Of a step that a program gives, by `headroom`; or of a script as it is, under ``hybridloader run
--headroom``: its loaders give a few of their batches again and again. Their iterators ask for that once,
by `running_reuse`.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Any, TextIO

from hybridloader._support.arguments import function, whole
from hybridloader._support.attributes import attribute, length_of
from hybridloader._support.devices_in_use import device_in_use
from hybridloader._support.text import html, short
from hybridloader._support.text import time as shown
from hybridloader.observe.program_block import ProgramBlock, numbered

WARM_UP = 4
"""Steps at the beginning that are not timed: workers start, kernels are compiled."""


@dataclass(frozen=True)
class Headroom:
    """Speed of a loop with loading, and on batches that are there already.

    Attributes
    ----------
    loading
        Seconds of one step with loading, on average.
    ready
        Seconds of one step on batches that are there already, on average.
    steps
        Steps that were timed of each.
    batches
        Batches that were used again and again.
    """

    loading: float
    ready: float
    steps: int
    batches: int

    @property
    def speedup(self) -> float:
        """Greatest factor by which the loop would be faster if loading cost nothing; 1 or more."""
        return max(1.0, self.loading / self.ready) if self.ready > 0 else 1.0

    @property
    def share(self) -> float:
        """Share of the time of a step that loading takes, from 0 to 1."""
        return 1 - 1 / self.speedup

    def to_dict(self) -> dict[str, Any]:
        """Return all of this as a dict of JSON types."""
        return asdict(self) | {"speedup": self.speedup, "share": self.share}

    @property
    def summary(self) -> str:
        """Both speeds, as a sentence."""
        return (
            f"{_rate(self.loading)} batches/s with loading ({shown(self.loading)} a step), "
            f"{_rate(self.ready)} on batches that are there already ({shown(self.ready)}): "
            f"at most {self.speedup:.2f} times as fast if loading cost nothing."
        )

    def __str__(self) -> str:
        return f"{self.summary} {self.steps} steps of each, on {self.batches} batches."

    def print(self) -> None:
        """Print it as a sentence."""
        print(self)

    def _repr_html_(self) -> str:
        rows = [["", "a step", "batches/s"]]
        for name, seconds in (("with loading", self.loading), ("batches there", self.ready)):
            rows.append([name, shown(seconds), _rate(seconds)])
        return html(rows, [str(self)])


def headroom(
    loader: Iterable[Any],
    step: Callable[[Any], object],
    *,
    steps: int = 100,
    batches: int = 4,
) -> Headroom:
    """Measure how much faster a training loop could be at most, if loading cost nothing.

    The loop is timed with loading, as it is; then the loader is let go, and `step` is timed on a few
    of its batches, again and again. Both times the device is waited for at the begin and at the end.
    `step` does what it does: a model is trained on, and a step that changes a batch gets it changed
    the next time.

    Parameters
    ----------
    loader
        Loader, pipeline, or other iterable of batches; iterated once, not to its end unless it is
        shorter.
    step
        Function of one batch: the body of your loop, such as forward, backward and ``optimizer.step()``.
        If it copies the batch to the device, that is part of it.
    steps
        Steps to time of each, at most; fewer if `loader` is shorter. Beforehand 4 steps, or half of
        those there are, are not timed.
    batches
        Batches that are kept and used again. They stay in memory meanwhile.

    Returns
    -------
    Headroom
        Times in seconds, and `speedup`.

    Raises
    ------
    TypeError
        `loader` can't be iterated, or `step` can't be called.
    ValueError
        `steps` or `batches` is below 1, or `loader` gave fewer than 2 batches.

    Examples
    --------
    >>> from hybridloader import DataLoader, headroom
    >>> found = headroom(DataLoader(range(400), 4), lambda batch: batch.sum())
    >>> found.steps, found.batches, found.speedup >= 1
    (96, 4, True)
    """
    return measure(loader, step, steps, batches, time.perf_counter, synchronize)


def synchronize() -> None:
    """Wait until torch's device has done all that it was given, if there is one in use."""
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
    """Do what `headroom` describes, with this clock and this device."""
    function("step", step, "a function of one batch")
    steps, batches = whole("steps", steps, 1), whole("batches", batches, 1)
    try:
        iterator = iter(loader)
    except TypeError as error:
        if hasattr(loader, "__iter__"):
            raise  # of its own
        raise TypeError(
            f"headroom() takes a loader or a pipeline first, not {short(loader)}: {error}"
        ) from None
    kept, taken, warm = list[Any](), 0, WARM_UP
    length = length_of(loader)
    if length is not None:
        warm = min(warm, length // 2)
    began = _since(clock, wait) if not warm else 0.0
    try:
        for batch in iterator:
            if len(kept) < batches:
                kept.append(batch)
            step(batch)
            taken += 1
            if taken == warm:
                began = _since(clock, wait)
            if taken == warm + steps:
                break
        ended = _since(clock, wait)
    finally:
        batch = None
        if not attribute(loader, "persistent_workers"):
            close = attribute(iterator, "close")
            if callable(close):
                close()
        del iterator
    timed = taken - warm
    if timed < 1:
        raise ValueError(
            f"headroom() needs {warm + 1} batches at least, and the loader gave {taken}; give it more "
            "data, or smaller batches"
        )
    loading = (ended - began) / timed
    began = _since(clock, wait)
    for number in range(timed):
        step(kept[number % len(kept)])
    ready = (_since(clock, wait) - began) / timed
    return Headroom(loading, ready, timed, len(kept))


def _since(clock: Callable[[], float], wait: Callable[[], None]) -> float:
    wait()
    return clock()


def _rate(seconds: float) -> str:
    return f"{1 / seconds:,.1f}" if seconds > 0 else "infinite"


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
