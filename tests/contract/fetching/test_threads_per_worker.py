"""`threads_per_worker`: a loader whose workers fetch the samples of a batch together."""

from __future__ import annotations

import gc
import os
import threading
import weakref
from collections.abc import Iterator
from itertools import count
from typing import Any

import numpy as np
import pytest
import torch
from support.comparison import same
from support.failing_datasets import outcomes
from support.forking import in_a_fork
from support.programs import python
from support.references import merge_references
from torch.utils.data import DataLoader as TorchLoader
from torch.utils.data import Dataset, IterableDataset, StackDataset, Subset, TensorDataset
from torch.utils.data import get_worker_info as imported_earlier

import hybridloader
from hybridloader import DataLoader, Threads

LONG = 60.0
"""Seconds after which a test gives up; never reached when all is well."""

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


def fanout_threads() -> set[threading.Thread]:
    return {t for t in threading.enumerate() if t.name.startswith("hybridloader-fanout")}


class Samples(Dataset[Any]):
    """Numbers, arrays and strings; one that is too large for a small batch's slot."""

    def __len__(self) -> int:
        return 21

    def __getitem__(self, index: int) -> Any:
        if not 0 <= index < 21:
            raise IndexError(index)
        generator = np.random.default_rng(int(index))  # it may be a tensor
        large = torch.full((300, 300), index / 7)
        return {
            "i": index,
            "a": generator.normal(size=5),
            "large": large,
            "s": (f"n{index}", index),
        }


class Batches(Samples):
    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [(index, threading.current_thread().name) for index in indices]


def first(samples: list[Any]) -> Any:
    return samples[0]


DATASETS: dict[str, tuple[Any, dict[str, Any]]] = {
    "plain": (Samples(), {"batch_size": 8}),
    "dropped": (Samples(), {"batch_size": 8, "drop_last": True}),
    "batches": (Samples(), {"batch_sampler": [[3, 3, 0], (1,), torch.tensor([5, 6])]}),
    "subset": (Subset(Subset(Samples(), range(20)), [5, 2, 9, 11]), {"batch_size": 3}),
    "stack": (StackDataset(a=Samples(), b=Subset(Samples(), range(21))), {"batch_size": 4}),
    "tensors": (TensorDataset(torch.arange(9.0)), {"batch_size": 4}),
    "not collated": (Samples(), {"batch_size": 2, "collate_fn": first}),
}


@pytest.mark.parametrize(
    ("backend", "workers", "kind"),
    [
        *(("inline", 0, kind) for kind in DATASETS),
        *(
            (*place, kind)
            for place in [("threads", 1), ("fork", 1)]
            for kind in ("plain", "subset")
        ),
    ],
)
def test_batches_are_torchs(backend: str | None, workers: int, kind: str) -> None:
    dataset, options = DATASETS[kind]
    ours = DataLoader(
        dataset, num_workers=workers, backend=backend, threads_per_worker=4, **options
    )
    for one, other in zip(ours, TorchLoader(dataset, **options), strict=True):
        same(one, other)


MEETING = threading.Barrier(4)


class Meeting(Samples):
    """Samples that are given only four at a time."""

    def __getitem__(self, index: int) -> Any:
        MEETING.wait(LONG)
        ours, torchs = hybridloader.get_worker_info(), imported_earlier()
        assert ours is torchs
        if ours is None:
            return index, None, None, True
        return index, ours.id, ours.seed, ours.dataset is self


@pytest.mark.parametrize(
    ("backend", "workers", "wrap"),
    [("inline", 0, True), ("inline", 1, False), ("threads", 1, True), ("fork", 1, False)],
)
def test_the_samples_of_a_batch_are_fetched_together(
    backend: str | None, workers: int, wrap: bool
) -> None:
    meeting: Any = Meeting()
    dataset = Subset(meeting, range(8)) if wrap else meeting
    loader = DataLoader(
        dataset,
        sampler=range(8),
        batch_size=4,
        num_workers=workers,
        backend=backend,
        collate_fn=list,
        threads_per_worker=4,
    )
    iterator: Any = iter(loader)
    seed = iterator._base_seed
    for batch, samples in enumerate(iterator):
        worker = batch % workers if workers else None
        told = seed + worker if worker is not None else None
        mine = not wrap or not workers
        assert samples == [(4 * batch + i, worker, told, mine) for i in range(4)]


class Fragile(Samples):
    def __getitem__(self, index: int) -> int:
        if index == 5:
            raise KeyError("five")
        if index == 17:
            raise StopIteration
        return index


@pytest.mark.parametrize(("backend", "workers"), [("inline", 0), ("threads", 2), ("fork", 1)])
def test_an_error_names_the_sample_and_costs_one_batch(backend: str | None, workers: int) -> None:
    loader = DataLoader(Fragile(), 4, num_workers=workers, backend=backend, threads_per_worker=3)
    found = outcomes(iter(loader))
    good = [batch.tolist() for batch in found if isinstance(batch, torch.Tensor)]
    assert good == [[0, 1, 2, 3], [8, 9, 10, 11], [12, 13, 14, 15], [20]]
    errors = [found[1], found[4]]
    assert [type(error) for error in errors] == [KeyError, RuntimeError]
    assert errors[0].args == ("five",)
    assert "sample 5" in errors[0].__notes__
    assert isinstance(errors[1].__cause__, StopIteration) or "StopIteration" in str(errors[1])


