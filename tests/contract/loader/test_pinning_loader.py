"""A loader that pins, or moves to a device, by a thread: order, bounds, epochs, states."""

from __future__ import annotations

import os
import threading
import warnings
from typing import Any

import pytest
import torch
from support.compat import Noted
from support.failing_datasets import outcomes
from support.fake_accelerator import FakeAccelerator, taken_for_current
from support.installed_torch import warns_without_accelerator
from support.pinning_datasets import (
    BACKENDS,
    NO_ACCELERATOR,
    Counting,
    Rows,
    Stream,
    first_of,
    on_backends,
    reading,
    runs,
    start,
)
from torch.utils.data import DataLoader as TorchLoader

from hybridloader import DataLoader, Transfer

OWN = 256 << 10
"""Bytes from which on a buffer has a slot of its own."""

PIN_THREAD = "hybridloader-pin_memory"
TO_THREAD = "hybridloader-to"


def main() -> str:
    return threading.current_thread().name


# -- what comes ------------------------------------------------------------------------------------


@pytest.mark.filterwarnings(NO_ACCELERATOR)
@pytest.mark.parametrize(
    ("moves", "options"),
    [
        *((moves, {"num_workers": 2, "backend": b}) for b in BACKENDS for moves in (True, False)),
        (True, {}),
        (False, {"num_workers": 2, "backend": "inline"}),
    ],
)
def test_one_thread_enters_the_device_and_pins_or_moves_or_the_caller_where_it_does_the_work(
    moves: bool, options: Any
) -> None:
    fake = Counting()
    loader = DataLoader(Rows(), 2, pin_memory=True, device=fake if moves else None, **options)
    with taken_for_current(fake):
        iterator = iter(loader)
    batches = list(iterator)
    fake.run()
    assert all(fake.holds(batch) if moves else fake.is_pinned(batch) for batch in batches)
    assert [first_of(batch) for batch in batches] == [[k, k + 1] for k in range(0, 12, 2)]
    if options.get("backend") not in BACKENDS:
        assert set(fake.pinners) == {main()}
        assert fake.entries == [], "the caller's device is the caller's"
        assert fake.takers == [], "its own stream has the copies"
        return
    thread = TO_THREAD if moves else PIN_THREAD
    assert thread in fake.entries
    assert main() not in fake.entries
    assert {*fake.pinners, *fake.movers} <= {thread}
    assert fake.movers == ([thread] * 6 if moves else [])
    assert fake.takers == ([main()] * 6 if moves else [])
    assert len(fake.kept) == 6 * moves


def test_a_device_is_found_by_its_name_when_the_iterator_is_made() -> None:
    fake = FakeAccelerator("fake:0")
    loader = DataLoader(Rows(), 4)
    loader.device = fake.name
    assert vars(loader)["device"] == "fake:0"
    with taken_for_current(fake):
        assert fake.holds(next(iter(loader)))
    loader.device = None
    assert not fake.holds(next(iter(loader)))


@on_backends
def test_slots_that_the_device_has_yet_to_read_are_not_filled_again(backend: str) -> None:
    """Check that no slot is used again: the copies read the slots at the very end."""
    fake = FakeAccelerator()
    size = OWN // 4  # a batch has a slot of its own
    loader = DataLoader(Rows(40, size), 2, num_workers=2, backend=backend, device=fake)
    seen: list[torch.Tensor] = []
    for number, batch in enumerate(loader):
        fake.launch(lambda batch=batch: seen.append(batch[:, ::1024].clone()))
        del batch
        if number == 5:
            fake.run()
    fake.run()
    assert [first_of(batch) for batch in seen] == [[k, k + 1] for k in range(0, 40, 2)]


# -- copies that the loop makes itself -------------------------------------------------------------


