"""Loaders on a real accelerator: batches are pinned and moved, and no copy is read too late."""

from __future__ import annotations

from collections import deque
from typing import Any

import pytest
import torch
from support.device_loaders import loader_of, on_backends, queueing
from support.digested_batches import BATCHES, KIND, Noise, busy, digest, wanted, with_digest
from support.fake_accelerator import Accelerator, current
from support.installed_torch import device_in_use
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from hybridloader import DataLoader, Pipeline, SharedMemory, Transfer
from hybridloader.errors import BackendUnavailable

# -- pinned ----------------------------------------------------------------------------------------


@on_backends
def test_pinned_batches_are_pinned(backend: Any) -> None:
    batches = list(loader_of(64, backend, pin_memory=True))
    assert all(batch.is_pinned() for batch in batches)
    assert torch.equal(torch.cat([digest(batch) for batch in batches]), wanted(64))


def test_without_workers_the_caller_pins_and_moves_and_small_tensors_and_containers_too() -> None:
    assert all(batch.is_pinned() for batch in DataLoader(Noise(16), 8, pin_memory=True))
    batches = list(DataLoader(Noise(16), 8, device=KIND))
    assert all(batch.device.type == KIND for batch in batches)
    assert torch.equal(torch.cat([digest(batch) for batch in batches]).cpu(), wanted(16))
    data = [{"x": torch.ones(2), "n": k} for k in range(8)]
    for batch in DataLoader(data, 4, num_workers=1, backend="threads", pin_memory=True):  # type: ignore[arg-type]
        assert batch["x"].is_pinned()
        assert batch["n"].is_pinned()


def test_the_number_of_threads_of_the_process_is_left_alone() -> None:
    before = torch.get_num_threads()
    assert len(list(loader_of(64, "threads", device=KIND))) == 8
    assert torch.get_num_threads() == before


# -- moved -----------------------------------------------------------------------------------------


@on_backends
def test_batches_are_on_the_device_when_next_returns(backend: Any) -> None:
    for device in (KIND, f"{KIND}:0", torch.device(KIND, 0)):
        batches = list(loader_of(64, backend, device=device))
        assert all(batch.device == torch.device(KIND, 0) for batch in batches)
        assert torch.equal(torch.cat([digest(batch) for batch in batches]).cpu(), wanted(64))


def test_a_pipeline_moves_too() -> None:
    pipe = Pipeline.from_dataset(Noise(64), backend="threads", num_workers=2).batch(8).to(KIND)
    for epoch in pipe.epochs(2):
        found = torch.cat([digest(batch) for batch in epoch])
        assert torch.equal(found.cpu(), wanted(64))


def test_the_stream_waits_for_the_copy_and_the_host_does_not() -> None:
    device = queueing()
    side = device.side_stream()
    with device.on(side):
        busy(0.2)  # no slot is free before all are taken: what they need is there after this pass
    warm = list(DataLoader(Noise(64, first=64), 8, num_workers=2, backend="threads", device=KIND))
    digest(warm[0]).cpu()
    del warm
    torch.accelerator.synchronize()
    with device.on(side):
        busy(2)  # all copies stand behind this
    done = side.record_event()
    iterator = iter(loader_of(64, "threads", device=KIND))
    batch = next(iterator)
    waited = done.query()
    found = digest(batch)
    assert torch.equal(found.cpu(), wanted(8)), "of memory that the copy had not reached"
    assert done.query()
    iterator.close()  # type: ignore[attr-defined]
    assert not waited, "next() has waited for the copy; or the machine was busy for seconds"


def collated(data: Any, collate: Any) -> Any:
    """Batches of four on the device, as a function makes them of their samples."""
    options: dict[str, Any] = {"num_workers": 1, "backend": "threads", "device": KIND}
    return DataLoader(data, 4, collate_fn=collate, **options)


def test_what_is_on_the_device_is_left_alone() -> None:
    there = torch.ones(3, device=KIND)
    for batch in collated(Noise(8), lambda samples: {"there": there, "x": torch.stack(samples)}):
        assert batch["there"] is there
        assert batch["x"].device.type == KIND


def test_objects_with_a_to_are_moved() -> None:
    for number, packed in enumerate(collated(Noise(8), pack_sequence)):
        assert type(packed) is PackedSequence
        assert packed.data.device.type == KIND
        rows = packed.data.view(-1, 4).t().contiguous()
        assert torch.equal(digest(rows).cpu(), wanted(8)[4 * number : 4 * number + 4])


@pytest.mark.filterwarnings("ignore:Sparse")  # the compressed ones are in beta
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr], ids=str)
def test_sparse_tensors_are_moved(layout: torch.layout) -> None:
    try:
        torch.eye(2).to_sparse(layout=layout).to(KIND).to_dense().cpu()
    except RuntimeError as error:
        pytest.skip(f"the device holds no such tensor: {error}".partition(" with ")[0])
    rows = [torch.eye(4) * number for number in range(8)]
    blocks = collated(rows, lambda samples: torch.block_diag(*samples).to_sparse(layout=layout))
    for number, batch in enumerate(blocks):
        assert batch.device.type == KIND
        assert batch.layout is layout
        block = torch.block_diag(*rows[4 * number : 4 * number + 4])
        assert torch.equal(batch.to_dense().cpu(), block)


# -- nothing is read too late ----------------------------------------------------------------------


