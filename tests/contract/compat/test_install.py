"""``hybridloader.install``: torch's own loaders on our engine, and nothing else changed, and undone."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from support.compat import is_ours
from support.failing_datasets import Samples
from support.programs import output
from support.sample_origin import ORIGINS, PROCESS, THREAD, origin_loader, origins
from torch.utils.data import DataLoader as TorchLoader
from torch.utils.data import IterableDataset, get_worker_info
from torch.utils.data import dataloader as torchs

from hybridloader import DataLoader, Skip, Threads, install


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        yield from range(5) if info is None else range(info.id, 9, info.num_workers)


# -- what it does ----------------------------------------------------------------------------------


def test_one_method_of_torchs_is_replaced_and_nothing_else() -> None:
    classes = [TorchLoader, *(c for c in vars(torchs).values() if isinstance(c, type))]
    before = [dict(vars(c)) for c in classes]
    module = dict(vars(torchs)), dict(vars(torch.utils.data))
    with install("threads"):
        list(origin_loader())
        changed = {
            (c.__name__, name)
            for c, old in zip(classes, before, strict=True)
            for name in vars(c)
            if vars(c)[name] is not old.get(name)
        }
        assert changed == {("DataLoader", "_get_iterator")}
        assert (dict(vars(torchs)), dict(vars(torch.utils.data))) == module
    assert [dict(vars(c)) for c in classes] == before


def test_options_hold_for_all_loaders_that_can_have_them() -> None:
    def fails_at(index: int) -> int:
        return {3: 1 // (index != 3)}.get(index, index)

    options: Any = {
        "on_error": Skip(),
        "threads_per_worker": 2,
        "task_timeout": 1e6,
        "seeding": "sample",
    }
    with install("threads", **options) as installed:
        loader: Any = TorchLoader(Samples(fails_at, 6), 2, num_workers=2)  # type: ignore[arg-type]
        with iter(loader) as iterator:
            assert [b.tolist() for b in iterator] == [[0, 1], [2], [4, 5]]
            assert [lost.index for lost in iterator.skipped] == [3]
        assert [len(b) for b in TorchLoader(Stream(), 3, num_workers=2)] == [3, 3, 2, 1]
        assert [len(b) for b in TorchLoader(Stream(), 3)] == [3, 2]
        assert [int(x) for x in TorchLoader(range(3), None)] == [0, 1, 2]  # type: ignore[arg-type]
        assert installed.options.threads_per_worker == 2


# -- whose loaders ---------------------------------------------------------------------------------


class Asks(TorchLoader):  # type: ignore[type-arg]
    """Loader like PyG's: an iterator around that of the class below; some names are ours elsewhere."""

    asked = 0
    on_error = threads_per_worker = seeding = device = "of its own"

    def _get_iterator(self) -> Any:
        self.asked += 1
        return super()._get_iterator()


class MakesItsOwn(TorchLoader):  # type: ignore[type-arg]
    """Loader like torchdata's, which makes its own iterators."""

    def _get_iterator(self) -> Any:
        return torchs._MultiProcessingDataLoaderIter(self)


class AsksTorch(DataLoader):
    """Loader of ours that wants torch's own iterator."""

    def _get_iterator(self) -> Any:
        return TorchLoader._get_iterator(self)


class Both(Asks, DataLoader):  # type: ignore[misc]
    on_error = threads_per_worker = seeding = device = None  # set for each loader


@dataclass(frozen=True)
class Mine(Threads):
    """A backend of somebody's own."""

    name: ClassVar[str] = "mine"


INLINE, CALLER = {("inline", True)}, {("caller", True)}
WHOSE: list[tuple[Any, dict[str, Any], set[tuple[str, bool]], bool]] = [
    (TorchLoader, {}, THREAD, True),
    (TorchLoader, {"num_workers": 0}, CALLER, True),
    (Asks, {}, THREAD, True),
    (DataLoader, {"backend": "inline"}, INLINE, True),
    (Both, {"backend": "inline"}, INLINE, True),
    (MakesItsOwn, {}, PROCESS, False),
    (AsksTorch, {}, PROCESS, False),
]
"""Loaders, options, where samples are made within `install`, and whether by an iterator of ours."""


def test_each_loader_runs_where_its_class_says_and_on_torchs_workers_after() -> None:
    for backend in ("threads", Mine()):
        with install(backend) as installed:
            assert installed.active
            for kind, options, wanted, by_ours in WHOSE:
                given = {"batch_size": None, "num_workers": 1, **options}
                loader: Any = kind(ORIGINS, **given)
                assert origins(loader) == wanted, kind
                iterator = iter(loader)
                assert is_ours(iterator) is by_ours
                del iterator
                assert getattr(loader, "asked", 2) == 2
        assert not installed.active
    assert origins(origin_loader(1)) == PROCESS


# -- iterators that were there before, and that are there after ------------------------------------


def test_what_was_begun_goes_on_as_it_is() -> None:
    loader = origin_loader(1, persistent_workers=True)
    theirs = iter(loader)
    list(theirs)
    with install("threads"):
        assert iter(loader) is theirs  # persistent workers have one iterator
        assert {pid == os.getpid() for _, pid in theirs} == {False}
        other = origin_loader(1, persistent_workers=True)
        ours: Any = iter(other)
        list(ours)
        running = iter(origin_loader())
        next(running)
    assert iter(other) is ours
    assert {pid == os.getpid() for _, pid in ours} == {True}
    assert {pid == os.getpid() for _, pid in running} == {True}
    loader._iterator = other._iterator = None
    assert origins(other) == PROCESS
    loader._iterator = other._iterator = None


# -- without torch ---------------------------------------------------------------------------------


def test_it_imports_no_torch_and_takes_hold_when_somebody_does() -> None:
    code = """
import sys, hybridloader
one = hybridloader.install("threads")
one.uninstall()
with hybridloader.install("threads", on_error="skip", seeding="sample"):
    assert "torch" not in sys.modules
    import torch
    from torch.utils.data import DataLoader
    loader = DataLoader(range(4), num_workers=1)
    print(type(iter(loader)).__name__)
print(DataLoader._get_iterator.__module__)
"""
    assert output("-c", code) == "LoaderIterator\ntorch.utils.data.dataloader\n"