@pytest.mark.parametrize(("backend", "workers"), [("inline", 0), ("inline", 2), ("threads", 2)])
def test_letting_an_iterator_go_ends_its_threads(backend: str, workers: int) -> None:
    before = fanout_threads()
    iterator = iter(
        DataLoader(Samples(), 4, num_workers=workers, backend=backend, threads_per_worker=3)
    )
    next(iterator)
    threads = fanout_threads() - before
    assert threads
    del iterator
    gc.collect()
    for thread in threads:
        thread.join(LONG)
        assert not thread.is_alive()


class Remembering(Dataset[int]):
    """Keeps something per thread, as one keeps open files."""

    def __init__(self) -> None:
        self.mine = threading.local()
        self.opened = count()
        self.meeting = threading.Barrier(3)

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> int:
        self.meeting.wait(LONG)
        if not hasattr(self.mine, "number"):
            self.mine.number = next(self.opened)
        return int(self.mine.number)


def test_persistent_workers_keep_their_threads_over_epochs() -> None:
    before = fanout_threads()
    options: dict[str, Any] = {"num_workers": 1, "persistent_workers": True, "backend": "threads"}
    loader = DataLoader(Remembering(), 3, threads_per_worker=3, **options)
    for _ in range(4):
        (batch,) = loader
        assert len(set(batch.tolist())) == 3
        # A task that takes long is left to three helpers, others to two and the worker's own thread.
        assert max(batch.tolist()) < 4
        assert len(fanout_threads() - before) <= 3


class Thing:
    """Something that can be seen to die."""


class Things(Remembering):
    """Samples that are given only three at a time, so that each thread makes one of each batch."""

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> Any:
        self.meeting.wait(LONG)
        return Thing()


@pytest.mark.parametrize(("backend", "workers"), [("inline", 0), ("threads", 1)])
def test_threads_hold_nothing_of_the_batches_before(backend: str, workers: int) -> None:
    options: dict[str, Any] = {"num_workers": workers, "backend": backend, "collate_fn": list}
    if workers:
        options["prefetch_factor"] = 1
    batches = iter(DataLoader(Things(), 3, threads_per_worker=3, **options))
    refs = [weakref.ref(thing) for thing in next(batches)]
    last = next(batches)
    assert len(last) == 3
    merge_references()
    assert [ref() for ref in refs] == [None] * 3


# -- forks, and exits ----------------------------------------------------


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
def test_after_a_fork_in_the_middle_the_child_has_threads_of_its_own() -> None:
    dataset: Any = Remembering()
    batches = iter(DataLoader(dataset, sampler=[0, 1, 2] * 3, batch_size=3, threads_per_worker=3))
    next(batches)
    assert in_a_fork(lambda: next(batches)) == 0
    next(batches)


@pytest.mark.parametrize(
    "stop", ["KeyboardInterrupt", pytest.param("SystemExit(7)", marks=pytest.mark.full)]
)
def test_a_sample_that_is_stuck_holds_up_neither_an_interrupt_nor_the_exit_of_python(
    stop: str,
) -> None:
    code = f"""if True:
        import threading
        from hybridloader import DataLoader
        caller, begun = threading.get_ident(), threading.Barrier(2)
        class Samples:
            def __len__(self): return 2
            def __getitem__(self, index):
                begun.wait()
                if threading.get_ident() == caller:
                    raise {stop}
                threading.Event().wait()
        try:
            list(DataLoader(Samples(), 2, threads_per_worker=2))
        except KeyboardInterrupt:
            raise SystemExit(7)
    """
    done = python("-c", code)
    assert (done.returncode, done.stdout, done.stderr) == (7, "", "")


# -- where there is nothing to share out -----------------------------------------------------------


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(4))


@pytest.mark.parametrize("workers", [0, 1])
def test_what_has_no_batches_of_indices_is_refused(workers: int) -> None:
    for dataset, size, words in [
        (Stream(), 2, "iterable dataset.*one next.. at a time.*num_workers"),
        (Stream(), None, "iterable dataset"),
        (Samples(), None, "batch_size=None.*one sample at a time.*num_workers"),
    ]:
        with pytest.raises(ValueError, match=f"threads_per_worker=2 .*{words}"):
            DataLoader(dataset, size, num_workers=workers, threads_per_worker=2)
        loader = DataLoader(dataset, size, num_workers=workers)
        loader.threads_per_worker = 2
        with pytest.raises(ValueError, match=words):
            iter(loader)


def test_threads_that_would_draw_in_any_order_are_refused() -> None:
    options: Any = {"num_workers": 1, "backend": "threads", "threads_per_worker": 3}
    with pytest.raises(ValueError, match=r"seeding='worker' .* the 3 threads .*leave one of them"):
        DataLoader(Samples(), 2, seeding="worker", **options)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_dataset_that_makes_batches_itself_is_asked_for_them_with_one_warning(
    workers: int, warned_anew: None
) -> None:
    options: dict[str, Any] = {"num_workers": workers, "backend": Threads() if workers else None}
    loader = DataLoader(
        Subset(Batches(), range(6)), 6, collate_fn=list, threads_per_worker=3, **options
    )
    with pytest.warns(UserWarning, match="no effect for Subset.*__getitems__") as caught:
        (batch,) = loader
    assert [index for index, _ in batch] == list(range(6))
    assert len({name for _, name in batch}) == 1
    assert os.path.samefile(caught[0].filename, __file__)
    assert len(list(loader)) == 1  # a second warning would be an error
