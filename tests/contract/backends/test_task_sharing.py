"""Tasks that the workers of a crew of threads share: a slow sample holds up one thread alone."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import islice
from typing import Any

import pytest
import torch
from support.failing_datasets import Samples, kinds, outcomes
from torch.utils.data import DataLoader as TorchLoader

import hybridloader
from hybridloader import DataLoader, Pipeline, Threads, WorkerDied, WorkerTimeout

LONG = 60.0
"""Seconds after which a test gives up; never reached when all is well."""

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


@pytest.fixture(autouse=True)
def shared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every task be worth sharing, as soon as one has an answer."""
    monkeypatch.setattr("hybridloader.backends.threads._LEAST", 0.0)
    monkeypatch.setattr("hybridloader.backends.threads._EACH", 0.0)
    monkeypatch.setattr("hybridloader.engine.feed.TASK_SECONDS", 0.0)  # one item a task


class Stuck(Samples):
    """Some samples wait at a gate; tells when a number of others were fetched."""

    def __init__(self, stuck: set[int], others: int) -> None:
        super().__init__(int, 40)
        self.stuck, self.others = stuck, others
        self.gate, self.arrived, self.rest = (threading.Event() for _ in range(3))
        self.fetched: list[int] = []
        self.here: list[int] = []

    def __getitem__(self, index: int) -> int:
        if index in self.stuck:
            self.here.append(index)
            if len(self.here) == len(self.stuck):
                self.arrived.set()
            assert self.gate.wait(LONG)
        else:
            self.fetched.append(index)
            if len(self.fetched) == self.others:
                self.rest.set()
        return index


def lists(loader: Any) -> list[list[int]]:
    return [batch if isinstance(batch, list) else batch.tolist() for batch in loader]


def batches_of(dataset: Any, size: int, backend: str = "threads", **options: Any) -> Pipeline:
    sampler = [list(range(i, i + size)) for i in range(0, len(dataset), size)]
    options = {"num_workers": 3, "prefetch": 8, **options}
    return Pipeline.from_dataset(dataset, batch_sampler=sampler, backend=backend, **options)


def with_another_step(dataset: Any) -> Pipeline:
    pipe = batches_of(dataset, 4, on_error="skip")
    return pipe.map(torch.clone, backend="threads", num_workers=3, prefetch=8, on_error="skip")


@pytest.mark.parametrize(
    ("make", "most"),  # 8 batches of a loader were sent after three, or 9
    [
        (lambda dataset: DataLoader(dataset, 4, num_workers=3, backend="threads"), 31),
        (lambda dataset: batches_of(dataset, 4), 39),
        (with_another_step, 39),
    ],
    ids=["loader", "pipeline", "with another step of the stage"],
)
def test_all_other_samples_of_the_window_are_fetched_while_one_is_stuck(
    make: Callable[[Any], Any], most: int
) -> None:
    dataset = Stuck({13}, most)
    with iter(make(dataset)) as iterator:
        got = [next(iterator) for _ in range(3)]
        assert dataset.arrived.wait(LONG)
        assert dataset.rest.wait(LONG), "another worker fetches 14 and 15"
        dataset.gate.set()
        assert lists([*got, *iterator]) == [list(range(i, i + 4)) for i in range(0, 40, 4)]
    assert sorted([*dataset.fetched, 13]) == list(range(40))  # each once


class Waits(Samples):
    """Each sample of the first batch waits until all four are asked for, and the next three batches wait
    for the first."""

    def __init__(self) -> None:
        super().__init__(int, 40)
        self.together, self.gate = threading.Barrier(4), threading.Event()

    def __getitem__(self, index: int) -> int:
        if index < 4:
            self.together.wait(LONG)
        elif index < 16:
            assert self.gate.wait(LONG)
        return index


@pytest.mark.parametrize("form", ["loader", "pipeline"])
def test_the_first_batch_is_shared(form: str) -> None:
    dataset: Any = Waits()
    if form == "loader":
        iterator = iter(DataLoader(dataset, 4, num_workers=4, backend="threads"))
    else:
        iterator = iter(batches_of(dataset, 4, num_workers=4))
    first = next(iterator)
    dataset.gate.set()
    assert lists([first, *iterator]) == [list(range(i, i + 4)) for i in range(0, 40, 4)]


