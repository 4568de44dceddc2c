"""`PipelineLoader`: epochs as a training loop asks for them, and states by the rules of loaders."""

from __future__ import annotations

import gc
import threading
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support.pipeline_model import changed, saved

from hybridloader import DataLoader, Pipeline, PipelineLoader, StateError
from hybridloader.errors import IteratorClosed

EPOCHS = 3
PLACES: dict[str, dict[str, Any]] = {
    "inline": {},
    "threads": {"backend": "threads", "num_workers": 2},
}


def even(item: int) -> bool:
    return item % 2 == 0


def shuffled(**place: Any) -> Pipeline:
    return (
        Pipeline.from_dataset(range(10), shuffle=True)
        .map(changed, **place)
        .batch(4, collate_fn=list)
    )


def uneven(**place: Any) -> Pipeline:
    pipe = Pipeline.from_dataset(range(24), shuffle=True).filter(even, **place)
    return pipe.shuffle(3).batch(5, collate_fn=list)


def followed(loader: PipelineLoader, epochs: int) -> list[list[Any]]:
    return [list(loader) for _ in range(epochs)]


# -- epochs ------------------------------------------------------------------------------------------


def test_each_iter_is_the_next_epoch_of_one_seed_on_the_same_workers() -> None:
    torch.manual_seed(5)
    with PipelineLoader(shuffled(**PLACES["threads"])) as loader:
        before = threading.active_count()
        first = list(loader)
        workers = threading.active_count()
        found = [first, *followed(loader, 2)]
        assert threading.active_count() == workers > before
    torch.manual_seed(5)
    with shuffled().epochs(EPOCHS) as epochs:
        assert found == [list(epoch) for epoch in epochs]
    assert found[0] != found[1]


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
    with pytest.raises(TypeError, match="filter"):
        len(PipelineLoader(uneven()))


def test_set_epoch_names_the_next_epoch() -> None:
    loader = PipelineLoader(shuffled(), seed=1)
    whole = followed(loader, EPOCHS)
    again = PipelineLoader(shuffled(), seed=1)
    for epoch in (2, 0):
        again.set_epoch(epoch)
        assert list(again) == whole[epoch]
    assert list(again) == whole[1]
    with pytest.raises(ValueError, match="epoch"):
        loader.set_epoch(-1)


def test_an_epoch_of_which_nothing_was_taken_begins_again() -> None:
    """Lightning asks for an iterator to see whether there is one."""
    loader = PipelineLoader(uneven(**PLACES["threads"]), seed=1)
    whole = followed(loader, 2)
    next(iter(loader))
    state = loader.state_dict()
    for _ in range(2):
        assert iter(loader).epoch == 3
    loader.load_state_dict(state)
    for _ in range(2):
        assert iter(loader).epoch == 2
    assert saved(loader) == state
    other = PipelineLoader(uneven(), seed=1)
    iter(other)
    assert followed(other, 2) == whole
    iter(other)
    other.set_epoch(3)
    assert iter(other).epoch == 3
    loader.close()


def test_an_epoch_that_was_left_is_followed_by_the_next() -> None:
    loader = PipelineLoader(shuffled(), seed=1)
    left = iter(loader)
    next(left)
    assert iter(loader).epoch == 1
    with pytest.raises(IteratorClosed, match="a later epoch has begun"):
        next(left)


# -- states ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [shuffled, uneven])
@pytest.mark.parametrize(("place", "other"), [("inline", "threads"), ("threads", "inline")])
def test_a_loader_resumes_after_any_item_and_the_later_epochs_follow(
    make: Any, place: str, other: str
) -> None:
    found: list[Any] = []
    states: list[tuple[int, Any]] = []
    with PipelineLoader(make(**PLACES[place])) as loader:
        states.append((0, saved(loader)))
        for _ in range(EPOCHS):
            for item in loader:
                found.append(item)
                states.append((len(found), saved(loader)))
            states.append((len(found), saved(loader)))
    for stop, state in states:
        with PipelineLoader(make(**PLACES[other])) as resumed:
            resumed.load_state_dict(state)
            assert saved(resumed) == state
            rest = followed(resumed, EPOCHS - state["epoch"] - state["finished"])
            assert [item for epoch in rest for item in epoch] == found[stop:]


