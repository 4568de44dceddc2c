"""What loaders and backends are given, as far as types and numbers tell; refused in words that name it.

torch's constructor looks first, and what it refuses stays its own. Here is what it lets through, to fail
in a worker, at the first batch or never. Nothing here reads a dataset or iterates a sampler.
"""

from __future__ import annotations

import operator
import threading
from collections.abc import Iterable
from typing import Any, TypeVar

from hybridloader.buffers.memory import Memory

_Any = TypeVar("_Any")


def check_loader(loader: Any) -> None:
    """Refuse what a `DataLoader` can't work with, also if it was set after the constructor.

    Raises
    ------
    TypeError
        An argument is of a type that can't be meant.
    ValueError
        It is out of range.
    """
    _whole("num_workers", loader.num_workers, "give an int, or 0 for no workers")
    if loader.prefetch_factor is not None:
        factor = _whole("prefetch_factor", loader.prefetch_factor, "give an int, or None for 2")
        if factor < 1:
            raise ValueError(
                f"prefetch_factor must be at least 1, got {factor}: workers would be asked for nothing"
            )
    _seconds("timeout", loader.timeout)
    _function("collate_fn", loader.collate_fn, "a function of a list of samples")
    if loader.worker_init_fn is not None:
        _function("worker_init_fn", loader.worker_init_fn, "a function of the worker's number")
    for name in ("pin_memory", "persistent_workers", "in_order", "drop_last"):
        _flag(name, getattr(loader, name))
    _generator(loader.generator)
    _dataset(loader.dataset)
    for name in ("sampler", "batch_sampler"):
        given = getattr(loader, name)
        if given is not None and not _iterable(given):
            raise TypeError(f"{name} must be an iterable of indices, got {given!r}")
    if loader.num_workers < 0 or loader.timeout < 0:
        raise ValueError(
            "num_workers and timeout must not be negative, "
            f"got {loader.num_workers} and {loader.timeout}"
        )
    if loader.num_workers == 0 and loader.timeout > 0:
        raise ValueError(
            f"timeout={loader.timeout} needs num_workers > 0: with 0 the caller itself makes the "
            "batch and can't stop waiting for it"
        )


def check_backend(backend: _Any) -> _Any:
    """Give `backend` back, if its options are of their types. Raises `TypeError`."""
    memory = getattr(backend, "memory", None)
    if memory is not None and not isinstance(memory, Memory):
        raise TypeError(
            f"{type(backend).__name__}: memory must be a Memory, got {memory!r}; say memory=Memory(...)"
        )
    copies = getattr(backend, "copy_dataset", False)
    if not isinstance(copies, bool):
        raise TypeError(
            f"{type(backend).__name__}: copy_dataset must be True or False, got {copies!r}"
        )
    return backend


def _whole(name: str, value: Any, instead: str) -> int:
    """As torch: True is 1, and a number of numpy's is one."""
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be a whole number, got {value!r}; {instead}") from None


def _seconds(name: str, value: Any) -> None:
    try:
        sound = 0 <= value <= threading.TIMEOUT_MAX  # False for NaN
    except (TypeError, ValueError, RuntimeError):  # not comparable; an array or tensor of several
        raise TypeError(f"{name} must be a number of seconds, got {value!r}") from None
    if not sound:
        raise ValueError(
            f"{name} must be a number of seconds up to {threading.TIMEOUT_MAX:.0f}, or 0 for no limit, "
            f"got {value!r}"
        )


def _function(name: str, value: Any, what: str) -> None:
    if not callable(value):
        raise TypeError(f"{name} must be {what}, got {value!r}")


def _flag(name: str, value: Any) -> None:
    """As torch: 0, 1 and None will do, but a text is always true."""
    if not (value is None or isinstance(value, int) or type(value).__name__ in ("bool", "bool_")):
        raise TypeError(f"{name} must be True or False, got {value!r}")


def _generator(value: Any) -> None:
    import torch

    if value is not None and not isinstance(value, torch.Generator):
        raise TypeError(
            f"generator must be a torch.Generator, got {value!r}; "
            "say torch.Generator().manual_seed(...), or None"
        )


def _dataset(dataset: Any) -> None:
    from torch.utils.data import IterableDataset

    kind = type(dataset)
    if isinstance(dataset, IterableDataset) or hasattr(kind, "__getitem__"):
        return
    if hasattr(kind, "__getitems__"):
        return
    if isinstance(dataset, type):
        raise TypeError(
            f"dataset must be a dataset, got the class {dataset.__name__}; "
            f"make one: {dataset.__name__}(...)"
        )
    if hasattr(kind, "__iter__"):
        raise TypeError(
            f"dataset must have __getitem__ and __len__, or be an IterableDataset, got {dataset!r}; "
            "to read an iterable, use Pipeline.from_iterable, or a subclass of IterableDataset"
        )
    raise TypeError(
        f"dataset must have __getitem__ and __len__, or be an IterableDataset, got {dataset!r}"
    )


def _iterable(value: Any) -> bool:
    return isinstance(value, Iterable) or hasattr(type(value), "__getitem__")
