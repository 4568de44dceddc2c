"""Objects that can't be sent to a fresh process are named, by their path, before any worker starts."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from support.platforms import needs_fork
from support.unsendable import WithInner, nested
from torch.utils.data import IterableDataset, RandomSampler

from hybridloader import DataLoader, SharedMemory
from hybridloader.errors import WorkerPicklingError


class Box:
    def __init__(self, handle: Any) -> None:
        self.handle = handle


class FailingState:
    def __getstate__(self) -> Any:
        raise OSError("the device is busy")


class Trainer:
    def __init__(self, lock: Any) -> None:
        self.logger = lock

    def do(self, argument: Any) -> Any:
        return argument


def closure_over(thing: Any) -> Callable[[Any], Any]:
    def function(batch: Any) -> Any:
        return thing

    return function


def in_a_cycle(handle: Any) -> Box:
    box = Box(None)
    box.handle = [box, handle]
    return box


def of_the_main_module(handle: Any) -> Any:
    class Local:
        inner = handle

    Local.__module__ = "__main__"
    return Local()


def with_global(lock: Any) -> Any:
    names: dict[str, Any] = {"__name__": "__main__", "lock": lock}
    exec("def collate(batch):\n    with lock:\n        return batch", names)
    return names["collate"]


def with_a_base(lock: Any) -> Any:
    base = type("Base", (), {"held": lock, "__module__": "__main__"})
    return type("Derived", (base,), {"__module__": "__main__"})


class WithState(Box):
    def __getstate__(self) -> Any:
        return [self.handle]


def of_autograd() -> Any:
    """Tensor that torch's own pickles take, and that can't be sent."""
    weights = torch.ones(2).share_memory_().requires_grad_() * 2
    return {"weights": weights.share_memory_()}


LOCK = r" \(a lock\)"
HELD: list[tuple[Callable[[Any], Any], str]] = [
    (lambda lock: lock, LOCK),
    (Box, rf"\.handle{LOCK}"),
    (lambda lock: (3, Box(lock)), rf"\[1\]\.handle{LOCK}"),
    (lambda lock: {"key": lock}, rf"\['key'\]{LOCK}"),
    (lambda lock: {(1, 2): lock}, rf"\[\(1, 2\)\]{LOCK}"),
    (closure_over, rf"\.<closure>\.thing{LOCK}"),
    (in_a_cycle, rf"\.handle\[1\]{LOCK}"),
    (lambda lock: {lock}, rf"\.<element>\[0\]{LOCK}"),
    (of_the_main_module, rf"\.<class>\.inner{LOCK}"),
    (lambda lock: {Box(lock): 1}, rf"\.<key>\[0\]\.handle{LOCK}"),
    (with_a_base, rf"\.<base>\.Base\.held{LOCK}"),
    (lambda lock: lambda batch, held=lock: batch, rf"\.<default>\[0\]{LOCK}"),
    (lambda lock: lambda batch, *, held=lock: batch, rf"\.held{LOCK}"),
    (WithState, rf"\.<state>\[0\]{LOCK}"),
    (lambda _: nested(50_000), r"(\[0\]){1,25} \(a list\).*recursion"),
    (lambda _: FailingState(), r" \(a FailingState\).*the device is busy"),
    (lambda _: of_autograd(), r"\['weights'\] \(a Tensor\) .*detach"),
]
"""What a dataset holds as `inner`, made with a lock, and how the message goes on."""

GIVEN: list[tuple[Callable[[Any], dict[str, Any]], str]] = [
    *((lambda lock, make=make: {"dataset": WithInner(make(lock))}, rf"dataset\.inner{then}")
      for make, then in HELD),
    (lambda lock: {"collate_fn": closure_over(lock)}, r"collate_fn\.<closure>\.thing "),
    (lambda lock: {"worker_init_fn": closure_over(Box(lock))}, r"init_fn\.<closure>\.thing\.handle "),
    (lambda lock: {"collate_fn": Trainer(lock).do}, r"\.__self__\.logger"),
    (lambda lock: {"collate_fn": functools.partial(max, key=Trainer(lock))}, r"\.keywords\['key'\]\.l"),
    (lambda lock: {"collate_fn": functools.partial(Trainer(lock).do)}, r"\.func\.__self__\.logger"),
    (lambda lock: {"collate_fn": with_global(lock)}, r"collate_fn\.<global>\.lock"),
]  # fmt: skip


@pytest.fixture
def _no_process_may_start(monkeypatch: pytest.MonkeyPatch) -> None:
    from loky.backend.process import LokyProcess

    def start(process: Any) -> None:
        raise AssertionError("a worker was started")

    monkeypatch.setattr(LokyProcess, "start", start)


@pytest.mark.usefixtures("_no_process_may_start")
def test_what_can_not_be_pickled_is_named_by_its_path_before_any_worker_starts() -> None:
    for number, (make, says) in enumerate(GIVEN):
        given = {"dataset": WithInner(3), **make(threading.Lock())}
        for backend in ("spawn", SharedMemory("loky"))[: 1 + (number == 0)]:
            with pytest.raises(WorkerPicklingError, match=says) as caught:
                iter(DataLoader(num_workers=1, backend=backend, **given))
            text = str(caught.value)
            assert "threads" in text, "the way out"
            assert len(text) < 1000
            assert isinstance(caught.value, TypeError)
            assert caught.value.__cause__ is not None


@pytest.mark.usefixtures("_no_process_may_start")
def test_a_sampler_is_not_sent() -> None:
    """It is this process's own, where a copy would be easiest."""

    class Unpicklable(RandomSampler):
        def __reduce__(self) -> Any:
            raise TypeError("a sampler is the parent's own")

    data: Any = WithInner(3)
    loader = DataLoader(data, sampler=Unpicklable(data), num_workers=1, backend="spawn")
    with pytest.raises(AssertionError, match="a worker was started"):
        iter(loader)


@pytest.mark.parametrize(
    "backend", ["threads", "fork", pytest.param("shared-memory", marks=needs_fork)]
)
def test_what_can_not_be_pickled_may_be_used_where_nothing_is_sent(backend: str) -> None:
    data: Any = WithInner(threading.Lock())
    loader = DataLoader(data, 8, num_workers=1, backend=backend)
    assert [batch.tolist() for batch in loader] == [[0, 1, 2, 3]]


class Unloadable:
    def __setstate__(self, state: Any) -> None:
        raise OSError("there is no such device here")

    def __getstate__(self) -> Any:
        return {"some": "state"}


class Stream(IterableDataset[int]):
    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __iter__(self) -> Iterator[int]:
        return iter(range(4))


def test_a_dataset_of_which_threads_can_have_no_copy_is_refused_and_shared_if_it_may_be() -> None:
    for inner, backends, says in [
        ([1, Unloadable()], ("threads",), r"dataset\.inner\[1\] .*copied.*no such device"),
        (threading.Lock(), ("threads", "inline"), r"dataset\.inner .*copy"),
    ]:
        for backend in backends:
            with pytest.raises(WorkerPicklingError, match=says):
                iter(DataLoader(Stream(inner), num_workers=1, backend=backend))
    data: Any = WithInner(Box(threading.Lock()))
    loader = DataLoader(data, 8, num_workers=1, backend="inline")
    with pytest.warns(UserWarning, match=r"dataset\.inner\.handle"):
        assert [batch.tolist() for batch in loader] == [[0, 1, 2, 3]]