@pytest.mark.timeout(900)
@on_backends
def test_batches_moved_under_pressure_on_several_streams(backend: Any) -> None:
    """Slots and blocks of the device are used again thousands of times, with the streams far behind."""
    device = queueing()
    streams = [torch.Stream(device.device) for _ in range(3)]
    found, sums = [], []
    kept: deque[Any] = deque(maxlen=5)
    samples = 8 * BATCHES
    loader = loader_of(
        samples, backend, device=Transfer(KIND, batches_ahead=3), collate_fn=with_digest
    )
    iterator = iter(loader)
    for number in range(BATCHES):
        with device.on(streams[number % 3]):
            batch, said = next(iterator)
            if number % 40 == 0:
                busy(0.005)  # this stream comes to the batch long after it was let go
            found.append(digest(batch))
            sums.append(said)
            if number % 7 == 0:
                kept.append(batch)
            del batch, said
    torch.accelerator.synchronize()
    assert next(iterator, None) is None
    assert torch.equal(torch.cat(found), torch.cat(sums))
    assert torch.equal(torch.cat(found)[:800].cpu(), wanted(800))


@pytest.mark.timeout(900)
@on_backends
def test_pinned_batches_copied_by_the_user_and_let_go_at_once(backend: Any) -> None:
    found, sums = [], []
    loader = loader_of(8 * BATCHES, backend, pin_memory=True, collate_fn=with_digest)
    for number, (batch, said) in enumerate(loader):
        if number % 40 == 0:
            busy(0.005)  # the copy stands behind this, and the pinned memory must wait for it
        found.append(digest(batch.to(KIND, non_blocking=True)))
        sums.append(said.clone())
        del batch, said
    torch.accelerator.synchronize()
    assert torch.equal(torch.cat(found).cpu(), torch.cat(sums))
    assert torch.equal(torch.cat(sums)[:800], wanted(800))


def test_a_loop_that_only_queues_work_has_six_batches_on_the_device() -> None:
    """`batches_ahead + 4`, as docs/devices.md promises: two of them wait or are being copied."""
    queueing()
    if not hasattr(torch.accelerator, "memory_reserved"):
        pytest.skip("this torch does not report the memory of a device")
    size = 16 << 20  # the allocator reserves memory for one tensor of this size
    loader = loader_of(320, "threads", data=Noise(320, size // 8), workers=4, device=KIND)
    torch.accelerator.synchronize()
    torch.accelerator.empty_cache()
    before = torch.accelerator.memory_reserved()
    for batch in loader:
        batch.view(-1)[::4096].clone()
        busy(0.02)
        del batch
    # And a block of 2 MiB for small tensors.
    assert torch.accelerator.memory_reserved() - before <= 6 * size + (2 << 20)


def test_the_stream_of_the_copies_may_be_the_users_too() -> None:
    """torch has 32 streams, and returns them in turn."""
    device = queueing()
    side = device.side_stream()
    streams = [type(side)(device.device) for _ in range(40)]
    same = next((stream for stream in streams if stream == side), side)
    with device.on(same):
        found = [digest(batch) for batch in loader_of(160, "threads", device=KIND)]
    torch.accelerator.synchronize()
    assert torch.equal(torch.cat(found).cpu(), wanted(160))


# -- which device, and when ------------------------------------------------------------------------


def test_the_current_device_is_known_and_more_than_there_are_is_refused() -> None:
    device = current()
    assert isinstance(device, Accelerator)
    assert device.name == f"{KIND}:{torch.accelerator.current_device_index()}"
    count = torch.accelerator.device_count()
    with pytest.raises(ValueError, match=f"sees {count}"):
        DataLoader(Noise(8), device=f"{KIND}:{count}")


def test_the_thread_takes_the_device_that_was_current_where_the_iterator_was_made() -> None:
    if torch.accelerator.device_count() < 2:
        pytest.skip("needs two devices")
    with torch.accelerator.device_index(1):
        iterator = iter(loader_of(64, "threads", device=KIND))
    before = torch.accelerator.memory_allocated(0)
    batches = list(iterator)
    assert all(batch.device.index == 1 for batch in batches)
    assert torch.accelerator.memory_allocated(0) == before
    assert torch.accelerator.current_device_index() == 0


def test_streams_and_device_of_the_caller_are_left_alone() -> None:
    last = torch.accelerator.device_count() - 1
    index, stream = torch.accelerator.current_device_index(), torch.accelerator.current_stream()
    for backend in ("inline", "threads"):
        loader = loader_of(16, backend, device=f"{KIND}:{last}")
        assert all(batch.device.index == last for batch in loader)
        assert torch.accelerator.current_device_index() == index
        assert torch.accelerator.current_stream() == stream


# -- generators and forks --------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["threads", "inline"])
def test_a_seed_that_a_worker_sets_is_not_that_of_the_device(backend: str) -> None:
    module = torch.get_device_module(KIND)
    numbers = range(torch.accelerator.device_count())
    torch.manual_seed(3)
    before = [module.get_rng_state(number) for number in numbers]
    assert len(list(loader_of(16, backend, worker_init_fn=torch.manual_seed))) == 2
    for number, state in zip(numbers, before, strict=True):
        assert torch.equal(module.get_rng_state(number), state)


def test_a_fork_is_refused_now() -> None:
    if device_in_use() is None:
        pytest.skip("the module of this device does not tell whether it is in use")
    for backend in ("fork", SharedMemory("fork")):
        with pytest.raises(BackendUnavailable, match="does not survive a fork"):
            iter(DataLoader(Noise(8), num_workers=1, backend=backend))
    assert SharedMemory()._method() != "fork"
