"""A closed loader or pipeline leaves no thread that still ends: a fork would copy its locks."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from hybridloader import DataLoader, Pipeline

pytestmark = pytest.mark.skipif(
    not Path("/proc/self/task").exists(), reason="needs a list of all threads"
)


class EndsLate:
    """Function whose thread sleeps 0.1 s in native code after it has left Python."""

    def __init__(self) -> None:
        library = ctypes.CDLL(None)
        key = ctypes.c_uint()
        assert library.pthread_key_create(ctypes.byref(key), library.usleep) == 0
        self.key, self.library = key, library
        self.threads: set[int] = set()

    def __call__(self, item: int) -> int:
        self.threads.add(threading.get_native_id())
        assert self.library.pthread_setspecific(self.key, ctypes.c_void_p(100_000)) == 0
        return item

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        return self(index)


def batches_of(function: EndsLate) -> Iterable[Any]:
    return DataLoader(function, num_workers=2, backend="threads")


def mapped_by(function: EndsLate) -> Iterable[Any]:
    return Pipeline.from_dataset(range(4)).map(function, backend="threads", num_workers=2)


def pulled_by_a_relay(function: EndsLate) -> Iterable[Any]:
    return Pipeline.from_dataset(range(4)).map(function).prefetch(2)


@pytest.mark.parametrize("made", [batches_of, mapped_by, pulled_by_a_relay])
def test_a_worker_thread_has_ended_when_its_run_has(made: Any) -> None:
    function = EndsLate()
    assert len(list(made(function))) == 4
    assert function.threads
    assert threading.get_native_id() not in function.threads
    assert [ident for ident in function.threads if Path(f"/proc/self/task/{ident}").exists()] == []
