"""Objects that can't be sent to a fresh process are named, by their path, before any worker starts."""

from __future__ import annotations

import functools
import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from support.platforms import needs_fork
from support.unsendable import Endless, nested
from torch.utils.data import Dataset, IterableDataset, RandomSampler

from hybridloader import DataLoader, SharedMemory
from hybridloader.errors import WorkerPicklingError


class Numbers(Dataset[int]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        return index


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(8))


class WithInner(Numbers):
    """Dataset that holds an object."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner


class Box:
    def __init__(self, handle: Any) -> None:
        self.handle = handle


def _closure_over(thing: Any) -> Callable[[Any], Any]:
    def function(batch: Any) -> Any:
        return thing

    return function


def _no_process_may_start(monkeypatch: pytest.MonkeyPatch) -> None:
    from loky.backend.process import LokyProcess

    def start(process: Any) -> None:
        raise AssertionError("a worker was started")

    monkeypatch.setattr(LokyProcess, "start", start)


UNSENDABLE: list[tuple[str, Callable[[Any], dict[str, Any]]]] = [
    ("dataset.inner", lambda lock: {"dataset": WithInner(lock)}),
    ("dataset.inner.handle", lambda lock: {"dataset": WithInner(Box(lock))}),
    ("dataset.inner[1].handle", lambda lock: {"dataset": WithInner((3, Box(lock)))}),
    ("dataset.inner['key']", lambda lock: {"dataset": WithInner({"key": lock})}),
    ("dataset.inner.<closure>.thing", lambda lock: {"dataset": WithInner(_closure_over(lock))}),
    ("collate_fn.<closure>.thing", lambda lock: {"collate_fn": _closure_over(lock)}),
    ("init_fn.<closure>.thing.handle", lambda lock: {"worker_init_fn": _closure_over(Box(lock))}),
]


@pytest.mark.parametrize(("path", "options"), UNSENDABLE, ids=[path for path, _ in UNSENDABLE])
def test_what_can_not_be_pickled_is_named_before_any_worker_starts(
    monkeypatch: pytest.MonkeyPatch, path: str, options: Callable[[Any], dict[str, Any]]
) -> None:
    _no_process_may_start(monkeypatch)
    given = {"dataset": Numbers(), **options(threading.Lock())}
    for backend in ("spawn", SharedMemory("loky")):
        loader = DataLoader(num_workers=1, backend=backend, **given)
        with pytest.raises(WorkerPicklingError) as caught:
            iter(loader)
        text = str(caught.value)
        assert f"{path} " in text
        assert "lock" in text
        assert "threads" in text
        assert isinstance(caught.value, TypeError)
        assert caught.value.__cause__ is not None


def test_a_sampler_is_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is this process's own, where a copy would be easiest."""

    class Unpicklable(RandomSampler):
        def __reduce__(self) -> Any:
            raise TypeError("a sampler is the parent's own")

    _no_process_may_start(monkeypatch)
    loader = DataLoader(Numbers(), sampler=Unpicklable(Numbers()), num_workers=1, backend="spawn")
    with pytest.raises(AssertionError, match="a worker was started"):
        iter(loader)


class Nameless:
    def __reduce_ex__(self, protocol: Any) -> Any:
        return "no such name anywhere"


class WrongReduce:
    def __reduce__(self) -> Any:
        return 3


class FailingState:
    def __getstate__(self) -> Any:
        raise OSError("the device is busy")


@pytest.mark.parametrize(
    ("inner", "says"),
    [
        (Endless, r"dataset\.inner \(a Endless\).*recursion"),
        (lambda: nested(50_000), r"dataset\.inner(\[0\]){1,25} \(a list\).*recursion"),
        (Nameless, r"dataset\.inner \(a Nameless\).*no such name"),
        (WrongReduce, r"dataset\.inner \(a WrongReduce\).*__reduce__"),
        (FailingState, r"dataset\.inner \(a FailingState\).*the device is busy"),
        (threading.Semaphore, r"dataset\.inner\._cond\._lock \(a lock\)"),
        (lambda: {(1, 2): threading.Lock()}, r"inner\[\(1, 2\)\] \(a lo"),
    ],
)
def test_what_is_wrong_with_it_is_told(
    monkeypatch: pytest.MonkeyPatch, inner: Callable[[], Any], says: str
) -> None:
    _no_process_may_start(monkeypatch)
    with pytest.raises(WorkerPicklingError, match=says) as caught:
        iter(DataLoader(WithInner(inner()), num_workers=1, backend="spawn"))
    assert len(str(caught.value)) < 1000


class Choosy(Box):
    """Object that pickles without its lock, as something else."""

    def __init__(self, handle: Any) -> None:
        super().__init__(handle)
        self.lock = threading.Lock()

    def __getstate__(self) -> Any:
        return {"handle": self.handle}


class Listed(list[Any]):
    """List with an attribute."""


class Slotted:
    __slots__ = ("handle",)

    def __init__(self, handle: Any) -> None:
        self.handle = handle


def _in_a_cycle(handle: Any) -> Box:
    box = Box(None)
    box.handle = [box, handle]
    return box


