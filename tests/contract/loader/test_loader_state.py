"""State of a loader: what it does to generators, what it is, and batches that an interrupt held back."""

from __future__ import annotations

import json
import pickle
from typing import Any

import pytest
import torch
from support.sampler_loaders import (
    BATCH,
    LENGTH,
    SAMPLERS,
    InIter,
    epochs_of,
    flat,
    left_after,
    make,
)
from torch.utils.data import Dataset

from hybridloader import DataLoader

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")

every_sampler_once = pytest.mark.parametrize(
    ("sampler", "workers"), [(name, at % 2 * 2) for at, name in enumerate(sorted(SAMPLERS))]
)
"""Every other one with workers, which ask a sampler in the same way."""

# -- generators ------------------------------------------------------------------------------------


@every_sampler_once
def test_at_the_end_of_an_epoch_the_next_one_comes_once(sampler: str, workers: int) -> None:
    backend = "threads" if workers else "inline"
    whole = epochs_of(make(sampler, workers, backend), 2)
    loader = make(sampler, workers, backend)
    torch.manual_seed(0)
    assert flat(loader) == whole[0]
    state = loader.state_dict()
    assert state["_iterator_finished"] is True
    training = torch.get_rng_state()
    other = make(sampler)
    other.load_state_dict(state)
    assert flat(other) == whole[1], "where the training code has restored torch's generator"
    torch.manual_seed(5)
    other = make(sampler)
    other.load_state_dict(state)
    if sampler != "sequential":
        assert flat(other) == whole[1], "and where it has not"
    assert not torch.equal(training, torch.get_rng_state())


def test_the_training_codes_generator_is_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    _, state = left_after(make("shuffle"), 3)
    torch.manual_seed(11)
    before = torch.get_rng_state()
    other = make("shuffle", 2, "threads")
    other.load_state_dict(state)
    iterator = iter(other)
    assert torch.equal(before, torch.get_rng_state())
    next(iterator)
    assert torch.equal(before, torch.get_rng_state())
    # Also where nothing can be gone on from.
    _, state = left_after(make("in iter"), 3)
    other = make("in iter")
    monkeypatch.setattr(InIter, "__iter__", lambda self: iter(range(LENGTH)))
    other.load_state_dict(state)
    before = torch.get_rng_state()
    with pytest.raises(ValueError, match="item 2 of BatchSampler differs from the one when"):
        iter(other)
    assert torch.equal(before, torch.get_rng_state())


@every_sampler_once
def test_asking_for_a_state_changes_nothing(sampler: str, workers: int) -> None:
    def run(asks: bool) -> list[Any]:
        torch.manual_seed(0)
        loader = make(sampler, workers, "threads" if workers else "inline")
        found: list[Any] = [loader.state_dict() if asks else None]
        for _ in range(2):
            for batch in loader:
                found.append(batch[0].tolist())
                if asks:
                    loader.state_dict()
        return [*found[1:], torch.get_rng_state().tolist()]

    assert run(True) == run(False)


# -- what a state is -------------------------------------------------------------------------------


def test_it_counts_what_was_yielded_and_not_what_was_prefetched() -> None:
    loader = make("sequential", 2, "threads", prefetch_factor=2)
    _, state = left_after(loader, 1)
    assert (state["_num_yielded"], state["_sampler_iter_yielded"]) == (1, 1)
    assert state["_index_sampler_state"]["samples_yielded"] == BATCH


def test_but_for_generators_it_is_json() -> None:
    for sampler in SAMPLERS:
        torch.manual_seed(0)
        (whole,) = epochs_of(make(sampler), 1)
        torch.manual_seed(0)
        taken, state = left_after(make(sampler), 2)
        generators = state["_hybridloader"].pop("generators")
        state = json.loads(json.dumps(state))
        assert all(isinstance(value, torch.Tensor) for value in generators.values())
        state["_hybridloader"]["generators"] = generators
        other = make(sampler)
        other.load_state_dict(state)
        assert taken + flat(other) == whole
        assert len(pickle.dumps(state)) < 10_000


def test_a_state_starts_no_worker_and_is_a_dict_of_its_own_each_time() -> None:
    class Silent(Dataset[int]):
        def __len__(self) -> int:
            return 4

        def __getitem__(self, index: int) -> int:
            raise AssertionError("nobody asked for a sample")

    loader = DataLoader(Silent(), num_workers=2, backend="fork")
    one, other = loader.state_dict(), loader.state_dict()
    assert one is not other
    assert one["_hybridloader"] is not other["_hybridloader"]
    one["_hybridloader"]["counts"].append(1)
    assert loader.state_dict()["_hybridloader"]["counts"] == [0, 0]
    assert loader._iterator is None


# -- what its caller was not given -----------------------------------------------------------------

interrupted: list[int] = []


class Opened:
    """A batch that is interrupted, once, while it is opened in the process of the loop."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __reduce__(self) -> Any:
        return opened, (self.number,)


def opened(number: int) -> Opened:
    if number == 3 and not interrupted:
        interrupted.append(number)
        raise KeyboardInterrupt
    return Opened(number)


def test_a_batch_that_an_interrupt_kept_from_its_caller_comes_after_resuming() -> None:
    interrupted.clear()

    def loader() -> DataLoader[Any]:
        return DataLoader(
            range(6),  # type: ignore[arg-type]
            num_workers=1,
            backend="fork",
            collate_fn=lambda samples: Opened(samples[0]),
        )

    first, found = loader(), list[int]()
    with pytest.raises(KeyboardInterrupt):
        found.extend(batch.number for batch in first)
    second = loader()
    second.load_state_dict(first.state_dict())
    assert found == [0, 1, 2]
    assert [batch.number for batch in second] == [3, 4, 5]
