"""Headroom: speed of a training step on batches that are there already."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Any

from hybridloader._support.arguments import function, whole
from hybridloader._support.attributes import attribute, length_of
from hybridloader._support.devices_in_use import device_in_use
from hybridloader._support.text import short
from hybridloader.observe.display import html
from hybridloader.observe.display import time as shown

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
