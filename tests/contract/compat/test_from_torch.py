"""``hybridloader.from_torch``: all that a loader of torch's has, on a backend; or why that can't be."""

from __future__ import annotations

import inspect
import pickle
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader as TorchLoader
from torch.utils.data import Dataset
from torch.utils.data.datapipes.iter import IterableWrapper

from hybridloader import DataLoader, Threads, from_torch
from hybridloader.errors import BackendUnavailable

PARAMETERS = set(inspect.signature(DataLoader).parameters)


class Squares(Dataset[int]):
    def __init__(self, size: int = 7) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> int:
        return index**2


def first_of(samples: list[int]) -> int:
    return samples[0]


def passes(loader: Any, count: int = 2) -> list[Any]:
    return [[torch.as_tensor(batch).tolist() for batch in loader] for _ in range(count)]


def test_workers_are_on_the_backend_and_the_given_loader_is_as_it_was() -> None:
    theirs = TorchLoader(Squares(), 2, num_workers=2, persistent_workers=True)
    before = dict(vars(theirs))
    ours = from_torch(theirs, backend="threads", on_error="skip")
    assert type(ours) is DataLoader
    assert passes(ours, 1) == [[[0, 1], [4, 9], [16, 25], [36]]]
    assert ours._iterator is not None
    assert dict(vars(theirs)) == before
    assert theirs._iterator is None
    ours._iterator = None


def test_samplers_generator_functions_and_datasets_are_the_same_objects() -> None:
    options = {"shuffle": True, "generator": torch.Generator(), "collate_fn": first_of}
    for theirs, wanted in (
        (TorchLoader(Squares(), 2, num_workers=1, **options), None),  # type: ignore[arg-type]
        (TorchLoader(Squares(), batch_sampler=[[3, 1], [0]]), [[9, 1], [0]]),
        (TorchLoader(IterableWrapper(range(4)), 2), [[0, 1], [2, 3]]),  # not wrapped again
        (Prepared(5), [0, 4, 16]),  # a subclass that only constructs loses nothing
    ):
        ours: Any = from_torch(theirs, "inline")
        assert type(ours) is DataLoader
        for name in ("dataset", "sampler", "batch_sampler", "generator", "collate_fn"):
            assert getattr(ours, name) is getattr(theirs, name)
        assert wanted is None or passes(ours, 1) == [wanted]


def test_what_was_set_after_the_constructor_comes_along() -> None:
    theirs: Any = TorchLoader(Squares(), 3, num_workers=2)
    theirs.collate_fn = first_of
    theirs.num_workers = 1
    theirs.prefetch_factor = 5
    theirs.mark = ["of a framework"]
    ours: Any = from_torch(theirs, "threads")
    assert passes(ours, 1) == [[0, 9, 36]]
    assert (ours.num_workers, ours.prefetch_factor) == (1, 5)
    assert ours.mark is theirs.mark
    assert set(vars(from_torch(TorchLoader(Squares())))) == set(vars(DataLoader(Squares())))
    # An attribute with the name of an option is not taken for it.
    theirs = TorchLoader(Squares(), 3)
    theirs.device = "cuda:1"
    ours = from_torch(theirs)
    assert ours.device is None
    assert passes(ours, 1) == passes(theirs, 1)


def test_it_is_made_for_frameworks_as_any_of_ours() -> None:
    """Its keywords are attributes as passed, under their names; it pickles; guarded ones are guarded."""
    backend = Threads()
    options: Any = {"threads_per_worker": 2, "task_timeout": 3.0, "on_worker_death": "restart"}
    ours = from_torch(TorchLoader(Squares(), 2, num_workers=1), backend, **options)
    assert {name: vars(ours)[name] for name in options} == options
    assert vars(ours)["backend"] is backend
    assert {name for name in vars(ours) if not name.startswith("_")} <= PARAMETERS
    assert passes(pickle.loads(pickle.dumps(ours)), 1) == passes(ours, 1)
    with pytest.raises(ValueError, match="batch_size attribute should not be set"):
        ours.batch_size = 3
    ours.load_state_dict(ours.state_dict())


