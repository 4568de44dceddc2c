"""Behavior that frameworks rely on, R13 to R24: the iterator, and how long it lives.

No framework is imported. A test does with our loader what the framework does with any loader.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from support.compat import Noted, Numbers, flat, quick
from torch.utils.data import DataLoader as TorchLoader
from torch.utils.data import get_worker_info
from torch.utils.data.dataloader import _BaseDataLoaderIter

from hybridloader import DataLoader


class Transformed:
    """PyG's iterator around an iterator."""

    def __init__(self, iterator: Any, transform: Callable[[Any], Any]) -> None:
        self.iterator, self.transform = iterator, transform

    def __iter__(self) -> Transformed:
        return self

    def _reset(self, loader: Any, first_iter: bool = False) -> None:
        self.iterator._reset(loader, first_iter)

    def __len__(self) -> int:
        return len(self.iterator)

    def __next__(self) -> Any:
        return self.transform(next(self.iterator))


class TheirLoader(TorchLoader):  # type: ignore[type-arg]
    """A framework's loader that knows nothing of ours."""

    def __init__(self, length: int, **options: Any) -> None:
        options.pop("collate_fn", None)
        super().__init__(Numbers(length), collate_fn=self.sampled, **options)

    def sampled(self, samples: list[int]) -> list[int]:
        return [10 * sample for sample in samples]

    def _get_iterator(self) -> Any:
        return Transformed(super()._get_iterator(), lambda batch: [x + 1 for x in batch])


class Mixed(TheirLoader, DataLoader):
    pass


@pytest.mark.parametrize(("workers", "backend"), [(0, None), (2, None), (2, "threads")])
def test_r13_a_subclass_of_a_framework_adopts_us_by_mixin(workers: int, backend: Any) -> None:
    more = {"persistent_workers": True, "backend": backend} if workers else {}
    loader = Mixed(5, batch_size=2, num_workers=workers, **more)
    assert type(iter(loader).iterator).__module__ == "hybridloader.loader.iterator"  # type: ignore[attr-defined]
    for _ in range(2):
        iterator = iter(loader)
        assert len(iterator) == 3
        assert list(iterator) == [[1, 11], [21, 31], [41]]
    loader._iterator = None


@quick
def test_r14_the_iterator_is_torchs_base_with_its_counters(backend: str) -> None:
    told = Noted(6)
    loader = DataLoader(Numbers(), sampler=told, num_workers=1, backend=backend, prefetch_factor=2)
    iterator: Any = iter(loader)
    assert isinstance(iterator, _BaseDataLoaderIter)
    assert (iterator._num_yielded, told.given) == (0, [0, 1])
    next(iterator)
    assert (iterator._num_yielded, told.given) == (1, [0, 1, 2])
    assert next(iterator._sampler_iter) == [3]  # a CombinedLoader may look, and take
    assert flat(iterator) == [1, 2, 4, 5]
    assert iterator._num_yielded == 5


@quick
def test_r15_workers_stop_when_the_last_reference_goes(backend: str) -> None:
    """A CombinedLoader sets `_iterator` to None; no garbage collection is needed."""
    loader = DataLoader(Numbers(), num_workers=2, backend=backend, persistent_workers=True)
    iterator: Any = iter(loader)
    assert loader._iterator is iterator
    next(iterator)
    workers = list(iterator._workers)
    assert [worker.is_alive() for worker in workers] == [True, True]
    gc.disable()
    try:
        loader._iterator = None
        assert all(worker.is_alive() for worker in workers)
        del iterator
        assert not any(worker.is_alive() for worker in workers)
    finally:
        gc.enable()
    assert flat(loader) == list(range(8))


@quick
def test_r15_a_loader_that_collates_by_its_own_method_can_be_collected(backend: str) -> None:
    """Loader like PyG's: ``collate_fn=self.sampled`` makes a cycle through the persistent iterator."""
    loader = Mixed(5, num_workers=1, persistent_workers=True, backend=backend)
    assert len(list(loader)) == 5
    gone = weakref.ref(loader)
    del loader
    gc.collect()
    assert gone() is None


class Repeating:
    """ultralytics' sampler that never ends."""

    def __init__(self, sampler: Any) -> None:
        self.sampler = sampler

    def __iter__(self) -> Iterator[Any]:
        while True:
            yield from iter(self.sampler)


class Endless(DataLoader):
    """ultralytics' InfiniteDataLoader."""

    iterator: Any

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        object.__setattr__(self, "batch_sampler", Repeating(self.batch_sampler))
        self.iterator = super().__iter__()

    def __len__(self) -> int:
        return len(self.batch_sampler.sampler)  # type: ignore[union-attr]

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        for _ in range(len(self)):
            yield next(self.iterator)

    def reset(self) -> None:
        self.iterator = self._get_iterator()

    def end(self) -> None:
        for worker in self.iterator._workers:
            if worker.is_alive():
                worker.terminate()
        self.iterator._shutdown_workers()


@quick
def test_r16_ultralytics_reuses_and_terminates_the_workers(backend: str) -> None:
    loader = Endless(Numbers(4), 2, num_workers=2, backend=backend)
    for _ in range(3):
        assert flat(loader) == [0, 1, 2, 3]
    loader.reset()
    assert flat(loader) == [0, 1, 2, 3]
    workers = list(loader.iterator._workers)
    loader.end()
    assert not any(worker.is_alive() for worker in workers)
    loader.iterator._shutdown_workers()


@pytest.mark.parametrize("backend", [None, "threads"])
def test_r17_the_loader_holds_an_iterator_only_when_persistent(backend: str | None) -> None:
    loader = DataLoader(Numbers(), num_workers=1, backend=backend)
    assert loader._iterator is None
    iterator = iter(loader)
    next(iterator)
    assert loader._iterator is None
    persistent = DataLoader(Numbers(), num_workers=1, backend=backend, persistent_workers=True)
    assert persistent._iterator is None
    assert persistent._iterator is not iter(persistent)
    assert persistent._iterator is iter(persistent)


class Counting(Numbers):
    """Counts, in shared memory, how many samples were fetched by all workers."""

    def __init__(self, length: int) -> None:
        super().__init__(length)
        self.fetched = torch.zeros(2, length, dtype=torch.uint8).share_memory_()

    def __getitem__(self, index: int) -> int:
        worker = get_worker_info()
        self.fetched[0 if worker is None else worker.id, index] = 1
        return index


@pytest.mark.parametrize(
    ("backend", "persistent"), [("inline", False), ("threads", True), ("fork", True)]
)
def test_r24_a_break_drains_nothing(backend: str, persistent: bool) -> None:
    dataset, told = Counting(500), Noted(500)
    loader = DataLoader(
        dataset, sampler=told, num_workers=2, backend=backend, persistent_workers=persistent
    )
    for _ in loader:
        break
    window = 2 * 2
    assert len(told.given) == 1 + window
    if persistent:
        assert int(next(iter(loader))) == 0
    loader._iterator = None
    assert 1 <= int(dataset.fetched.sum()) <= 1 + window
