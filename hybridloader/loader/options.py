"""Options that `DataLoader` has beyond torch's: their keywords, their defaults, and a check of values.

The iterator asks for options and never for attributes of the loader, so that it runs any loader of
torch's. Nothing here reads a dataset, knows backends, or imports torch: `hybridloader run` checks its
options before the script has set the variables that torch reads.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import repeat
from typing import Any, NamedTuple, TypedDict

from hybridloader._support.text import flag, keywords, seconds, spelled_out, whole
from hybridloader.devices.pinning import check as check_device
from hybridloader.engine.stage import RestartPolicy
from hybridloader.fetching.on_error import Replace, Retry, Skip, parse_on_error
from hybridloader.seeding.sample_rng import SampleSeeding, parse_seeding


class OptionWords(TypedDict, total=False):
    """Keywords that `DataLoader` has beyond torch's and `backend`."""

    threads_per_worker: int
    on_error: str | Skip | Retry | Replace
    on_worker_death: str | RestartPolicy
    task_timeout: float
    seeding: str | SampleSeeding | None
    device: Any
    observe: bool


class Options(NamedTuple):
    """Values of these keywords; `hybridloader.DataLoader` describes them."""

    threads_per_worker: int = 1
    on_error: str | Skip | Retry | Replace = "raise"
    on_worker_death: str | RestartPolicy = "raise"
    task_timeout: float = 0
    seeding: str | SampleSeeding | None = None
    device: Any = None
    observe: bool = False

    @classmethod
    def parsed(cls, caller: str, words: Mapping[str, Any]) -> Options:
        """Make options of the keywords that a user gave to `caller`; check words and values."""
        keywords(caller, words, OptionWords.__annotations__, ("backend",))
        options = cls(**words)
        options.check()
        return options

    @classmethod
    def of(cls, loader: Any) -> Options:
        """Read the options of one of our loaders."""
        return cls._make(map(getattr, repeat(loader), _DEFAULTS, _DEFAULTS.values()))

    def check(self) -> None:
        """Refuse values that no loader could take. Raises `TypeError` or `ValueError`."""
        instead = "1 is the worker's own thread"
        whole("threads_per_worker", self.threads_per_worker, 1, instead=instead)
        parse_on_error(self.on_error)
        parse_seeding(self.seeding)
        RestartPolicy.of(self.on_worker_death)
        seconds("task_timeout", self.task_timeout)
        check_device(self.device)
        flag("observe", self.observe)


in_keywords = spelled_out(OptionWords, Options._field_defaults)
"""Decorator of functions that take these keywords: their signature lists each with its default."""

_DEFAULTS = Options._field_defaults
