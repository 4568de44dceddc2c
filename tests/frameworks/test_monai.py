"""MONAI: its loaders adopt ours by mixin; `set_rnd` gives every worker's dataset its own seed."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.comparison import same
from support.seeded_training import LIKE_TORCHS_PROCESSES, WORKERS

import hybridloader
from hybridloader import Threads
from hybridloader.errors import BackendUnavailable

pytest.importorskip("monai")
import monai.data
from monai.data import MetaTensor
from monai.transforms import Compose, RandFlip, Randomizable, RandScaleIntensity
from monai.utils import set_determinism


class Loader(monai.data.DataLoader, hybridloader.DataLoader):
    """Loader as written on the page of MONAI."""


class ThreadLoader(monai.data.ThreadDataLoader, hybridloader.DataLoader):
    """Loader with a buffer thread, as written on the page of MONAI."""


IMAGES = [np.full((1, 4, 4), k, dtype=np.float32) + np.eye(4, dtype=np.float32) for k in range(8)]
BACKENDS = [*LIKE_TORCHS_PROCESSES, Threads(copy_dataset=True)]
NAMES = [str(getattr(b, "name", b)) for b in BACKENDS]


def transforms() -> Compose:
    return Compose([RandFlip(prob=0.5, spatial_axis=0), RandScaleIntensity(0.5, prob=0.8)])


def plain() -> Any:
    return monai.data.Dataset(IMAGES, transforms())


def cached() -> Any:
    return monai.data.CacheDataset(IMAGES, transforms(), progress=False)


def batches(kind: Any, dataset: Any, epochs: int = 2, **options: Any) -> list[Any]:
    """Each batch with what MONAI knows of it, in memory of its own."""
    set_determinism(3)
    try:
        loader = kind(dataset, batch_size=2, shuffle=True, **options)
        return [_shown(batch) for _ in range(epochs) for batch in loader]
    finally:
        set_determinism(None)


def _shown(batch: Any) -> Any:
    if not isinstance(batch, MetaTensor):
        return batch
    names = [operation["class"] for sample in batch.applied_operations for operation in sample]
    return [batch.as_tensor().clone(), batch.affine.clone(), names]


@functools.cache
def monais(dataset: Callable[[], Any], threaded: bool = False) -> list[Any]:
    kind = monai.data.ThreadDataLoader if threaded else monai.data.DataLoader
    return batches(kind, dataset(), num_workers=WORKERS)


@pytest.mark.parametrize("backend", BACKENDS, ids=NAMES)
def test_batches_are_those_of_monais_loader(backend: Any) -> None:
    for dataset in (plain, cached):
        got = batches(Loader, dataset(), num_workers=WORKERS, backend=backend)
        same(got, monais(dataset))
        assert len(got) == 8
        assert isinstance(got[0], list), "a MetaTensor came as something else"
    got = batches(ThreadLoader, plain(), num_workers=WORKERS, backend=backend)
    same(got, monais(plain, threaded=True))


@pytest.mark.parametrize("kind", [Loader, ThreadLoader])
def test_without_workers_the_constructor_sets_the_seeds(kind: Any) -> None:
    wanted = batches(monai.data.DataLoader, plain())
    for backend in (None, "inline"):
        same(batches(kind, plain(), backend=backend), wanted)


@pytest.mark.parametrize("backend", ["fork", Threads(copy_dataset=True)], ids=["fork", "threads"])
def test_workers_that_stay_and_a_dataset_that_is_filled(tmp_path: Path, backend: Any) -> None:
    """torch's persistent workers go on with their random states, and so do ours."""

    def filled(name: str) -> Any:
        return monai.data.PersistentDataset(IMAGES, transforms(), tmp_path / name)

    options: dict[str, Any] = {"num_workers": WORKERS, "persistent_workers": True, "epochs": 3}
    wanted = batches(monai.data.DataLoader, plain(), **options)
    same(batches(Loader, plain(), backend=backend, **options), wanted)
    gc.collect()
    wanted = batches(monai.data.DataLoader, filled("theirs"), num_workers=WORKERS)
    same(batches(Loader, filled("ours"), num_workers=WORKERS, backend=backend), wanted)
    assert len(list((tmp_path / "ours").iterdir())) == len(IMAGES)


class Seeds(torch.utils.data.Dataset[Any], Randomizable):
    """Tells the first number that the worker's own state gives, without drawing from it."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> tuple[int, int]:
        info = torch.utils.data.get_worker_info()
        state = np.random.RandomState()
        state.set_state(self.R.get_state())
        return int(state.randint(2**31)), info.seed % 2**32


@pytest.mark.parametrize("backend", BACKENDS, ids=NAMES)
def test_set_rnd_seeds_each_workers_dataset_by_its_worker(backend: Any) -> None:
    loader = Loader(Seeds(), batch_size=1, num_workers=WORKERS, backend=backend)
    for drawn, seed in loader:
        assert drawn.item() == np.random.RandomState(seed.item()).randint(2**31)


def test_threads_that_share_a_dataset_share_its_random_state() -> None:
    """Why the page says ``Threads(copy_dataset=True)``: the last worker to start has set the seed."""
    loader = Loader(Seeds(), batch_size=1, num_workers=WORKERS, backend="threads")
    drawn = [number.item() for number, _ in loader]
    assert len(set(drawn[-2:])) == 1


def test_monais_own_threads_are_no_backend_and_contradict_one() -> None:
    options: dict[str, Any] = {"batch_size": 2, "num_workers": WORKERS, "use_thread_workers": True}
    with pytest.raises(ValueError, match=r"contradicts multiprocessing_context='processthread'"):
        ThreadLoader(plain(), backend="threads", **options)
    with pytest.raises(BackendUnavailable, match="unknown start method 'processthread'"):
        list(ThreadLoader(plain(), **options))


@pytest.mark.parametrize("threaded", [False, True])
def test_monais_own_classes_run_on_ours_within_install(threaded: bool) -> None:
    kind = monai.data.ThreadDataLoader if threaded else monai.data.DataLoader
    wanted = monais(plain, threaded)
    with hybridloader.install(backend=Threads(copy_dataset=True)):
        same(batches(kind, plain(), num_workers=WORKERS), wanted)
