"""Memory that batches are collated into: slots, used again, and whose function does it."""

from __future__ import annotations

import collections
import pickle
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.utils.data
from support.collating import SIDE, Made, nested, ours, same, square, squares, torchs_own
from torch.utils.data import Dataset, IterableDataset, default_collate
from torch.utils.data._utils import collate as torchs

from hybridloader import DataLoader, Memory, Threads
from hybridloader.fetching.collate import slot_for, teach_torch
from hybridloader.memory.slots import OWN, PrivateSlots, set_slots

pytestmark = [
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
    pytest.mark.filterwarnings("ignore:backend=.* has no workers"),
]

WAYS = [
    pytest.param("inline", 0, id="caller"),
    pytest.param("inline", 2, id="inline"),
    pytest.param("threads", 2, id="threads"),
    pytest.param("fork", 2, id="fork"),
    pytest.param("shared-memory", 2, id="shared-memory"),
    pytest.param("spawn", 1, id="spawn", marks=pytest.mark.full),
]
IN_PROCESS = WAYS[:3]


# -- where the memory is ---------------------------------------------------------------------------


@pytest.mark.parametrize(("backend", "workers"), IN_PROCESS)
def test_batches_within_this_process_are_not_in_shared_memory(backend: str, workers: int) -> None:
    for image, label in ours(squares, backend, workers):
        assert not image.is_shared()
        assert not label.is_shared()


@pytest.mark.parametrize(("backend", "workers"), WAYS)
def test_memory_comes_again_when_batches_are_dropped_and_one_that_is_kept_never_changes(
    backend: str, workers: int
) -> None:
    dataset = Made(squares, 160)
    loader = DataLoader(dataset, 4, num_workers=workers, backend=backend)
    seen, kept = [], []
    with iter(loader) as batches:
        for number, (image, _) in enumerate(batches):
            seen.append(image.data_ptr())
            if number in (3, 4, 17):
                kept.append((number, image[1:3], image.clone()))
            del image
    addresses = collections.Counter(seen)
    assert len(addresses) <= 20  # of 40: window, those kept, those on their way
    assert max(addresses.values()) >= 3
    for number, part, whole in kept:
        assert torch.equal(part, whole[1:3])
        assert torch.equal(part[0], square(4 * number + 1))


def calls_default_collate(samples: list[Any]) -> Any:
    images, labels = zip(*samples, strict=True)
    return default_collate(images), default_collate(labels)


def passes_the_map_on(samples: list[Any]) -> Any:
    return torchs.collate(samples, collate_fn_map=torchs.default_collate_fn_map)


def passes_a_map_of_its_own(samples: list[Any]) -> Any:
    chosen = {**torchs.default_collate_fn_map, int: lambda batch, **_: torch.tensor(batch)}
    return torchs.collate(samples, collate_fn_map=chosen)


@pytest.mark.parametrize(
    "collate_fn", [calls_default_collate, passes_the_map_on, passes_a_map_of_its_own]
)
@pytest.mark.parametrize(("backend", "workers"), [*IN_PROCESS, WAYS[3]])
def test_a_users_own_collate_function_gets_slots_too(
    backend: str, workers: int, collate_fn: Any
) -> None:
    loader = DataLoader(
        Made(squares, 160), 4, num_workers=workers, collate_fn=collate_fn, backend=backend
    )
    seen = []
    with iter(loader) as batches:
        for number, (image, label) in enumerate(batches):
            seen.append(image.data_ptr())
            assert label.tolist() == list(range(4 * number, 4 * number + 4))
            assert torch.equal(image[3], square(4 * number + 3))
            del image
    assert len(set(seen)) <= 20


class Hoarding(Dataset[Any]):
    """Keeps what it has collated, and looks whether somebody wrote to it."""

    def __init__(self) -> None:
        self.kept: list[Any] = []

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> Any:
        for number, tensor in self.kept:
            assert (tensor == number).all(), f"what {number} had kept has changed"
        self.kept.append((index, default_collate([torch.full((SIDE, SIDE), index)] * 4)))
        return torch.full((SIDE, SIDE), index)


