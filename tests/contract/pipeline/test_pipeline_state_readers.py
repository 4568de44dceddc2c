"""Several readers go on where each of them was: from the state of what it reads, or by reading again."""

from __future__ import annotations

import copy
import itertools
import threading
import tracemalloc
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.pipeline_model import events, saved
from support.platforms import needs_fork

from hybridloader import Pipeline, Retry, Skip, get_worker_info
from hybridloader.errors import StateError

reads = 0
lock = threading.Lock()


def counted(item: Any) -> Any:
    global reads
    with lock:
        reads += 1
    if item % 100 == 13:
        raise ArithmeticError(str(item))
    return item


class Part:
    """Iterator over the part of this reader; its state is how far it is."""

    def __init__(self, sizes: list[int], at: int = 0) -> None:
        info: Any = get_worker_info()
        self.first, self.size, self.at = 1000 * info.id, sizes[info.id % len(sizes)], at

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self.at >= self.size:
            raise StopIteration
        self.at += 1
        return counted(self.first + self.at)


class StatefulPart(Part):
    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


class Source:
    """Iterable whose iterator has a state, or none."""

    def __init__(self, sizes: list[int], kind: Any) -> None:
        self.sizes, self.kind = sizes, kind

    def __iter__(self) -> Iterator[Any]:
        return iter(self.kind(self.sizes))


class StatefulSource:
    """Iterable with a state of its own, whose generator gives -n in the place of an error at n."""

    def __init__(self, sizes: list[int]) -> None:
        self.sizes, self.at = sizes, 0

    def __iter__(self) -> Iterator[Any]:
        part = Part(self.sizes, self.at)
        while True:
            try:
                item = next(part)
            except StopIteration:
                break
            except ArithmeticError:
                item = -part.at
            self.at = part.at
            yield item
        self.at = 0

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


