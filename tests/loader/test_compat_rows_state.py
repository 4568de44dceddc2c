"""Behavior that frameworks rely on, R35 to R37: state of a loader (more: test_loader_state*.py).

No framework is imported. A test does with our loader what the framework does with any loader.
"""

from __future__ import annotations

import itertools
import json
import threading
from typing import Any

import pytest
from support.compat import Numbers, flat, quick

from hybridloader import DataLoader


def made(backend: str = "inline", workers: int = 2, **more: Any) -> Any:
    return DataLoader(Numbers(12), 2, num_workers=workers, backend=backend, **more)


@quick
def test_r35_after_a_state_is_loaded_the_rest_of_the_epoch_comes(backend: str) -> None:
    """Lightning uses the two methods if both are there; one that did nothing would replay sample 0."""
    loader = made(backend, shuffle=True)
    with iter(loader) as iterator:
        list(itertools.islice(iterator, 2))
        state = loader.state_dict()
        rest = flat(iterator)
    again = made(backend, shuffle=True)
    again.load_state_dict(state)
    assert flat(again) == rest
    assert len(rest) == 8
    assert sorted(flat(again)) == list(range(12))  # and after it a whole one


def test_r36_a_state_can_be_had_at_any_time_and_is_a_dict_of_its_own() -> None:
    """accelerate asks before iterating, and before each batch: 6 times for 4 batches."""
    loader = made("threads")
    before = threading.active_count()
    states = [loader.state_dict(), loader.state_dict()]
    assert threading.active_count() == before
    with iter(loader) as iterator:
        for _ in iterator:
            states.append(loader.state_dict())
    assert [state["_num_yielded"] for state in states] == [0, 0, 1, 2, 3, 4, 5, 6]
    assert len({id(state) for state in states}) == len(states)
    states[0].clear()
    states[2]["_num_yielded"] = None
    assert loader.state_dict()["_num_yielded"] == 6


@pytest.mark.parametrize("workers", [0, 2])
def test_r37_what_accelerate_edits_is_there_and_heeded(workers: int) -> None:
    """Subtract the batches that were fetched ahead, and note whether the pass is over."""
    loader = made(workers=workers)
    with iter(loader) as iterator:
        list(itertools.islice(iterator, 3))
        state = loader.state_dict()
    json.dumps({key: state[key] for key in ("_sampler_iter_yielded", "_num_yielded")})
    assert state["_iterator_finished"] is False
    for counts, unit in ((state, 1), (state["_index_sampler_state"], 2)):
        for key in ("_sampler_iter_yielded", "_num_yielded", "samples_yielded"):
            if key in counts:
                counts[key] -= unit
    again = made(workers=workers)
    again.load_state_dict(state)
    assert flat(again) == list(range(4, 12))
    again.load_state_dict({**state, "_iterator_finished": True})
    assert flat(again) == list(range(12))