@pytest.mark.parametrize(("backend", "workers"), WAYS)
def test_what_a_workers_own_code_collates_and_keeps_stays_its_own(
    backend: str, workers: int
) -> None:
    loader = DataLoader(Hoarding(), 4, num_workers=workers, backend=backend)
    with iter(loader) as batches:
        for number, batch in enumerate(batches):
            assert batch[:, 0, 0].tolist() == list(range(4 * number, 4 * number + 4))
            batch.zero_()  # ours to write to


def keeps_its_batches(samples: list[Any]) -> Any:
    batch = default_collate(samples)
    keeps_its_batches.all.append((batch[0], batch[0].clone()))  # type: ignore[attr-defined]
    for kept, before in keeps_its_batches.all:  # type: ignore[attr-defined]
        assert torch.equal(kept, before)
    return batch


@pytest.mark.parametrize(("backend", "workers"), [*IN_PROCESS, WAYS[3]])
def test_a_batch_that_the_collate_function_keeps_is_not_written_over(
    backend: str, workers: int
) -> None:
    keeps_its_batches.all = []  # type: ignore[attr-defined]
    loader = DataLoader(
        Made(square, 80), 4, num_workers=workers, collate_fn=keeps_its_batches, backend=backend
    )
    with iter(loader) as batches:
        for number, batch in enumerate(batches):
            assert torch.equal(batch[2], square(4 * number + 2))
    keeps_its_batches.all = []  # type: ignore[attr-defined]


