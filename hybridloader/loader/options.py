"""What our loader has beyond torch's: the keywords, what they are where nobody said, and what can't be.

The iterator asks for these and never for attributes of the loader, so that it runs any loader of
torch's. Reads no dataset, and knows nothing of backends.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, TypedDict

from hybridloader._support.arguments import keywords, one_of, seconds, whole
from hybridloader.devices.pinning import check as check_device
from hybridloader.engine.restart import RestartPolicy
from hybridloader.fetching.on_error.policies import Replace, Retry, Skip
from hybridloader.fetching.on_error.policies import parse as parse_on_error
from hybridloader.seeding.sample_seeds import SampleSeeding
from hybridloader.seeding.sample_seeds import parse as parse_seeding

if TYPE_CHECKING:
    from typing_extensions import Self


class OptionWords(TypedDict, total=False):
    """The keywords that `DataLoader` has beyond torch's and `backend`; it says what they mean."""

    threads_per_worker: int
    on_error: str | Skip | Retry | Replace
    on_worker_death: str | RestartPolicy
    task_timeout: float
    seeding: str | SampleSeeding
    shard_remainders: str
    device: Any


@dataclass(frozen=True)
class Options:
    """The values of those keywords; what they mean is told by `hybridloader.DataLoader`."""

    threads_per_worker: int = 1
    on_error: str | Skip | Retry | Replace = "raise"
    on_worker_death: str | RestartPolicy = "raise"
    task_timeout: float = 0
    seeding: str | SampleSeeding = "worker"
    shard_remainders: str = "keep"
    device: Any = None

    @classmethod
    def said(cls, caller: str, words: Mapping[str, Any]) -> Self:
        """Those that somebody gave to `caller`.

        Raises
        ------
        TypeError, ValueError
            There is no such keyword, or it has a value that no loader could take.
        """
        keywords(caller, words, OptionWords.__annotations__, "backend, ")
        options = cls(**words)
        options.check()
        return options

    @classmethod
    def of(cls, loader: Any) -> Self:
        """Those of one of our loaders, as they are now."""
        values: list[Any] = [getattr(loader, name, default) for name, default in _DEFAULTS]
        return cls(*values)

    def check(self) -> None:
        """Refuse what no loader could take. Raises `TypeError` or `ValueError`."""
        instead = "1 is the worker's own thread"
        whole("threads_per_worker", self.threads_per_worker, 1, instead=instead)
        parse_on_error(self.on_error)
        parse_seeding(self.seeding)
        RestartPolicy.of(self.on_worker_death)
        seconds("task_timeout", self.task_timeout)
        one_of("shard_remainders", self.shard_remainders, ("keep", "join"))
        check_device(self.device)

    def without(self, names: Iterable[str]) -> Self:
        """Return a copy in which these options have their defaults."""
        default: Any = type(self)()
        return replace(self, **{name: getattr(default, name) for name in names})


_DEFAULTS = [(field.name, field.default) for field in fields(Options)]
