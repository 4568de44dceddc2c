"""Behavior that frameworks rely on, R1 to R11: the class, its constructor, its attributes.

No framework is imported. A test does with our loader what the framework does with any loader.
"""

from __future__ import annotations

import copy
import inspect
import pickle
from typing import Any

import pytest
import torch
from support.compat import (
    EVERY,
    Numbers,
    Watched,
    do_nothing,
    flat,
    keep,
    parameters,
    public,
    quick,
)
from torch.utils.data import DataLoader as TorchLoader
from torch.utils.data import SequentialSampler, TensorDataset

from hybridloader import DataLoader, Skip, Threads
from hybridloader.engine import backend_names


def test_every_backend_there_is_is_in_the_tables_of_this_file() -> None:
    assert sorted([*EVERY, "ray"]) == sorted(backend_names())


def test_r01_a_loader_is_one_of_torchs_and_a_subclass_of_the_bare_class() -> None:
    assert isinstance(DataLoader(Numbers()), TorchLoader)
    assert DataLoader.__bases__ == (TorchLoader,)
    assert DataLoader.__name__ == "DataLoader"


def test_r02_the_signature_is_torchs_with_ours_keyword_only_at_the_end() -> None:
    theirs, ours = parameters(TorchLoader.__init__), parameters(DataLoader.__init__)
    assert list(ours)[: len(theirs)] == list(theirs)
    for name, parameter in theirs.items():
        assert (ours[name].kind, ours[name].default) == (parameter.kind, parameter.default)
    for name in list(ours)[len(theirs) :]:
        assert ours[name].kind is inspect.Parameter.KEYWORD_ONLY


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


@pytest.mark.parametrize("options", CONFIGURATIONS, ids=lambda o: "+".join(o) or "-")
def test_r03_and_r05_what_is_public_are_parameters_that_make_ours_and_torchs_anew(
    options: dict[str, Any],
) -> None:
    """Ignite rebuilds the loader with another batch sampler; accelerate, Megatron and Ray as torch's."""
    loader = DataLoader(Numbers(), **options)
    kept = public(loader)
    assert set(kept) <= set(parameters(DataLoader.__init__))
    for name in ("batch_size", "sampler", "drop_last", "batch_sampler", "dataset_kind"):
        kept.pop(name, None)
    rebuilt = type(loader)(batch_sampler=[[5, 6], [7]], **kept)
    assert type(rebuilt) is DataLoader
    assert {name: getattr(rebuilt, name) for name in kept} == kept
    assert sorted(len(batch) for batch in rebuilt) == [1, 2]
    assert set(public(rebuilt)) <= set(parameters(DataLoader.__init__))

    left_to_the_sampler = ("batch_size", "shuffle", "sampler", "batch_sampler", "drop_last")
    names = set(parameters(TorchLoader.__init__)) - {"dataset", *left_to_the_sampler}
    kept = {name: getattr(loader, name) for name in names}
    if loader.batch_sampler is None:
        theirs = TorchLoader(loader.dataset, sampler=loader.sampler, batch_size=None, **kept)
    else:
        theirs = TorchLoader(loader.dataset, batch_sampler=loader.batch_sampler, **kept)
    assert {name: getattr(theirs, name) for name in names} == kept
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


@pytest.mark.parametrize("backend", [None, Threads(copy_dataset=True)])
@pytest.mark.parametrize("duplicate", [copy.copy, lambda x: pickle.loads(pickle.dumps(x))])
def test_r09_a_loader_can_be_pickled_and_copied(backend: Any, duplicate: Any) -> None:
    loader = DataLoader(TensorDataset(torch.arange(5)), 2, num_workers=1, backend=backend)
    assert [batch[0].tolist() for batch in loader] == [[0, 1], [2, 3], [4]]
    other = duplicate(loader)
    assert type(other) is DataLoader
    assert other.backend == backend
    assert [batch[0].tolist() for batch in other] == [[0, 1], [2, 3], [4]]


@pytest.mark.parametrize("backend", ["threads", "fork"])
def test_r09_an_iterator_can_not_be_pickled(backend: str) -> None:
    loader = DataLoader(Numbers(), num_workers=1, backend=backend, persistent_workers=True)
    with pytest.raises(NotImplementedError):
        pickle.dumps(iter(loader))
    with pytest.raises(NotImplementedError):
        copy.deepcopy(loader)


class Alike(DataLoader[Any]):
    """User's subclass with an ``__eq__``, and so without a hash unless it has one."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Alike)


class AlikeAndHashed(Alike):
    def __hash__(self) -> int:
        return 0


@pytest.mark.parametrize("kind", [Alike, AlikeAndHashed])
def test_what_is_kept_beside_a_loader_is_its_own_whatever_it_is_equal_to(
    kind: type[DataLoader[Any]],
) -> None:
    one, other = (
        kind(
            Numbers(6),
            2,
            on_error="skip",
            persistent_workers=True,
            num_workers=1,
            backend="threads",
        )
        for _ in range(2)
    )
    assert one == other
    with iter(one) as batches:
        next(batches)
        assert one.state_dict()["_num_yielded"] == 1
        assert other.state_dict()["_num_yielded"] == 0
        other.load_state_dict(one.state_dict())
        with iter(other) as rest:
            assert len(flat(rest)) == 4
        other.set_epoch(5)
        assert len(flat(batches)) == 4
        assert not one.skipped


def test_r11_the_context_is_none_or_tells_its_start_method() -> None:
    assert DataLoader(Numbers(), num_workers=1).multiprocessing_context is None
    for method in ("fork", "spawn", "forkserver"):
        loader = DataLoader(Numbers(), num_workers=1, multiprocessing_context=method)
        assert loader.multiprocessing_context.get_start_method() == method
        again = DataLoader(
            Numbers(), num_workers=1, multiprocessing_context=loader.multiprocessing_context
        )
        assert again.multiprocessing_context is loader.multiprocessing_context
