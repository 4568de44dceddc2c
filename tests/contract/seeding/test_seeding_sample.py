"""``seeding="sample"``: one digest for the same data, wherever and however it is made."""

from __future__ import annotations

import random
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.failing_datasets import Samples
from support.late_numpy_import import ImportsLate
from support.random_datasets import (
    Drawing,
    DrawingStream,
    DrawingWhole,
    Dying,
    Failing,
    collate,
    digest,
    replacement,
    states,
)

import hybridloader
from hybridloader import DataLoader, Replace, Retry, SampleSeeding

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")

IN_PROCESS = ("inline", "threads")


def run(dataset: Any, epochs: int = 2, **options: Any) -> list[Any]:
    """All batches; fails if the caller's generators have moved."""
    options = {"batch_size": 4, "collate_fn": collate, "seeding": SampleSeeding(7), **options}
    # With a generator: else torch draws the seed of its workers from the default one.
    loader = DataLoader(dataset, generator=torch.Generator().manual_seed(1), **options)
    random.gauss(0, 1)  # so that there is half a pair, which must survive
    before = states()
    found = [batch for _ in range(epochs) for batch in loader]
    assert states() == before
    return found


@cache
def expected(kind: type[Any]) -> str:
    return digest(run(kind(), num_workers=0))


@pytest.fixture(autouse=True)
def _seeded() -> None:
    random.seed(1)
    np.random.seed(2)
    torch.manual_seed(3)


# -- one digest --------------------------------------------------------------------------------------


def on(backend: str, workers: int, **more: Any) -> dict[str, Any]:
    return {"backend": backend, "num_workers": workers, **more}


THREADS_3 = {"threads_per_worker": 3}


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        *((Drawing, on(backend, 5)) for backend in (*IN_PROCESS, "fork")),
        *((DrawingWhole, on(backend, 2)) for backend in ("threads", "shared-memory")),
        pytest.param(Drawing, on("spawn", 1), marks=pytest.mark.full),
        (Drawing, {"num_workers": 0, **THREADS_3}),
        *((Drawing, on(backend, 2, **THREADS_3)) for backend in (*IN_PROCESS, "fork")),
        (DrawingWhole, on("threads", 2, **THREADS_3)),
        (Drawing, on("threads", 3, prefetch_factor=16)),
        *((Drawing, on(backend, 2, persistent_workers=True)) for backend in ("threads", "fork")),
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore:threads_per_worker has no effect")
def test_the_data_is_the_same_wherever_and_with_however_many_workers(
    kind: type[Any], options: dict[str, Any]
) -> None:
    assert digest(run(kind(), **options)) == expected(kind)


@pytest.mark.parametrize(("backend", "workers"), [("threads", 3), ("fork", 1)])
def test_an_iterable_is_seeded_by_worker_and_number(backend: str, workers: int) -> None:
    one = run(DrawingStream(), backend="inline", num_workers=workers)
    assert digest(run(DrawingStream(), backend=backend, num_workers=workers)) == digest(one)
    if workers == 1:
        assert digest(one) == expected(DrawingStream)


def test_epochs_differ_and_so_do_seeds_and_samples() -> None:
    first = [s[1][0] for batch in run(Drawing(), 2) for s in batch[0]]
    other = [s[1][0] for batch in run(Drawing(), 1, seeding=SampleSeeding(8)) for s in batch[0]]
    assert len({*first, *other}) == 3 * 23


def test_collation_draws_by_its_batch() -> None:
    drawn = [batch[1:] for batch in run(Drawing(), 2)]
    assert len({repr(one) for one in drawn}) == len(drawn)
    again = run(
        Drawing(), 1, batch_size=5
    )  # other batches, but the first begins with the same sample
    assert again[0][1:] == drawn[0]
    assert again[1][1:] != drawn[1]


def test_the_epoch_is_counted_by_the_loader_not_by_its_workers() -> None:
    loader = DataLoader(Drawing(), 4, collate_fn=collate, seeding=SampleSeeding(7))
    iter(loader)  # a pass that is broken off at once
    second = list(loader)
    assert digest(second) == digest(run(Drawing(), 2)[6:])


# -- the seed ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("seeding", ["sample", SampleSeeding(3)])
@pytest.mark.parametrize("workers", [0, 2])
def test_no_more_is_drawn_from_the_callers_generators_than_by_torch(
    seeding: Any, workers: int
) -> None:
    def after(**options: Any) -> Any:
        torch.manual_seed(4)
        list(DataLoader(range(9), 2, shuffle=True, num_workers=workers, **options))
        return states()

    backend = {"backend": "threads"} if workers else {}
    assert after(seeding=seeding, **backend) == after(**backend)


# -- faults ------------------------------------------------------------------------------------------


