"""Datasets and samplers of every kind, of which the tests of a loader's state make their cases."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import BatchSampler, Dataset, IterableDataset, Sampler, get_worker_info
from torch.utils.data.datapipes.iter import IterableWrapper

from hybridloader import Threads
from hybridloader.sampling import ShuffleSampler
from support.sampler_loaders import NUMBERS, SAMPLERS, seeded

LENGTH = 23

# -- samplers --------------------------------------------------------------------------------------


class Ordered(Sampler[int]):
    """Sampler whose order is in its state; a pass begins where the last one was left."""

    def __init__(self) -> None:
        self.order = torch.randperm(LENGTH, generator=torch.Generator().manual_seed(5)).tolist()
        self.at = 0

    def __len__(self) -> int:
        return LENGTH

    def __iter__(self) -> Iterator[int]:
        while self.at < LENGTH:
            self.at += 1
            yield self.order[self.at - 1]
        self.at = 0

    def state_dict(self) -> dict[str, Any]:
        return {"order": self.order, "at": self.at}  # and not a copy of it

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.order, self.at = state["order"], state["at"]


class Reordering(Ordered):
    """Sampler that changes the list that it returned as its state."""

    def __iter__(self) -> Iterator[int]:
        for index in super().__iter__():
            rest = self.order[self.at :]
            self.order[self.at :] = rest[1:] + rest[:1]
            yield index


class Drawing(Ordered):
    """Sampler that draws each index from a generator, which is its state."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(5)

    def __iter__(self) -> Iterator[int]:
        for _ in super().__iter__():
            yield int(torch.randint(LENGTH, (), generator=self.generator))

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at, "generator": self.generator.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]
        self.generator.set_state(state["generator"])


