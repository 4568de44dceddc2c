"""What frameworks lean on: a test for each row of the compatibility contract, R1 to R34.

No framework is imported. A test does with our loader what the framework does with any loader.
"""

from __future__ import annotations

import copy
import gc
import inspect
import os
import pickle
import random
import subprocess
import sys
import textwrap
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import FrozenInstanceError
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    StackDataset,
    Subset,
    TensorDataset,
    default_collate,
    get_worker_info,
)
from torch.utils.data import DataLoader as TorchLoader
from torch.utils.data._utils.worker import WorkerInfo
from torch.utils.data.dataloader import _BaseDataLoaderIter
from torch.utils.data.datapipes.iter import IterableWrapper
from torch.utils.data.distributed import DistributedSampler

import hybridloader
from hybridloader import (
    DataLoader,
    Inline,
    SharedMemory,
    Skip,
    Spawn,
    Threads,
    WorkerDied,
    backend_names,
)

QUICK = ("inline", "threads", "fork")
EVERY = ("inline", "threads", "fork", "spawn", "shared-memory")

quick = pytest.mark.parametrize("backend", QUICK)
every = pytest.mark.parametrize("backend", EVERY)


class Numbers(Dataset[int]):
    def __init__(self, length: int = 8) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        return index


class Told(Sampler[int]):
    """Counts how often it is asked to begin, and what it gave where."""

    def __init__(self, length: int = 8) -> None:
        self.length = length
        self.begun = 0
        self.given: list[int] = []
        self.places: set[tuple[int, int]] = set()

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[int]:
        self.begun += 1
        return self._walk()

    def _walk(self) -> Iterator[int]:
        for index in range(self.length):
            self.given.append(index)
            self.places.add((os.getpid(), threading.get_ident()))
            yield index


def keep(samples: Any) -> Any:
    return samples


def do_nothing(worker: int) -> None:
    pass


def flat(loader: Any) -> list[Any]:
    """All samples of one epoch."""
    return [item for batch in loader for item in (batch.tolist() if batch.dim() else [batch])]


def public(loader: Any) -> dict[str, Any]:
    return {name: value for name, value in vars(loader).items() if not name.startswith("_")}


def parameters(function: Any) -> dict[str, inspect.Parameter]:
    return {name: p for name, p in inspect.signature(function).parameters.items() if name != "self"}


def test_every_backend_there_is_is_in_the_tables_of_this_file() -> None:
    assert sorted(EVERY) == sorted(backend_names())


# -- class, constructor, attributes ----------------------------------------------------------------


def test_r01_a_loader_is_one_of_torchs_and_a_subclass_of_the_bare_class() -> None:
    assert isinstance(DataLoader(Numbers()), TorchLoader)
    assert DataLoader.__bases__ == (TorchLoader,)
    assert DataLoader.__name__ == "DataLoader"


def test_r01_the_class_takes_the_type_of_its_samples_as_torchs_does() -> None:
    class Mine(DataLoader[int]):  # type: ignore[type-arg]
        pass

    assert Mine.__mro__[1:3] == (DataLoader, TorchLoader)
    loader = DataLoader[int](Numbers(2), batch_size=2)  # type: ignore[type-arg,misc]
    assert type(loader) is DataLoader
    assert flat(loader) == flat(Mine(Numbers(2))) == [0, 1]


def test_r02_the_signature_is_torchs_with_ours_keyword_only_at_the_end() -> None:
    theirs, ours = parameters(TorchLoader.__init__), parameters(DataLoader.__init__)
    assert list(ours)[: len(theirs)] == list(theirs)
    for name, parameter in theirs.items():
        assert (ours[name].kind, ours[name].default) == (parameter.kind, parameter.default)
    for name in list(ours)[len(theirs) :]:
        assert ours[name].kind is inspect.Parameter.KEYWORD_ONLY
    assert {name: ours[name].default for name in list(ours)[len(theirs) :]} == {
        "backend": None,
        "threads_per_worker": 1,
        "on_error": "raise",
        "on_worker_death": "raise",
        "task_timeout": 0,
        "seeding": "worker",
        "shard_remainders": "keep",
    }


CONFIGURATIONS: list[dict[str, Any]] = [
    {},
    {"batch_size": 3, "shuffle": True, "drop_last": True},
    {"batch_size": None, "num_workers": 1, "backend": "threads"},
    {"batch_size": 2, "num_workers": 1, "persistent_workers": True, "backend": Threads()},
    {"num_workers": 2, "prefetch_factor": 1, "in_order": False, "timeout": 60, "backend": "inline"},
    {"num_workers": 1, "multiprocessing_context": "fork", "worker_init_fn": do_nothing},
    {"sampler": [3, 1], "generator": torch.Generator(), "collate_fn": keep},
    {"batch_size": 2, "num_workers": 1, "backend": "threads", "threads_per_worker": 3},
    {"num_workers": 1, "backend": "threads", "on_error": Skip(3), "on_worker_death": "restart"},
    {"num_workers": 1, "backend": "threads", "task_timeout": 60, "seeding": "sample"},
]

configurations = pytest.mark.parametrize(
    "options", CONFIGURATIONS, ids=lambda o: "+".join(o) or "-"
)


@configurations
def test_r03_public_attributes_are_parameters(options: dict[str, Any]) -> None:
    loader = DataLoader(Numbers(), **options)
    assert set(public(loader)) <= set(parameters(DataLoader.__init__))
    assert list(loader)
    assert set(public(loader)) <= set(parameters(DataLoader.__init__))


@configurations
def test_r03_ignite_rebuilds_the_loader_with_another_batch_sampler(options: dict[str, Any]) -> None:
    loader = DataLoader(Numbers(), **options)
    kept = public(loader)
    for name in ("batch_size", "sampler", "drop_last", "batch_sampler", "dataset_kind"):
        kept.pop(name, None)
    rebuilt = type(loader)(batch_sampler=[[5, 6], [7]], **kept)
    assert type(rebuilt) is DataLoader
    assert {name: getattr(rebuilt, name) for name in kept} == kept
    collated = list(rebuilt)
    assert sorted(len(batch) for batch in collated) == [1, 2]


