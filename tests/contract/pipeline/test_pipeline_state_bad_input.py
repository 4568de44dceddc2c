"""States that can't be gone on from exactly are refused, with the reason, before anything runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from support.pipeline_model import events, saved
from torch.utils.data import RandomSampler

from hybridloader import Pipeline, get_worker_info
from hybridloader.errors import HybridLoaderError, IteratorClosed, StateError
from hybridloader.sampling import DistributedShuffleSampler, ShuffleSampler

started: list[int] = []


def make(count: int = 20, size: int = 2, **place: Any) -> Pipeline:
    place = place or {"backend": "threads", "num_workers": 1, "worker_init_fn": started.append}
    pipe = Pipeline.from_dataset(range(count), shuffle=True).map(abs, **place)
    return pipe.batch(size, collate_fn=list)


def a_state(pipe: Pipeline, given: int = 3, epoch: int = 2) -> Any:
    with pipe.run(epoch=epoch) as run:
        events(run, given)
        return saved(run)


def change(**fields: Any) -> Callable[[Any], Any]:
    return lambda state: {**state, **fields}


def without(name: str) -> Callable[[Any], Any]:
    return lambda state: {key: value for key, value in state.items() if key != name}


BAD: dict[str, tuple[Callable[[Any], Any], str]] = {
    "a list": (lambda state: list(state), "is a dict, got list"),
    "empty": (lambda _: {}, "not the state of a pipeline's run: it has nothing"),
    "of a sampler": (
        lambda _: ShuffleSampler(3, seed=0).state_dict(),
        "not the state of a pipeline's run: it is that of a sampler",
    ),
    "of another kind": (change(kind="loader"), "the state of a loader, not of a pipeline"),
    "of another version": (change(version=1), "version is 1 in the state.* reads 5"),
    "operators": (change(operators=7), "operators is 7 in the state, and must be a list of texts"),
    "seed": (change(seed="1"), "seed is '1' in the state, and must be a whole number"),
    "epoch": (change(epoch=-1), "epoch is -1 in the state, and must be a whole number, 0"),
    "more raised": (change(raised=4), "raised: 4 errors among given=3"),
    "finished": (change(finished="no"), "finished is 'no' in the state"),
    "a mark": (change(marks={":0": {"at": 1}}), "marks is {':0': {'at': 1}} in the state"),
    "where a mark is": (
        change(marks={":0": {"at": "1", "epoch": 2, "value": None}}),
        "marks is {':0': {'at': '1', ",
    ),
}
FIELDS = [
    *("seed", "seeded", "epoch", "given", "raised", "finished", "draws", "marks"),
    *("ranks", "rank", "heads", "operators"),
]
"""Keys of a state, besides its version and kind. No pipeline runs here: other modules are imported
meanwhile, and would take functions of `random` and numpy that are replaced for its threads."""

for _name in FIELDS:
    BAD[f"without {_name}"] = (without(_name), f"the state lacks {_name}: was it truncated?")


@pytest.mark.parametrize("name", sorted(BAD))
def test_what_is_wrong_is_said_before_anything_is_started(name: str) -> None:
    spoil, message = BAD[name]
    pipe = make()
    state = a_state(pipe)
    assert set(state) == {"version", "kind", *FIELDS}
    started.clear()
    for begin in (pipe.run, pipe.epochs):
        with pytest.raises(StateError, match=message):
            begin(state=spoil(state))
    assert started == []
    assert issubclass(StateError, HybridLoaderError)
    assert issubclass(StateError, ValueError)


@pytest.mark.parametrize(
    ("pipe", "message"),
    [
        (make(21), r"number 0 is 'from_dataset\(range of 20.*' in the state and .*range of 21"),
        (make(size=3), r"number 3 is 'batch\(2, .*' in the state and 'batch\(3, .*' in this"),
        (make().take(2), r"number 4 is 'nothing more' in the state and 'take\(2\)' in this"),
        (
            make(backend="threads", num_workers=1, on_error="skip"),
            r"number 2 is 'map\(abs\)' in the state and 'map\(abs\) with on_error=Skip",
        ),
        (make().concat(make()), r"number 0 is 'from_dataset.* and 'concat"),
    ],
)
def test_the_first_operator_that_differs_is_named(pipe: Pipeline, message: str) -> None:
    state = a_state(make())
    started.clear()
    with pytest.raises(StateError, match=message):
        pipe.run(state=state)
    assert started == []


def test_branches_readers_and_shards_must_agree() -> None:
    def read() -> Iterator[int]:
        info = get_worker_info()
        return iter(range(info.id if info else 0, 9))

    def readers(workers: int) -> Pipeline:
        return Pipeline.from_iterable(read, backend="threads", num_workers=workers)

    def ranked(replicas: int) -> Pipeline:
        sampler = DistributedShuffleSampler(9, 0, num_replicas=replicas, rank=0)
        return Pipeline.from_dataset(range(9), sampler=sampler).filter(float)

    line = Pipeline.from_dataset(range(9))
    for one, other, message in (
        (ranked(2), ranked(3), r"the state is of \[2\] ranks and this pipeline is for \[3\]"),
        (line.zip(line), line.zip(line.map(abs)), r"nothing more.*\| map\(abs\)"),
        (readers(2), readers(3), r"'2 x read\(read\)' in the state and '3 x read"),
        (line.shard(2, 0), line.shard(2, 1), r"num_replicas=2, rank=0.*num_replicas=2, rank=1"),
    ):
        state = a_state(one, 1)
        with pytest.raises(StateError, match=message):
            other.run(state=state)


def test_an_epoch_or_a_seed_that_differs_is_refused() -> None:
    state = a_state(make())
    with pytest.raises(StateError, match=r"epoch: the state is of epoch 2, .* has epoch=1"):
        make().run(state=state, epoch=1)
    with pytest.raises(StateError, match=rf"seed: the state is of seed {state['seed']}, .* seed=7"):
        make().run(state=state, seed=7)
    assert len(list(make().run(state=state, epoch=2, seed=state["seed"]))) == 7
    with pytest.raises(StateError, match=r"epoch: the state is of epoch 2, .* first=3"):
        make().epochs(5, first=3, state=state)
    with pytest.raises(StateError, match=r"epoch: the state is of epoch 2, .* end before epoch 2"):
        make().epochs(2, state=state)


def test_what_is_unordered_has_no_state_but_between_epochs() -> None:
    pipe = make(backend="threads", num_workers=2, in_order=False)
    with pipe.run() as run:
        assert saved(run)["given"] == 0
        next(run)
        with pytest.raises(StateError, match=r"stage 'map\(abs\)' is in_order=False"):
            run.state_dict()
        list(run)
        assert saved(run)["finished"]


@pytest.mark.parametrize("place", [{}, {"backend": "threads", "num_workers": 2}])
@pytest.mark.parametrize("behind", ["source", "filter"])
def test_data_that_have_become_fewer_are_noticed(place: dict[str, Any], behind: str) -> None:
    def shrinking(count: int) -> Pipeline:
        pipe = Pipeline.from_iterable(lambda: iter(range(count))).map(abs, **place)
        return (pipe.filter(bool, **place) if behind == "filter" else pipe).batch(
            3, collate_fn=list
        )

    state = a_state(shrinking(30), 9)
    for count in (10, 24):
        with shrinking(count).run(state=state) as run:
            with pytest.raises(StateError, match=r"after item 2[78] of .*, which ended after item"):
                next(run)
            with pytest.raises(IteratorClosed):
                next(run)
            assert saved(run)["given"] == 9


def test_damaged_places_of_a_buffer_a_generator_and_readers_are_told() -> None:
    data, where = range(20), {"backend": "threads", "num_workers": 1}
    drawn = RandomSampler(data, generator=torch.Generator())
    plain = Pipeline.from_dataset(data)
    read = Pipeline.from_iterable(data, **where)  # type: ignore[arg-type]
    for pipe, mark, field, damage, message in (
        (plain.shuffle(4), ":1", "value", [3, 8, 0, "x"], "shuffle: the numbers .* are damaged"),
        (Pipeline.from_dataset(data, sampler=drawn), ":0", "value", "AA", "generator is damaged"),
        (read, ":0-0", "at", 9, "is after item 9 of pass 2, and item 5 of pass 2 is needed"),
    ):
        state = a_state(pipe, 5)
        state["marks"][mark][field] = damage
        with pytest.raises(StateError, match=message):
            pipe.run(state=state)


def test_a_sampler_that_refuses_its_state_is_named() -> None:
    state = a_state(Pipeline.from_dataset(range(9), sampler=ShuffleSampler(9, seed=1)), 2)
    with pytest.raises(StateError, match=r"from_dataset: ShuffleSampler.* seed is 1 .* and 2"):
        Pipeline.from_dataset(range(9), sampler=ShuffleSampler(9, seed=2)).run(state=state)
    state["marks"][":0"]["at"] = 5
    with pytest.raises(StateError, match=r"would have to begin at item 2, .* from item 5"):
        Pipeline.from_dataset(range(9), sampler=ShuffleSampler(9, seed=1)).run(state=state)