class Prepared(TorchLoader):  # type: ignore[type-arg]
    """Subclass like MONAI's, and PyG's for graphs: a constructor, and nothing else."""

    limit: int

    def __init__(self, size: int) -> None:
        super().__init__(Squares(size), 2, collate_fn=first_of)


class Filters(TorchLoader):  # type: ignore[type-arg]
    def filter_fn(self, batch: Any) -> Any:
        return batch

    def __call__(self) -> None: ...


class Stateful(TorchLoader):  # type: ignore[type-arg]
    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...


class Both(Filters, DataLoader):  # type: ignore[misc]
    """The advice of the message works."""


def test_the_way_that_is_told_for_a_subclass_works() -> None:
    with pytest.raises(
        TypeError, match=r"class Mine\(.*test_from_torch\.Filters, hybridloader\.DataL"
    ):
        from_torch(Filters(Squares()))
    both = Both(Squares(), 7, num_workers=1, backend="threads")
    assert passes(both, 1) == [[[n * n for n in range(7)]]]
    assert both.filter_fn(1) == 1


def kind(name: str, module: str, *bases: type) -> Any:
    return type(name, bases, {"__module__": module})


REFUSED: list[tuple[Any, str]] = [
    (lambda: DataLoader(Squares()), "is a hybridloader.DataLoader already; set its attributes"),
    (lambda: Both(Squares()), "this Both is a hybridloader.DataLoader already"),
    (lambda: Filters(Squares()), "DataLoader that defines __call__, filter_fn, which a plain"),
    (lambda: Stateful(Squares()), "has a state_dict() and a load_state_dict() itself"),
    (lambda: [1, 2], "not [1, 2] (a list); for a dataset, make a hybridloader.DataLoader(dataset"),
    (lambda: TorchLoader, "not <class 'torch.utils.data.dataloader.DataLoader'> (a type)"),
    (
        lambda: kind("DataLoaderShard", "accelerate.data_loader", Filters)(Squares()),
        "hybridloader.integrations.accelerate",
    ),
]


def test_what_can_not_be_had_is_refused_with_what_to_do() -> None:
    for given, says in REFUSED:
        with pytest.raises(TypeError) as caught:
            from_torch(given())
        assert says in str(caught.value)


def test_options_that_the_loader_can_not_have_are_refused() -> None:
    spawn = {"num_workers": 1, "multiprocessing_context": "spawn"}
    refused: list[tuple[Any, Any, type[Exception], str]] = [
        ({}, {"backend": "thread"}, BackendUnavailable, "unknown backend"),
        ({}, {"workers": 3}, TypeError, "from_torch() got an unexpected keyword 'workers'"),
        ({}, {"task_timeout": 1}, ValueError, "task_timeout=1 needs num_workers > 0"),
        ({"batch_size": None}, {"threads_per_worker": 2}, ValueError, "one sample at a time"),
        ({}, {"on_error": "ignore"}, ValueError, "on_error must be"),
        (spawn, {"backend": "threads"}, ValueError, "contradicts multiprocessing_context='spawn'"),
    ]
    for make, more, error, says in refused:
        with pytest.raises(error) as caught:
            from_torch(TorchLoader(Squares(), **make), **more)
        assert says in str(caught.value)


def test_the_options_are_the_keywords_of_the_loader() -> None:
    """Added in one place and forgotten in the other, an option would be lost without a word."""
    torchs = set(inspect.signature(TorchLoader).parameters)
    ours = inspect.signature(DataLoader).parameters
    taken = dict(inspect.signature(from_torch).parameters)
    del taken["loader"]
    assert taken.keys() == ours.keys() - torchs
    assert all(ours[name].default == one.default for name, one in taken.items())