@pytest.mark.parametrize("options", [{}, {"seeding": "sample"}, {"on_error": "skip"}])
def test_batches_are_torchs(options: dict[str, Any]) -> None:
    fetched: list[int] = []

    def sample(index: int) -> Any:
        info = hybridloader.get_worker_info()
        assert info is not None
        assert threading.current_thread().name.endswith(f"-{info.id}")
        fetched.append(index)
        return index / 7, torch.full((3,), index)

    dataset: Any = Samples(sample, 200)
    ours = DataLoader(dataset, 7, num_workers=3, backend="threads", **options)
    theirs = list(TorchLoader([(i / 7, torch.full((3,), i)) for i in range(200)], 7))  # type: ignore[arg-type]
    for mine, other in zip(ours, theirs, strict=True):
        assert all(map(torch.equal, mine, other))
    assert len(fetched) == 200


def test_samples_and_collation_draw_what_they_draw_in_processes() -> None:
    def batches(backend: str) -> list[Any]:
        torch.manual_seed(4)
        dataset: Any = Samples(lambda k: (k, random.random(), float(torch.rand(()))), 60)
        collate = lambda samples: (samples, random.random())  # noqa: E731
        options: dict[str, Any] = {"seeding": "sample", "collate_fn": collate, "shuffle": True}
        return list(DataLoader(dataset, 4, num_workers=3, backend=backend, **options))

    assert batches("threads") == batches("fork")


def drawn(_: int) -> Any:
    info: Any = hybridloader.get_worker_info()
    return info.id, info.rng.random_generator.random()


def test_what_draws_from_the_generators_of_its_worker_is_not_shared() -> None:
    dataset: Any = Samples(drawn, 60)
    loader = DataLoader(
        dataset, 4, num_workers=3, backend="threads", collate_fn=list, seeding="worker"
    )
    iterator: Any = iter(loader)
    generators = [random.Random(iterator._base_seed + worker) for worker in range(3)]
    for number, batch in enumerate(iterator):
        worker = number % 3
        assert batch == [(worker, generators[worker].random()) for _ in range(4)]


def fragile(index: int) -> Any:
    if index % 20 in (5, 6):
        raise KeyError(index)
    if index == 50:
        raise StopIteration
    return index


def test_an_error_is_that_of_the_first_sample_and_costs_one_batch() -> None:
    dataset: Any = Samples(fragile, 60)
    loader = DataLoader(dataset, 4, num_workers=3, backend="threads", collate_fn=list)
    found = outcomes(iter(loader))
    expected: list[Any] = [list(range(i, i + 4)) for i in range(0, 60, 4)]
    expected[1] = expected[6] = expected[11] = KeyError
    expected[12] = RuntimeError
    assert kinds(found) == expected
    assert [found[at].args for at in (1, 6, 11)] == [(5,), (25,), (45,)]
    assert "StopIteration" in str(found[12])


# -- ends ------------------------------------------------------------------------------------------


def test_closing_while_samples_are_stuck_begins_no_other_and_leaves_nothing() -> None:
    before = set(threading.enumerate())
    dataset: Any = Stuck({12, 13}, 35)
    iterator: Any = iter(DataLoader(dataset, 4, num_workers=2, backend="threads"))
    for _ in range(3):
        next(iterator)
    assert dataset.arrived.wait(LONG)
    iterator.close()
    fetched = sorted(dataset.fetched)
    dataset.gate.set()
    for thread in set(threading.enumerate()) - before:
        thread.join(LONG)
        assert not thread.is_alive()
    assert sorted(dataset.fetched) == fetched == list(range(12))


def test_a_timeout_shows_the_thread_that_is_stuck_and_its_sample() -> None:
    dataset: Any = Stuck({13}, 31)
    loader = DataLoader(dataset, 4, num_workers=3, backend="threads", timeout=0.05)
    iterator = iter(loader)
    words = r"no result came from worker 0 .*fetch \[12, 13, 14, 15\]"
    where = r"Worker \d, at sample 1: 13 \(most recent call last\):\n.*__getitem__"

    def batches(count: int) -> Any:
        while count:
            with suppress(WorkerTimeout):  # on a busy machine
                yield next(iterator)
                count -= 1

    got = [*batches(3)]
    assert dataset.arrived.wait(LONG)
    with pytest.raises(WorkerTimeout, match=rf"(?s){words}.*{where}.*gate.wait"):
        next(iterator)
    dataset.gate.set()
    got += batches(7)
    assert lists(got) == [list(range(i, i + 4)) for i in range(0, 40, 4)]


