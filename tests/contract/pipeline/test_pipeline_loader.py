"""`PipelineLoader`: epochs as a training loop asks for them, and states by the rules of loaders."""

from __future__ import annotations

import gc
import random
import threading
import warnings
from collections.abc import Iterator
from itertools import islice
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.pipeline_model import changed, saved

from hybridloader import DataLoader, Pipeline, PipelineLoader, StateError
from hybridloader.errors import IteratorClosed

THREADS: dict[str, Any] = {"backend": "threads", "num_workers": 2}


def shuffled(**place: Any) -> Pipeline:
    pipe = Pipeline.from_dataset(range(10), shuffle=True)
    return pipe.map(changed, **place).batch(4, collate_fn=list)


def uneven(**place: Any) -> Pipeline:
    pipe = Pipeline.from_dataset(range(24), shuffle=True)
    pipe = pipe.filter(lambda item: item % 2 == 0, name="even", **place)
    return pipe.shuffle(3).batch(5, collate_fn=list)


def epochs_of(make: Any, count: int) -> list[list[Any]]:
    return [list(make().run(epoch=epoch, seed=1)) for epoch in range(count)]


# -- any sequence of what a loop and a framework ask for ---------------------------------------------

WHOLE = {make: epochs_of(make, 30) for make in (shuffled, uneven)}


class Place:
    """Epoch of a loader, how many of its items were given, and what `iter` begins next."""

    def __init__(self, epoch: int = 0, at: int = 0, *, ended: bool = False) -> None:
        self.epoch, self.at, self.ended = epoch, at, ended
        self.stays = not ended  # `iter` begins here, not with the next epoch

    def begin(self) -> None:
        if not self.stays:
            self.epoch, self.at, self.ended = self.epoch + 1, 0, False
        self.stays = True

    def give(self, whole: list[Any]) -> list[Any]:
        found = whole[self.at : self.at + 1]
        self.at, self.ended, self.stays = self.at + len(found), not found, False
        return found


actions = st.one_of(
    st.tuples(st.just("take"), st.integers(1, 4)),
    st.tuples(st.sampled_from(["begin", "save", "load", "load elsewhere"]), st.just(0)),
    st.tuples(st.just("set_epoch"), st.integers(0, 3)),
)


@settings(deadline=None, max_examples=150)
@given(st.sampled_from([shuffled, uneven]), st.lists(actions, max_size=14), st.integers(0, 9))
def test_a_loader_gives_its_epochs_in_turn_and_goes_on_from_any_state(
    make: Any, actions: list[tuple[str, int]], seed: int
) -> None:
    """One of which nothing was taken begins again; one that was left is followed by the next."""
    whole, chosen = WHOLE[make], random.Random(seed)

    def loader_on() -> PipelineLoader:
        return PipelineLoader(make(**chosen.choice([{}, THREADS])), seed=1)

    loader, place, items, loaded = loader_on(), Place(), None, True
    states: list[tuple[Any, Place]] = []
    for what, number in actions:
        if what == "begin":
            place.begin()
            items, loaded = iter(loader), False
            assert items.epoch == place.epoch
        elif what == "take" and items is not None:
            for _ in range(number):
                assert list(islice(items, 1)) == place.give(whole[place.epoch])
        elif what == "save":
            state = saved(loader)
            assert (state["epoch"], state["given"]) == (place.epoch, place.at)
            assert state["finished"] is place.ended
            states.append((state, Place(place.epoch, place.at, ended=place.ended)))
        elif what.startswith("load") and states:
            (state, at), running = states[-1], items is not None and not place.ended
            place = Place(at.epoch, at.at, ended=at.ended)
            if what != "load":
                loader.close()
                loader = loader_on()
            loader.load_state_dict(state)
            assert saved(loader) == state
            if running:
                with pytest.raises(IteratorClosed, match=r"a state was loaded|closed"):
                    next(items)  # type: ignore[arg-type]
            items, loaded = None, True
        elif what == "set_epoch" and (loaded or place.ended):
            kept = place.stays and number == place.epoch
            known = make is shuffled  # a framework that counts may save before the end was met
            over = known and place.at == len(whole[place.epoch])
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                loader.set_epoch(number)
            follows = (over or place.ended) and number == place.epoch + 1
            dropped = loaded and place.at > 0 and not (kept or follows)
            assert ["drops the position" in str(each.message) for each in caught] == [
                True
            ] * dropped
            place = place if kept else Place(number)
            items, loaded = iter(loader), False
            assert items.epoch == number
    loader.close()


