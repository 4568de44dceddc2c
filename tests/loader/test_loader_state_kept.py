"""When states of samplers and datasets are taken, how they are copied, and that the stream is one.

How often a state is taken depends on what it costs. Here that is set, to every so many steps, so that
most places lie between two states; the uninterrupted run is the oracle.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.sampled import Every
from torch.utils.data import BatchSampler, Dataset, IterableDataset, Sampler, get_worker_info

from hybridloader import DataLoader, StateError, StatefulDataLoader, Threads
from hybridloader._support.cadence import FREE, SHARE, Cadence
from hybridloader._support.state_copies import Frozen, Kept, copied
from hybridloader.engine import dataset_state
from hybridloader.loader import samplers
from hybridloader.sampling import ShuffleSampler

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")

LENGTH = 23


@pytest.fixture
def every(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    def pace(steps: int) -> None:
        for module in ("hybridloader.loader.samplers", "hybridloader.engine.dataset_state"):
            monkeypatch.setattr(f"{module}.Cadence", lambda **_: Every(steps))

    return pace


# -- samplers --------------------------------------------------------------------------------------


class Ordered(Sampler[int]):
    """All of its order is in its state, and a pass begins where the last one was left."""

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
    """Changes the list that it told as its state."""

    def __iter__(self) -> Iterator[int]:
        for index in super().__iter__():
            rest = self.order[self.at :]
            self.order[self.at :] = rest[1:] + rest[:1]
            yield index


class Drawing(Ordered):
    """Draws from a generator for each index, and tells its state."""

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
    """Counts what it has yielded until its next pass begins, as torchdata's distributed one does."""

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


class Walk:
    """An iterator over batches, which has the state where its sampler has none."""

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Walk:
        return self

    def __next__(self) -> list[int]:
        if self.at >= 6:
            raise StopIteration
        self.at += 1
        return [(self.at * 7 + n) % LENGTH for n in range(4)]

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


class Walking(Sampler[list[int]]):
    def __len__(self) -> int:
        return 6

    def __iter__(self) -> Walk:
        return Walk()


class OfBatches(BatchSampler):
    """A sampler of batches with a state, which is that of its sampler."""

    def __init__(self) -> None:
        super().__init__(Ordered(), 4, False)

    def state_dict(self) -> dict[str, Any]:
        told: dict[str, Any] = self.sampler.state_dict()  # type: ignore[attr-defined]
        return told

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.sampler.load_state_dict(state)  # type: ignore[attr-defined]


KINDS: dict[str, Callable[[], dict[str, Any]]] = {
    "order": lambda: {"batch_size": 4, "sampler": Ordered()},
    "reordering": lambda: {"batch_size": 4, "sampler": Reordering()},
    "yielded": lambda: {"batch_size": 4, "sampler": Yielded()},
    "drawing": lambda: {"batch_size": 4, "sampler": Drawing()},
    "samples": lambda: {"batch_size": None, "sampler": Drawing()},
    "dropping": lambda: {"batch_size": 4, "sampler": Ordered(), "drop_last": True},
    "iterator": lambda: {"batch_sampler": Walking()},
    "batches": lambda: {"batch_sampler": OfBatches()},
    "ours": lambda: {"batch_size": 4, "sampler": ShuffleSampler(LENGTH, seed=2)},
}

NUMBERS: Any = range(LENGTH)
PLACES = st.sampled_from([(0, "inline"), (1, "threads"), (2, "inline"), (3, "threads")])


def loader_of(kind: str, where: tuple[int, str], ahead: int = 2) -> DataLoader:
    workers, backend = where
    more = {"prefetch_factor": ahead} if workers else {}
    return DataLoader(NUMBERS, num_workers=workers, backend=backend, **KINDS[kind](), **more)  # type: ignore[arg-type]


def flat(batches: Any) -> list[Any]:
    return [b.tolist() if isinstance(b, torch.Tensor) else b for b in batches]


stops = st.lists(st.tuples(st.integers(0, 5), PLACES, st.integers(1, 4)), min_size=1, max_size=4)


