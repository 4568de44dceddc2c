"""`get_worker_info` by thread, through torch's own function wherever it is held; and where that ends."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch.utils.data import default_collate, get_worker_info
from torch.utils.data._utils import worker as torchs
from torch.utils.data._utils.worker import WorkerInfo

import hybridloader
from hybridloader import DataLoader
from hybridloader.engine.worker import set_worker_info, worker_info_set

BEFORE = {name: getattr(get_worker_info, name) for name in ("__name__", "__module__", "__doc__")}


def info(number: int) -> Any:
    return WorkerInfo(id=number, num_workers=2, seed=0, dataset=None, worker_method="thread")


def on_another_thread(function: Callable[[], Any]) -> Any:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function).result()


def test_torchs_function_and_ours_answer_on_the_thread_that_was_set_alone() -> None:
    told = info(1)
    with worker_info_set(told):
        assert get_worker_info() is hybridloader.get_worker_info() is told
        assert on_another_thread(get_worker_info) is None
        with worker_info_set(info(0)):
            assert get_worker_info().id == 0  # type: ignore[union-attr]
        assert get_worker_info() is told
    assert get_worker_info() is hybridloader.get_worker_info() is None


def test_it_is_put_back_when_the_block_raises() -> None:
    with pytest.raises(KeyError), worker_info_set(info(1)):
        raise KeyError
    assert get_worker_info() is None


def test_without_a_worker_of_ours_it_answers_what_it_always_did(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with worker_info_set(info(0)):
        pass
    theirs = info(7)
    monkeypatch.setattr(torchs, "_worker_info", theirs)  # as in a worker process of torch's own
    assert get_worker_info() is theirs
    with worker_info_set(info(1)):
        assert get_worker_info().id == 1  # type: ignore[union-attr]
        assert torchs._worker_info is theirs


def test_it_is_the_same_function_and_is_changed_once() -> None:
    with worker_info_set(info(0)):
        code = get_worker_info.__code__
    with worker_info_set(info(1)):
        assert get_worker_info.__code__ is code
    assert torch.utils.data.get_worker_info is get_worker_info is torchs.get_worker_info
    assert {name: getattr(get_worker_info, name) for name in BEFORE} == BEFORE
    assert not inspect.signature(get_worker_info).parameters


def test_collating_in_a_thread_is_not_taken_for_a_worker_process() -> None:
    """torch would put such a batch into shared memory, for a process that is not there."""
    with worker_info_set(info(0)):
        assert not default_collate([torch.zeros(3), torch.zeros(3)]).is_shared()

        def collate_tensor_fn() -> Any:  # the name is not what is gone by
            return get_worker_info()

        assert collate_tensor_fn() is not None


class Asks:
    """Worker info on the sample's thread, and on one that the dataset starts."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:
        here = get_worker_info()
        own = on_another_thread(get_worker_info)
        handed = on_another_thread(lambda: here)
        return [None if i is None else i.id for i in (here, own, handed)]


@pytest.mark.parametrize(
    ("backend", "threads", "own"),
    [("threads", 1, False), ("threads", 2, False), ("fork", 1, True)],
)
def test_threads_of_the_dataset_are_told_nothing_unless_the_worker_is_a_process(
    backend: str, threads: int, own: bool
) -> None:
    loader: Any = DataLoader(
        Asks(),  # type: ignore[arg-type]
        2,
        num_workers=2,
        backend=backend,
        threads_per_worker=threads,
        collate_fn=lambda samples: samples,
    )
    for worker, batch in enumerate(loader):
        for found in batch:
            who = worker if own else found[0]  # threads share a batch that takes long
            assert found == [who, who if own else None, who]
            assert who in range(2)


def test_a_thread_that_is_gone_leaves_nothing_to_the_next() -> None:
    def work() -> None:
        set_worker_info(info(1))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert on_another_thread(get_worker_info) is None
    assert get_worker_info() is None
