"""Bad inputs that are refused before any worker starts, one a row, with the error's type and words."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from loky.backend.process import LokyProcess
from support.unsendable import Endless, WithInner, nested

from hybridloader import DataLoader, Memory, Pipeline, SharedMemory
from hybridloader.engine import get_backend
from hybridloader.errors import BackendUnavailable, WorkerPicklingError
from hybridloader.records import SharedDict, SharedList

nan, inf = float("nan"), float("inf")


@pytest.fixture(autouse=True)
def _goes_on() -> Iterator[None]:
    """Check that a good loader works afterwards; conftest.py checks that nothing is left behind."""
    yield
    assert [int(batch) for batch in DataLoader(range(3), num_workers=1, backend="threads")] == [  # type: ignore[arg-type]
        0,
        1,
        2,
    ]


@pytest.fixture
def _no_worker(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def start(*_: Any) -> None:
        raise AssertionError("a worker was started")

    with monkeypatch.context() as patch:
        patch.setattr(BaseProcess, "start", start)
        patch.setattr(LokyProcess, "start", start)
        patch.setattr(threading.Thread, "start", start)
        yield


# -- what is known before any worker starts --------------------------------------------------------

BASE = Pipeline.from_dataset(range(7))
THREADS: dict[str, Any] = {"backend": "threads"}

Row = tuple[Callable[[], Any], type[Exception], str]

SHARE = r"^Memory: limit is bytes \(an int\) or a share"
NO_MEMORY = "leaves no memory for a batch; pass bytes or a share above 0"

EARLY: dict[str, Row] = {
    "limit numpy int": (lambda: Memory(np.int64(5)), TypeError, SHARE),  # type: ignore[arg-type]
    "limit complex": (lambda: Memory(1j), TypeError, SHARE),  # type: ignore[arg-type]
    "limit nan": (lambda: Memory(nan), ValueError, f"limit=nan {NO_MEMORY}"),
    "limit inf": (lambda: Memory(inf), ValueError, "limit=inf: a float is a share"),
    "backend None": (lambda: get_backend(None), TypeError, "a name or a Backend, not None"),
    "backend path": (lambda: get_backend(Path("fork")), TypeError, "a name or a Backend, not"),
    "backend long": (lambda: get_backend("x" * 99), BackendUnavailable, "unknown backend"),
    "backend auto": (lambda: get_backend("atuo"), BackendUnavailable, "mean 'auto'.* and auto "),
    "method bytes": (lambda: SharedMemory(b"fork"), BackendUnavailable, "unknown start method b'f"),  # type: ignore[arg-type]
    "take nan": (lambda: BASE.take(nan), TypeError, "take: count must be a whole number, got nan"),  # type: ignore[arg-type]
    "skip None": (lambda: BASE.skip(None), TypeError, "skip: count .*got None"),  # type: ignore[arg-type]
    "skip below": (lambda: BASE.skip(-1), ValueError, "skip: count must be at least 0, got -1"),
    "batch nan": (lambda: BASE.batch(nan), TypeError, "batch: batch_size .*got nan"),  # type: ignore[arg-type]
    "batch flag": (lambda: BASE.batch(2, drop_last="no"), TypeError, "batch: drop_last .*'no'"),  # type: ignore[arg-type]
    "shuffle nan": (lambda: BASE.shuffle(nan), TypeError, "shuffle: buffer_size .*got nan"),  # type: ignore[arg-type]
    "seed below": (lambda: BASE.shuffle(2, seed=-1), ValueError, "shuffle: seed .*got -1"),
    "repeat nan": (lambda: BASE.repeat(nan), TypeError, "repeat: times .*got nan"),  # type: ignore[arg-type]
    "prefetch inf": (lambda: BASE.prefetch(inf), TypeError, "prefetch: count .*got inf"),  # type: ignore[arg-type]
    "shard str": (lambda: BASE.shard("2", "0"), TypeError, "shard: num_replicas .*got '2'"),  # type: ignore[arg-type]
    "shard below": (lambda: BASE.shard(2, -1), ValueError, "shard: rank .*got -1"),
    "fork bool": (lambda: BASE.tee(True), TypeError, "tee: count .*got True"),
    "weights text": (lambda: BASE.mix(BASE, weights="12"), TypeError, r"mix: weights\[0\] .*'1'"),  # type: ignore[arg-type]
    "weight bool": (lambda: BASE.mix(BASE, weights=[1, True]), TypeError, r"mix: weights\[1\]"),
    "interleave str": (lambda: BASE.interleave("ab"), TypeError, "interleave joins pipelines"),  # type: ignore[arg-type]
    "filter number": (lambda: BASE.filter(3), TypeError, "needs a function of one item, not 3"),  # type: ignore[arg-type]
    "dataset class": (lambda: Pipeline.from_dataset(Endless), TypeError, "type can't be read by i"),
    "source bytes": (
        lambda: Pipeline.from_iterable(b"ab"),
        TypeError,
        "one character at a time: b'ab'",
    ),
    "run seed nan": (lambda: BASE.run(seed=nan), TypeError, "seed must be a whole number, got nan"),  # type: ignore[arg-type]
    "epochs nan": (lambda: BASE.epochs(nan), TypeError, "count must be a whole number, got nan"),  # type: ignore[arg-type]
    "cache number": (lambda: BASE.cache(3), TypeError, r"cache: path .*not 3 \(a int\)"),  # type: ignore[arg-type]
    "cache empty": (lambda: BASE.cache(""), ValueError, "cache: path='' names no file"),
    "cache folder": (lambda: BASE.cache("some/"), ValueError, "cache: path='some/' names no file"),
    "cache null": (lambda: BASE.cache("x\0y"), ValueError, r"cache: path='x\\x00y' names no file"),
    "cache print": (
        lambda: BASE.cache("x", fingerprint=3),
        TypeError,
        "cache: fingerprint .*not 3",
    ),  # type: ignore[arg-type]
    "list number": (lambda: SharedList(3), TypeError, "'int' object is not iterable"),  # type: ignore[arg-type]
    "list lock": (lambda: SharedList([threading.Lock()]), TypeError, "cannot pickle '_thread.lock"),
    "dict number": (lambda: SharedDict(3), TypeError, "'int' object is not iterable"),  # type: ignore[call-overload]
    "dict no pair": (lambda: SharedDict([1]), TypeError, "1 is not a pair of a key and a value"),  # type: ignore[list-item]
}


@pytest.mark.usefixtures("_no_worker")
@pytest.mark.parametrize(("make", "kind", "says"), EARLY.values(), ids=EARLY)
def test_it_is_refused_before_any_worker_starts(
    make: Callable[[], Any], kind: type[Exception], says: str
) -> None:
    with pytest.raises(kind, match=says) as caught:
        make()
    assert type(caught.value) is kind


# -- what can't be sent to a fresh process ---------------------------------------------------------


class Nameless:
    def __reduce_ex__(self, protocol: Any) -> Any:
        return "no such name anywhere"


class WrongReduce:
    def __reduce__(self) -> Any:
        return 3


class FailingState:
    def __getstate__(self) -> Any:
        raise OSError("the device is busy")


UNSENDABLE: dict[str, tuple[Callable[[], Any], str]] = {
    "endless": (Endless, r"dataset\.inner \(a Endless\).*recursion"),
    "deep": (lambda: nested(50_000), r"dataset\.inner(\[0\]){1,25} \(a list\).*recursion"),
    "nameless": (Nameless, r"dataset\.inner \(a Nameless\).*no such name"),
    "wrong reduce": (WrongReduce, r"dataset\.inner \(a WrongReduce\).*__reduce__"),
    "failing state": (FailingState, r"dataset\.inner \(a FailingState\).*the device is busy"),
    "frame": (lambda: sys._getframe(), r"dataset\.inner \(a frame\).*pickle"),
    "semaphore": (threading.Semaphore, r"dataset\.inner\._cond\._lock \(a lock\)"),
    "in a dict in a tuple": (
        lambda: ({"k": (0, threading.Lock())},),
        r"inner\[0\]\['k'\]\[1\] \(a l",
    ),
    "under a key that is no text": (
        lambda: {(1, 2): threading.Lock()},
        r"inner\[\(1, 2\)\] \(a lo",
    ),
    "thread": (threading.Thread, r"dataset\.inner\.[\w.]+ \(a (.*lock|_ThreadHandle)\)"),
}


@pytest.mark.usefixtures("_no_worker")
@pytest.mark.parametrize(("inner", "says"), UNSENDABLE.values(), ids=UNSENDABLE)
def test_what_can_not_be_sent_is_named(inner: Callable[[], Any], says: str) -> None:
    with pytest.raises(WorkerPicklingError, match=says) as caught:
        iter(DataLoader(WithInner(inner()), num_workers=1, backend="spawn"))  # type: ignore[arg-type]
    assert len(str(caught.value)) < 1000