class NamedShards:
    """Shards of the sizes, of twice these, and one that is empty; three numbers in each fail."""

    def __init__(self, sizes: list[int]) -> None:
        self.sizes = [*sizes, 0, *(2 * size for size in sizes)]
        self.shard_names = [f"{number}.txt" for number in range(len(self.sizes))]

    def read_shard(self, name: str, start: int) -> Iterator[Any]:
        first = 1000 * int(name.partition(".")[0])
        for number in range(start, self.sizes[first // 1000]):
            yield counted(first + number)

    def __iter__(self) -> Iterator[Any]:
        raise AssertionError("it is read by shards")


KINDS: dict[str, Any] = {
    "named shards": NamedShards,
    "no state": lambda sizes: Source(sizes, Part),
    "on the iterator": lambda sizes: Source(sizes, StatefulPart),
    "on the object": StatefulSource,
    "of a function": lambda sizes: lambda: StatefulPart(sizes),
}


RETRIES = Retry(1, then=Skip())
OPTIONS = [{}, {"seeding": "sample"}, {"on_error": "skip"}, {"on_error": RETRIES}]


@pytest.mark.parametrize("kind", KINDS)
@settings(deadline=None, max_examples=9)
@example([0, 0, 29], [0, 29], "threads", {}, False)  # the second stop is the end of the last reader
@given(
    st.lists(st.integers(0, 40), min_size=3, max_size=3),
    st.lists(st.integers(0, 60), min_size=2, max_size=2),
    st.sampled_from(["threads", "inline"]),
    st.sampled_from(OPTIONS),
    st.booleans(),
)
def test_readers_go_on_at_every_place(
    kind: str, sizes: list[int], stops: list[int], backend: str, options: Any, more: bool
) -> None:
    global reads

    def make(backend: str) -> Pipeline:
        source = KINDS[kind](sizes)
        pipe = Pipeline.from_iterable(
            source, backend=backend, num_workers=3, name="read", **options
        )
        return (
            pipe.filter(lambda item: item % 7 != 0).repeat(2).batch(2, collate_fn=list)
            if more
            else pipe
        )

    whole = events(make("threads").run(seed=1))
    found, state = [], None
    for stop in stops:
        with make(backend).run(**({"seed": 1} if state is None else {"state": state})) as run:
            found += events(run, stop)
            state = saved(run)
    reads = 0
    with make("threads").run(state=state) as run:
        found += events(run)
    assert found == whole
    if kind != "no state" and not more:
        # A reader reads some items at a time, up to 16 of which were not given.
        assert reads <= len(whole) - min(len(whole), sum(stops)) + 3 * 32


class Refusing(StatefulPart):
    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise KeyError("at")


def test_reading_again_is_told_and_a_state_that_is_refused_ends_the_run() -> None:
    def make(kind: Any) -> Pipeline:
        return Pipeline.from_iterable(
            Source([30, 30], kind), backend="threads", num_workers=2, name="read"
        )

    with make(StatefulPart).run() as run:
        events(run, 40)
        state = saved(run)
    with (
        make(Refusing).run(state=state) as run,
        pytest.raises(
            StateError, match=r"reader [01] could not .* after its item \d+: KeyError: 'at'"
        ),
    ):
        next(run)
    with make(Part).run() as run:
        events(run, 21)
        state = saved(run)
    with make(Part).run(state=state) as run:
        assert run.resuming is not None
        assert run.resuming[1] == 21
        events(run)
        assert run.resuming is None


class LargeState:
    def __iter__(self) -> Iterator[int]:
        return iter(range(40_000))

    def state_dict(self) -> dict[str, Any]:
        return {"large": bytes(20_000)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise AssertionError("nothing is resumed")


def test_states_of_a_reader_that_no_state_can_need_any_more_are_let_go() -> None:
    tracemalloc.start()
    try:
        for _ in Pipeline.from_iterable(LargeState(), backend="threads", num_workers=1):
            pass
        assert tracemalloc.get_traced_memory()[1] < 20 << 20
    finally:
        tracemalloc.stop()


def test_named_shards_resume_with_other_readers() -> None:
    def make(readers: int) -> Pipeline:
        source = NamedShards([4, 6])
        where: Any = {"backend": "fork", "num_workers": readers} if readers else {}
        return Pipeline.from_iterable(source, **where).map(str).batch(2, collate_fn=list)

    wanted = sorted(item for batch in make(1).run() for item in batch)
    had, state = [], None
    for readers in (2, 0, 3):
        with make(readers).run(state=state) as run:
            had += [item for batch in itertools.islice(run, 4) for item in batch]
            state = saved(run)
    with make(1).run(state=state) as run:
        had += [item for batch in run for item in batch]
    assert sorted(had) == wanted


def test_after_other_steps_than_one_to_one_other_readers_take_a_merged_state() -> None:
    def make(readers: int) -> Pipeline:
        source = NamedShards([4, 6])
        pipe = Pipeline.from_iterable(source, num_workers=readers, backend="inline")
        return pipe.filter(lambda number: number % 2 == 1)

    wanted = sorted(make(1).run())
    with make(2).run() as run:
        had = list(itertools.islice(run, 6))
        state = saved(run)
    with pytest.raises(StateError, match=r"is of 2 readers, .* has 3 readers.*merge_states"):
        make(3).run(state=state)
    had += make(3).run(state=make(3).merge_states([state]))
    assert sorted(had) == wanted


class Undivided:
    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


@pytest.mark.parametrize(
    ("backend", "source", "items"),
    [
        ("threads", Undivided(), 3),
        pytest.param("fork", lambda: map(str, range(1)), 1, marks=needs_fork),
    ],
)
def test_readers_that_all_read_everything_are_warned_of_once(
    backend: str, source: Any, items: int
) -> None:
    pipe = Pipeline.from_iterable(source, name=f"{source}{backend}", backend=backend, num_workers=3)
    with pytest.warns(UserWarning, match="its readers begin with the same item") as caught:
        assert len(list(pipe)) == len(list(pipe)) == 3 * items
    assert len(caught) == 1


class Drawn:
    """Numbers of an epoch that keeps no position."""

    epoch = -1

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        return (
            (self.epoch, n)
            for n in range(info.id if info else 0, 4, info.num_workers if info else 1)
        )


@pytest.mark.parametrize("backend", [None, "threads", "fork"])
def test_readers_within_repeat_get_the_epoch_of_their_repetition(backend: str | None) -> None:
    workers: Any = {} if backend is None else {"backend": backend, "num_workers": 2}
    pipe = Pipeline.from_iterable(Drawn(), **workers).repeat(2)
    for taken in (2, 5):
        with pipe.run(epoch=2, seed=1) as run:
            begun = list(itertools.islice(run, taken))
            state = run.state_dict()
        begun += pipe.run(state=state)
        assert begun == [(epoch, number) for epoch in (4, 5) for number in range(4)]


def test_shards_of_other_ranks_are_merged_and_wrong_ones_refused() -> None:
    def make(rank: int, ranks: int, sizes: list[int]) -> Pipeline:
        source: Any = NamedShards(sizes)
        source.rank, source.num_replicas = rank, ranks
        return Pipeline.from_iterable(source)

    with make(0, 2, [5, 5, 5]).run() as run:
        next(run)
        state = saved(run)
    with pytest.raises(StateError, match=r"ranks: the state is of \[2\] ranks .* merge_states"):
        make(0, 1, [5, 5, 5]).run(state=state)
    with pytest.raises(
        StateError, match="shard_names of the dataset differ from those in the state"
    ):
        make(0, 2, [5, 5, 5, 5]).run(state=state)
    with pytest.raises(StateError, match=r"state is of rank 0 of 2, and this is rank 1 of 2"):
        make(1, 2, [5, 5, 5]).run(state=state)
    unnamed = copy.deepcopy(state)
    del unnamed["marks"][":0-0"]["value"]["shards"]
    with pytest.raises(StateError, match="the source of the state does not name its shards"):
        make(0, 2, [5, 5, 5]).run(state=unnamed)
    state["marks"][":0-0"]["value"]["readers"][0] = [1]
    with pytest.raises(StateError, match="the positions of the readers are damaged"):
        make(0, 2, [5, 5, 5]).run(state=state)
