"""Calls of torch for a device: its streams, their abilities, and the thread that each is current on.

Against a scripted device, because the machines that run this have none. The same is run on real devices,
and on backends from outside of torch, by tests/accelerator.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hybridloader.devices import pinning
from hybridloader.devices.pinning import TorchAccelerator

DEVICE = torch.device("cuda", 1)


class _Stream:
    """Copy of `torch.Stream`."""

    number = 0

    def __init__(self, device: torch.device, number: int | None = None) -> None:
        if number is None:
            number = type(self).number = type(self).number + 1
        self.device, self.number = device, number

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Stream) and vars(self) == vars(other)

    __hash__ = None  # type: ignore[assignment]

    def record_event(self) -> Any:
        return SimpleNamespace(query=lambda: True)

    def wait_event(self, event: Any) -> None:
        pass


class Own(_Stream):
    """Copy of `torch.cuda.Stream`: a class that the module of a device may have."""


class Only(_Stream):
    """Stream of MPS: each one that is made equals the default one."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device, 0)


class _None:
    def __init__(self, device: torch.device) -> None:
        raise RuntimeError("Backend doesn't support create a new Stream.")


class Eventless(_Stream):
    def record_event(self) -> Any:
        raise RuntimeError("Backend doesn't support events.")


class Scripted:
    """A kind of device of which there are two, seen through `torch.accelerator`."""

    def __init__(self) -> None:
        self.module = SimpleNamespace()
        self.index = 0
        self.streams = [_Stream(torch.device("cuda", number), 0) for number in range(2)]
        self.records = True

    def set_stream(self, stream: Any) -> None:
        self.index = stream.device.index
        self.streams[self.index] = stream

    def set_index(self, index: int) -> None:
        self.index = index

    def empty(self, *_: Any, device: torch.device) -> Any:
        return SimpleNamespace(record_stream=self.record)

    def record(self, stream: Any) -> None:
        if not self.records:
            raise NotImplementedError("Could not run 'aten::record_stream'")


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> Scripted:
    made = Scripted()
    monkeypatch.setattr(torch, "get_device_module", lambda device: made.module)
    monkeypatch.setattr(torch, "Stream", _Stream)
    monkeypatch.setattr(torch, "empty", made.empty)
    for name, call in (
        ("current_stream", lambda device: made.streams[device.index]),
        ("set_stream", made.set_stream),
        ("current_device_index", lambda: made.index),
        ("set_device_index", made.set_index),
    ):
        monkeypatch.setattr(torch.accelerator, name, call)
    monkeypatch.setattr(pinning, "_side_streams", {})
    return made


class Host:
    """Tensor on the host."""

    device = torch.device("cpu")

    def __init__(self, *, pinned: bool) -> None:
        self.pinned = pinned

    def is_pinned(self) -> bool:
        return self.pinned

    def to(self, device: torch.device, *, non_blocking: bool) -> tuple[torch.device, bool]:
        return device, non_blocking


def moved(device: TorchAccelerator, *, pinned: bool) -> Any:
    host: Any = Host(pinned=pinned)
    return device.move(host)


def test_a_device_whose_module_has_no_streams_gets_those_that_torch_has(scripted: Scripted) -> None:
    device = TorchAccelerator(DEVICE)
    side = device.side_stream()
    assert type(side) is _Stream
    assert side.device == DEVICE
    assert device.current_stream() is scripted.streams[1]
    assert device.queues_copies
    with device.on(side):
        assert device.current_stream() is side


def test_the_kind_of_stream_that_the_module_has_is_taken(scripted: Scripted) -> None:
    current = Own(DEVICE, 0)
    scripted.module = SimpleNamespace(Stream=Own, current_stream=lambda device: current)
    device = TorchAccelerator(DEVICE)
    assert type(device.side_stream()) is Own
    assert device.current_stream() is current