@pytest.mark.parametrize("size", [OWN // 4 - 1, OWN // 4])
def test_small_batches_take_no_slot(size: int, slots: PrivateSlots) -> None:
    batch = default_collate([torch.ones(size, dtype=torch.uint8)] * 4)
    assert batch.shape == (4, size)
    assert (slots.size > 0) == (size == OWN // 4)


def test_an_elements_size_counts_for_what_is_small(slots: PrivateSlots) -> None:
    assert slot_for((OWN // 8,), torch.float32) is None
    assert slot_for((OWN // 8,), torch.float64).shape == (OWN // 8,)
    assert slot_for((0, 1 << 40), torch.float64) is None


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return (square(k) for k in range(80))


def test_batches_of_an_iterable_dataset_take_slots_too() -> None:
    with iter(DataLoader(Stream(), 4, num_workers=1, backend="threads")) as batches:
        seen = set()
        for number, batch in enumerate(batches):
            seen.add(batch.data_ptr())
            assert torch.equal(batch[1], square(4 * number + 1))
            del batch
    assert len(seen) <= 10  # of 20


# -- whose function it is --------------------------------------------------------------------------


def test_who_has_changed_torchs_map_finds_it_as_it_was(torchs_map: dict[Any, Any]) -> None:
    def mine(batch: Any, *, collate_fn_map: Any = None) -> Any:
        return "mine", len(batch)

    torchs_map[torch.Tensor] = mine
    for backend, workers in (("threads", 2), ("fork", 1), ("inline", 0)):
        assert ours(square, backend, workers) == [("mine", 4)] * 2
    assert torchs_map[torch.Tensor] is mine


NUMBERS = [
    [1, 2], [1, True], [1, 2.5], [1, np.int64(2)], [1, torch.tensor(2)], [-(2**63), 2**63 - 1],
    [1, np.float32(2)], [1.5, 2], [1.5, float("nan")], [1.5, np.float64(2)], [1.5, np.longdouble(2)],
    [1.5, torch.tensor(2.0)], [1.5, torch.ones(1, requires_grad=True)[0]], [2.5, True], (1, 2),
    [1, 2**63], [1, "2"], [1.5, None], [1, [2]], [True, False], [True, 2], range(2), bytes(8),
]  # fmt: skip


@pytest.mark.filterwarnings("ignore:Converting a tensor with requires_grad")
@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("numbers", NUMBERS, ids=repr)
def test_numbers_collate_to_what_torch_makes_of_them(numbers: Any, device: str) -> None:
    def tensor(batch: Any) -> Any:
        return torch.tensor(batch, dtype=torch.float64 if type(batch[0]) is float else None)

    def outcome(collate: Callable[[Any], Any]) -> Any:
        try:
            made = collate(numbers)
        except Exception as error:
            return type(error), str(error)
        return made.dtype, made.device, None if device == "meta" else repr(made), made.requires_grad

    teach_torch()
    with torch.device(device):
        assert outcome(default_collate) == outcome(tensor)


@pytest.mark.parametrize("backend", ["inline", "threads"])
def test_a_batch_of_numbers_can_be_resized_as_torchs_can(backend: str) -> None:
    [batch, *_] = ours(index_alone, backend, 1 if backend == "threads" else 0)
    assert batch.resize_(9).shape == (9,)


def test_an_empty_batch_of_numbers_is_what_torch_makes_of_it() -> None:
    teach_torch()
    for collate in (torchs.collate_int_fn, torchs.collate_float_fn):
        assert torch.equal(collate([]), torch.tensor([]))


def test_torchs_function_is_the_same_and_is_changed_once() -> None:
    teach_torch()
    code = torchs.collate_tensor_fn.__code__
    teach_torch()
    assert torchs.collate_tensor_fn.__code__ is code
    assert torchs.default_collate_fn_map[torch.Tensor] is torchs.collate_tensor_fn
    assert pickle.loads(pickle.dumps(torchs.collate_tensor_fn)) is torchs.collate_tensor_fn


def test_who_calls_torchs_function_for_tensors_itself_gets_a_slot(slots: PrivateSlots) -> None:
    held = torchs.collate_tensor_fn  # as a library that has taken it from there
    found = held([square(k) for k in range(4)])
    assert torch.equal(found[3], square(3))
    assert slots.size >= found.nbytes


def test_a_thread_without_slots_collates_as_ever() -> None:
    teach_torch()
    mine = PrivateSlots(1 << 30)
    before = set_slots(mine)
    try:
        found: list[Any] = []
        thread = threading.Thread(target=lambda: found.append(default_collate([square(1)] * 4)))
        thread.start()
        thread.join()
        assert mine.size == 0
        assert torch.equal(found[0][2], square(1))
    finally:
        assert set_slots(before) is mine


class Spying(PrivateSlots):
    """Notes which thread has asked."""

    def __init__(self, limit: int) -> None:
        super().__init__(limit)
        self.threads: set[str] = set()
        spies.append(self)

    def empty(self, size: int) -> Any:
        self.threads.add(threading.current_thread().name)
        return super().empty(size)


spies: list[Spying] = []


def test_the_training_threads_own_collation_takes_no_slot_of_the_workers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from hybridloader.backends import threads

    monkeypatch.setattr(threads, "PrivateSlots", Spying)
    spies.clear()
    backend = Threads(memory=Memory(limit=1 << 28))
    with iter(DataLoader(Made(square, 40), 4, num_workers=2, backend=backend)) as batches:
        for batch in batches:
            again = default_collate([batch[0]] * 4)
            assert torch.equal(again[3], batch[0])
    (spy,) = spies
    assert spy.threads == {"hybridloader-DataLoader-0", "hybridloader-DataLoader-1"}
    spies.clear()


def test_a_loader_in_the_caller_gives_the_thread_back_without_slots(slots: PrivateSlots) -> None:
    ours(square, "inline", 0)
    ours(square, "inline", 2)
    assert set_slots(slots) is slots
    assert slots.size == 0


@pytest.mark.parametrize("workers", [0, 2])
def test_torchs_own_loader_works_as_ever_after_ours(workers: int) -> None:
    expected = ours(nested, "threads", 1)  # and torch is taught
    options: dict[str, Any] = {"multiprocessing_context": "fork"} if workers else {}
    found = torchs_own(nested, num_workers=workers, **options)
    for batch, ours_ in zip(found, expected, strict=True):
        same(batch, ours_)
    assert found[0]["tuple"][0].is_shared() == (workers > 0)  # by torch's own way


def test_a_large_batch_of_the_caller_is_resized_as_little_as_one_of_torchs_workers() -> None:
    """Advice of docs/backends.md, which is followed here."""
    [batch, *_] = ours(square, "inline", 0)
    [theirs, *_] = torchs_own(square, num_workers=1, multiprocessing_context="fork")
    for one in (batch, theirs):
        assert one.clone().resize_(5, SIDE, SIDE).shape == (5, SIDE, SIDE)
        with pytest.raises(RuntimeError, match="resize storage that is not resizable"):
            one[:].resize_(5, SIDE, SIDE)  # a view: what torch refuses to resize is in ruins


def index_alone(index: int) -> int:
    return index
