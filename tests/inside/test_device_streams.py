"""Batches between streams, on devices that can hand them over and on others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from support.fake_accelerator import BUFFER_BYTES, FakeAccelerator, Mover
from support.pinning_datasets import Rows, first_of, reading

from hybridloader import DataLoader, Pipeline


class Apart(FakeAccelerator):
    """Has streams, but can't tell its allocator who uses what."""

    queues_copies = False


def mover(device: FakeAccelerator) -> Mover:
    made = Mover(device, 2, BUFFER_BYTES)
    made.stream = device.side_stream()
    return made


# -- where nothing can be handed from one stream to another -----------------------------------------


@pytest.mark.parametrize("kind", [FakeAccelerator, Apart])
def test_what_is_read_late_on_the_users_stream_is_what_was_sent(
    kind: type[FakeAccelerator],
) -> None:
    device = kind()
    moving = mover(device)
    own = device.new_stream()
    seen: list[bytes] = []
    for value in range(4):
        ahead = [moving.send({"x": torch.full((8,), value, dtype=torch.uint8)})]
        with device.on(own):
            data = moving.take(ahead.pop())
            device.launch(reading(data["x"], seen))
            del data
        device.run(*(stream for stream in device.streams if stream is not own))
    device.run()
    assert seen == [bytes([value]) * 8 for value in range(4)]
    assert device.refused == []


def test_a_loader_and_a_pipeline_do_the_same() -> None:
    device = Apart()
    loader = DataLoader(Rows(12), 2, num_workers=2, backend="threads", device=device)
    pipe = Pipeline.from_dataset(Rows(12), backend="threads", num_workers=2).batch(2).to(device)
    for batches in (loader, pipe):
        found = list(batches)
        assert all(device.holds(batch) for batch in found)
        assert [first_of(batch) for batch in found] == [[k, k + 1] for k in range(0, 12, 2)]
    assert device.refused == []


class Packed(NamedTuple):
    """Object like torch's `PackedSequence`: one part of it is never moved."""

    data: torch.Tensor
    lengths: torch.Tensor
    device: Any

    def to(self, device: Any, non_blocking: bool = False) -> Packed:
        return self._replace(data=self.device.move(self.data))


@pytest.mark.parametrize("kind", [FakeAccelerator, Apart])
def test_a_part_that_stays_on_the_host_is_not_named_to_the_allocator(
    kind: type[FakeAccelerator],
) -> None:
    device = kind()
    moving = mover(device)
    packed = Packed(torch.arange(4), torch.ones(2), device)
    found = moving.take(moving.send(packed))
    assert device.holds(found.data)
    assert found.lengths is packed.lengths
    device.run()
    assert torch.equal(found.data, packed.data)
    assert len(device.kept) == int(device.queues_copies)
    assert device.refused == []


# -- the fake refuses what torch and a driver refuse ------------------------------------------------


def test_the_fake_refuses() -> None:
    other = FakeAccelerator("fake:1")
    foreign = other.new_stream()
    rows: list[tuple[Callable[[FakeAccelerator], object], type[Exception], str]] = [
        (lambda d: d.keep_for(torch.ones(2), d.default), NotImplementedError, "record_stream"),
        (lambda d: d.keep_for(d.move(torch.ones(2)), foreign), TypeError, "no stream of"),
        (lambda d: d.mark(foreign), TypeError, "no stream of fake:0"),
        (lambda d: d.hold_up(foreign, d.mark(d.default)), TypeError, "no stream of"),
        (lambda d: d.hold_up(d.default, None), TypeError, "no mark"),
        (lambda d: d.on(None).__enter__(), TypeError, "no stream of"),
    ]
    for call, kind, words in rows:
        device = FakeAccelerator()
        with pytest.raises(kind, match=words) as caught:
            call(device)
        assert device.refused == [str(caught.value)]
    device = Apart()
    with pytest.raises(NotImplementedError, match="aten::record_stream"):
        device.keep_for(device.move(torch.ones(1)), device.default)
