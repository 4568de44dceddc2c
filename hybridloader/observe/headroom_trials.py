"""Headroom: how much faster a loop could be if loading cost nothing.

`headroom` times a training step with loading, then on batches that are already in memory.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from time import perf_counter
from typing import Any

from hybridloader._support.text import Shown, function, short, whole
from hybridloader._support.text import time as shown
from hybridloader._support.torch_env import device_in_use
from hybridloader._support.user_objects import attribute, close, length_of
from hybridloader.observe.figures import others_busy
from hybridloader.observe.measures import CoreUsage

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

    def __str__(self) -> str:
        busy = (
            f" Other programs kept {self.others:.1f} cores busy, so the step may be faster than this: "
            "measure again without them, or call torch.set_num_threads(1) first."
        )
        return (
            f"{_rate(self.loading)} batches/s with loading ({shown(self.loading)} a step), "
            f"{_rate(self.ready)} on batches in memory ({shown(self.ready)}): "
            f"at most {self.speedup:.2f} times as fast if loading cost nothing."
            f"{busy if self.others else ''} {self.steps} steps of each, on {self.batches} batches."
        )


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
    kept, taken, length = list[Any](), 0, length_of(loader)
    warm = WARM_UP if length is None else min(WARM_UP, length // 2)
    began = _now()
    try:
        for batch in iterator:
            if len(kept) < batches:
                kept.append(batch)
            step(batch)
            taken += 1
            if taken == warm:
                began = _now()
            if taken == warm + steps:
                break
        ended = _now()
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
    began = _now()
    for number in range(timed):
        step(kept[number % len(kept)])
    ready = (_now() - began) / timed
    return Headroom(loading, ready, timed, len(kept), others_busy(cores.use()))


def synchronize() -> None:
    """Wait until the device has finished its work, if torch uses one."""
    torch = sys.modules.get("torch")
    if torch is not None and device_in_use() is not None:  # else it would make a context
        torch.accelerator.synchronize()


def _now() -> float:
    synchronize()
    return perf_counter()


def _rate(seconds: float) -> str:
    return f"{1 / seconds:,.1f}" if seconds > 0 else "infinite"
