"""Wherever a pass is left, the rest of it comes: every kind of dataset and sampler, on any backend.

The uninterrupted run is the oracle. How often a state is taken depends on what it costs; here that is
set, to every so many steps, so that many places lie between two states.
"""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import pytest
import torch
from support.sampler_loaders import pace, through_a_file
from support.state_cases import CASES, Case

from hybridloader import DataLoader, StatefulDataLoader

pytestmark = [
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
    pytest.mark.filterwarnings("ignore:.* so each worker reads its part of it again"),
    pytest.mark.filterwarnings("ignore:backend=.* has no workers"),
]

KINDS: tuple[Any, ...] = (
    DataLoader,
    StatefulDataLoader,
    DataLoader,
    partial(StatefulDataLoader, snapshot_every_n_steps=3),
)

NUMBERS_OF_WORKERS = [3, 0, 1, 2]


def plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.tolist()
    return [plain(one) for one in value] if isinstance(value, (list, tuple)) else value


def take(iterator: Any, count: int = 99) -> list[Any]:
    """Return up to `count` results, with errors in their places."""
    found: list[Any] = []
    while len(found) < count:
        try:
            found.append(plain(next(iterator)))
        except StopIteration:
            break
        except (LookupError, ValueError) as error:
            found.append(str(error))
    return found


def assert_alike(one: Any, other: Any) -> None:
    if isinstance(one, torch.Tensor):
        assert torch.equal(one, other)
    elif isinstance(one, dict):
        assert set(one) == set(other)
        for key in one:
            assert_alike(one[key], other[key])
    else:
        assert one == other


@cache
def passes(kind: Any, case: Case, workers: int) -> list[list[Any]]:
    """Run a loader without a stop. What is drawn depends on the number of workers that it has."""
    torch.manual_seed(0)
    loader = kind(num_workers=workers, backend="inline", **case.options())
    return [take(iter(loader)) for _ in range(case.passes)]


def leg(kind: Any, case: Case, workers: int, backend: str, state: Any) -> Any:
    """Make a loader that goes on from `state`, while the process's generator is anywhere."""
    torch.manual_seed(0 if state is None else workers + 90)
    backend = case.backend(backend) if workers else "inline"
    loader = kind(num_workers=workers, backend=backend, **case.options())
    if state is not None:
        loader.load_state_dict(through_a_file(state))
        assert_alike(loader.state_dict(), state)
    return loader


@pytest.mark.parametrize("name", CASES)
def test_left_after_any_batch_the_rest_comes_under_other_settings_and_twice(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    case, number = CASES[name], [*CASES].index(name)
    for workers in case.workers or (2,):
        length = len(passes(DataLoader, case, workers)[0])
        for count in range(number % 2, length + 1, 2 + length // 8):
            turn = count + number
            kind = KINDS[turn % 4]
            pace(monkeypatch, 1 + turn % 4)
            numbers = NUMBERS_OF_WORKERS if case.workers is None else [workers] * 4
            backends = ("threads", "inline", "threads", "inline")
            taken, state = [], None
            for now, steps in ((turn, count), (turn + 1, min(1, length - count))):
                backend = "fork" if steps == count == number % 5 else backends[now % 4]
                loader = leg(kind, case, numbers[now % 4], backend, state)
                iterator = iter(loader)
                taken += take(iterator, steps)
                state = loader.state_dict()
                del iterator
            last = leg(kind, case, numbers[(turn + 2) % 4], backends[turn % 4], state)
            for wanted in passes(kind, case, numbers[turn % 4]):
                assert taken + take(iter(last)) == wanted, f"left after {count}, {workers} workers"
                taken = []
