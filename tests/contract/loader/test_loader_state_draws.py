"""A resumed loader draws from its generators as the loader that was saved would have gone on to draw.

torch draws a seed for the workers at each pass, but not where workers stay, and asks a sampler twice
where workers are started. So these draws, and with them the shuffles of all later epochs, depend on
`num_workers` and `persistent_workers`, which may be others after a resume.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
from support.failing_datasets import Samples
from torch.utils.data import DataLoader as TorchLoader
from torch.utils.data import IterableDataset, RandomSampler, Sampler

from hybridloader import DataLoader, StatefulDataLoader
from hybridloader.sampling import ShuffleSampler

pytestmark = pytest.mark.filterwarnings("ignore:Shard has no state_dict")

SAMPLES, EPOCHS = 12, 4


class Workers(NamedTuple):
    """Workers of a loader: their number, and whether they stay."""

    number: int
    stay: bool

    def __str__(self) -> str:
        return f"{self.number}{' that stay' if self.stay else ''}"


WORKERS = [
    Workers(0, False),
    Workers(1, False),
    Workers(2, False),
    Workers(1, True),
    Workers(2, True),
]


INDICES = range(SAMPLES)
DRAWS = Samples(lambda _: int(torch.randint(1 << 40, ())), SAMPLES)


class Shard(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(torch.randint(1 << 40, (SAMPLES,)).tolist())


class Early(Sampler[int]):
    """Sampler that draws when its iterator is made, and not with the first index."""

    def __init__(self, generator: torch.Generator | None) -> None:
        self.generator = generator

    def __len__(self) -> int:
        return SAMPLES

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(SAMPLES, generator=self.generator).tolist())


def as_it_is(value: Any) -> Any:
    return value


def arguments(kind: str) -> dict[str, Any]:
    """Return the arguments of one kind of loader, with new generators."""
    generator = torch.Generator().manual_seed(0)
    if kind == "single samples":
        return {"batch_size": None, "sampler": Early(generator), "generator": generator}
    if kind == "a sampler that draws early":
        return {"sampler": Early(generator), "generator": generator}
    if kind == "a generator of the sampler":
        return {"sampler": RandomSampler(INDICES, generator=torch.Generator().manual_seed(1))}
    if kind == "with replacement":
        sampler = RandomSampler(INDICES, replacement=True, generator=generator)
        return {"sampler": sampler, "generator": generator}
    if kind == "the default generator":
        return {"shuffle": True}
    if kind == "in order":
        return {}
    if kind == "a sampler of ours":
        return {"sampler": ShuffleSampler(SAMPLES, seed=3), "generator": generator}
    if kind == "samples that draw":
        return {"dataset": DRAWS, "shuffle": True, "seeding": "sample", "generator": generator}
    if kind == "shards that draw":
        return {"dataset": Shard(), "seeding": "sample", "generator": generator}
    assert kind == "shuffle"
    return {"shuffle": True, "generator": generator}


KINDS = (
    "shuffle",
    "the default generator",
    "in order",
    "a generator of the sampler",
    "with replacement",
    "a sampler that draws early",
    "single samples",
    "a sampler of ours",
    "samples that draw",
    "shards that draw",
)


def loader_of(cls: Any, kind: str, workers: Workers) -> Any:
    number, stay = workers
    given = {"dataset": INDICES, "batch_size": 4, "collate_fn": as_it_is, **arguments(kind)}
    if cls is not TorchLoader and number:
        given["backend"] = "threads"
    return cls(num_workers=number, persistent_workers=stay, **given)


def epochs(loader: Any, count: int) -> list[Any]:
    """Return the batches of some epochs; and, of each, what the training code draws after it."""
    return [(list(loader), torch.rand(()).item()) for _ in range(count)]


def check_resumed(cls: Any, kind: str, saved: Workers, loaded: Workers) -> None:
    torch.manual_seed(0)
    whole = epochs(loader_of(cls, kind, saved), EPOCHS)
    for done, begun in itertools.product((0, 2), (False, True)):
        torch.manual_seed(0)
        first = loader_of(cls, kind, saved)
        assert epochs(first, done) == whole[:done]
        batches = iter(first) if begun else None
        given = [] if batches is None else [next(batches)]
        state, drawn = first.state_dict(), torch.get_rng_state()
        del first, batches
        torch.manual_seed(1)
        second = loader_of(cls, kind, loaded)
        second.load_state_dict(state)
        torch.set_rng_state(drawn)
        rest = epochs(second, EPOCHS - done)
        rest[0] = given + rest[0][0], rest[0][1]
        assert rest == whole[done:], f"saved in epoch {done}" + " after a batch" * begun


table = [
    (kind, saved, loaded)
    for kind, saved, loaded in itertools.product(KINDS, WORKERS, WORKERS)
    if kind != "shards that draw" or saved.number == loaded.number  # else it is refused
]


def in_short(cases: list[Any]) -> list[Any]:
    """Return the cases, most of which are `full`.

    A kind has 25 pairs of workers, and 13 does not divide 25: all kinds together meet most pairs.
    """
    return [
        case if number % 13 == 0 else pytest.param(*case, marks=pytest.mark.full)
        for number, case in enumerate(cases)
    ]


@pytest.mark.parametrize(("kind", "saved", "loaded"), in_short(table), ids=str)
def test_later_epochs_are_those_of_the_run_that_was_saved(
    kind: str, saved: Workers, loaded: Workers
) -> None:
    check_resumed(DataLoader, kind, saved, loaded)


@pytest.mark.parametrize(
    ("kind", "saved", "loaded"),
    in_short(
        [
            *itertools.product(
                ["shuffle", "a sampler that draws early", "samples that draw"], WORKERS, WORKERS
            )
        ]
    ),
    ids=str,
)
def test_so_are_those_of_a_stateful_data_loader(kind: str, saved: Workers, loaded: Workers) -> None:
    check_resumed(StatefulDataLoader, kind, saved, loaded)


@pytest.mark.parametrize("workers", WORKERS, ids=str)
def test_a_state_from_before_it_had_these_draws_is_loaded(workers: Workers) -> None:
    first, second = (loader_of(DataLoader, "shuffle", workers) for _ in range(2))
    list(first)
    state = first.state_dict()
    del state["_hybridloader"]["later"]
    second.load_state_dict(state)
    assert list(second) == list(first)