@given(st.sampled_from(sorted(KINDS)), st.integers(1, 9), stops)
@settings(max_examples=150, deadline=None)
def test_stopped_anywhere_on_any_backend_the_stream_is_one(
    kind: str, steps: int, legs: list[tuple[int, tuple[int, str], int]]
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(samplers, "Cadence", lambda: Every(steps))
        whole = flat(loader_of(kind, (0, "inline")))
        taken: list[Any] = []
        state: dict[str, Any] = {}
        for count, where, ahead in legs:
            loader = loader_of(kind, where, ahead)
            loader.load_state_dict(state)
            iterator = iter(loader)
            for _ in range(min(count, len(whole) - len(taken))):
                taken += flat([next(iterator)])
            state = loader.state_dict()
        last = loader_of(kind, (0, "inline"))
        last.load_state_dict(state)
        assert taken + flat(last) == whole
        if kind not in (
            "reordering",
            "drawing",
            "samples",
            "ours",
        ):  # no pass of which is as another
            assert flat(last) == whole
            assert_followed_by(whole, kind, last, (0, "inline"))
            assert_followed_by(whole, kind, loader, legs[-1][1])


def assert_followed_by(
    whole: list[Any], kind: str, loader: DataLoader, where: tuple[int, str]
) -> None:
    """The state at the end of an epoch is that of the beginning of the next."""
    list(loader)
    other = loader_of(kind, where)
    other.load_state_dict(loader.state_dict())
    assert [flat(other), flat(other)] == [whole, whole]


@pytest.mark.parametrize("where", [(0, "inline"), (2, "threads")], ids=str)
@pytest.mark.parametrize("kind", sorted(KINDS))
def test_behind_the_last_batch_an_end_that_is_declared_is_followed_by_the_next_pass(
    kind: str, where: tuple[int, str]
) -> None:
    """As accelerate does it, while the iterator has not told its end."""
    uninterrupted = loader_of(kind, where)
    whole, following = flat(uninterrupted), flat(uninterrupted)
    loader = loader_of(kind, where)
    iterator = iter(loader)
    for _ in whole:
        next(iterator)
    state = loader.state_dict()
    rest = loader_of(kind, (0, "inline"))
    rest.load_state_dict(state)
    assert flat(rest) == []
    state["_iterator_finished"] = True
    other = loader_of(kind, where)
    other.load_state_dict(state)
    assert flat(other) == following


@pytest.mark.parametrize("kind", ["reordering", "drawing", "iterator"])
def test_the_same_with_processes(kind: str, every: Callable[[int], None]) -> None:
    every(3)
    whole = flat(loader_of(kind, (0, "inline")))
    for count in (1, 4, 6):
        loader = loader_of(kind, (2, "fork"))
        iterator = iter(loader)
        taken = flat(next(iterator) for _ in range(min(count, len(whole))))
        other = loader_of(kind, (1, "threads"))
        other.load_state_dict(loader.state_dict())
        assert taken + flat(other) == whole


def test_what_is_asked_again_and_again_is_of_its_own_place_each_time(
    every: Callable[[int], None],
) -> None:
    every(4)
    whole = flat(loader_of("reordering", (0, "inline")))
    loader = loader_of("reordering", (2, "threads"), 4)
    states = [loader.state_dict(), *(loader.state_dict() for _ in loader)]
    for count, state in enumerate(states[:-1]):
        other = loader_of("reordering", (0, "inline"))
        other.load_state_dict(state)
        assert flat(other) == whole[count:], count


class Shrunk(Ordered):
    def __iter__(self) -> Iterator[int]:
        return iter(self.order[self.at : 13])


def test_a_sampler_that_gives_less_than_it_gave_is_found_out(every: Callable[[int], None]) -> None:
    every(9)
    loader = loader_of("order", (0, "inline"))
    iterator = iter(loader)
    for _ in range(5):
        next(iterator)
    other = DataLoader(NUMBERS, 4, sampler=Shrunk())
    state = loader.state_dict()
    state["_hybridloader"]["samplers"][1] = "Shrunk"
    other.load_state_dict(state)
    with pytest.raises(StateError, match="has given 3 of the 4 items that it gave between"):
        iter(other)


class Untold(Ordered):
    """Has the methods and can't tell its state."""

    def state_dict(self) -> dict[str, Any]:
        raise RuntimeError("not on this day")


class Locked(Ordered):
    def state_dict(self) -> dict[str, Any]:
        return {"lock": threading.Lock()}


@pytest.mark.parametrize(
    ("sampler", "why"), [(Untold, "RuntimeError: not on this day"), (Locked, "cannot pickle")]
)
def test_a_sampler_that_cannot_tell_its_state_fails_who_asks_for_it_alone(
    sampler: type[Ordered], why: str
) -> None:
    loader = DataLoader(NUMBERS, 4, sampler=sampler(), num_workers=2, backend="threads")
    iterator = iter(loader)
    batches = [next(iterator)]
    with pytest.raises(StateError, match=rf"the sampler \({sampler.__name__}\) could not.*{why}"):
        loader.state_dict()
    assert len([*batches, *iterator]) == 6


# -- what it costs ---------------------------------------------------------------------------------


class Clock:
    """Stands still but where it is told."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def paced(costs: Iterator[float], step: float, steps: int, every: int = 1) -> list[int]:
    """The steps at which a state is taken, where each takes as long as is said."""
    clock = Clock()
    cadence = Cadence(clock, every=every)
    found = []
    for number in range(steps):
        clock.now += step
        if cadence.due():
            found.append(number)
            clock.now += next(costs)
            cadence.taken()
    return found


def test_what_is_cheap_is_taken_each_time_and_what_is_dear_for_a_share_of_the_time() -> None:
    assert paced(iter([FREE / 2] * 50), 1e-6, 50) == list(range(50))
    dear = paced(iter([0.02] * 50), 0.001, 5000)
    assert dear[0] == 0
    assert dear[1] == pytest.approx(0.02 * (SHARE - 1) / 0.001, abs=2)
    assert len(dear) * 0.02 <= 5.0 / SHARE + 0.02
    assert paced(iter([0.02] * 50), 2.0, 50) == list(range(50)), "nobody waits for it"


def test_steps_may_lie_between_two_states_however_cheap_they_are() -> None:
    assert paced(iter([FREE / 2] * 50), 1e-6, 50, every=7) == list(range(0, 50, 7))
    dear = paced(iter([0.02] * 50), 0.001, 5000, every=7)
    assert dear == paced(iter([0.02] * 50), 0.001, 5000)


def test_a_cold_start_and_a_step_that_was_interrupted_make_no_cheap_state_dear() -> None:
    costs = [10 * FREE, FREE / 4, FREE / 4, 1.0, *[FREE / 4] * 46]
    assert paced(iter(costs), 1e-6, 50) == list(range(50))


def test_a_state_that_grows_is_taken_less_often() -> None:
    found = paced(iter([FREE / 4, *[0.02] * 100]), 0.001, 5000)
    assert len(found) < 30
    assert found[-1] > 3000


class Asked(Ordered):
    """Counts how often it is asked for its state, which takes a while by its clock."""

    def __init__(self, clock: Clock, seconds: float) -> None:
        super().__init__()
        self.clock, self.seconds, self.asked = clock, seconds, 0

    def state_dict(self) -> dict[str, Any]:
        self.asked += 1
        self.clock.now += self.seconds
        return super().state_dict()


@pytest.mark.parametrize("kind", [DataLoader, StatefulDataLoader])
@pytest.mark.parametrize(("workers", "backend"), [(0, "inline"), (2, "threads")])
def test_nobody_asks_a_sampler_for_a_large_state_at_each_batch(
    workers: int, backend: str, kind: type[DataLoader], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    monkeypatch.setattr(samplers, "Cadence", lambda: Cadence(clock))
    whole = flat(loader_of("order", (0, "inline")))
    sampler = Asked(clock, 0.025)
    loader = kind(NUMBERS, 4, sampler=sampler, num_workers=workers, backend=backend)
    assert flat(loader) == whole
    assert sampler.asked == 2, "how the pass begins, and the first item"
    iterator = iter(loader)
    taken = flat([next(iterator), next(iterator)])
    asked = sampler.asked
    states = [loader.state_dict() for _ in range(5)]
    assert sampler.asked == asked, "who asks the loader does not ask the sampler"
    other = kind(NUMBERS, 4, sampler=Asked(clock, 0), num_workers=workers, backend=backend)
    other.load_state_dict(states[4])
    assert taken + flat(other) == whole


# -- datasets --------------------------------------------------------------------------------------


class Curriculum(Dataset[int]):
    """Harder with every sample."""

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


class Growing(IterableDataset[int]):
    """Each sample follows from all before it."""

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


def ahead_of(iterator: Any, count: int) -> list[Any]:
    """Some results, and errors in their places."""
    found: list[Any] = []
    for _ in range(count):
        try:
            found += flat([next(iterator)])
        except StopIteration:
            break
        except LookupError as error:
            found.append(str(error))
    return found


@pytest.mark.parametrize("where", [(0, "inline"), (2, "inline"), (2, "fork")], ids=str)
@pytest.mark.parametrize(
    ("kind", "policy"), [(Curriculum, "raise"), (Growing, "raise"), (Growing, "skip")]
)
def test_a_dataset_is_where_it_was_also_between_two_of_its_states(
    kind: type[Any], where: tuple[int, str], policy: str, every: Callable[[int], None]
) -> None:
    every(3)
    workers, backend = where

    def loader() -> DataLoader:
        dataset = kind()
        return DataLoader(dataset, 2, num_workers=workers, backend=backend, on_error=policy)

    whole = ahead_of(iter(loader()), 20)
    counts = range(1, len(whole)) if backend == "inline" else (2, 5, 7)
    for count in counts:
        one = loader()
        taken = ahead_of(iter(one), count)
        state = one.state_dict()
        between = loader()
        between.load_state_dict(state)
        iterator = iter(between)
        taken += ahead_of(iterator, 1)
        last = loader()
        last.load_state_dict(between.state_dict())
        assert taken + ahead_of(iter(last), 20) == whole, count


class Dying(Curriculum):
    """Its worker dies, once."""

    def __init__(self, flag: Path) -> None:
        super().__init__()
        self.flag = flag

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> int:
        if index == 2 and not self.flag.exists():
            self.flag.touch()
            os._exit(3)
        return super().__getitem__(index)


def test_how_a_worker_began_that_took_the_place_of_another_is_not_told_of_the_next_pass(
    tmp_path: Path,
) -> None:
    dataset = Dying(tmp_path / "died")
    loader = StatefulDataLoader(
        dataset,
        1,
        num_workers=1,
        persistent_workers=True,
        on_worker_death="restart",
        backend="fork",
    )
    assert len(list(loader)) == 6
    iterator = iter(loader)
    told = loader.state_dict()["_snapshot"]["_worker_snapshots"]["worker_0"]
    following = next(iterator).item()
    assert told["dataset_state"]["level"] == following // 100 - 1 > 0
    iterator.close()  # type: ignore[attr-defined]


parts = st.lists(
    st.tuples(st.integers(0, 6), st.booleans(), st.integers(1, 4)), min_size=1, max_size=4
)


@given(st.sampled_from([Curriculum, Growing]), st.integers(0, 3), st.integers(1, 5), parts)
@settings(max_examples=60, deadline=None)
def test_a_dataset_stopped_anywhere_on_any_backend_gives_one_stream(
    kind: type[Any], workers: int, steps: int, legs: list[tuple[int, bool, int]]
) -> None:
    def loader(threads: bool, ahead: int) -> DataLoader:
        backend: Any = Threads(copy_dataset=True) if threads and workers else "inline"
        more: dict[str, Any] = {"prefetch_factor": ahead} if workers else {}
        return DataLoader(kind(), 2, num_workers=workers, backend=backend, **more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dataset_state, "Cadence", lambda **_: Every(steps))
        whole = ahead_of(iter(loader(False, 2)), 99)
        taken: list[Any] = []
        state: dict[str, Any] = {}
        for count, threads, ahead in legs:
            one = loader(threads, ahead)
            one.load_state_dict(state)
            taken += ahead_of(iter(one), min(count, len(whole) - len(taken)))
            state = one.state_dict()
        last = loader(False, 2)
        last.load_state_dict(state)
        assert taken + ahead_of(iter(last), 99) == whole


class Module(torch.nn.Module):
    """A dataset that is a module: what it tells is what it was made with."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.arange(300_000.0))

    def __len__(self) -> int:
        return 400

    def __getitem__(self, index: int) -> float:
        return self.weight[index].item()


@pytest.mark.parametrize("backend", ["threads", "fork"])
def test_what_is_large_is_not_sent_with_each_batch(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hybridloader.loader import progress

    monkeypatch.setattr(dataset_state, "Cadence", lambda **_: Every(1000))
    come = []
    note = progress.Progress.passed

    def passed(self: Any, stage: Any, error: Any = None) -> None:
        come.append("state" in (stage.last.extras or {}))
        note(self, stage, error)

    monkeypatch.setattr(progress.Progress, "passed", passed)
    loader = DataLoader(Module(), 20, num_workers=2, backend=backend)  # type: ignore[arg-type]
    iterator = iter(loader)
    taken = [next(iterator) for _ in range(7)]
    if backend == "fork":
        assert come == [True, True, *[False] * 5]
    one = loader.state_dict()
    assert one["dataset_state"]["weight"].data_ptr() != loader.dataset.weight.data_ptr()
    other = DataLoader(Module(), 20, num_workers=2, backend=backend)  # type: ignore[arg-type]
    other.load_state_dict(one)
    assert torch.cat([*taken, *other]).tolist() == list(range(400))


# -- copies ----------------------------------------------------------------------------------------


class Unpicklable:
    """Can be copied, but not pickled."""

    def __init__(self) -> None:
        self.values = [1, 2]
        self.function = lambda: None


def test_a_copy_shares_nothing_that_can_be_changed() -> None:
    shared = [1, 2]
    weight = torch.nn.Parameter(torch.ones(3))
    state = {
        "list": shared,
        "again": shared,
        "tensor": torch.arange(6).reshape(2, 3),
        "turned": torch.arange(6).reshape(2, 3).T,
        "parameter": weight,
        "numpy": torch.arange(4).numpy(),
        "tuple": (1, [2]),
    }
    copy = copied(state)
    assert copy["list"] is copy["again"]
    assert type(copy["parameter"]) is torch.nn.Parameter
    assert copy["parameter"].requires_grad
    for name in ("tensor", "turned", "numpy"):
        copy[name][0] = 77
    copy["list"].append(3)
    copy["tuple"][1].append(3)
    with torch.no_grad():
        copy["parameter"][0] = 77
    assert state["tensor"].tolist() == [[0, 1, 2], [3, 4, 5]]  # type: ignore[attr-defined]
    assert state["turned"].tolist() == [[0, 3], [1, 4], [2, 5]]  # type: ignore[attr-defined]
    assert state["numpy"].tolist() == [0, 1, 2, 3]  # type: ignore[attr-defined]
    assert (shared, state["tuple"], weight.tolist()) == ([1, 2], (1, [2]), [1.0, 1.0, 1.0])
    odd = copied({"odd": Unpicklable()})["odd"]
    odd.values.append(3)
    assert odd.values == [1, 2, 3]


def test_a_state_that_has_not_changed_is_not_copied_again_while_that_is_dear(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from hybridloader._support import state_copies

    monkeypatch.setattr(state_copies, "Cadence", lambda: Every(100))
    module = torch.nn.BatchNorm1d(3)
    latest = state_copies.Latest()
    first = latest.copy(module.state_dict())
    assert latest.copy(module.state_dict()) is first
    for change in (
        lambda: module.train()(torch.randn(4, 3)),
        lambda: torch.optim.SGD([module.weight], 1.0).step(module.weight.sum().backward),
        lambda: setattr(module.weight, "data", torch.zeros(3)),
        lambda: module.load_state_dict(torch.nn.BatchNorm1d(3).state_dict()),
    ):
        change()
        found = latest.copy(module.state_dict())
        assert found is not first
        assert all(torch.equal(found[n], value) for n, value in module.state_dict().items())
        first = found
    assert latest.copy({"order": [1, 2]}) == {"order": [1, 2]}
    assert latest.copy({"order": [1, 3]}) == {"order": [1, 3]}


def test_a_state_that_is_cheap_is_of_each_who_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    from hybridloader._support import state_copies

    monkeypatch.setattr(state_copies, "Cadence", lambda: Every(1))
    latest, state = state_copies.Latest(), {"order": [1, 2]}
    one = latest.copy(state)
    assert latest.copy(state) is not one


@pytest.mark.parametrize("kind", [Kept, Frozen])
def test_what_is_dear_to_copy_is_given_to_all_who_ask_and_what_is_not_to_each(
    kind: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    import pickle

    from hybridloader._support import state_copies

    state = {"order": [3, 1, 2]}
    held = kind(state if kind is Kept else pickle.dumps(state))
    monkeypatch.setattr(state_copies, "DEAR", 60.0)  # on a busy machine, too
    first = held.given()
    first["order"].append(4)
    assert held.given() == state
    monkeypatch.setattr(state_copies, "DEAR", -1.0)
    dear = held.given()
    assert held.given() is dear
    dear["order"].append(4)
    kept = held.kept if kind is Kept else pickle.loads(held.kept)
    assert kept == state, "what is gone on from is nobody's"