@pytest.mark.parametrize(
    "backend", [None, *EVERY, "Shared_Memory", Threads(), SharedMemory("fork")]
)
def test_r04_our_arguments_are_stored_under_their_names_as_passed(backend: Any) -> None:
    loader = DataLoader(Numbers(), num_workers=1, backend=backend)
    assert vars(loader)["backend"] is backend
    extra = set(parameters(DataLoader.__init__)) - set(parameters(TorchLoader.__init__))
    assert extra <= set(vars(loader))


@pytest.mark.parametrize("threads", [1, 2, 1000])
def test_r04_threads_per_worker_is_stored_under_its_name_as_passed(threads: int) -> None:
    assert vars(DataLoader(Numbers(), threads_per_worker=threads))["threads_per_worker"] is threads


def lightning_arguments(loader: Any, sampler: Any) -> dict[str, Any]:
    """How Lightning finds the arguments to re-create a loader with another sampler."""
    attributes = public(loader)
    attributes["multiprocessing_context"] = loader.multiprocessing_context
    signature = inspect.signature(loader.__init__).parameters
    assert not any(p.kind is p.VAR_KEYWORD for p in signature.values())
    changed = {
        n for n, p in signature.items() if n in attributes and p.default is not attributes[n]
    }
    arguments = {n: v for n, v in attributes.items() if n in changed | {"dataset"}}
    if isinstance(loader.dataset, IterableDataset):
        arguments |= {"batch_sampler": None, "sampler": None}
    else:
        arguments |= {"sampler": sampler, "shuffle": False, "batch_sampler": None}
    required = {n for n, p in signature.items() if p.default is p.empty}
    assert required <= set(arguments)
    assert set(arguments) <= set(signature)
    return arguments


@pytest.mark.parametrize(
    "options",
    [
        {"batch_size": 2, "shuffle": True},
        {"batch_size": 2, "num_workers": 2, "backend": "threads", "persistent_workers": True},
        {"batch_size": 2, "num_workers": 1, "multiprocessing_context": "fork"},
        {"batch_size": 2, "num_workers": 1, "multiprocessing_context": "fork", "backend": "fork"},
        {"batch_size": 2, "num_workers": 1, "backend": "threads", "threads_per_worker": 2},
        {"batch_size": 2, "threads_per_worker": 300},
    ],
    ids="+".join,
)
def test_r04_lightning_recreates_the_loader_with_a_distributed_sampler(
    options: dict[str, Any],
) -> None:
    loader = DataLoader(Numbers(), **options)
    sampler = DistributedSampler(Numbers(), num_replicas=2, rank=1, shuffle=False)
    clone = type(loader)(**lightning_arguments(loader, sampler))
    assert clone.backend == options.get("backend")
    assert clone.threads_per_worker == options.get("threads_per_worker", 1)
    assert clone.multiprocessing_context is loader.multiprocessing_context
    assert clone.sampler is sampler
    assert flat(clone) == [1, 3, 5, 7]