def test_what_a_device_can_do_is_asked_once(scripted: Scripted) -> None:
    before = _Stream.number
    side = TorchAccelerator(DEVICE).side_stream()
    made = _Stream.number - before
    assert TorchAccelerator(DEVICE).side_stream() is side
    assert _Stream.number - before == made


@pytest.mark.parametrize("current", [0, 1])
def test_stream_and_device_are_what_they_were_behind_the_block(
    scripted: Scripted, current: int
) -> None:
    device = TorchAccelerator(DEVICE)
    scripted.index, before = current, list(scripted.streams)

    def fail() -> None:
        with device.on(device.side_stream()):
            assert scripted.index == 1
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert scripted.index == current
    assert all(now is then for now, then in zip(scripted.streams, before, strict=True))


def test_the_host_waits_for_an_event_without_keeping_a_core_busy(
    scripted: Scripted, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers, rests = [False, False, True], []
    monkeypatch.setattr(pinning.time, "sleep", rests.append)
    TorchAccelerator(DEVICE).wait(SimpleNamespace(query=lambda: answers.pop(0)))
    assert len(rests) == 2
    assert answers == []


class Captured(_Stream):
    """Stream of torch 2.13 and later, within a capture."""

    def is_capturing(self) -> bool:
        return True


@pytest.mark.parametrize("kind", [Captured, _Stream])  # the latter: of torch before 2.13
def test_a_batch_can_not_be_taken_within_a_capture(scripted: Scripted, kind: Any) -> None:
    device, captured, beside = TorchAccelerator(DEVICE), kind(DEVICE), _Stream(DEVICE)
    if kind is _Stream:
        scripted.module.is_current_stream_capturing = lambda: scripted.streams[1] is captured
    assert device.mark(beside).query()
    with pytest.raises(RuntimeError, match="take batches outside the capture"):
        device.mark(captured)
    assert scripted.index == 0
    assert scripted.streams[1].number == 0


def test_only_what_is_page_locked_is_copied_while_the_host_goes_on(scripted: Scripted) -> None:
    device = TorchAccelerator(DEVICE)
    assert moved(device, pinned=True) == (DEVICE, True)
    assert moved(device, pinned=False) == (DEVICE, False)


@pytest.mark.parametrize("kind", [_None, Only])
def test_of_a_device_with_one_stream_each_copy_is_waited_for(scripted: Scripted, kind: Any) -> None:
    scripted.module = SimpleNamespace(Stream=kind)
    device = TorchAccelerator(DEVICE)
    assert not device.queues_copies
    assert device.side_stream() is None
    assert moved(device, pinned=True) == (DEVICE, False)


@pytest.mark.parametrize("lacks", ["events", "record_stream"])
def test_and_of_one_whose_streams_can_not_be_told_of_each_other(
    scripted: Scripted, lacks: str
) -> None:
    if lacks == "events":
        scripted.module = SimpleNamespace(Stream=Eventless)
    scripted.records = lacks == "events"
    device = TorchAccelerator(DEVICE)
    assert not device.queues_copies
    assert device.side_stream() is None
    assert moved(device, pinned=True) == (DEVICE, False)


def test_what_has_stayed_elsewhere_is_not_held() -> None:
    device = TorchAccelerator(DEVICE)
    there, beside, host = (
        SimpleNamespace(device=torch.device(name)) for name in ("cuda:1", "cuda:0", "cpu")
    )
    assert device.holds(there)  # type: ignore[arg-type]
    assert not device.holds(beside)  # type: ignore[arg-type]
    assert not device.holds(host)  # type: ignore[arg-type]


def test_pages_are_locked_only_where_there_is_a_call_for_it(scripted: Scripted) -> None:
    device = TorchAccelerator(DEVICE)
    assert not device.locks_pages
    with pytest.raises(OSError, match="can lock only pages that it allocated"):
        device.page_lock(1 << 20, 4096)
    scripted.module.cudart = object
    assert device.locks_pages
