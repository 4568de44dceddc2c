"""Values on their way to workers, from these to others and back: whole, writable, and within the limits.

Items of a pipeline are read here and sent as tasks; results of its first stage go on unopened.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.comparison import same
from support.crew_driver import OWN, CrewDriver, echo, full
from torch.utils.data import default_collate

from hybridloader import DataLoader, Fork, Memory, Pipeline, Spawn, Threads, WorkerDied

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")
LARGE = 2 * OWN
NO_ROOM = Fork(memory=Memory(limit=1))
FRESH = pytest.mark.full  # a fresh worker takes and sends as a forked one does

PAIRS = [
    pytest.param(Fork(), Fork(), id="fork-fork"),
    pytest.param(Threads(), Fork(), id="threads-fork"),
    pytest.param(NO_ROOM, NO_ROOM, id="no room"),
    pytest.param(Fork(), Spawn(), id="fork-spawn", marks=FRESH),
    pytest.param(Spawn(), Fork(), id="spawn-fork", marks=FRESH),
]


def filled(number: int, size: int = LARGE) -> np.ndarray:
    return np.full(size, number, np.uint8)


def keyed(index: int) -> dict[str, Any]:
    """A dict of 60 keys: tensors of two kinds, numbers and text."""
    sample: dict[str, Any] = {f"row {i}": torch.full((4,), index + i) for i in range(20)}
    sample |= {f"scalar {i}": torch.tensor(index * 0.5 + i) for i in range(20)}
    return sample | {f"number {i}": index + i for i in range(20)} | {"text": f"sample {index}"}


def of_all_sizes(index: int) -> dict[str, torch.Tensor]:
    """Tensors of sizes about those at which the way to send them changes."""
    sample = {}
    for kind in ("bool", "uint8", "float32", "bfloat16", "float64", "complex64"):
        dtype = getattr(torch, kind)
        for size in (1, 17, 64, 257, 4096, 4097, 32 * 1024, 256 * 1024):
            for count in {max(1, size // dtype.itemsize + more) for more in (-1, 0, 1)}:
                sample[f"{kind} {count}"] = torch.full((count,), index).to(dtype)
    return sample


def kinds_of_values() -> list[Any]:
    rng = np.random.default_rng(0)
    big = rng.integers(0, 255, (300, 1000), np.uint8)
    tensor = torch.from_numpy(rng.random((3, 64, 400)))
    return [
        7,
        None,
        [0, (1, 2)],
        big,
        tensor,
        big[::2, ::3].astype(">u4"),
        np.asfortranarray(big.astype(np.float32)),
        tensor.transpose(0, 2),
        tensor[0].requires_grad_(),
        [big[:150], {"a": (tensor, "text", None)}, np.empty((0, 7)), torch.empty(0, 3)],
        [rng.random(5000) for _ in range(130)],  # many small: they share a slot
        [np.full(OWN, k, np.uint8) for k in range(60)],  # more new slots than one message tells
        rng.bytes(1_000_000),
        bytearray(500_000),
        "ç" * 400_000,  # a header that has a slot
        [rng.bytes(90_000) for _ in range(8)],
        np.array([{"an": "object"}, None], dtype=object),
        keyed(3),
        [torch.arange(1 + (7 * i) % 50) for i in range(40)],
    ]


@pytest.fixture(autouse=True)
def _those_without_room_may_be_warned_of(request: pytest.FixtureRequest) -> Any:
    with warnings.catch_warnings():
        if "no room" in request.node.name:
            warnings.filterwarnings("ignore", message=".*ordinary memory")
        yield


def stages(items: Any, *steps: tuple[Callable[[Any], Any], Any], **more: Any) -> Pipeline:
    """A pipeline of steps, each on workers of its own."""
    pipe = Pipeline.from_iterable(items)
    for function, backend in steps:
        pipe = pipe.map(function, backend=backend, num_workers=1, fuse=False, **more)
    return pipe


# -- what arrives ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("one", "other"), PAIRS)
def test_values_of_every_kind_arrive_as_they_are_in_slots_that_are_used_again(
    one: Any, other: Any
) -> None:
    values = kinds_of_values()
    with stages(values * 2, (echo, one), (echo, other)).run() as run:
        for value, found in zip(values * 2, run, strict=True):
            same(value, found)


@pytest.mark.parametrize("backend", [Threads(), Fork()], ids=repr)
@pytest.mark.parametrize("collate", [default_collate, list])
def test_every_tensor_of_a_batch_begins_at_a_cache_line_as_with_torch(
    backend: Any, collate: Any
) -> None:
    dataset: Any = [of_all_sizes(index) for index in range(4)]
    loader = DataLoader(dataset, 2, num_workers=1, backend=backend, collate_fn=collate)
    for number, batch in enumerate(loader):
        same(batch, collate(dataset[2 * number : 2 * number + 2]))
        if backend == Threads() and collate is list:
            continue  # they are the dataset's own
        for sample in batch if collate is list else [batch]:
            assert {key: t.data_ptr() % 64 for key, t in sample.items() if t.data_ptr() % 64} == {}


def test_results_go_from_process_to_process_unopened(tmp_path: Path) -> None:
    class Noted:
        """Leaves a mark of each process that loads it."""

        def __init__(self, number: int) -> None:
            self.number, self.large = number, full(number)

        def __setstate__(self, state: dict[str, Any]) -> None:
            vars(self).update(state)
            (tmp_path / str(os.getpid())).touch()

    def number(noted: Noted) -> tuple[int, int]:
        return noted.number, os.getpid()

    numbers, pids = zip(*stages(range(6), (Noted, Fork()), (number, Fork())), strict=True)
    assert numbers == tuple(range(6))
    assert {file.name for file in tmp_path.iterdir()} == {str(pid) for pid in pids}


class Mine:
    """Lives in a module that every worker can import; made to look as if in the main script."""

    def __init__(self, x: Any) -> None:
        self.x = x


@pytest.mark.parametrize("other", [Fork(), pytest.param(Spawn(), marks=FRESH)], ids=repr)
def test_functions_and_classes_made_on_the_spot_are_the_callers_own_again(
    other: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    import __main__

    monkeypatch.setattr(Mine, "__module__", "__main__")
    monkeypatch.setattr(__main__, "Mine", Mine, raising=False)

    def wrap(index: Any) -> Any:
        kind, x = index
        return Mine(x) if kind == "class" else lambda: x

    def unwrap(found: Any) -> Any:
        return ["class", found.x] if isinstance(found, Mine) else ["function", found()]

    sent = [["class", 5], ["class", full(5)], ["function", 5], ["function", full(5)]]
    same(list(stages(sent, (wrap, Fork()), (unwrap, other))), sent)
    same(list(stages(map(wrap, sent), (unwrap, other))), sent)


# -- who holds what --------------------------------------------------------------------------------


@pytest.mark.parametrize(("one", "other"), PAIRS)
def test_a_worker_may_write_to_its_input_and_give_views_of_it_on(one: Any, other: Any) -> None:
    def doubled(index: Any) -> Any:
        index[0][:] *= 2
        index[1].mul_(2)
        return [index[0][1000:], index[0].reshape(-1, 2)[:, 1], index[1][:OWN]]

    items = [[filled(k), torch.full((LARGE,), k)] for k in range(12)]
    with stages(items, (doubled, one), (echo, other)).run() as run:
        kept = list(run)
    for k, views in enumerate(kept):
        assert [len(view) for view in views] == [LARGE - 1000, LARGE // 2, OWN]
        assert all(int(view.min()) == int(view.max()) == 2 * k for view in views)
    if not one.in_process:
        for k, (array, tensor) in enumerate(items):  # those of the caller are its own
            assert array.min() == array.max() == tensor.min() == tensor.max() == k


def hoard() -> Callable[[Any], int]:
    kept: list[Any] = []

    def keep(index: Any) -> int:
        kept.append(index)
        assert all(one.min() == one.max() == k for k, one in enumerate(kept))
        return len(kept)

    return keep


@pytest.mark.parametrize("limit", [8_000_000, 1], ids=["some room", "none"])
@pytest.mark.parametrize("first", [True, False], ids=["tasks", "results of others"])
def test_a_worker_that_keeps_all_is_given_copies_and_its_parent_warns_once(
    limit: int, first: bool
) -> None:
    last = hoard(), Fork(memory=Memory(limit=limit))
    pipe = (
        stages(map(filled, range(30)), last) if first else stages(range(30), (filled, Fork()), last)
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert list(pipe) == list(range(1, 31))
    (told,) = [str(one.message) for one in caught]
    assert "ordinary memory" in told
    assert "Memory(limit=...)" in told


def test_slots_of_two_stages_are_used_again_so_hundreds_of_items_stay_within_the_limit() -> None:
    """A slot that is not given back would end in a warning, which is an error here."""
    limited = Fork(memory=Memory(limit=96 * LARGE))
    sizes = [LARGE, LARGE + 4096, LARGE + 8192]

    def made(number: int) -> np.ndarray:
        return filled(number % 251, sizes[number % 3])

    with stages(map(made, range(300)), (echo, limited), (echo, limited), prefetch=4).run() as run:
        for number, array in enumerate(run):
            assert len(array) == sizes[number % 3]
            assert array[0] == array[-1] == number % 251


def test_a_payload_is_opened_discarded_or_sent_on_and_then_no_more() -> None:
    with CrewDriver(Fork(), full) as a, CrewDriver(Fork(), echo) as b:
        opened, sent, dropped = (a.payload(a.send(k)) for k in range(3))
        assert opened.open()[0] == 0
        same(b.call(sent), full(1))
        dropped.discard()
        for payload in (opened, sent, dropped):
            with pytest.raises(RuntimeError, match="already"):
                payload.open()
            with pytest.raises(RuntimeError, match="already"):
                b.send(payload)
            payload.discard()  # nothing


# -- when it goes wrong: `conftest.py` counts descriptors and segments that are left ---------------


class Poison:
    """Can be sent, and not be loaded."""

    def __init__(self, more: Any = None) -> None:
        self.more = more

    def __reduce__(self) -> Any:
        return _refuse, (self.more,)


def _refuse(more: Any) -> None:
    raise LookupError("this can't be loaded")


def test_a_task_that_can_not_be_loaded_fails_alone_and_gives_its_slots_back() -> None:
    items = [Poison(filled(3)) if k % 2 else filled(2) for k in range(40)]
    limited = Fork(memory=Memory(limit=16 * LARGE))
    # One item in flight, so that no task has two: an item that can't be loaded takes its task along.
    with stages(items, (np.sum, limited), prefetch=1).run() as run:
        for _ in range(20):
            assert next(run) == 2 * LARGE
            with pytest.raises(LookupError, match="can't be loaded"):
                next(run)


@pytest.mark.parametrize("stage", [0, 1])
def test_what_a_dead_worker_never_read_leaves_nothing(stage: int) -> None:
    def die(index: Any) -> None:
        os._exit(3)

    functions = [(echo, Fork()), (echo, Fork())]
    functions[stage] = (die, Fork())
    pipe = stages(map(filled, range(12)), *functions, prefetch=8)
    with pipe.run() as run, pytest.raises(WorkerDied, match="exited with code 3"):
        list(run)
