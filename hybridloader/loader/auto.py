"""``num_workers="auto"`` and ``backend="auto"``: a choice that is left open until the first epoch.

The measurement is a layer above loaders, so it is found by its name, as backends are.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, cast

from torch.utils.data import IterableDataset

if TYPE_CHECKING:
    from hybridloader.engine.contract import Backend

AUTO = "auto"

_CHOOSER = "hybridloader.tuning.tune"


class Auto(NamedTuple):
    """Parameters of a loader that are chosen by measurement."""

    workers: bool
    backend: bool

    @classmethod
    def of(cls, dataset: Any, num_workers: Any, backend: Any, context: Any) -> Auto | None:
        """Return the parameters that are ``"auto"``; None if none is. Raises `ValueError`."""
        auto = cls(num_workers == AUTO, isinstance(backend, str) and backend.lower() == AUTO)
        if not any(auto):
            return None
        if isinstance(dataset, IterableDataset):
            raise ValueError(
                "num_workers='auto' and backend='auto' are for map-style datasets: the batches of an "
                "iterable dataset depend on the number of workers. Call hybridloader.tune(loader), and "
                "pass the numbers that it prints"
            )
        if auto.backend and context is not None:
            raise ValueError("backend='auto' contradicts multiprocessing_context; omit one of them")
        if auto.backend and not auto.workers and not num_workers:
            raise ValueError(
                "backend='auto' has no choice with num_workers=0; pass num_workers='auto', or a number"
            )
        return auto


class Chooser(Protocol):
    """Module that measures."""

    def choose(self, loader: Any, auto: Auto) -> Any:
        """Set the attributes of `loader` that are ``"auto"``, and return the `Tuning`."""


def chooser() -> Chooser:
    return cast(Chooser, importlib.import_module(_CHOOSER))


def settled(
    auto: Auto | None, num_workers: int | str, backend: str | Backend | None
) -> tuple[int, str | Backend | None]:
    """Return number and backend until they are chosen: one worker, as ``num_workers=0`` allows less."""
    if auto is None:
        return num_workers, backend  # type: ignore[return-value]  # torch refuses other strings
    return (
        1 if auto.workers else int(num_workers),
        None if auto.backend else backend,
    )