@pytest.mark.filterwarnings(NO_ACCELERATOR)
@pytest.mark.parametrize(("backend", "other"), [("fork", False), ("inline", True)])
def test_pinned_batches_are_what_the_loop_copies_on_streams_that_the_loader_does_not_know(
    backend: str, other: bool
) -> None:
    """`enumerate` drops each batch outside the block of the stream that copies it."""
    fake, size = FakeAccelerator(), OWN // 4
    device = FakeAccelerator("fake:1") if other else fake
    device.pinned = fake.pinned  # for all devices
    stream = device.default if other else device.new_stream()
    loader = DataLoader(Rows(40, size), 2, num_workers=2, backend=backend, pin_memory=True)
    copies = []
    with taken_for_current(fake):
        for _, batch in enumerate(loader):
            assert fake.is_pinned(batch)
            with device.on(stream):
                copies.append(device.move(batch))
            del batch
            fake.run(fake.default)
    device.run()
    assert [first_of(copy) for copy in copies] == [[k, k + 1] for k in range(0, 40, 2)]


# -- the sampler -----------------------------------------------------------------------------------


def test_the_sampler_is_asked_by_the_caller_when_torch_asks_it() -> None:
    def rhythm(kind: Any, **options: Any) -> list[int]:
        sampler = Noted(12)
        iterator = iter(kind(Rows(), 2, sampler=sampler, num_workers=1, **options))
        drawn = [len(sampler.given)]
        for _ in iterator:
            drawn.append(len(sampler.given))
        assert sampler.places == {(os.getpid(), threading.get_ident())}
        return drawn

    theirs = rhythm(TorchLoader)
    for backend in BACKENDS:
        assert rhythm(DataLoader, backend=backend, device=FakeAccelerator()) == theirs


def test_what_the_sampler_raises_comes_behind_what_it_had_given() -> None:
    def indices() -> Any:
        yield from range(5)
        raise KeyError("no more")

    class Failing(Noted):
        def __iter__(self) -> Any:
            return indices()

    loader = DataLoader(
        Rows(),
        None,
        sampler=Failing(12),
        num_workers=1,
        backend="threads",
        device=FakeAccelerator(),
    )
    found = outcomes(iter(loader))
    assert [type(item) for item in found] == [torch.Tensor] * 5 + [KeyError]


# -- bounds ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("transfer", "most"),
    [
        ({"batches_ahead": 3}, 3),
        ({"batches_ahead": 99, "buffer_bytes": 40}, 2),
        ({"buffer_bytes": 1}, 1),
    ],
    ids=["batches", "bytes", "one batch is larger"],
)
def test_so_many_wait_and_one_more_is_at_hand(transfer: Any, most: int) -> None:
    fake = Counting()
    fake.enough = most + 1
    loader = DataLoader(
        Rows(60),
        1,
        num_workers=2,
        prefetch_factor=20,
        backend="threads",
        device=Transfer(fake, **transfer),
    )
    with start(loader) as iterator:
        for taken in range(1, 30):
            next(iterator)
            assert fake.many.wait(60)
            assert len(fake.pinners) <= taken + most + 1


