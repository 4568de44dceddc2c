"""Batches are pinned, handed to a device, and taken from there: no thread, no loader.

And calls of torch for a device: its streams, their abilities, and the thread that each is current on.
These are of a scripted device, because the machines that run this have none. The same is run on real
devices, and on backends from outside of torch, by tests/accelerator.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from support.fake_accelerator import (
    BUFFER_BYTES,
    Accelerator,
    FakeAccelerator,
    Mover,
    Pinner,
    pinning,
)
from support.pinning_datasets import Leaf
from torch.nn.utils.rnn import PackedSequence, pack_sequence

# -- pinning -----------------------------------------------------------------------------------------


def test_a_tensor_is_pinned_once_and_one_that_is_stays_itself() -> None:
    fake = FakeAccelerator()
    pinner = Pinner(fake)
    plain = torch.arange(6).view(2, 3)
    foreign = fake.pin(torch.arange(3))
    sent = pinner.send({"plain": plain, "foreign": foreign})
    data = pinner.take(sent)
    assert fake.is_pinned(data["plain"])
    assert not fake.is_pinned(plain)
    assert torch.equal(data["plain"], plain)
    assert data["foreign"] is foreign
    assert sent.size == plain.nbytes + foreign.nbytes


def test_what_can_not_be_pinned_at_all_is_an_error_as_with_torch_unless_it_pins_itself() -> None:
    class Refusing(FakeAccelerator):
        def pin(self, tensor: torch.Tensor) -> torch.Tensor:
            raise RuntimeError("only dense CPU tensors can be pinned")

    @dataclass
    class Edges:
        adjacency: torch.Tensor

        def pin_memory(self) -> Edges:
            return self

    sparse = torch.eye(3).to_sparse()
    with pytest.raises(RuntimeError, match="only dense"):
        Pinner(Refusing()).send(sparse)
    edges = Edges(sparse)
    sent = Pinner(Refusing()).send(edges)
    assert sent.data is edges
    assert sent.size == 0


# -- moving ------------------------------------------------------------------------------------------


def mover(fake: FakeAccelerator) -> Mover:
    made = Mover(fake, 2, BUFFER_BYTES)
    made.stream = fake.side_stream()
    return made


def test_copies_are_queued_and_the_stream_that_is_current_then_waits_and_no_host() -> None:
    fake = FakeAccelerator()
    moving, own = mover(fake), fake.new_stream()
    host = torch.arange(6.0)
    sent = moving.send({"x": host.clone(), "n": 3})
    seen: list[torch.Tensor] = []
    with fake.on(own):
        data = moving.take(sent)
        fake.launch(lambda: seen.append(data["x"].clone()))
    fake.run(own, fake.default)
    assert not seen, "the copy has not been made"
    assert fake.holds(data["x"])
    assert data["n"] == 3
    assert [stream for _, stream in fake.kept] == [own]
    fake.run()
    assert torch.equal(seen[0], host)


def test_what_is_on_the_device_is_left_alone_and_an_empty_tensor_is_moved() -> None:
    fake = FakeAccelerator()
    there = fake.move(torch.ones(3))
    moving = mover(fake)
    assert moving.take(moving.send([there]))[0] is there
    assert moving.here(there) is there
    assert fake.kept == []
    host = torch.empty(0, 3, dtype=torch.int16)
    data = moving.take(moving.send([host]))[0]
    fake.run()
    assert (data.shape, data.dtype) == (host.shape, host.dtype)
    assert data is not host


@pytest.mark.filterwarnings("ignore:Sparse", "ignore:The PyTorch API of nested")
def test_the_allocator_hears_of_the_dense_parts_of_a_tensor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    named: list[torch.Tensor] = []
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda part, stream: named.append(part))
    eye = torch.eye(4)
    for tensor, parts in [
        (eye, 1),
        (eye.to_sparse(), 2),
        (eye.to_sparse_csr(), 3),
        (eye.to_sparse_csc(), 3),
        (eye.to_sparse_bsr((2, 2)), 3),
        (eye.to_sparse_bsc((2, 2)), 3),
        (torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), 1),
    ]:
        named.clear()
        Accelerator(torch.device("cuda", 0)).keep_for(tensor, "stream")
        assert len(named) == parts
        assert all(part.layout is torch.strided and not part.is_nested for part in named)


class Graph:
    """Moves itself, names streams, and knows what it holds."""

    def __init__(self, x: torch.Tensor) -> None:
        self.x = x
        self.moved: list[Any] = []
        self.streams: list[Any] = []
        self.thread = 0

    def to(self, device: str, *, non_blocking: bool = False) -> Graph:
        graph = Graph(self.x)
        graph.moved = [device, non_blocking]
        graph.thread = threading.get_ident()
        return graph

    def record_stream(self, stream: Any) -> None:
        self.streams.append(stream)


class PinnedGraph(Graph):
    """Pins itself before it moves."""

    def pin_memory(self) -> PinnedGraph:
        return self


class Opaque:
    """Moves itself, and nobody can tell what it holds."""

    def __init__(self) -> None:
        self.streams: list[Any] = []
        self.pinned = False

    def pin_memory(self) -> Opaque:
        made = Opaque()
        made.pinned = True
        return made

    def to(self, device: str) -> Opaque:
        made = Opaque()
        made.pinned, made.streams = self.pinned, [FAKE.current_stream()]
        return made


FAKE = FakeAccelerator()


class Span:
    """Something that is converted, not moved."""

    def to(self, unit: str) -> Span:
        raise AssertionError("has nothing to do with devices")


def test_objects_that_move_themselves_do_so_and_hear_of_the_stream() -> None:
    class OnCpu(FakeAccelerator):
        pins = False  # type: ignore[assignment]

    moving = mover(FAKE)
    graph, pinned, span = moving.take(
        moving.send((Graph(torch.ones(1)), PinnedGraph(torch.ones(1)), Span()))
    )
    assert graph.moved == [FAKE.name, False], "its memory may be used again at once"
    assert pinned.moved == [FAKE.name, True]
    assert graph.streams == pinned.streams == [FAKE.default]
    assert type(span) is Span
    moving = mover(OnCpu("cpu"))
    packed = pack_sequence([torch.arange(3), torch.arange(2)])
    data = moving.take(moving.send(packed))
    assert type(data) is PackedSequence
    assert torch.equal(data.data, packed.data)


def test_of_which_nobody_knows_what_it_holds_that_is_moved_by_who_takes_it() -> None:
    moving = mover(FAKE)
    sent = moving.send({"o": Opaque(), "x": torch.ones(1)})
    own = FAKE.new_stream()
    with FAKE.on(own):
        data = moving.take(sent)
    assert data["o"].streams == [own]
    assert data["o"].pinned
    assert FAKE.holds(data["x"])
    assert moving.here(Opaque()).streams == [FAKE.default]


def test_an_object_that_only_pins_is_pinned_and_what_a_named_one_holds_is_moved() -> None:
    class Pinnable(NamedTuple):
        x: Any

        def pin_memory(self) -> Pinnable:
            return Pinnable(FAKE.pin(self.x))

    moving = mover(FAKE)
    data = moving.take(moving.send([Pinnable(torch.ones(2)), Leaf(1)]))
    assert FAKE.holds(data[0].x)
    assert data[1] == Leaf(1, 1)


def test_what_a_batch_holds_in_containers_is_found_and_no_text_is_looked_into() -> None:
    one, two = torch.ones(2), torch.zeros(3)
    assert pinning.tensors_in({"x": (one, "text"), "b": b"bytes", "y": [two]}) == [one, two]


def test_a_device_that_can_not_pin_copies_at_once() -> None:
    class Plain(FakeAccelerator):
        pins = queues_copies = False  # type: ignore[assignment]

        def pin(self, tensor: torch.Tensor) -> torch.Tensor:
            raise AssertionError("does not pin")

    moving = Mover(Plain(), 1, 1)
    moving.prepare()
    sent = moving.send([torch.ones(2)])
    assert torch.equal(moving.take(sent)[0], torch.ones(2))
    assert moving.stream is None
    assert sent.size == 8


# -- calls of torch --------------------------------------------------------------------------------

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


def moved(device: Accelerator, *, pinned: bool) -> Any:
    """Device and ``non_blocking`` with which a tensor of the host is copied."""
    host: Any = SimpleNamespace(
        device=torch.device("cpu"),
        is_pinned=lambda: pinned,
        to=lambda device, *, non_blocking: (device, non_blocking),
    )
    return device.move(host)


def test_a_device_gets_the_streams_that_torch_or_its_module_has_and_is_asked_once(
    scripted: Scripted,
) -> None:
    device = Accelerator(DEVICE)
    side = device.side_stream()
    made = _Stream.number
    assert type(side) is _Stream
    assert side.device == DEVICE
    assert device.current_stream() is scripted.streams[1]
    assert device.queues_copies
    with device.on(side):
        assert device.current_stream() is side
    assert Accelerator(DEVICE).side_stream() is side
    assert _Stream.number == made
    assert moved(device, pinned=True) == (DEVICE, True)
    assert moved(device, pinned=False) == (DEVICE, False), "the host waits"


def test_the_kind_of_stream_that_the_module_has_is_taken(scripted: Scripted) -> None:
    current = Own(DEVICE, 0)
    scripted.module = SimpleNamespace(Stream=Own, current_stream=lambda device: current)
    device = Accelerator(DEVICE)
    assert type(device.side_stream()) is Own
    assert device.current_stream() is current


@pytest.mark.parametrize("context", [False, True], ids=["no context yet", "a context"])
def test_a_device_without_a_number_is_the_current_one_and_nothing_is_initialized_by_asking(
    scripted: Scripted, monkeypatch: pytest.MonkeyPatch, context: bool
) -> None:
    scripted.module = SimpleNamespace(is_initialized=lambda: context)
    scripted.index = 1
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    for found in (pinning.find("cuda"), pinning.current()):
        assert repr(found) == f"Accelerator('cuda:{int(context)}')"
    scripted.index = 0
    other: Any = pinning.find("cuda:1")
    assert other.device == DEVICE
    other.enter()
    assert scripted.index == 1
    mps = Accelerator(torch.device("mps", 0))
    assert not mps.pins
    assert not mps.queues_copies


@pytest.mark.parametrize("current", [0, 1])
def test_stream_and_device_are_what_they_were_behind_the_block(
    scripted: Scripted, current: int
) -> None:
    device = Accelerator(DEVICE)
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
    Accelerator(DEVICE).wait(SimpleNamespace(query=lambda: answers.pop(0)))
    assert len(rests) == 2
    assert answers == []


class Captured(_Stream):
    """Stream of torch 2.13 and later, within a capture."""

    def is_capturing(self) -> bool:
        return True


@pytest.mark.parametrize("kind", [Captured, _Stream])  # the latter: of torch before 2.13
def test_a_batch_can_not_be_taken_within_a_capture(scripted: Scripted, kind: Any) -> None:
    device, captured, beside = Accelerator(DEVICE), kind(DEVICE), _Stream(DEVICE)
    if kind is _Stream:
        scripted.module.is_current_stream_capturing = lambda: scripted.streams[1] is captured
    assert device.mark(beside).query()
    with pytest.raises(RuntimeError, match="take batches outside the capture"):
        device.mark(captured)
    assert scripted.index == 0
    assert scripted.streams[1].number == 0


@pytest.mark.parametrize("kind", [_None, Only, Eventless, _Stream])
def test_of_a_device_with_one_stream_or_deaf_ones_each_copy_is_waited_for(
    scripted: Scripted, kind: Any
) -> None:
    """Without events, or `record_stream`, streams can't be ordered."""
    scripted.module = SimpleNamespace(Stream=kind)
    scripted.records = kind is not _Stream
    device = Accelerator(DEVICE)
    assert not device.queues_copies
    assert device.side_stream() is None
    assert moved(device, pinned=True) == (DEVICE, False)


def test_what_has_stayed_elsewhere_is_not_held() -> None:
    device = Accelerator(DEVICE)
    there, beside, host = (
        SimpleNamespace(device=torch.device(name)) for name in ("cuda:1", "cuda:0", "cpu")
    )
    assert device.holds(there)  # type: ignore[arg-type]
    assert not device.holds(beside)  # type: ignore[arg-type]
    assert not device.holds(host)  # type: ignore[arg-type]