def test_a_worker_that_was_replaced_draws_the_same(tmp_path: Path) -> None:
    marker = tmp_path / "died"
    options: Any = {"backend": "fork", "num_workers": 2, "on_worker_death": "restart"}
    found = run(Dying(marker), **options)
    assert marker.exists()
    marker2 = tmp_path / "untouched"
    marker2.touch()
    assert digest(found) == digest(run(Dying(marker2), num_workers=0))


POLICIES = {
    "skip": "skip",
    "replace": Replace(replacement),
    "retry": Retry(2, backoff=0, then="skip"),
    "retry and replace": Retry(1, backoff=0, then=Replace(replacement)),
}


@pytest.mark.parametrize(
    ("backend", "policy"),
    [("threads", "skip"), ("fork", "replace"), ("fork", "retry"), ("threads", "retry and replace")],
)
def test_samples_that_fail_are_the_same_under_every_policy(backend: str, policy: str) -> None:
    options: Any = {"on_error": POLICIES[policy]}
    one = run(Failing(), 2, num_workers=0, **options)
    assert digest(run(Failing(), 2, backend=backend, num_workers=2, **options)) == digest(one)
    if "replace" in policy:
        assert sum(len(batch[0]) for batch in one) == 2 * 23


@pytest.mark.slow
def test_what_is_imported_in_the_middle_of_a_sample_is_seeded() -> None:
    def found(**options: Any) -> list[Any]:
        loader = DataLoader(
            ImportsLate(), batch_size=3, collate_fn=list, seeding=SampleSeeding(1), **options
        )
        return [sample for batch in loader for sample in batch]

    fresh = found(backend="spawn", num_workers=1)
    assert "numpy" not in fresh[1][1], "the worker had numpy before"
    at_once = np.__version__ < "2"  # numpy 1 imports it with itself
    assert ("numpy.random" in fresh[1][1]) == at_once, "it was imported although nobody had drawn"
    assert "torch" not in fresh[-1][1], "numpy alone was to be seeded"
    here = found(num_workers=0)
    assert [s[2:] for s in fresh] == [s[2:] for s in here]


# -- bad input ---------------------------------------------------------------------------------------


def test_what_is_no_seeding_or_seed_is_refused_with_what_there_is() -> None:
    for seeding, hint in [
        *((wrong, '"worker"') for wrong in ("Sample", "", True, b"sample")),
        (7, r"SampleSeeding\(seed=7\)"),
        (SampleSeeding, "is the class"),
    ]:
        with pytest.raises(ValueError, match=hint):
            DataLoader(range(3), seeding=seeding)  # type: ignore[arg-type]
    for seed in (1.0, "7", True, b"1"):
        with pytest.raises(TypeError, match="seed must be a whole number"):
            SampleSeeding(seed)  # type: ignore[arg-type]
    for large in (1 << 64, -(1 << 63) - 1):
        with pytest.raises(ValueError, match="torch takes"):
            SampleSeeding(large)
    assert SampleSeeding((1 << 64) - 1).seed == (1 << 64) - 1


class Odd:
    """No index of which anything is the same tomorrow."""


def test_batches_without_samples_and_indices_of_any_kind_with_a_key_are_seeded() -> None:
    batches: Any = [[], [(1, "a"), (2.5, b"b")], [(3, None)]]
    data: Any = Samples(lambda index: [*index, random.random(), hybridloader.rng().python.random()])
    options: Any = {"batch_sampler": batches, "collate_fn": list, "seeding": SampleSeeding(2)}
    found = list(DataLoader(data, **options))
    assert [len(batch) for batch in found] == [0, 2, 1]
    for where in (on("threads", 2), on("threads", 1, **THREADS_3)):
        assert list(DataLoader(data, **options, **where)) == found


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("backend", ["threads", None])
def test_an_index_without_a_stable_key_is_refused(backend: str | None, threads: int) -> None:
    index: Any = Odd()
    loader = DataLoader(
        Samples(lambda index: int(random.random())),  # type: ignore[arg-type]
        sampler=[index],
        seeding="sample",
        backend=backend,
        num_workers=0 if backend is None else 1,
        threads_per_worker=threads,
    )
    with pytest.raises(TypeError, match="Odd has nothing that would be the same in every process"):
        list(loader)


def test_rng_outside_of_a_sample_says_what_to_do() -> None:
    with pytest.raises(RuntimeError, match='seeding="sample"'):
        hybridloader.rng()
    run(Drawing(), 1)
    with pytest.raises(RuntimeError, match='seeding="sample"'):
        hybridloader.rng()
    loader = DataLoader(Drawing(), num_workers=1, backend="threads")
    with pytest.raises(RuntimeError, match='seeding="sample"'):
        list(loader)
