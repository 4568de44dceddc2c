"""On a real device: what is pinned is pinned, what is moved is there, and nothing is read too late."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from collections import deque
from typing import Any

import pytest
import torch
from digests import Noise, busy, digest, wanted, with_digest

from hybridloader import DataLoader, Memory, Pipeline, SharedMemory, Threads, Transfer
from hybridloader.buffers.segments import make_private
from hybridloader.devices.accelerator import TorchAccelerator, current, find

LIMIT = 24 << 20
"""Of the slots: some forty batches of half a MiB, so that each is filled again and again."""

BACKENDS = {
    "threads": Threads(memory=Memory(limit=LIMIT)),
    "processes": SharedMemory("loky", memory=Memory(limit=LIMIT)),
}
on_backends = pytest.mark.parametrize("backend", list(BACKENDS.values()), ids=list(BACKENDS))


def loader_of(samples: int, backend: Any, **options: Any) -> DataLoader:
    return DataLoader(Noise(samples), 8, num_workers=4, backend=backend, **options)


# -- pinned ----------------------------------------------------------------------------------------


@on_backends
def test_pinned_batches_are_pinned_where_they_were_made(backend: Any) -> None:
    with iter(loader_of(64, backend, pin_memory=True)) as iterator:  # type: ignore[attr-defined]
        first = next(iterator)
        assert first.is_pinned()
        assert iterator._pinner.locks.size > 0
        rest = [first, *iterator]
    assert all(batch.is_pinned() for batch in rest)
    assert torch.equal(torch.cat([digest(batch) for batch in rest]), wanted(64))


def test_without_workers_the_caller_pins() -> None:
    batches = list(DataLoader(Noise(16), 8, pin_memory=True))
    assert all(batch.is_pinned() for batch in batches)


def test_small_tensors_and_containers_are_pinned() -> None:
    data = [{"x": torch.ones(2), "n": k} for k in range(8)]
    for batch in DataLoader(data, 4, num_workers=1, backend="threads", pin_memory=True):  # type: ignore[arg-type]
        assert batch["x"].is_pinned()
        assert batch["n"].is_pinned()


def test_the_number_of_threads_of_the_process_is_left_alone() -> None:
    before = torch.get_num_threads()
    assert len(list(loader_of(64, "threads", device="cuda"))) == 8
    assert torch.get_num_threads() == before


# -- moved -----------------------------------------------------------------------------------------


@on_backends
@pytest.mark.parametrize("device", ["cuda", "cuda:0", torch.device("cuda", 0)], ids=str)
def test_batches_are_on_the_device_when_next_returns(backend: Any, device: Any) -> None:
    batches = list(loader_of(64, backend, device=device))
    assert all(batch.device == torch.device("cuda", 0) for batch in batches)
    assert torch.equal(torch.cat([digest(batch) for batch in batches]).cpu(), wanted(64))


def test_a_pipeline_moves_too() -> None:
    pipe = Pipeline.from_dataset(Noise(64), backend="threads", workers=2).batch(8).to("cuda")
    for epoch in pipe.epochs(2):
        found = torch.cat([digest(batch) for batch in epoch])
        assert torch.equal(found.cpu(), wanted(64))


def test_without_workers_the_caller_moves() -> None:
    batches = list(DataLoader(Noise(16), 8, device="cuda"))
    assert all(batch.is_cuda for batch in batches)
    assert torch.equal(torch.cat([digest(batch) for batch in batches]).cpu(), wanted(16))


def test_the_stream_waits_for_the_copy_and_the_host_does_not() -> None:
    device = find("cuda")
    assert device is not None
    side = device.side_stream()
    loader = loader_of(64, "threads", device="cuda", persistent_workers=True)
    with device.on(side):
        busy(200)  # no slot is free before all are taken: what they need is there after this pass
    warm = list(loader)
    digest(warm[0]).cpu()
    del warm
    torch.cuda.synchronize()
    with device.on(side):
        busy(3000)  # all copies stand behind this
    done = side.record_event()
    iterator = iter(loader)
    batch = next(iterator)
    found = digest(batch)
    assert not done.query(), "next() has waited for the copy; or the machine was busy for seconds"
    assert torch.equal(found.cpu(), wanted(8))
    assert done.query()
    iterator.close()  # type: ignore[attr-defined]


def test_what_is_on_the_device_is_left_alone() -> None:
    there = torch.ones(3, device="cuda")

    def collate(samples: list[Any]) -> dict[str, Any]:
        return {"there": there, "x": torch.stack(samples)}

    loader = DataLoader(
        Noise(8), 4, collate_fn=collate, num_workers=1, backend="threads", device="cuda"
    )
    for batch in loader:
        assert batch["there"] is there
        assert batch["x"].is_cuda


def test_objects_with_a_to_are_moved() -> None:
    from torch.nn.utils.rnn import PackedSequence, pack_sequence

    def collate(samples: list[Any]) -> PackedSequence:
        return pack_sequence(samples)

    loader = DataLoader(
        Noise(8), 4, collate_fn=collate, num_workers=1, backend="threads", device="cuda"
    )
    for number, packed in enumerate(loader):
        assert type(packed) is PackedSequence
        assert packed.data.is_cuda
        rows = packed.data.view(-1, 4).t().contiguous()
        assert torch.equal(digest(rows).cpu(), wanted(8)[4 * number : 4 * number + 4])


@pytest.mark.filterwarnings("ignore:Sparse")  # the compressed ones are in beta
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr], ids=str)
def test_sparse_tensors_are_moved(layout: torch.layout) -> None:
    rows = [torch.eye(4) * number for number in range(8)]

    def collate(samples: list[Any]) -> torch.Tensor:
        return torch.block_diag(*samples).to_sparse(layout=layout)

    loader = DataLoader(
        rows,  # type: ignore[arg-type]
        4,
        collate_fn=collate,
        num_workers=1,
        backend="threads",
        device="cuda",
    )
    for number, batch in enumerate(loader):
        assert batch.is_cuda
        assert batch.layout is layout
        block = torch.block_diag(*rows[4 * number : 4 * number + 4])
        assert torch.equal(batch.to_dense().cpu(), block)


def test_pages_that_the_driver_does_not_lock_leave_no_error_behind() -> None:
    device = find("cuda")
    assert device is not None
    mapping = make_private(1 << 20, forks_share=True)
    device.page_lock(mapping.address, mapping.size)
    with pytest.raises(OSError, match="does not lock 1,048,576 bytes"):
        device.page_lock(mapping.address, mapping.size)
    assert torch.ones(3, device="cuda").sum().item() == 3
    device.page_unlock(mapping.address)
    device.page_unlock(mapping.address)
    assert torch.ones(3, device="cuda").sum().item() == 3


# -- nothing is read too late ----------------------------------------------------------------------


@pytest.mark.timeout(900)
@on_backends
def test_ten_thousand_batches_moved_under_pressure_on_several_streams(backend: Any) -> None:
    """Slots and blocks of the device are used again thousands of times, with the streams far behind."""
    streams = [torch.cuda.Stream() for _ in range(3)]
    found, sums = [], []
    kept: deque[Any] = deque(maxlen=5)
    loader = loader_of(80_000, backend, device=Transfer("cuda", prefetch=3), collate_fn=with_digest)
    iterator = iter(loader)
    for number in range(10_000):
        with torch.cuda.stream(streams[number % 3]):
            batch, said = next(iterator)
            if number % 40 == 0:
                busy(5)  # this stream comes to the batch long after it was let go
            found.append(digest(batch))
            sums.append(said)
            if number % 7 == 0:
                kept.append(batch)
            del batch, said
    torch.cuda.synchronize()
    assert next(iterator, None) is None
    assert torch.equal(torch.cat(found), torch.cat(sums))
    assert torch.equal(torch.cat(found)[:800].cpu(), wanted(800))


@pytest.mark.timeout(900)
@on_backends
def test_ten_thousand_pinned_batches_copied_by_the_user_and_let_go_at_once(backend: Any) -> None:
    found, sums = [], []
    loader = loader_of(80_000, backend, pin_memory=True, collate_fn=with_digest)
    for number, (batch, said) in enumerate(loader):
        if number % 40 == 0:
            busy(5)  # the copy stands behind this, and the slot must wait for it
        found.append(digest(batch.to("cuda", non_blocking=True)))
        sums.append(said.clone())
        del batch, said
    torch.cuda.synchronize()
    assert torch.equal(torch.cat(found).cpu(), torch.cat(sums))
    assert torch.equal(torch.cat(sums)[:800], wanted(800))


def test_a_pipeline_collates_into_pinned_slots_under_pressure() -> None:
    memory = Memory(limit=LIMIT)
    pipe = (
        Pipeline.from_dataset(Noise(16_000), backend="threads", workers=2)
        .batch(8, collate_fn=None, memory=memory)
        .to("cuda", prefetch=3)
    )
    found = []
    for number, batch in enumerate(pipe):
        if number % 40 == 0:
            busy(5)
        found.append(digest(batch))
        del batch
    assert torch.equal(torch.cat(found)[:800].cpu(), wanted(800))
    assert len(torch.cat(found)) == 16_000


# -- which device, and when ------------------------------------------------------------------------


def test_the_current_device_is_known_and_more_than_there_are_is_refused() -> None:
    device = current()
    assert isinstance(device, TorchAccelerator)
    assert device.name == f"cuda:{torch.cuda.current_device()}"
    count = torch.cuda.device_count()
    with pytest.raises(ValueError, match=f"sees {count}"):
        DataLoader(Noise(8), device=f"cuda:{count}")


def test_the_thread_takes_the_device_that_was_current_where_the_iterator_was_made() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two devices")
    with torch.cuda.device(1):
        iterator = iter(loader_of(64, "threads", device="cuda"))
    before = torch.cuda.memory_allocated(0)
    batches = list(iterator)
    assert all(batch.device.index == 1 for batch in batches)
    assert torch.cuda.memory_allocated(0) == before
    assert torch.cuda.current_device() == 0


def run(script: str) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(script)],
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_forks_come_before_cuda_and_the_thread_behind_them() -> None:
    run(
        """
        import torch
        from torch.utils.data import TensorDataset
        from hybridloader import DataLoader

        data = TensorDataset(torch.arange(40_000).view(40, 1000))
        loader = DataLoader(
            data, 4, num_workers=2, backend="fork", persistent_workers=True, device="cuda"
        )
        assert not torch.cuda.is_initialized(), "by the constructor"
        for _ in range(2):
            found = torch.cat([batch for (batch,) in loader])
            assert torch.equal(found.cpu(), data.tensors[0])
        """
    )


@pytest.mark.parametrize("backend", ["threads", "fork"])
def test_a_process_may_end_in_the_midst_of_it(backend: str) -> None:
    run(
        f"""
        import torch
        from torch.utils.data import TensorDataset
        from hybridloader import DataLoader

        data = TensorDataset(torch.zeros(64, 100_000))
        kept = iter(DataLoader(data, 4, num_workers=2, backend={backend!r}, device="cuda"))
        batch = next(kept)
        """
    )