class Yielded(Ordered):
    """Sampler that counts its items until its next pass begins, as torchdata's distributed one."""

    def __init__(self) -> None:
        super().__init__()
        self.next: int | None = None

    def __iter__(self) -> Iterator[int]:
        self.at, self.next = self.next or 0, None
        for index in self.order[self.at :]:
            self.at += 1
            yield index

    def state_dict(self) -> dict[str, Any]:
        return {"yielded": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.next = state["yielded"]


class Place:
    """What has its place as its state."""

    def __init__(self) -> None:
        self.at = 0

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


class WalkOfBatches(Place):
    """Iterator over batches that has a state, while its sampler has none."""

    def __iter__(self) -> WalkOfBatches:
        return self

    def __next__(self) -> list[int]:
        if self.at >= 6:
            raise StopIteration
        self.at += 1
        return [(self.at * 7 + n) % LENGTH for n in range(4)]


class Walking(Sampler[list[int]]):
    def __len__(self) -> int:
        return 6

    def __iter__(self) -> WalkOfBatches:
        return WalkOfBatches()


class OfBatches(BatchSampler):
    """Batch sampler whose state is that of its sampler."""

    def __init__(self) -> None:
        super().__init__(Ordered(), 4, False)

    def state_dict(self) -> dict[str, Any]:
        found: dict[str, Any] = self.sampler.state_dict()  # type: ignore[attr-defined]
        return found

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.sampler.load_state_dict(state)  # type: ignore[attr-defined]


KEPT: dict[str, Callable[[], dict[str, Any]]] = {
    "order": lambda: {"batch_size": 4, "sampler": Ordered()},
    "reordering": lambda: {"batch_size": 4, "sampler": Reordering()},
    "yielded": lambda: {"batch_size": 4, "sampler": Yielded()},
    "drawing": lambda: {"batch_size": 4, "sampler": Drawing()},
    "drawing samples": lambda: {"batch_size": None, "sampler": Drawing()},
    "order, dropping": lambda: {"batch_size": 4, "sampler": Ordered(), "drop_last": True},
    "walk": lambda: {"batch_sampler": Walking()},
    "batches of an order": lambda: {"batch_sampler": OfBatches()},
}

# -- datasets --------------------------------------------------------------------------------------

SIZES = (7, 3, 10)
"""Samples of three workers: one ends long before the others, and no two end on a full batch together."""


def place() -> tuple[int, int]:
    """Number of the worker, and of its samples."""
    info = get_worker_info()
    return (0, 9) if info is None else (info.id, SIZES[info.id % 3])


class Plain(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        worker, size = place()
        return iter([worker * 100 + n for n in range(size)])


class Stateful(Place, IterableDataset[int]):
    """Dataset with its place as state, which begins again at its end, as in torchdata's examples."""

    def __iter__(self) -> Iterator[int]:
        worker, size = place()
        while self.at < size:
            self.at += 1
            yield worker * 100 + self.at - 1
        self.at = 0


class Walk(Place):
    """An iterator with a state. It reads nothing again."""

    def __init__(self, bad: tuple[int, ...] = ()) -> None:
        super().__init__()
        self.bad = bad
        self.worker, self.size = place()

    def __iter__(self) -> Walk:
        return self

    def __next__(self) -> int:
        if self.at >= self.size:
            raise StopIteration
        self.at += 1
        if self.at - 1 in self.bad:
            raise ValueError(f"sample {self.at - 1}")
        return self.worker * 100 + self.at - 1


class Walks(IterableDataset[int]):
    def __init__(self, bad: tuple[int, ...] = ()) -> None:
        self.bad = bad

    def __iter__(self) -> Walk:
        return Walk(self.bad)


class Growing(IterableDataset[int]):
    """Dataset whose samples depend on all before them."""

    def __init__(self) -> None:
        self.sum, self.at = 0, 0

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        first = 0 if info is None else 100 * info.id
        while self.at < 11:
            self.at += 1
            self.sum += first + self.at
            yield self.sum
        self.at = 0

    def state_dict(self) -> dict[str, Any]:
        return {"sum": self.sum, "at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.sum, self.at = state["sum"], state["at"]


class Curriculum(Dataset[int]):
    """Dataset whose samples depend on how many it has given."""

    def __init__(self) -> None:
        self.level = 0

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> int:
        self.level += 1
        if index == 7:
            raise LookupError("sample 7")
        return self.level * 100 + index

    def state_dict(self) -> dict[str, Any]:
        return {"level": self.level}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.level = state["level"]


class Bad(Dataset[int]):
    """A fifth of the samples fail."""

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> int:
        if index % 5 == 2:
            raise ValueError(f"sample {index}")
        return index


# -- samples that draw -------------------------------------------------------------------------------


def sample(at: int) -> list[float]:
    """A sample that nobody can make again without its seed."""
    worker, _ = place()
    return [worker * 100 + at, random.random(), float(np.random.rand()), float(torch.rand(()))]


class DrawingWalk(Walk):
    def __init__(self, bad: tuple[int, ...] = ()) -> None:
        super().__init__(bad)
        self.offset = random.random()  # drawn as it is made

    def __next__(self) -> Any:
        return [*sample(super().__next__() % 100), self.offset]

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at, "offset": self.offset}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at, self.offset = state["at"], state["offset"]


class DrawingWalks(Walks):
    def __iter__(self) -> Walk:
        return DrawingWalk(self.bad)


class DrawingStateful(Stateful):
    def __iter__(self) -> Iterator[Any]:
        return (sample(number % 100) for number in super().__iter__())


class Itself(DrawingWalk, IterableDataset[Any]):
    """A dataset that is its own iterator."""

    def __init__(self) -> None:
        super().__init__()
        self.offset, self.size = 0.0, 7

    def __iter__(self) -> Itself:
        self.at = self.at % self.size
        return self


class Rows(Dataset[Any]):
    def __len__(self) -> int:
        return 7

    def __getitem__(self, index: int) -> list[float]:
        return [index, *sample(index)[1:]]  # any thread may make a sample of a task that takes long


def with_a_draw(samples: list[int]) -> list[Any]:
    return [*samples, random.random()]


# -- cases -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """Options of a loader.

    Attributes
    ----------
    workers
        Numbers of workers, of which a run has one; None: each leg of a run has another.
    copies
        Whether threads need copies of the dataset.
    passes
        Passes that the same seed of torch repeats, resumed in the middle or not: 1 for a sampler that
        draws from torch's default generator, which the training code draws from, too.
    """

    options: Callable[[], dict[str, Any]]
    workers: tuple[int, ...] | None = None
    copies: bool = False
    passes: int = 2

    def backend(self, name: str) -> Any:
        return Threads(copy_dataset=True) if self.copies and name == "threads" else name


def over(dataset: Callable[[], Any], **options: Any) -> Callable[[], dict[str, Any]]:
    return lambda: {"dataset": dataset(), "batch_size": 4, **options}


def shuffled() -> dict[str, Any]:
    return {"dataset": Bad(), "shuffle": True, "generator": seeded()}


def ours() -> dict[str, Any]:
    return {"dataset": Bad(), "sampler": ShuffleSampler(LENGTH, seed=1)}


def pipe() -> Any:
    return IterableWrapper(range(40)).shuffle().sharding_filter()


DEFAULT = {"shuffle", "subset", "weighted", "in iter", "dropping", "samples"}
"""Samplers that draw from torch's default generator."""

BY_SAMPLE = {"seeding": "sample", "collate_fn": list, "batch_size": 2}
ALONE_OR_3, TWO = (0, 3), (2,)

CASES: dict[str, Case] = {
    **{
        name: Case(lambda made=made: {"dataset": NUMBERS, **made()}, passes=2 - (name in DEFAULT))
        for name, made in SAMPLERS.items()
    },
    **{name: Case(lambda m=m: {"dataset": range(LENGTH), **m()}) for name, m in KEPT.items()},
    **{
        f"{name}{more}": Case(over(made, **{**options, **given}), ALONE_OR_3)
        for name, made, options in (
            ("stream", Plain, {}),
            ("stream with a place", Stateful, {}),
            ("walk of samples", Walks, {}),
            ("failing walk", lambda: Walks((2, 5)), {"on_error": "skip"}),
        )
        for more, given in (("", {}), (", dropping", {"drop_last": True}))
    },
    "single samples with a place": Case(over(Stateful, batch_size=None), ALONE_OR_3),
    "curriculum": Case(over(Curriculum, batch_size=2), (0, 1, 2), copies=True, passes=1),
    "growing": Case(over(Growing, batch_size=2), (0, 1, 2), passes=1),
    "growing, skipping": Case(over(Growing, batch_size=2, on_error="skip"), TWO, passes=1),
    "skipping, shuffled": Case(lambda: {**shuffled(), "batch_size": 4, "on_error": "skip"}),
    "skipping, ours": Case(lambda: {**ours(), "batch_size": 4, "on_error": "skip"}),
    "pipe": Case(over(pipe, shuffle=True), TWO, passes=1),
    "pipe with a generator": Case(
        lambda: {"dataset": pipe(), "batch_size": 4, "shuffle": True, "generator": seeded()}, TWO
    ),
    "collation that draws": Case(
        over(Bad, on_error="skip", seeding="sample", collate_fn=with_a_draw), TWO, passes=1
    ),
    **{
        f"seeded {name}": Case(over(made, **{**BY_SAMPLE, **more}), (0, 2), passes=1)
        for name, made, more in (
            ("walk", DrawingWalks, {}),
            ("walk, skipping", lambda: DrawingWalks((2, 5)), {"on_error": "skip"}),
            ("stream", DrawingStateful, {}),
            ("stream, skipping", DrawingStateful, {"on_error": "skip"}),
            ("dataset that is its iterator", Itself, {}),
            ("single samples", DrawingWalks, {"batch_size": None}),
            ("rows", Rows, {"shuffle": True}),
        )
    },
}