def test_r04_lightning_wraps_the_constructor_and_replays_its_arguments(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def wrapped(init: Callable[..., None]) -> Callable[..., None]:
        def wrapper(self: Any, *args: Any, **kwargs: Any) -> None:
            if not hasattr(self, "__pl_saved_args"):
                object.__setattr__(self, "__pl_saved_args", args)
                object.__setattr__(self, "__pl_saved_kwargs", kwargs)
            init(self, *args, **kwargs)

        return wrapper

    for kind in (TorchLoader, DataLoader):
        monkeypatch.setattr(kind, "__init__", wrapped(kind.__init__))
    loader = DataLoader(Numbers(), 4, num_workers=1, backend="threads", threads_per_worker=2)
    saved = vars(loader)
    assert saved["__pl_saved_args"] == (loader.dataset, 4)
    clone = type(loader)(*saved["__pl_saved_args"], **saved["__pl_saved_kwargs"])
    assert clone.backend == "threads"
    assert clone.threads_per_worker == 2
    assert flat(clone) == list(range(8))


@configurations
def test_r05_what_is_stored_makes_a_loader_of_torchs(options: dict[str, Any]) -> None:
    """accelerate, Megatron and Ray read torch's names and call torch's constructor."""
    loader = DataLoader(Numbers(), **options)
    left_to_the_sampler = ("batch_size", "shuffle", "sampler", "batch_sampler", "drop_last")
    names = set(parameters(TorchLoader.__init__)) - {"dataset", *left_to_the_sampler}
    kept = {name: getattr(loader, name) for name in names}
    if loader.batch_sampler is None:
        theirs = TorchLoader(loader.dataset, sampler=loader.sampler, batch_size=None, **kept)
    else:
        theirs = TorchLoader(loader.dataset, batch_sampler=loader.batch_sampler, **kept)
    assert type(theirs) is TorchLoader
    assert {name: getattr(theirs, name) for name in names} == kept
    assert isinstance(loader.num_workers, int)
    if loader.num_workers == 0:
        assert loader.prefetch_factor is None
        assert not loader.persistent_workers


class FastCollate:
    def __call__(self, samples: list[int]) -> torch.Tensor:
        return torch.tensor(samples) * 10


@quick
def test_r06_what_the_user_passed_stays_the_users_object(backend: str) -> None:
    dataset, sampler, collate_fn = Numbers(), SequentialSampler(range(8)), FastCollate()
    loader = DataLoader(
        dataset,
        2,
        sampler=sampler,
        collate_fn=collate_fn,
        worker_init_fn=do_nothing,
        num_workers=1,
        backend=backend,
        persistent_workers=True,
    )
    for _ in range(2):
        assert loader.dataset is dataset
        assert loader.sampler is sampler
        assert loader.batch_sampler.sampler is sampler  # type: ignore[union-attr]
        assert loader.worker_init_fn is do_nothing
        assert isinstance(loader.collate_fn, FastCollate)  # as timm asks
        assert loader.collate_fn is collate_fn
        assert flat(loader) == list(range(0, 80, 10))


def test_r06_without_a_collate_fn_it_is_torchs_own() -> None:
    assert DataLoader(Numbers()).collate_fn is TorchLoader(Numbers()).collate_fn
    theirs = TorchLoader(Numbers(), batch_size=None)
    assert DataLoader(Numbers(), batch_size=None).collate_fn is theirs.collate_fn


def test_r07_no_name_of_ours_is_mangled_into_torchs() -> None:
    def mangled(thing: Any) -> set[str]:
        return {name for name in vars(thing) if name.startswith("_DataLoader__")}

    loader, theirs = DataLoader(Numbers(), num_workers=1), TorchLoader(Numbers(), num_workers=1)
    assert mangled(DataLoader) == set()
    assert mangled(loader) == mangled(theirs) != set()


def test_r08_the_six_guarded_attributes_are_guarded() -> None:
    loader = DataLoader(Numbers())
    for name in (
        "batch_size", "batch_sampler", "sampler", "drop_last", "dataset", "persistent_workers"
    ):  # fmt: skip
        with pytest.raises(ValueError, match=f"{name} attribute should not be set"):
            setattr(loader, name, getattr(loader, name))


def seen_by_workers(index: Any) -> Any:
    info = get_worker_info()
    return None if info is None else (info.id, info.num_workers, info.worker_method)


class Watched(Numbers):
    """Samples that tell who made them."""

    def __getitem__(self, index: int) -> Any:
        return seen_by_workers(index)


def test_r08_other_attributes_are_read_when_the_iterator_is_made() -> None:
    loader = DataLoader(Watched(4), collate_fn=keep)
    assert list(loader) == [[None]] * 4
    loader.num_workers = 2
    loader.backend = "threads"
    assert list(loader) == [[(0, 2, "thread")], [(1, 2, "thread")]] * 2
    loader.backend = "inline"
    loader.collate_fn = len
    assert list(loader) == [1] * 4
    loader.collate_fn = keep
    assert list(loader) == [[(0, 2, "inline")], [(1, 2, "inline")]] * 2
    loader.backend = None
    loader.num_workers = 1
    assert list(loader) == [[(0, 1, "multiprocessing")]] * 4


def test_r08_generator_init_fn_and_prefetch_factor_are_read_when_the_iterator_is_made() -> None:
    told = Told()
    loader = DataLoader(Watched(), sampler=told, num_workers=1, backend="threads", collate_fn=keep)
    called: list[int] = []
    generator = torch.Generator().manual_seed(1)
    before = generator.get_state()
    loader.worker_init_fn = called.append
    loader.generator = generator
    loader.prefetch_factor = 3
    iterator = iter(loader)
    assert called == [0]
    assert told.given == [0, 1, 2]
    assert not torch.equal(before, generator.get_state())
    assert len(list(iterator)) == 8


@pytest.mark.parametrize("backend", [None, "threads", Threads(copy_dataset=True), SharedMemory()])
@pytest.mark.parametrize("duplicate", [copy.copy, lambda x: pickle.loads(pickle.dumps(x))])
def test_r09_a_loader_can_be_pickled_and_copied(backend: Any, duplicate: Any) -> None:
    loader = DataLoader(TensorDataset(torch.arange(5)), 2, num_workers=1, backend=backend)
    assert [batch[0].tolist() for batch in loader] == [[0, 1], [2, 3], [4]]
    other = duplicate(loader)
    assert type(other) is DataLoader
    assert other.backend == backend
    assert [batch[0].tolist() for batch in other] == [[0, 1], [2, 3], [4]]


def test_r09_the_dict_of_a_loader_can_be_copied_to_another() -> None:
    loader = DataLoader(Numbers(), 4, num_workers=1, backend="threads")
    other = DataLoader.__new__(DataLoader)
    other.__dict__.update(loader.__dict__)
    assert flat(other) == list(range(8))


@quick
def test_r09_an_iterator_can_not_be_pickled(backend: str) -> None:
    loader = DataLoader(Numbers(), num_workers=1, backend=backend, persistent_workers=True)
    with pytest.raises(NotImplementedError):
        pickle.dumps(iter(loader))
    with pytest.raises(NotImplementedError):
        copy.deepcopy(loader)


@pytest.mark.parametrize("backend", [None, *QUICK])
def test_r10_after_the_constructor_only_the_iterator_is_set(backend: str | None) -> None:
    class Recorded(DataLoader):
        _replayed: list[str] = []  # noqa: RUF012

        def __setattr__(self, name: str, value: Any) -> None:
            self._replayed.append(name)
            super().__setattr__(name, value)

    loader = Recorded(Numbers(), num_workers=1, backend=backend, persistent_workers=True)
    Recorded._replayed.clear()
    for _ in range(2):
        assert flat(loader) == list(range(8))
    assert len(loader) == 8
    assert Recorded._replayed == ["_iterator"]


def test_r11_the_context_is_none_or_tells_its_start_method() -> None:
    assert DataLoader(Numbers(), num_workers=1).multiprocessing_context is None
    for method in ("fork", "spawn", "forkserver"):
        loader = DataLoader(Numbers(), num_workers=1, multiprocessing_context=method)
        assert loader.multiprocessing_context.get_start_method() == method
        again = DataLoader(
            Numbers(), num_workers=1, multiprocessing_context=loader.multiprocessing_context
        )
        assert again.multiprocessing_context is loader.multiprocessing_context


_inherited = False


class Inheriting(Numbers):
    """Tells whether the worker has what this process had in memory when it was started."""

    def __getitem__(self, index: int) -> bool:
        return _inherited


@pytest.mark.parametrize(("method", "inherits"), [("fork", True), ("spawn", False)])
def test_r11_workers_are_started_as_the_context_says(
    method: str, inherits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules[__name__], "_inherited", True)
    loader = DataLoader(Inheriting(2), num_workers=1, multiprocessing_context=method)
    assert flat(loader) == [inherits] * 2


# -- iterator and lifetime -------------------------------------------------------------------------


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


@pytest.mark.parametrize("backend", [None, *QUICK])
@pytest.mark.parametrize("workers", [0, 2])
def test_r13_a_subclass_of_a_framework_adopts_us_by_mixin(backend: Any, workers: int) -> None:
    if workers == 0:
        backend = None
    more = {"persistent_workers": True, "backend": backend} if workers else {}
    loader = Mixed(5, batch_size=2, num_workers=workers, **more)
    assert type(iter(loader).iterator).__module__ == "hybridloader.loader_iterator"  # type: ignore[attr-defined]
    for _ in range(2):
        iterator = iter(loader)
        assert len(iterator) == 3
        assert list(iterator) == [[1, 11], [21, 31], [41]]
    loader._iterator = None


def test_r13_monai_passes_all_by_keyword_through_the_mixin() -> None:
    class Theirs(TorchLoader):  # type: ignore[type-arg]
        def __init__(self, dataset: Any, num_workers: int = 0, **options: Any) -> None:
            options.setdefault("worker_init_fn", do_nothing)
            super().__init__(dataset=dataset, num_workers=num_workers, **options)

    class Mine(Theirs, DataLoader):
        pass

    loader = Mine(Numbers(), num_workers=1, batch_size=4, backend="threads")
    assert loader.worker_init_fn is do_nothing
    assert {worker.name for worker in iter(loader)._workers} == {"thread"}
    assert flat(loader) == list(range(8))


@quick
def test_r14_the_iterator_is_torchs_base_with_its_counters(backend: str) -> None:
    told = Told(6)
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
def test_r14_reset_begins_anew_with_the_same_workers(backend: str) -> None:
    loader = DataLoader(Numbers(4), num_workers=1, backend=backend, persistent_workers=True)
    iterator: Any = iter(loader)
    workers = list(iterator._workers)
    next(iterator)
    iterator._reset(loader)
    assert iterator._num_yielded == 0
    assert flat(iterator) == [0, 1, 2, 3]
    iterator._reset(loader, first_iter=False)
    assert flat(iterator) == [0, 1, 2, 3]
    assert list(iterator._workers) == workers


@pytest.mark.parametrize("workers", [0, 1])
@quick
def test_r14_speechbrain_skips_ahead_by_patching_the_base_class(
    backend: str, workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    old_init, old_next = _BaseDataLoaderIter.__init__, _BaseDataLoaderIter.__next__
    asked: list[Any] = []

    def new_init(self: Any, loader: Any, *args: Any, **kwargs: Any) -> None:
        old_init(self, loader, *args, **kwargs)
        if loader._speechbrain_recovery_skip_to is not None:
            for step in range(loader._speechbrain_recovery_skip_to):
                next(self._sampler_iter)
                self._num_yielded = step + 1
            loader._speechbrain_recovery_skip_to = None

    def new_reset(self: Any, loader: Any, first_iter: bool = False, *args: Any) -> None:
        if not first_iter:
            self._sampler_iter = iter(self._index_sampler)
            self._num_yielded = 0
            self._IterableDataset_len_called = loader._IterableDataset_len_called

    def new_next(self: Any) -> Any:
        asked.append(self)
        return old_next(self)

    monkeypatch.setattr(_BaseDataLoaderIter, "__init__", new_init)
    monkeypatch.setattr(_BaseDataLoaderIter, "_reset", new_reset)
    monkeypatch.setattr(_BaseDataLoaderIter, "__next__", new_next)
    more: dict[str, Any] = {"backend": backend, "persistent_workers": True} if workers else {}
    loader: Any = DataLoader(Numbers(6), num_workers=workers, **more)
    loader._speechbrain_recovery_skip_to = 4
    iterator: Any = iter(loader)
    assert iterator._num_yielded == 4
    assert flat(iterator) == [4, 5]
    assert iterator._num_yielded == 6
    assert len(asked) == 3
    assert flat(loader) == list(range(6))


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
    """As PyG's: ``collate_fn=self.sampled`` closes a circle over the persistent iterator."""
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


@quick
def test_r16_workers_are_handles_like_processes(backend: str) -> None:
    iterator: Any = iter(DataLoader(Numbers(), num_workers=2, backend=backend))
    next(iterator)
    workers = iterator._workers
    assert len(workers) == 2
    assert all(worker.is_alive() and worker.pid > 0 for worker in workers)
    assert (workers[0].pid == os.getpid()) is (backend != "fork")
    for _ in range(3):
        iterator._shutdown_workers()
    for worker in workers:
        worker.join(timeout=60)
        assert not worker.is_alive()


def test_r16_without_workers_there_is_nothing_to_shut_down_twice() -> None:
    iterator: Any = iter(DataLoader(Numbers()))
    next(iterator)
    for _ in range(2):
        iterator._shutdown_workers()


@pytest.mark.parametrize("backend", [None, *QUICK])
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


@quick
def test_r18_persistent_iterators_are_one_and_others_are_independent(backend: str) -> None:
    persistent = DataLoader(Numbers(4), num_workers=1, backend=backend, persistent_workers=True)
    first = iter(persistent)
    next(first)
    assert iter(persistent) is first
    assert flat(first) == [0, 1, 2, 3]

    loader = DataLoader(Numbers(4), num_workers=1, backend=backend)
    one, two = iter(loader), iter(loader)
    assert one is not two
    taken = [int(next(one)), int(next(two)), int(next(one)), int(next(one)), int(next(two))]
    assert taken == [0, 0, 1, 2, 1]
    assert (flat(one), flat(two)) == ([3], [2, 3])


class Recording(BatchSampler):
    """Lightning's wrapper that remembers the indices of each batch for the prediction writer."""

    seen: list[list[int]]

    def __iter__(self) -> Iterator[list[int]]:
        self.seen = []
        for batch in super().__iter__():
            self.seen.append(batch)
            yield batch


@quick
def test_r19_indices_are_drawn_here_from_that_very_sampler_in_order(backend: str) -> None:
    told = Told(7)
    recording = Recording(told, 2, drop_last=False)
    loader = DataLoader(Numbers(), batch_sampler=recording, num_workers=2, backend=backend)
    batches = [batch.tolist() for batch in loader]
    assert recording.seen == batches == [[0, 1], [2, 3], [4, 5], [6]]
    assert told.places == {(os.getpid(), threading.get_ident())}


@pytest.mark.parametrize("persistent", [False, True])
@quick
def test_r20_nothing_of_an_epoch_is_drawn_before_iter(backend: str, persistent: bool) -> None:
    class Shuffled(DistributedSampler[int]):
        begun: list[int] = []  # noqa: RUF012

        def __iter__(self) -> Iterator[int]:
            self.begun.append(self.epoch)
            return super().__iter__()

    sampler = Shuffled(Numbers(), num_replicas=1, rank=0, seed=3)
    loader = DataLoader(
        Numbers(), sampler=sampler, num_workers=1, backend=backend, persistent_workers=persistent
    )
    Shuffled.begun.clear()
    for epoch in range(3):
        sampler.set_epoch(epoch)
        orders = flat(loader)
        assert set(Shuffled.begun) == {epoch}
        Shuffled.begun.clear()
        assert orders == list(DistributedSampler.__iter__(sampler))


def draws(seed: int, count: int) -> torch.Tensor:
    """The state of a generator after `count` seeds were drawn from it."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        torch.empty((), dtype=torch.int64).random_(generator=generator)
    return generator.get_state()


@pytest.mark.parametrize("workers", [0, 1])
@quick
def test_r21_an_iterator_draws_one_seed_and_a_reset_none(backend: str, workers: int) -> None:
    generator = torch.Generator().manual_seed(5)
    more: dict[str, Any] = {"backend": backend, "persistent_workers": True} if workers else {}
    loader = DataLoader(Numbers(2), num_workers=workers, generator=generator, **more)
    globals_before = torch.get_rng_state()
    for epoch in range(3):
        assert len(list(loader)) == 2
        drawn = 1 if workers else epoch + 1
        assert torch.equal(generator.get_state(), draws(5, drawn))
    assert torch.equal(torch.get_rng_state(), globals_before)


@quick
def test_r21_a_pipe_draws_a_shared_seed_more_and_again_at_a_reset(backend: str) -> None:
    generator = torch.Generator().manual_seed(5)
    pipe = IterableWrapper(range(4)).shuffle()
    loader = DataLoader(
        pipe, num_workers=1, generator=generator, backend=backend, persistent_workers=True
    )
    assert sorted(flat(loader)) == [0, 1, 2, 3]
    after_one = generator.get_state()
    assert sorted(flat(loader)) == [0, 1, 2, 3]

    theirs = torch.Generator().manual_seed(5)
    torchs = TorchLoader(pipe, num_workers=1, generator=theirs, persistent_workers=True)
    assert len(list(torchs)) == 4
    assert torch.equal(after_one, theirs.get_state())
    assert len(list(torchs)) == 4
    assert torch.equal(generator.get_state(), theirs.get_state())


@pytest.mark.parametrize(("workers", "persistent"), [(0, False), (2, False), (2, True)])
@quick
def test_r22_the_sampler_is_asked_to_begin_as_often_as_by_torch(
    backend: str, workers: int, persistent: bool
) -> None:
    def begun(kind: Any, **more: Any) -> list[int]:
        told = Told(4)
        loader = kind(
            Numbers(4), sampler=told, num_workers=workers, persistent_workers=persistent, **more
        )
        found = []
        for _ in range(3):
            iterator = iter(loader)
            found.append(told.begun)
            list(iterator)
            found.append(told.begun)
        return found

    ours = begun(DataLoader, **({"backend": backend} if workers else {}))
    assert ours == begun(TorchLoader)


class Unsized(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


class Sized(Unsized):
    def __len__(self) -> int:
        return 3


def test_r23_lengths_are_torchs() -> None:
    loader = DataLoader(Numbers(7), 2, num_workers=1, backend="threads")
    assert len(loader) == len(iter(loader)) == 4
    assert len(DataLoader(Numbers(7), 2, drop_last=True)) == 3
    assert len(DataLoader(Sized(), 2)) == 2
    with pytest.raises(TypeError):
        len(DataLoader(Unsized()))
    assert not hasattr(iter(DataLoader(Unsized())), "length_hint")


def test_r23_more_samples_than_the_length_said_are_warned_of_as_by_torch() -> None:
    class Liar(Sized):
        def __len__(self) -> int:
            return 2

    loader = DataLoader(Liar(), num_workers=1, backend="threads")
    assert len(loader) == 2
    with pytest.warns(UserWarning, match="Length of IterableDataset"):
        assert flat(loader) == [0, 1, 2]


class Counting(Numbers):
    """Counts, in shared memory, how many samples were fetched by all workers."""

    def __init__(self, length: int) -> None:
        super().__init__(length)
        self.fetched = torch.zeros(2, length, dtype=torch.uint8).share_memory_()

    def __getitem__(self, index: int) -> int:
        worker = get_worker_info()
        self.fetched[0 if worker is None else worker.id, index] = 1
        return index


@pytest.mark.parametrize("persistent", [False, True])
@quick
def test_r24_a_break_drains_nothing(backend: str, persistent: bool) -> None:
    dataset, told = Counting(500), Told(500)
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


# -- inside workers --------------------------------------------------------------------------------


def test_r25_references_taken_before_our_import_tell_the_thread_who_it_is() -> None:
    script = """
        from torch.utils.data import get_worker_info as one
        from torch.utils.data._utils.worker import get_worker_info as two
        import torch.utils.data

        assert one is two
        from hybridloader import DataLoader

        class Data(torch.utils.data.Dataset):
            def __len__(self):
                return 4

            def __getitem__(self, index):
                ids = {f().id for f in (one, two, torch.utils.data.get_worker_info)}
                return ids, torch.utils.data._utils.worker._worker_info

        def keep(samples):
            return samples

        for backend in ("threads", "inline"):
            loader = DataLoader(Data(), num_workers=2, backend=backend, collate_fn=keep)
            found = []
            for batch in loader:
                assert one() is None
                found += batch
            assert found == [({0}, None), ({1}, None)] * 2, found
        theirs = torch.utils.data.DataLoader(Data(), num_workers=1, collate_fn=keep)
        assert [batch[0][1].id for batch in theirs] == [0] * 4
        print("fine")
    """
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(script)],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert (done.stdout, done.returncode) == ("fine\n", 0), done.stderr


def test_r25_two_loaders_of_threads_do_not_mix_up_their_workers() -> None:
    two = iter(DataLoader(Watched(6), num_workers=2, backend="threads", collate_fn=keep))
    one = iter(DataLoader(Watched(6), num_workers=1, backend="threads", collate_fn=keep))
    for step in range(6):
        assert next(two) == [(step % 2, 2, "thread")]
        assert next(one) == [(0, 1, "thread")]
        assert get_worker_info() is None
        assert hybridloader.get_worker_info() is None


def describe(index: int) -> Any:
    info = get_worker_info()
    assert info is hybridloader.get_worker_info()
    assert type(info) is WorkerInfo
    with pytest.raises(FrozenInstanceError):
        info.id = 7  # type: ignore[misc]
    return info.id, info.num_workers, info.seed, info.worker_method, info.rng is not None


class Described(Numbers):
    def __getitem__(self, index: int) -> Any:
        info = get_worker_info()
        assert info is not None
        assert info.dataset is self
        return describe(index)


@every
def test_r26_worker_info_is_torchs_and_frozen_and_tells_all(backend: str) -> None:
    loader = DataLoader(
        Described(4),
        num_workers=2,
        backend=backend,
        collate_fn=keep,
        generator=torch.Generator().manual_seed(9),
    )
    base = int(
        torch.empty((), dtype=torch.int64).random_(generator=torch.Generator().manual_seed(9))
    )
    method = {"inline": "inline", "threads": "thread"}.get(backend, "multiprocessing")
    told = [(worker, 2, base + worker, method, backend == "threads") for worker in (0, 1)]
    assert [batch[0] for batch in loader] == told * 2


class Augmented(Numbers):
    """Draws from the generator that torch recommends for threads, and from those in `rng`."""

    def __getitem__(self, index: int) -> Any:
        generator = torch.random.thread_safe_generator()
        info = get_worker_info()
        assert info is not None
        assert (generator is None) == (info.rng is None)
        if info.rng is None:
            return None
        draws: Any = info.rng
        assert generator is draws.torch_generator
        return (
            torch.rand(2, generator=generator).tolist(),
            draws.random_generator.random(),
            draws.numpy_generator.random(),
        )


def test_r26_threads_draw_from_generators_of_their_own() -> None:
    def run() -> list[Any]:
        generator = torch.Generator().manual_seed(9)
        loader = DataLoader(
            Augmented(6), num_workers=2, backend="threads", collate_fn=keep, generator=generator
        )
        return [batch[0] for batch in loader]

    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    first = run()
    assert run() == first
    assert len({str(sample) for sample in first}) == 6
    base = int(
        torch.empty((), dtype=torch.int64).random_(generator=torch.Generator().manual_seed(9))
    )
    for worker in (0, 1):
        mine = torch.Generator().manual_seed(base + worker)
        python = random.Random(base + worker)
        for sample in first[worker::2]:
            assert sample[:2] == (torch.rand(2, generator=mine).tolist(), python.random())
    after = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    assert torch.equal(before[0], after[0])
    assert before[1:] == after[1:]
    assert torch.random.thread_safe_generator() is None


@pytest.mark.parametrize("backend", ["inline", "fork"])
def test_r26_other_workers_have_no_thread_safe_generator(backend: str) -> None:
    loader = DataLoader(Augmented(2), num_workers=1, backend=backend, collate_fn=keep)
    assert list(loader) == [[None]] * 2


def lightning_seeds(found: torch.Tensor, worker: int) -> None:
    """Lightning's `pl_worker_init_function`; writes down the seed that it was given."""
    process_seed = torch.initial_seed()
    found[worker] = process_seed
    sequence = np.random.SeedSequence([process_seed - worker, worker, 0])
    np.random.seed(sequence.generate_state(4))
    torch_sequence, python_sequence = sequence.spawn(2)
    torch.manual_seed(int(torch_sequence.generate_state(1, dtype=np.uint64)[0] >> 1))
    random.seed(int(python_sequence.generate_state(2, dtype=np.uint64)[0]))


@every
def test_r27_init_functions_find_their_seed_and_leave_the_main_thread_alone(backend: str) -> None:
    found = torch.zeros(2, dtype=torch.int64).share_memory_()
    torch.manual_seed(11)
    random.seed(12)
    np.random.seed(13)
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    loader = DataLoader(
        Numbers(4),
        num_workers=2,
        backend=backend,
        worker_init_fn=partial(lightning_seeds, found),
        generator=torch.Generator().manual_seed(9),
    )
    iterator: Any = iter(loader)
    assert flat(iterator) == [0, 1, 2, 3]
    assert found.tolist() == [iterator._base_seed, iterator._base_seed + 1]
    assert torch.initial_seed() == 11
    after = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    assert torch.equal(before[0], after[0])
    assert before[1:] == after[1:]


@pytest.mark.parametrize("backend", ["inline", "threads"])
def test_r27_workers_of_this_process_do_not_reseed_the_devices(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`torch.manual_seed` seeds the generators of all devices, which the training code draws from."""
    seeded: list[Any] = []
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeded.append)
    loader = DataLoader(Numbers(2), num_workers=1, backend=backend, worker_init_fn=do_nothing)
    assert flat(loader) == [0, 1]
    assert seeded == []
    torch.manual_seed(0)
    assert seeded == [0]  # the test would see it


class Shard(IterableDataset[Any]):
    """Keeps its place on itself, so that two workers must not share it."""

    def __init__(self) -> None:
        self.place = 0

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        assert info is not None
        assert info.dataset is self
        for _ in range(3):
            self.place += 1
            yield info.id, self.place, id(self)


@pytest.mark.parametrize("backend", ["inline", "threads", Inline(copy_dataset=False)])
def test_r29_each_worker_iterates_a_copy_of_an_iterable_dataset(backend: Any) -> None:
    dataset = Shard()
    loader = DataLoader(dataset, num_workers=2, backend=backend, collate_fn=keep)
    iterator = iter(loader)  # held, so that the copies live and their ids differ
    found = [batch[0] for batch in iterator]
    assert [item[:2] for item in found] == [(0, 1), (1, 1), (0, 2), (1, 2), (0, 3), (1, 3)]
    assert len({item[2] for item in found} | {id(dataset)}) == 3
    assert dataset.place == 0


class Epoch:
    """The epoch of a streaming dataset of Hugging Face: a tensor in shared memory."""

    def __init__(self) -> None:
        self.value = torch.tensor(0).share_memory_()


class Streaming(IterableDataset[Any]):
    def __init__(self) -> None:
        self._epoch = Epoch()

    def set_epoch(self, epoch: int) -> None:
        self._epoch.value.fill_(epoch)

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        assert info is not None
        for _ in range(2):
            yield info.id, int(self._epoch.value)


@every
def test_r30_an_epoch_in_shared_memory_is_seen_by_every_worker(backend: str) -> None:
    dataset = Streaming()
    loader = DataLoader(
        dataset, num_workers=2, backend=backend, collate_fn=keep, persistent_workers=True
    )
    for epoch in range(3):
        dataset.set_epoch(epoch)
        assert [batch[0] for batch in loader] == [(0, epoch), (1, epoch)] * 2
    assert dataset._epoch.value.is_shared()


class Randomized(Numbers):
    """A dataset of MONAI, whose transforms get their seed from the init function."""

    state = -1

    def __getitem__(self, index: int) -> int:
        return self.state


def set_state(worker: int) -> None:
    info = get_worker_info()
    assert info is not None
    dataset: Any = info.dataset
    dataset.state = worker


@pytest.mark.parametrize("backend", [Threads(copy_dataset=True), "inline", "fork"])
def test_r31_init_functions_change_the_workers_own_dataset(backend: Any) -> None:
    dataset = Randomized(4)
    loader = DataLoader(dataset, num_workers=2, backend=backend, worker_init_fn=set_state)
    assert flat(loader) == [0, 1, 0, 1]
    assert dataset.state == -1


def test_r31_threads_share_a_map_style_dataset_unless_told_to_copy_it() -> None:
    dataset = Randomized(4)
    loader = DataLoader(dataset, num_workers=1, backend="threads", worker_init_fn=set_state)
    assert flat(loader) == [0] * 4
    assert dataset.state == 0


class Batchwise:
    """No `Dataset` of torch's, and asked for a batch at once: a dataset of Hugging Face."""

    def __len__(self) -> int:
        return 5

    def __getitem__(self, index: int) -> int:
        raise AssertionError("a dataset with __getitems__ is asked for batches")

    def __getitems__(self, indices: list[int]) -> list[int]:
        return [100 * len(indices) + index for index in indices]


class Declined(Numbers):
    __getitems__ = None


@pytest.mark.parametrize("workers", [0, 1])
@quick
def test_r33_getitems_is_used_where_it_is(backend: str, workers: int) -> None:
    more: dict[str, Any] = {"num_workers": 1, "backend": backend} if workers else {}
    data: Any = Batchwise()
    assert flat(DataLoader(data, 2, **more)) == [200, 201, 202, 203, 104]
    assert flat(DataLoader(Declined(3), 2, **more)) == [0, 1, 2]
    assert flat(DataLoader([7, 8, 9], 2, **more)) == [7, 8, 9]  # type: ignore[arg-type]


class Unfit(Exception):
    def __init__(self, index: int, *, why: str) -> None:
        super().__init__(f"sample {index} is unfit: {why}")
        self.index = index


class Fragile(Numbers):
    def __getitem__(self, index: int) -> int:
        if index == 1:
            raise Unfit(index, why="rotten")
        return index


def refuse(worker: int) -> None:
    raise Unfit(worker, why="no worker")


@quick
def test_r34_errors_keep_type_message_and_the_workers_traceback(backend: str) -> None:
    iterator = iter(DataLoader(Fragile(3), num_workers=1, backend=backend))
    assert int(next(iterator)) == 0
    with pytest.raises(Unfit, match="sample 1 is unfit: rotten") as caught:
        next(iterator)
    assert caught.value.index == 1
    shown = "".join(caught.value.__notes__) + str(caught.getrepr(style="native"))
    assert 'raise Unfit(index, why="rotten")' in shown
    assert "worker 0" in shown
    assert int(next(iterator)) == 2


@quick
def test_r34_errors_of_init_functions_reach_the_consumer(backend: str) -> None:
    loader = DataLoader(Numbers(3), num_workers=1, backend=backend, worker_init_fn=refuse)
    with pytest.raises(Unfit, match="no worker"):
        list(loader)


def leave(worker: int) -> None:
    raise SystemExit(3)


class Leaving(Numbers):
    def __getitem__(self, index: int) -> int:
        raise SystemExit(3)


@pytest.mark.parametrize("backend", ["threads", "fork"])
@pytest.mark.parametrize("where", ["in a sample", "at the start"])
def test_r34_what_escapes_a_worker_never_hangs_the_consumer(backend: str, where: str) -> None:
    options: dict[str, Any] = {"num_workers": 1, "backend": backend}
    if where == "at the start":
        loader = DataLoader(Numbers(), worker_init_fn=leave, **options)
    else:
        loader = DataLoader(Leaving(), **options)
    with pytest.raises(WorkerDied, match=r"SystemExit|code 3"):
        list(loader)


# -- set_epoch reaches persistent workers ----------------------------------------------------------


class Plain(Numbers):
    """The epoch is an attribute that is bound anew."""

    epoch = -1

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __getitem__(self, index: int) -> int:
        return self.epoch


class Reordered(Numbers):
    """The epoch's order is an array that is bound anew; the array before must not be seen."""

    def __init__(self, length: int = 8) -> None:
        super().__init__(length)
        self.set_epoch(-1)

    def set_epoch(self, epoch: int) -> None:
        self.order = np.full(self.length, epoch)
        self.parts = {"names": [epoch]}

    def __getitem__(self, index: int) -> int:
        assert self.parts["names"] == [self.order[index]]
        return int(self.order[index])


class Wrapper:
    """No `Dataset`, and holds one."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __len__(self) -> int:
        return len(self.inner)

    def __getitem__(self, index: int) -> Any:
        return self.inner[index]


def stacked() -> tuple[Any, list[Any]]:
    """A dataset that holds others in all the ways there are, and these; only one is spawned."""
    leaves: list[Any] = [Plain(4), Reordered(4), Plain(4), Plain(2), Reordered(2)]
    plain, reordered, in_subset, *in_concat = leaves
    subset = Subset(Subset(in_subset, [3, 2, 1, 0]), [0, 1, 2, 3])
    whole = StackDataset(plain, reordered, subset, ConcatDataset(in_concat))
    return Wrapper(whole), leaves


@every
def test_set_epoch_in_the_parent_is_seen_by_all_persistent_workers(backend: str) -> None:
    dataset, leaves = stacked()
    loader = DataLoader(
        dataset, num_workers=2, backend=backend, collate_fn=keep, persistent_workers=True
    )
    for epoch in range(3):
        for leaf in leaves:
            leaf.set_epoch(epoch)
        assert [batch[0] for batch in loader] == [(epoch,) * 4] * 4


@pytest.mark.parametrize("backend", ["inline", "threads", "fork", Threads(copy_dataset=True)])
def test_set_epoch_is_seen_when_an_epoch_is_begun_twice(backend: Any) -> None:
    """As with two loops over the loader, of which the first is given up before its first batch."""
    dataset = Plain(4)
    loader = DataLoader(dataset, num_workers=2, backend=backend, persistent_workers=True)
    assert flat(loader) == [-1] * 4
    dataset.set_epoch(5)
    iter(loader)
    assert flat(iter(loader)) == [5] * 4


@quick
def test_what_a_worker_changed_on_its_copy_stays_in_the_next_epoch(backend: str) -> None:
    dataset = Randomized(4)
    chosen: Any = Threads(copy_dataset=True) if backend == "threads" else backend
    loader = DataLoader(
        dataset, num_workers=2, backend=chosen, persistent_workers=True, worker_init_fn=set_state
    )
    for _ in range(2):
        assert flat(loader) == [0, 1, 0, 1]
    dataset.state = 7
    assert flat(loader) == [7] * 4


@quick
def test_without_persistent_workers_each_epoch_reads_the_dataset_as_it_is(backend: str) -> None:
    dataset = Reordered(4)
    loader = DataLoader(dataset, num_workers=1, backend=backend)
    for epoch in range(2):
        dataset.order[:] = epoch
        dataset.parts["names"] = [epoch]
        assert flat(loader) == [epoch] * 4


# -- batches of threads ----------------------------------------------------------------------------


def collate_pairs(samples: list[Any]) -> Any:
    return {"own": default_collate(samples)}


class Pairs(Numbers):
    def __getitem__(self, index: int) -> Any:
        return torch.full((3,), index), np.float32(index)


@pytest.mark.parametrize("collate_fn", [None, collate_pairs])
@pytest.mark.parametrize("backend", ["inline", "threads"])
def test_batches_made_in_this_process_are_not_moved_to_shared_memory(
    backend: str, collate_fn: Any
) -> None:
    loader = DataLoader(Pairs(4), 2, num_workers=2, backend=backend, collate_fn=collate_fn)
    for batch in loader:
        one, two = batch["own"] if collate_fn else batch
        assert one.shape == (2, 3)
        assert not one.is_shared()
        assert not two.is_shared()


# -- what a spawned worker must not need -----------------------------------------------------------


def test_a_random_sampler_is_not_sent_to_workers() -> None:
    """R19 again, where a copy would be easiest: the sampler holds what can't be pickled."""

    class Unpicklable(RandomSampler):
        lock = threading.Lock()

        def __reduce__(self) -> Any:
            raise TypeError("a sampler is the parent's own")

    sampler = Unpicklable(Numbers(4))
    loader = DataLoader(Numbers(4), sampler=sampler, num_workers=1, backend=Spawn())
    assert sorted(flat(loader)) == [0, 1, 2, 3]
