"""The epochs after a resumed one: nothing but the state stays of a load.

Streams of Hugging Face note a loaded state and begin each later iteration there. Other datasets and
samplers carry a part of their state on. After a resume the epochs of both are those of a run that was
not interrupted.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from typing import Any

import pytest
import torch
from support.sampler_loaders import pace
from torch.utils.data import IterableDataset, get_worker_info

from hybridloader import DataLoader, Pipeline, PipelineLoader, StatefulDataLoader

LENGTH = 16
LONG = 150  # a pipeline takes a state every 64 items


class Resting(IterableDataset[int]):
    """Dataset that knows how many of its samples were returned."""

    start: dict[str, Any] | None = None

    def __init__(self, length: int = LENGTH) -> None:
        self.at, self.length = 0, length

    def rest(self) -> Iterator[int]:
        info = get_worker_info()
        first = 0 if info is None else 1_000_000 * info.id
        while self.at < self.length:
            self.at += 1
            yield first + self.at + 100 * self.more()

    def more(self) -> int:
        return 0

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}


class Stream(Resting):
    """Dataset that begins each iteration at the loaded state, as a stream of Hugging Face does."""

    def __init__(self, length: int = LENGTH) -> None:
        super().__init__(length)
        self._starting_state_dict: dict[str, Any] | None = None

    def __iter__(self) -> Iterator[int]:
        self.at = 0 if self._starting_state_dict is None else self._starting_state_dict["at"]
        yield from self.rest()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._starting_state_dict = state


Stream.__name__, Stream.__module__ = "IterableDataset", "datasets.iterable_dataset"


class Within(IterableDataset[int]):
    """Dataset whose state is that of a stream."""

    def __init__(self, length: int = LENGTH) -> None:
        self.inner = Stream(length)

    def __iter__(self) -> Iterator[int]:
        return iter(self.inner)

    def state_dict(self) -> dict[str, Any]:
        return self.inner.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.inner.load_state_dict(state)


class Counted(Resting):
    """Dataset with its number of epochs in its state, which its end advances."""

    epoch = 0

    def __iter__(self) -> Iterator[int]:
        yield from self.rest()
        self.at, self.epoch = 0, self.epoch + 1

    def more(self) -> int:
        return self.epoch

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at, "epoch": self.epoch}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at, self.epoch = state["at"], state["epoch"]


class Deferred(Counted):
    """The same, advanced by the beginning of an iteration that does not resume."""

    epoch = -1

    def __iter__(self) -> Iterator[int]:
        if self.start is None:
            self.at, self.epoch = 0, self.epoch + 1
        else:
            Counted.load_state_dict(self, self.start)
            self.start = None
        yield from self.rest()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.start = state


class Walking(Counted):
    """Dataset with a generator, which a load makes of the number of samples that were drawn."""

    def __init__(self, length: int = LENGTH) -> None:
        super().__init__(length)
        self.generator = random.Random(0)

    def more(self) -> int:
        self.epoch += 1
        return self.generator.randrange(8)

    def __iter__(self) -> Iterator[int]:
        yield from self.rest()
        self.at = 0

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.generator = random.Random(0)
        for _ in range(self.epoch):
            self.generator.randrange(8)


def as_sampler(kind: type[Counted], *, batches: bool) -> Any:
    """Return a sampler, of batches or not, with the methods and the state of `kind`."""

    class AsSampler(kind):  # type: ignore[misc, valid-type]
        batch_size, drop_last = 2, False

        def __len__(self) -> int:
            return LENGTH

        def __iter__(self) -> Iterator[Any]:
            for number in super().__iter__():
                yield [number, number + 1] if batches else number

    return AsSampler()


KINDS: list[Any] = [Stream, Within, Counted, Deferred, Walking]

PERSISTENT: dict[str, Any] = {"num_workers": 2, "persistent_workers": True}
PLACES: dict[str, dict[str, Any]] = {
    "caller": {},
    "threads": {"num_workers": 2, "backend": "threads"},
    "threads, persistent": {**PERSISTENT, "backend": "threads", "prefetch_factor": 4},
    "fork, persistent": {**PERSISTENT, "backend": "fork"},
}


def listed(items: Any) -> list[Any]:
    return [item.tolist() if isinstance(item, torch.Tensor) else item for item in items]


def check(make: Callable[[], Any], epoch: int, taken: int, elsewhere: Any = None) -> None:
    """Check a resume, and one from a state of a later epoch, against a run without any."""
    whole, resumed, last = make(), (elsewhere or make)(), make()
    for _ in range(epoch):
        listed(whole)
    items = iter(whole)
    listed(islice(items, taken))
    resumed.load_state_dict(whole.state_dict())
    expected = [listed(items), *(listed(whole) for _ in range(4))]
    assert [listed(resumed) for _ in range(2)] == expected[:2]
    items = iter(resumed)
    given = listed(islice(items, taken))
    last.load_state_dict(resumed.state_dict())
    assert [given + listed(last), listed(last), listed(last)] == expected[2:]
    for loader in (whole, resumed, last):
        if isinstance(loader, PipelineLoader):
            loader.close()
        elif loader._iterator is not None:
            loader._iterator.close()


CASES: list[Any] = [(kind, "caller") for kind in KINDS]
CASES += [(Within, "threads"), (Deferred, "threads, persistent"), (Walking, "fork, persistent")]
"""Each kind in the caller; in workers a kind that notes its state, one that counts, one that draws."""


@pytest.mark.parametrize(("kind", "place"), CASES)
def test_epochs_after_a_resumed_one_are_those_of_the_run_that_was_not_interrupted(
    kind: Any, place: str
) -> None:
    for epoch, taken in ((0, 1), (1, 3)) if "fork" not in place else ((1, 2),):
        check(lambda: DataLoader(kind(), 4, **PLACES[place]), epoch, taken)
    if place != "threads":
        check(lambda: StatefulDataLoader(kind(), 4, **PLACES[place]), 1, 2)


@pytest.mark.parametrize(
    ("kind", "place"),
    [case for case in CASES if case[0] not in (Stream, Within) and "fork" not in case[1]],
)
def test_a_sampler_begins_its_later_epochs_as_without_a_resume(kind: Any, place: str) -> None:
    """On a loader with as many workers, and with others, which draws each epoch as the saved one."""

    def loader(batches: bool, **more: Any) -> DataLoader:
        name = "batch_sampler" if batches else "sampler"
        sampler = as_sampler(kind, batches=batches)
        return DataLoader(range(1000), **{name: sampler}, **more)  # type: ignore[arg-type]

    for batches in (False, True):
        for elsewhere in (PLACES[place], {"num_workers": 1, "backend": "threads"}):
            check(
                partial(loader, batches, **PLACES[place]),
                1,
                2,
                partial(loader, batches, **elsewhere),
            )


@pytest.mark.parametrize("readers", [{}, {"num_workers": 2, "backend": "threads"}], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_a_source_of_a_pipeline_begins_its_later_epochs_as_without_a_resume(
    kind: Any, readers: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """From a state at item 64 of its second epoch, and, with one reader, from one at its beginning."""
    pace(monkeypatch, 1)
    for taken in (100,) if readers else (100, 10):
        check(
            lambda: PipelineLoader(Pipeline.from_iterable(kind(LONG), **readers), seed=0), 1, taken
        )


@pytest.mark.parametrize("kind", [Stream, Within])
def test_a_state_that_is_loaded_in_the_middle_of_an_epoch_stays_for_one_epoch(kind: Any) -> None:
    loader = DataLoader(kind(), 4)
    whole = listed(loader)
    batches = iter(loader)
    next(batches)
    state = loader.state_dict()
    next(batches)
    loader.load_state_dict(state)
    batches = iter(loader)
    next(batches)
    loader.load_state_dict(state)
    assert [listed(loader) for _ in range(3)] == [whole[1:], whole, whole]