def test_a_state_before_the_first_epoch_has_its_seed_and_starts_no_worker() -> None:
    loader = PipelineLoader(shuffled(**PLACES["threads"]))
    before = threading.active_count()
    state = saved(loader)
    assert saved(loader) == state
    assert threading.active_count() == before
    resumed = PipelineLoader(shuffled())
    resumed.load_state_dict(state)
    assert followed(loader, 2) == followed(resumed, 2)
    loader.close()


def test_set_epoch_keeps_the_place_in_that_epoch_and_drops_another_with_a_warning() -> None:
    loader = PipelineLoader(shuffled(), seed=1)
    whole = followed(loader, 2)
    items = iter(loader)
    found = [next(items)]
    state = saved(loader)
    loader.load_state_dict(state)
    loader.set_epoch(2)
    found += loader
    loader.load_state_dict(state)
    with pytest.warns(UserWarning, match=r"set_epoch\(1\) drops the position.*in epoch 2"):
        loader.set_epoch(1)
    assert list(loader) == whole[1]
    assert len(found) == len(whole[0])


def test_a_framework_that_counts_may_begin_the_next_epoch_after_the_last_item() -> None:
    """It saves before the end was met, and the epoch of its own count is the next one."""
    loader = PipelineLoader(shuffled(), seed=1)
    items = iter(loader)
    for _ in range(len(loader)):
        next(items)
    state = saved(loader)
    assert not state["finished"]
    whole = list(loader)
    loader.load_state_dict(state)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loader.set_epoch(1)
    assert list(loader) == whole
    loader.load_state_dict(state)
    assert followed(loader, 2) == [[], whole]


def test_a_state_may_be_loaded_at_any_time_and_ends_the_epoch_that_runs() -> None:
    loader = PipelineLoader(shuffled(), seed=1)
    items = iter(loader)
    first = next(items)
    state = saved(loader)
    rest = list(items)
    items = iter(loader)
    next(items)
    loader.load_state_dict(state)
    with pytest.raises(IteratorClosed, match="a state was loaded"):
        next(items)
    assert [first, *loader] == [first, *rest]


def test_states_of_runs_epochs_and_loaders_are_one() -> None:
    with uneven().run(seed=3) as run:
        next(run)
        state, rest = saved(run), list(run)
    loader = PipelineLoader(uneven())
    loader.load_state_dict(state)
    assert list(loader) == rest
    with uneven().epochs(2) as epochs:
        epochs.load_state_dict(state)
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
    with pytest.raises(TypeError, match="runs a Pipeline, not a list"):
        PipelineLoader([1])  # type: ignore[arg-type]


def test_epochs_load_a_state_between_two_and_count_those_before_it() -> None:
    with shuffled(**PLACES["threads"]).epochs(3, seed=1) as epochs:
        whole = [list(epoch) for epoch in epochs]
    with shuffled(**PLACES["threads"]).epochs(3, seed=1) as epochs:
        epoch = next(epochs)
        next(epoch)
        state = saved(epochs)
        next(epochs)
        epochs.load_state_dict(state)
        assert [list(epoch) for epoch in epochs] == [whole[0][1:], *whole[1:]]


# -- the end -----------------------------------------------------------------------------------------


def test_a_run_keeps_its_loader_and_a_loader_that_is_let_go_ends_its_workers() -> None:
    before = threading.active_count()
    items: Iterator[Any] = iter(PipelineLoader(shuffled(**PLACES["threads"]), seed=1))
    assert len(list(items)) == 3
    assert threading.active_count() > before
    del items
    gc.collect()
    assert threading.active_count() == before


def test_a_closed_loader_has_a_state_and_no_further_epoch() -> None:
    with PipelineLoader(uneven(**PLACES["threads"])) as loader:
        items = iter(loader)
        first = next(items)
        state = saved(loader)
    assert saved(loader) == state
    with pytest.raises(IteratorClosed, match="closed"):
        iter(loader)
    resumed = PipelineLoader(uneven())
    resumed.load_state_dict(saved(loader))
    assert first not in list(resumed)