def _listed(handle: Any) -> Listed:
    listed = Listed([1, 2])
    listed.handle = handle  # type: ignore[attr-defined]
    return listed


def _of_the_main_module(handle: Any) -> Any:
    class Local:
        inner = handle

    Local.__module__ = "__main__"
    return Local()


def _with_default(handle: Any) -> Any:
    def collate(batch: Any, first: int = 1, second: Any = handle) -> Any:
        return batch

    return collate


@pytest.mark.parametrize(
    ("make", "path"),
    [
        (Choosy, ".handle (a lock)"),
        (Slotted, ".handle (a lock)"),
        (_in_a_cycle, ".handle[1] (a lock)"),
        (_listed, ".handle (a lock)"),
        (lambda lock: deque([1, lock]), "[1] (a lock)"),
        (lambda lock: {lock}, ".<element>[0] (a lock)"),
        (lambda lock: {1: 2, lock: 3}, ".<key>[1] (a lock)"),
        (_of_the_main_module, ".<class>.inner (a lock)"),
        (_with_default, ".<default>[1] (a lock)"),
    ],
)
def test_whatever_goes_along_is_named(
    monkeypatch: pytest.MonkeyPatch, make: Callable[[Any], Any], path: str
) -> None:
    _no_process_may_start(monkeypatch)
    with pytest.raises(WorkerPicklingError) as caught:
        iter(DataLoader(WithInner(make(threading.Lock())), num_workers=1, backend="spawn"))
    assert str(caught.value).startswith(f"dataset.inner{path} can't")


def test_a_tensor_that_autograd_knows_more_of_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Object that torch's own pickles take, and that can't be sent."""
    _no_process_may_start(monkeypatch)
    for tensor in (torch.ones(2), torch.ones(2).share_memory_()):
        inner = {"weights": tensor.requires_grad_() * 2}
        inner["weights"].share_memory_()
        with pytest.raises(
            WorkerPicklingError, match=r"dataset\.inner\['weights'\] \(a Tensor\) .*detach"
        ):
            iter(DataLoader(WithInner(inner), num_workers=1, backend="spawn"))


class Trainer:
    def __init__(self) -> None:
        self.logger = threading.Lock()

    def do(self, argument: Any) -> Any:
        return argument


@pytest.mark.parametrize(
    ("make", "path"),
    [
        (lambda: Trainer().do, ".__self__.logger"),
        (lambda: functools.partial(max, key=Trainer()), ".keywords['key'].logger"),
        (lambda: functools.partial(Trainer().do), ".func.__self__.logger"),
    ],
)
def test_what_stands_behind_a_method_or_a_partial_is_looked_into(
    monkeypatch: pytest.MonkeyPatch, make: Callable[[], Any], path: str
) -> None:
    _no_process_may_start(monkeypatch)
    with pytest.raises(WorkerPicklingError) as caught:
        iter(DataLoader(Numbers(), num_workers=1, backend="spawn", collate_fn=make()))
    assert path in str(caught.value)


def test_a_global_that_a_function_of_the_main_module_uses_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _no_process_may_start(monkeypatch)
    names: dict[str, Any] = {"__name__": "__main__", "lock": threading.Lock()}
    exec("def collate(batch):\n    with lock:\n        return batch", names)
    loader = DataLoader(Numbers(), num_workers=1, backend="spawn", collate_fn=names["collate"])
    with pytest.raises(WorkerPicklingError, match=r"collate_fn\.<global>\.lock"):
        iter(loader)


@pytest.mark.parametrize(
    "backend", ["threads", "fork", pytest.param("shared-memory", marks=needs_fork)]
)
def test_what_can_not_be_pickled_may_be_used_where_nothing_is_sent(backend: str) -> None:
    loader = DataLoader(WithInner(threading.Lock()), 8, num_workers=1, backend=backend)
    assert [batch.tolist() for batch in loader] == [list(range(8))]


def test_a_dataset_that_inline_workers_can_not_copy_is_shared_with_a_warning() -> None:
    loader = DataLoader(WithInner(Box(threading.Lock())), 8, num_workers=1, backend="inline")
    with pytest.warns(UserWarning, match=r"dataset\.inner\.handle"):
        batches = [batch.tolist() for batch in loader]
    assert batches == [list(range(8))]


class Unloadable:
    def __setstate__(self, state: Any) -> None:
        raise OSError("there is no such device here")

    def __getstate__(self) -> Any:
        return {"some": "state"}


def test_what_a_copy_can_not_be_made_of_is_named() -> None:
    stream = Stream()
    stream.inner = [1, Unloadable()]  # type: ignore[attr-defined]
    with pytest.raises(WorkerPicklingError, match=r"dataset\.inner\[1\] .*copied.*no such device"):
        iter(DataLoader(stream, num_workers=1, backend="threads"))


def test_an_iterable_dataset_that_threads_can_not_copy_is_refused() -> None:
    class Locked(Stream):
        def __init__(self) -> None:
            self.handle = threading.Lock()

    for backend in ("threads", "inline"):
        with pytest.raises(WorkerPicklingError, match=r"dataset\.handle .*copy"):
            iter(DataLoader(Locked(), num_workers=1, backend=backend))