# -- epochs ------------------------------------------------------------------------------------------


def test_each_iter_is_the_next_epoch_of_one_seed_on_the_same_workers() -> None:
    torch.manual_seed(5)
    with PipelineLoader(shuffled(**THREADS)) as loader:
        before = threading.active_count()
        state = saved(loader)
        assert saved(loader) == state
        assert threading.active_count() == before
        found = [list(loader)]
        workers = threading.active_count()
        found += [list(loader) for _ in range(2)]
        assert threading.active_count() == workers > before
    torch.manual_seed(5)
    with shuffled().epochs(3) as epochs:
        assert found == [list(epoch) for epoch in epochs]
    assert found[0] != found[1]
    resumed = PipelineLoader(shuffled())
    resumed.load_state_dict(state)  # it has the seed
    assert [list(resumed) for _ in range(3)] == found


def test_the_first_epoch_has_the_order_of_a_loader_that_was_seeded_alike() -> None:
    torch.manual_seed(5)
    loader = DataLoader(range(10), 4, shuffle=True, collate_fn=list)  # type: ignore[arg-type]
    wanted = list(loader)
    torch.manual_seed(5)
    pipe = Pipeline.from_dataset(range(10), shuffle=True).batch(4, collate_fn=list)
    assert list(PipelineLoader(pipe)) == wanted


def test_the_length_is_that_of_a_whole_epoch_or_an_error_that_names_the_step() -> None:
    loader = PipelineLoader(shuffled())
    next(iter(loader))
    loader.load_state_dict(loader.state_dict())
    assert len(loader) == 3
    assert bool(PipelineLoader(uneven()))
    with pytest.raises(TypeError, match="even"):
        len(PipelineLoader(uneven()))


def test_a_later_epoch_closes_one_that_was_left() -> None:
    loader = PipelineLoader(shuffled(), seed=1)
    left = iter(loader)
    next(left)
    assert iter(loader).epoch == 1
    with pytest.raises(IteratorClosed, match="a later epoch has begun"):
        next(left)


# -- states ------------------------------------------------------------------------------------------


def test_states_of_runs_epochs_and_loaders_are_one() -> None:
    with uneven().run(seed=3) as run:
        next(run)
        state, rest = saved(run), list(run)
    loader = PipelineLoader(uneven())
    loader.load_state_dict(state)
    assert list(loader) == rest
    with uneven().epochs(2, state=state) as epochs:
        assert list(next(epochs)) == rest
        assert next(epochs).epoch == 1
        assert next(epochs, None) is None


def test_what_can_not_be_resumed_is_refused_and_nothing_has_changed() -> None:
    state = saved(PipelineLoader(shuffled(), seed=1))
    loader = PipelineLoader(uneven(), seed=1)
    before = saved(loader)
    with pytest.raises(StateError, match="operators"):
        loader.load_state_dict(state)
    with pytest.raises(StateError, match="seed"):
        PipelineLoader(shuffled(), seed=2).load_state_dict(state)
    assert saved(loader) == before
    loader.load_state_dict({})
    assert saved(loader) == before
    with pytest.raises(ValueError, match="epoch"):
        loader.set_epoch(-1)
    with pytest.raises(TypeError, match="runs a Pipeline, not a list"):
        PipelineLoader([1])  # type: ignore[arg-type]


# -- the end -----------------------------------------------------------------------------------------


def test_a_run_keeps_its_loader_and_a_loader_that_is_let_go_ends_its_workers() -> None:
    before = threading.active_count()
    items: Iterator[Any] = iter(PipelineLoader(shuffled(**THREADS), seed=1))
    assert len(list(items)) == 3
    assert threading.active_count() > before
    del items
    gc.collect()
    assert threading.active_count() == before


def test_a_closed_loader_has_a_state_and_no_further_epoch() -> None:
    with PipelineLoader(uneven(**THREADS)) as loader:
        items = iter(loader)
        first = next(items)
        state = saved(loader)
    assert saved(loader) == state
    with pytest.raises(IteratorClosed, match="closed"):
        iter(loader)
    resumed = PipelineLoader(uneven())
    resumed.load_state_dict(saved(loader))
    assert first not in list(resumed)
