"""Datasets that fail on demand, and the outcomes of loaders over them.

Importing this imports no torch, so fresh workers that are sent one of the datasets start at once.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest

from hybridloader.testing import Gate

if TYPE_CHECKING:
    from hybridloader import DataLoader

ALL = ("inline", "threads", "fork")
"""Without `spawn`, whose workers take seconds to start, and `shared-memory`, which starts one of these
two: from there on they run the very same code. What is sent to them is tested where it is sent."""

MEGABYTE = 1 << 20

every_backend = pytest.mark.parametrize("backend", ALL)
every_process = pytest.mark.parametrize("backend", ["fork", "spawn"])


class Samples:
    """A dataset whose samples are what a function makes of the index."""

    def __init__(self, function: Callable[[int], Any], length: int = 8) -> None:
        self.function, self.length = function, length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        return self.function(index)


def load(
    dataset: Any, backend: str | None, *, workers: int = 1, collate_fn: Any = list, **options: Any
) -> DataLoader:
    from hybridloader import DataLoader

    return DataLoader(
        dataset, num_workers=workers, collate_fn=collate_fn, backend=backend, **options
    )


def start(loader: DataLoader) -> Any:
    """Begin an epoch, and return the iterator with the methods that torch's lack."""
    return iter(loader)


def of_a_loader_within(error: Exception) -> Exception:
    """Return an error as a loader raises it that a user's function goes through."""
    from hybridloader._support.user_objects import no_answer

    return no_answer(error)


def outcomes(iterator: Iterator[Any]) -> list[Any]:
    """Return the results of successive calls of ``next()``, exceptions included, until the end."""
    found: list[Any] = []
    while len(found) < 100:
        try:
            found.append(next(iterator))
        except StopIteration:
            return found
        except Exception as error:
            found.append(error)
    raise AssertionError(f"there is no end to it: {found[:10]}...")


def kinds(found: list[Any]) -> list[Any]:
    """`outcomes` with exceptions replaced by their types, to be compared."""
    return [type(item) if isinstance(item, Exception) else item for item in found]


def text_of(error: BaseException) -> str:
    return "".join(traceback.format_exception(type(error), error, error.__traceback__))


def notes_of(error: BaseException) -> str:
    return "\n".join(getattr(error, "__notes__", []))


def at_gate(gate: Gate, wanted: int) -> Callable[[int], int]:
    def sample(index: int) -> int:
        if index == wanted:
            gate.arrive()
        return index

    return sample


def fail_on_third(index: int) -> int:
    if index % 3 == 2:
        raise ArithmeticError("third", index)
    return index


def explode(what: str) -> Any:
    raise ArithmeticError(f"{what} that can't be loaded")
