"""Description of a case: its variants, its loaders, and the function that measures."""

from __future__ import annotations

import importlib.metadata
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from benchmarks.names import FRESH_RIVALS, LIMITS, PACKAGES
from benchmarks.results import Measurement

Spec = dict[str, Any]
"""Parameters of a variant, as JSON: the dataset by name, batch, workers, seconds, ..."""

Answer = dict[str, Any]
"""Result of a measurement, as JSON: `value` and perhaps `cpu`, `details`, `digest`, `passed`."""

Measure = Callable[[str, Spec], Answer]
"""Function of a module that measures the loader of that name; it runs in a runner process."""

UNLIMITED = 1 << 30


class CannotDo(Exception):
    """This loader can't do this work; the message says why."""


def check_installed(loader: str) -> None:
    """Raise `CannotDo` if the project of `loader`, which is a rival's, is not installed."""
    package = PACKAGES[loader.split(" ")[0]]
    try:
        importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        raise CannotDo(f"not installed: pip install {package}") from None


@dataclass(frozen=True)
class Variant:
    """One row of a case.

    Attributes
    ----------
    loaders
        Names of the loaders that take part.
    blanks
        Loader -> why it takes no part although it does in others.
    most_rounds
        Fewer rounds for work that is slow and steady, or takes long to start.
    again
        Loader that is measured twice, to see the noise; "" for torch's, or the first that is no limit.
    seconds
        Estimate of one repetition of one loader, where ``spec["seconds"]`` does not tell.
    """

    name: str
    spec: Spec
    loaders: tuple[str, ...]
    blanks: dict[str, str] = field(default_factory=dict)
    most_rounds: int = UNLIMITED
    again: str = ""
    seconds: float | None = None

    def measured_again(self, measured: Sequence[str]) -> str:
        """Loader out of those `measured` that is measured twice; "" if there is none."""
        loaders = [name for name in measured if name not in LIMITS]
        wished = [name for name in (self.again, "torch") if name in loaders]
        return (wished or loaders or [""])[0]


@dataclass(frozen=True)
class Derived:
    """A case that is worked out from another one's measurements."""

    name: str
    title: str
    derive: Callable[[Sequence[Measurement]], list[Measurement]]


@dataclass(frozen=True)
class Case:
    """Work that loaders are compared at.

    Attributes
    ----------
    measure
        Called in each round, in the runner process of each loader.
    scale
        Factor from the value of `measure` (seconds, mostly) to `unit`.
    kind
        "rounds": interleaved rounds of all loaders. "weigh": memory while an epoch is under way, one
        fresh process after the other; `measure` weighs itself, or leaves the epoch as it is and
        gives no value. "pass": one repetition, passed or failed.
    check
        True if all loaders must deliver the same batches.
    """

    name: str
    title: str
    unit: str
    measure: Measure
    variants: tuple[Variant, ...]
    kind: Literal["rounds", "weigh", "pass"] = "rounds"
    scale: float = 1.0
    check: bool = True
    derived: Derived | None = None


@dataclass(frozen=True)
class Options:
    """Amount of work of a run.

    Attributes
    ----------
    caps
        True if slow and steady variants get fewer rounds; False if the user gave their number.
    """

    workers: int = 2
    quick: bool = False
    rivals: bool = True
    caps: bool = True

    @property
    def cores(self) -> int:
        """Workers that can work at the same time."""
        return min(self.workers, len(os.sched_getaffinity(0)))

    def most(self, rounds: int, quick: int | None = None) -> int:
        """Bound on the rounds of a variant; `quick` is that of a quick run, if it differs."""
        if not self.caps:
            return UNLIMITED
        return quick if self.quick and quick is not None else rounds

    def taking_part(self, *names: str) -> tuple[str, ...]:
        """Those of the rivals `names` that take part; a quick run leaves out `FRESH_RIVALS`."""
        if self.quick:
            names = tuple(name for name in names if name not in FRESH_RIVALS)
        return names if self.rivals else ()
