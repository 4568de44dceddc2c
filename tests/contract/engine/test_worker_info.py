"""`get_worker_info` by thread, through torch's own function; and where that ends."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from support.failing_datasets import Samples
from torch.utils.data import default_collate, get_worker_info

from hybridloader import DataLoader

BEFORE = {name: getattr(get_worker_info, name) for name in ("__name__", "__module__", "__doc__")}


def on_another_thread(function: Callable[[], Any]) -> Any:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function).result()


def infos(index: int) -> list[int | None]:
    """Worker info on the sample's thread, and on one that the dataset starts."""
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
    where: Any = {"num_workers": 2, "backend": backend, "threads_per_worker": threads}
    loader: Any = DataLoader(Samples(infos, 4), 2, collate_fn=list, **where)  # type: ignore[arg-type]
    for worker, batch in enumerate(loader):
        for found in batch:
            who = worker if own else found[0]  # threads share a batch that takes long
            assert found == [who, who if own else None, who]
            assert who in range(2)


def collates(index: int) -> bool:
    """Call torch's function from within a function with a name that torch looks for."""

    def collate_tensor_fn() -> Any:
        return get_worker_info()

    assert collate_tensor_fn() is not None
    return bool(default_collate([torch.zeros(3)] * 2).is_shared())


def test_torchs_function_is_changed_once_and_collation_in_a_thread_sees_no_process() -> None:
    """torch would put such a batch into shared memory, for a process that is not there."""
    for _ in range(2):
        data: Any = Samples(collates, 4)
        loader: Any = DataLoader(data, 4, num_workers=1, backend="threads", collate_fn=list)
        assert list(loader) == [[False] * 4]
        code = get_worker_info.__code__
    list(DataLoader(range(2), num_workers=1, backend="inline"))  # type: ignore[arg-type]
    assert get_worker_info.__code__ is code
    assert get_worker_info() is None
    assert {name: getattr(get_worker_info, name) for name in BEFORE} == BEFORE
    assert not inspect.signature(get_worker_info).parameters