# -- batches of a pipeline -------------------------------------------------------------------------


def jittered(batch: Any) -> Any:
    indices, draws = [values.tolist() for values in batch]
    if indices[0] % 12 == 8:
        raise KeyError("later")
    return indices, draws, random.random(), float(torch.rand(()))


def large(batch: Any) -> bool:
    return bool(batch == (7, 0.0) or batch[0][0] % 5)


def halves(batch: Any) -> Iterator[Any]:
    yield batch, random.random()
    yield random.random()


LATER: list[tuple[str, Any]] = [("map", jittered), ("filter", large), ("flat_map", halves)]


@pytest.mark.parametrize(
    ("seeding", "on_error"),
    [
        (None, hybridloader.Replace(lambda index, error: (7, 0.0), None)),
        ("sample", hybridloader.Skip(None)),
    ],
)
def test_the_steps_that_follow_a_shared_batch_draw_what_they_draw_in_one_worker(
    seeding: str | None, on_error: Any
) -> None:
    def later(workers: int) -> Pipeline:
        options = {"num_workers": workers, "seeding": seeding, "on_error": on_error}
        pipe = batches_of(Samples(lambda k: (fragile(k), random.random()), 60), 4, **options)
        for kind, function in LATER:
            pipe = getattr(pipe, kind)(function, backend="threads", prefetch=8, **options)
        return pipe

    def found(workers: int) -> tuple[list[Any], list[Any]]:
        with later(workers).run(seed=3) as run:
            results = list(run)
            return results, sorted((str(record.index), record.replaced) for record in run.skipped)

    expected = found(1)
    assert found(3) == expected
    with later(3).run(seed=3) as run:
        got = list(islice(run, 7))
        state = run.state_dict()
    with later(3).run(state=state) as run:
        assert [*got, *run] == expected[0]


# -- where tasks stay whole ------------------------------------------------------------------------


class Batches(Samples):
    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [(len(indices), threading.get_ident()) for _ in indices]


ALIKE = Samples(lambda _: threading.get_ident(), 200)


@pytest.mark.parametrize(
    ("dataset", "backend", "options"),
    [
        (Batches(int, 200), Threads(), {}),
        (ALIKE, Threads(copy_dataset=True), {}),
        (ALIKE, Threads(), {"task_timeout": 60}),
        (ALIKE, Threads(), {"on_worker_death": "restart"}),
        (ALIKE, Threads(), {"num_workers": 1}),
    ],
)
def test_some_tasks_are_done_by_their_worker_alone(
    dataset: Any, backend: Threads, options: dict[str, Any]
) -> None:
    loader = DataLoader(
        dataset, 20, backend=backend, collate_fn=set, **{"num_workers": 2, **options}
    )
    assert all(len(batch) == 1 for batch in loader)


def broken_in_one(worker: int) -> None:
    if worker == 1:
        raise KeyError("init")


def test_tasks_of_a_worker_whose_init_fn_failed_are_errors() -> None:
    dataset: Any = Samples(int, 24)
    loader = DataLoader(dataset, 4, num_workers=2, backend="threads", worker_init_fn=broken_in_one)
    found = [
        batch if batch is KeyError else int(batch[0]) for batch in kinds(outcomes(iter(loader)))
    ]
    assert found == [0, KeyError, 8, KeyError, 16, KeyError]


def leaving(index: int) -> int:
    if index == 26:
        raise SystemExit(3)
    return index


def test_a_worker_that_ends_says_at_which_sample() -> None:
    dataset: Any = Samples(leaving, 80)
    iterator = iter(DataLoader(dataset, 8, num_workers=2, backend="threads"))
    with pytest.raises(WorkerDied, match=r"ended by SystemExit: 3.*It was at sample 2 of .*: 26\."):
        lists(iterator)