def test_a_loop_that_runs_ahead_of_its_device_reserves_the_memory_of_few_batches() -> None:
    fake = FakeAccelerator()
    seen: list[bytes] = []
    loader = DataLoader(
        Rows(80),
        2,
        num_workers=2,
        backend="threads",
        persistent_workers=True,
        device=Transfer(fake, batches_ahead=1),
    )
    most = 0
    for count in (3, 40):
        for number, batch in enumerate(loader):
            fake.launch(reading(batch, seen))
            most = max(most, fake.reserved // batch.nbytes)
            if number + 1 == count:
                break
    assert most <= 1 + 4
    fake.run()
    assert [read[::16] for read in seen] == [bytes([k, k + 1]) for k in (0, 2, 4, *range(0, 80, 2))]


# -- states ----------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:Stream has no state_dict")
@pytest.mark.parametrize(
    ("dataset", "taken"), [(Rows(), 0), (Stream(), 1), (Rows(), 3), (Stream(), 6)]
)
def test_a_state_is_behind_what_was_taken_and_not_behind_what_was_moved(
    dataset: Any, taken: int
) -> None:
    fake = Counting(manual=False)
    fake.enough = min(6, taken + 3)  # two that wait, and the one behind them

    def make(**options: Any) -> DataLoader:
        return DataLoader(dataset, 2, num_workers=2, backend="threads", **options)

    whole = [first_of(batch) for batch in make()]
    loader = make(device=fake)
    iterator = start(loader)
    got = [first_of(next(iterator)) for _ in range(taken)]
    assert fake.many.wait(60)
    state = loader.state_dict()
    assert state["_num_yielded"] == taken
    iterator.close()
    for options in ({}, {"device": FakeAccelerator(manual=False)}):
        rest = make(**options)
        rest.load_state_dict(state)
        assert got + [first_of(batch) for batch in rest] == whole


# -- without an accelerator ------------------------------------------------------------------------


@pytest.mark.skipif(torch.accelerator.is_available(), reason="there is one here")
@pytest.mark.parametrize("workers", [0, 1])
def test_without_an_accelerator_pin_memory_warns_as_torch_does_and_all_comes(workers: int) -> None:
    def told(loader: Any) -> list[str]:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            # From Python 3.12 on, as torch's loader forks beside threads.
            warnings.filterwarnings("ignore", ".*use of fork", DeprecationWarning)
            assert [first_of(batch) for batch in loader] == [[0, 1], [2, 3]]
        return [str(w.message) for w in caught]

    options: dict[str, Any] = {"batch_size": 2, "num_workers": workers, "pin_memory": True}
    ours = DataLoader(Rows(4), backend="threads" if workers else None, **options)
    theirs = told(TorchLoader(Rows(4), **options))
    assert told(ours) == theirs
    assert len(theirs) == warns_without_accelerator


@pytest.mark.skipif(torch.accelerator.is_available(), reason="there is one here")
def test_a_device_that_is_not_there_is_refused_before_any_worker_starts() -> None:
    for device in ("cuda", "cuda:7", torch.device("cuda")):
        with pytest.raises(ValueError, match="is not available"):
            DataLoader(Rows(), num_workers=1, device=device)
    loader = DataLoader(Rows(), num_workers=1)
    drawn = torch.get_rng_state()
    loader.device = "cuda"
    with pytest.raises(ValueError, match="is not available"):
        iter(loader)
    assert torch.equal(drawn, torch.get_rng_state())
    for wrong, kind in (("cuad", ValueError), (3, TypeError), (True, TypeError)):
        with pytest.raises(kind, match="device"):
            DataLoader(Rows(), device=wrong)  # type: ignore[arg-type]


def test_the_cpu_is_where_batches_are_and_takes_no_thread() -> None:
    iterator = start(DataLoader(Rows(), num_workers=1, backend="threads", device="cpu"))
    assert not runs(TO_THREAD)
    assert first_of(next(iterator)) == [0]
    iterator.close()


@pytest.mark.parametrize(("backend", "dataset"), [("threads", Stream()), ("fork", Rows())])
def test_persistent_workers_go_on_after_an_early_break_with_another_thread(
    backend: str, dataset: Any
) -> None:
    fake = FakeAccelerator(manual=False)
    loader = DataLoader(
        dataset, 2, num_workers=2, backend=backend, persistent_workers=True, device=fake
    )
    whole = [first_of(batch) for batch in loader]
    workers = list(loader._iterator._workers)  # type: ignore[union-attr]
    for taken in (1, 3):
        iterator = iter(loader)
        assert [first_of(next(iterator)) for _ in range(taken)] == whole[:taken]
    assert [first_of(batch) for batch in loader] == whole
    assert list(loader._iterator._workers) == workers  # type: ignore[union-attr]
    assert all(worker.is_alive() for worker in workers)
