"""What is pinned, and how batches are handed to a device and taken from there: no thread, no loader."""

from __future__ import annotations

import collections
import ctypes
import threading
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.operator_context import no_deadline
from torch.nn.utils.rnn import PackedSequence, pack_sequence
from torch.utils.data._utils.pin_memory import pin_memory as torchs_pin_memory

from hybridloader import Transfer
from hybridloader.devices.accelerator import current, find, taken_for_current
from hybridloader.devices.batch_parts import mapped, pins_itself, tensors_in
from hybridloader.devices.pinning import BUFFER_BYTES, Mover, Pinner, check, pinner_for
from hybridloader.devices.torch_accelerator import TorchAccelerator
from hybridloader.engine.relay import Relay
from hybridloader.testing import FakeAccelerator

# -- what is pinned: torch's function is the oracle ------------------------------------------------


class Leaf:
    """Can pin itself."""

    def __init__(self, value: int, pinned: int = 0) -> None:
        self.value, self.pinned = value, pinned

    def __eq__(self, other: object) -> bool:
        return type(other) is Leaf and vars(self) == vars(other)

    __hash__ = None  # type: ignore[assignment]

    def pin_memory(self) -> Leaf:
        return Leaf(self.value, self.pinned + 1)


class Pair(NamedTuple):
    one: Any
    two: Any


class Frozen(Mapping[str, Any]):
    def __init__(self, items: Any) -> None:
        self.items_ = dict(items)

    def __getitem__(self, key: str) -> Any:
        return self.items_[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.items_)

    def __len__(self) -> int:
        return len(self.items_)


class Stubborn(Frozen):
    """Can't be made of a dict."""

    def __init__(self, items: Any, more: int) -> None:
        super().__init__(items)


class Seq(Sequence[Any]):
    def __init__(self, parts: Any) -> None:
        self.parts = tuple(parts)

    def __getitem__(self, index: Any) -> Any:
        return self.parts[index]

    def __len__(self) -> int:
        return len(self.parts)


class Tagged(dict[str, Any]):
    """Has more than its items."""


def tagged(parts: dict[str, Any]) -> Tagged:
    made = Tagged(parts)
    made.tag = "kept"  # type: ignore[attr-defined]
    return made


leaves = st.one_of(
    st.builds(Leaf, st.integers()),
    st.integers(),
    st.text(max_size=3),
    st.binary(max_size=3),
    st.none(),
    st.builds(range, st.integers(0, 3)),
)


def containers(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    parts, named = (
        st.lists(inner, max_size=3),
        st.dictionaries(st.text(max_size=2), inner, max_size=3),
    )
    return st.one_of(
        parts,
        parts.map(tuple),
        parts.map(Seq),
        parts.map(collections.UserList),
        parts.map(collections.deque),
        st.builds(Pair, inner, inner),
        named,
        named.map(Frozen),
        named.map(tagged),
        named.map(lambda parts: Stubborn(parts, 1)),
        named.map(types.MappingProxyType),
        named.map(collections.OrderedDict),
    )


def told(data: Any) -> Any:
    """What can be compared of it."""
    if isinstance(data, Leaf):
        return data
    extra = getattr(data, "tag", None)
    if isinstance(data, Mapping):
        return type(data), extra, {key: told(value) for key, value in data.items()}
    if isinstance(data, Sequence) and not isinstance(data, (str, bytes)):
        return type(data), [told(value) for value in data]
    return type(data), data


def ours(data: Any) -> Any:
    return mapped(data, pins_itself, lambda part: part.pin_memory())


@no_deadline
@given(st.recursive(leaves, containers, max_leaves=8))
def test_containers_are_taken_apart_and_rebuilt_as_torch_does_it(data: Any) -> None:
    before = told(data)
    assert told(ours(data)) == told(torchs_pin_memory(data))
    assert told(data) == before


def test_a_counter_is_not_added_to_itself() -> None:
    counted = collections.Counter(a=2, b=3)
    assert ours([counted]) == [counted]
    assert counted == collections.Counter(a=2, b=3)


@dataclass(frozen=True)
class Sample:
    image: Any
    label: int
    name: str = "n"
    made: list[int] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        self.made.append(1)


def test_dataclasses_are_looked_into_and_not_constructed_again() -> None:
    sample = Sample([Leaf(1)], 3)
    pinned = ours(sample)
    assert type(pinned) is Sample
    assert pinned.image[0].pinned == 1
    assert (pinned.label, pinned.name, pinned.made) == (3, "n", [1])
    assert sample.image[0].pinned == 0


def test_a_dataclass_without_anything_to_pin_stays_itself() -> None:
    @dataclass
    class Plain:
        name: str
        label: int

    plain = Plain("a", 3)
    assert ours(plain) is plain


def test_the_tensors_of_containers_are_found_and_of_other_objects_nothing_is_known() -> None:
    one, two = torch.zeros(1), torch.ones(1)
    assert tensors_in({"a": [one, "text"], "b": Sample(two, 1)}) == [one, two]
    assert tensors_in(object()) is None
    assert tensors_in(one) == [one]


# -- pinning -----------------------------------------------------------------------------------------


def test_a_tensor_is_pinned_once_and_one_that_is_stays_itself() -> None:
    fake = FakeAccelerator()
    pinner = Pinner(fake)
    plain = torch.arange(6).view(2, 3)
    foreign = fake.pin(torch.arange(3))
    sent = pinner.send([{"plain": plain, "foreign": foreign}])
    data = pinner.take(sent)
    assert fake.is_pinned(data["plain"])
    assert not fake.is_pinned(plain)
    assert torch.equal(data["plain"], plain)
    assert data["foreign"] is foreign
    assert sent.size == plain.nbytes + foreign.nbytes


def test_pages_that_somebody_has_locked_are_pinned_already() -> None:
    fake = FakeAccelerator()
    tensor = torch.arange(1000)
    fake.page_lock(tensor.data_ptr(), tensor.nbytes)
    assert Pinner(fake).here(tensor[10:20]).data_ptr() == tensor[10:].data_ptr()
    fake.page_unlock(tensor.data_ptr())


def test_what_was_handed_over_is_no_longer_held() -> None:
    batch = [torch.arange(3)]
    Pinner(FakeAccelerator()).send(batch)
    assert batch == []


def test_where_the_system_refuses_to_pin_the_batch_comes_all_the_same_with_one_warning() -> None:
    fake = FakeAccelerator(pinnable=100)
    pinner = Pinner(fake)
    kept = pinner.take(pinner.send([torch.zeros(20)]))
    sent = pinner.send([torch.ones(20)])
    with pytest.warns(UserWarning, match=r"at most 100 bytes.*ulimit -l") as caught:
        refused = pinner.take(sent)
    assert len(caught) == 1
    assert caught[0].filename == __file__
    assert not fake.is_pinned(refused)
    assert torch.equal(refused, torch.ones(20))
    again = pinner.take(pinner.send([torch.ones(20)]))  # and no other warning
    assert not fake.is_pinned(again)
    del kept
    assert fake.is_pinned(pinner.here(torch.ones(20)))


def test_what_can_not_be_pinned_at_all_is_an_error_as_with_torch() -> None:
    class Refusing(FakeAccelerator):
        def pin(self, tensor: torch.Tensor) -> torch.Tensor:
            raise RuntimeError("only dense CPU tensors can be pinned")

    with pytest.raises(RuntimeError, match="only dense"):
        Pinner(Refusing()).send([torch.eye(3).to_sparse()])


def test_an_object_that_pins_itself_may_hold_what_has_no_size() -> None:
    @dataclass
    class Edges:
        adjacency: torch.Tensor

        def pin_memory(self) -> Edges:
            return self

    edges = Edges(torch.eye(3).to_sparse())
    sent = Pinner(FakeAccelerator()).send([edges])
    assert sent.data is edges
    assert sent.size == 0


class Runtime:
    """Refuses all, and keeps its last error for the next launch, as that of CUDA does."""

    def __init__(self) -> None:
        self.last = 0

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        self.last = 2
        return self.last

    def cudaHostUnregister(self, address: int) -> int:
        self.last = 713
        return self.last

    def cudaGetErrorString(self, code: int) -> str:
        return "out of memory"

    def launch(self, *_: Any, **__: Any) -> None:
        last, self.last = self.last, 0
        if last:
            raise RuntimeError(f"CUDA error {last}")


def test_an_error_of_the_driver_is_not_left_to_the_next_kernel(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runtime = Runtime()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "device", nullcontext)
    monkeypatch.setattr(torch, "ones", runtime.launch)
    device = TorchAccelerator(torch.device("cuda", 0))
    with pytest.raises(OSError, match="does not lock 4,096 bytes: out of memory"):
        device.page_lock(1 << 20, 4096)
    assert runtime.last == 0
    device.page_unlock(1 << 20)
    assert runtime.last == 0


# -- moving ------------------------------------------------------------------------------------------


def mover(fake: FakeAccelerator) -> Mover:
    made = Mover(fake, 2, BUFFER_BYTES)
    made.stream = fake.side_stream()
    return made


def test_copies_are_queued_and_the_stream_of_who_takes_them_waits_and_no_host() -> None:
    fake = FakeAccelerator()
    moving = mover(fake)
    host = torch.arange(6.0)
    data = moving.take(moving.send([{"x": host.clone(), "n": 3}]))
    seen: list[torch.Tensor] = []
    fake.launch(lambda: seen.append(data["x"].clone()))
    fake.run(fake.default)
    assert not seen, "the copy has not been made"
    assert fake.holds(data["x"])
    assert data["n"] == 3
    fake.run()
    assert torch.equal(seen[0], host)


def test_it_is_the_stream_that_is_current_when_a_batch_is_taken() -> None:
    fake = FakeAccelerator()
    moving = mover(fake)
    sent = moving.send([torch.ones(4)])
    own = fake.side_stream()
    seen: list[torch.Tensor] = []
    with fake.on(own):
        data = moving.take(sent)
        fake.launch(lambda: seen.append(data.clone()))
    fake.run(own)
    assert not seen
    assert [stream for _, stream in fake.kept] == [own]
    fake.run()
    assert torch.equal(seen[0], torch.ones(4))


def test_memory_of_the_device_is_not_used_again_before_the_stream_of_who_took_it_is_done() -> None:
    fake = FakeAccelerator()
    moving = mover(fake)
    seen: list[bytes] = []
    for value in range(4):
        data = moving.take(moving.send([torch.full((8,), value, dtype=torch.uint8)]))
        address = data.data_ptr()  # a kernel has no more than that
        fake.launch(lambda address=address: seen.append(ctypes.string_at(address, 8)))
        del data
        fake.run(moving.stream)  # the copies overtake the kernels
    fake.run()
    assert seen == [bytes([value]) * 8 for value in range(4)]


def test_a_kernel_that_is_done_gives_the_memory_free() -> None:
    fake = FakeAccelerator(manual=False)
    moving = mover(fake)
    addresses = set()
    for _ in range(4):
        data = moving.take(moving.send([torch.zeros(8)]))
        addresses.add(data.data_ptr())
        del data
    assert len(addresses) == 1


def test_what_is_on_the_device_is_left_alone() -> None:
    fake = FakeAccelerator()
    there = fake.move(torch.ones(3))
    moving = mover(fake)
    assert moving.take(moving.send([[there]]))[0] is there
    assert moving.here(there) is there
    assert fake.kept == []


def test_an_empty_tensor_is_moved_too() -> None:
    fake = FakeAccelerator()
    moving = mover(fake)
    host = torch.empty(0, 3, dtype=torch.int16)
    data = moving.take(moving.send([[host]]))[0]
    fake.run()
    assert (data.shape, data.dtype) == (host.shape, host.dtype)
    assert data is not host


@pytest.mark.filterwarnings("ignore:Sparse", "ignore:The PyTorch API of nested")
@pytest.mark.parametrize(
    ("make", "parts"),
    [
        (lambda: torch.eye(3), 1),
        (lambda: torch.eye(3).to_sparse(), 2),
        (lambda: torch.eye(3).to_sparse_csr(), 3),
        (lambda: torch.eye(3).to_sparse_csc(), 3),
        (lambda: torch.eye(4).to_sparse_bsr((2, 2)), 3),
        (lambda: torch.eye(4).to_sparse_bsc((2, 2)), 3),
        (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), 1),
    ],
    ids=["dense", "coo", "csr", "csc", "bsr", "bsc", "nested"],
)
def test_the_allocator_is_told_of_the_dense_parts_of_a_tensor(
    make: Callable[[], torch.Tensor], parts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[torch.Tensor] = []
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda part, stream: told.append(part))
    TorchAccelerator(torch.device("cuda", 0)).keep_for(make(), "stream")
    assert len(told) == parts
    assert all(part.layout is torch.strided and not part.is_nested for part in told)


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
    moving = mover(FAKE)
    graph, span = moving.take(moving.send([(Graph(torch.ones(1)), Span())]))
    assert graph.moved == [FAKE.name, True]
    assert graph.streams == [FAKE.default]
    assert type(span) is Span


def test_of_which_nobody_knows_what_it_holds_that_is_moved_by_who_takes_it() -> None:
    moving = mover(FAKE)
    sent = moving.send([{"o": Opaque(), "x": torch.ones(1)}])
    own = FAKE.side_stream()
    with FAKE.on(own):
        data = moving.take(sent)
    assert data["o"].streams == [own]
    assert data["o"].pinned
    assert FAKE.holds(data["x"])
    assert moving.here(Opaque()).streams == [FAKE.default]


def test_a_packed_sequence_moves_itself() -> None:
    class OnCpu(FakeAccelerator):
        pins = False  # type: ignore[assignment]

    moving = mover(OnCpu("cpu"))
    packed = pack_sequence([torch.arange(3), torch.arange(2)])
    data = moving.take(moving.send([packed]))
    assert type(data) is PackedSequence
    assert torch.equal(data.data, packed.data)


def test_an_object_that_only_pins_is_pinned_and_what_a_named_one_holds_is_moved() -> None:
    class Pinnable(NamedTuple):
        x: Any

        def pin_memory(self) -> Pinnable:
            return Pinnable(FAKE.pin(self.x))

    moving = mover(FAKE)
    data = moving.take(moving.send([[Pinnable(torch.ones(2)), Leaf(1)]]))
    assert FAKE.holds(data[0].x)
    assert data[1] == Leaf(1, 1)


def test_a_device_that_locks_no_pages_pins_by_a_copy() -> None:
    class ByCopy(FakeAccelerator):
        locks_pages = False

    device = ByCopy()
    pinning = Pinner(device)
    assert pinning.locks is None
    batch = pinning.here([torch.arange(3)])
    assert device.is_pinned(batch[0])
    assert torch.equal(batch[0], torch.arange(3))


def test_a_device_that_neither_pins_nor_has_streams_gets_its_copies_at_once() -> None:
    class Plain(FakeAccelerator):
        pins = queues_copies = False  # type: ignore[assignment]
        one_stream = True

        def pin(self, tensor: torch.Tensor) -> torch.Tensor:
            raise AssertionError("does not pin")

    plain = Plain()
    moving = Mover(plain, 1, 1)
    moving.prepare()
    sent = moving.send([[torch.ones(2)]])
    assert torch.equal(moving.take(sent)[0], torch.ones(2))
    assert moving.locks is moving.stream is None
    assert sent.size == 8


# -- which device ------------------------------------------------------------------------------------


def test_a_device_that_is_not_there_or_none_is_refused_in_words() -> None:
    with pytest.raises(
        ValueError, match=r"device='cuad' names no device: Expected one of cpu, cuda"
    ):
        find("cuad")
    with pytest.raises(TypeError, match="device must be a str such as 'cuda'"):
        find(3)
    with pytest.raises(TypeError, match="device must be a str"):
        find([])
    if not torch.accelerator.is_available():
        with pytest.raises(
            ValueError, match=r"device='cuda' is not there: torch .* no accelerator"
        ):
            find("cuda")
        with pytest.raises(ValueError, match="is not there"):
            find(torch.device("cuda", 7))


class _Module:
    """Of a kind of device of which there are two."""

    @staticmethod
    def is_initialized() -> bool:
        return False


def test_one_number_too_many_or_another_kind_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    monkeypatch.setattr(torch, "get_device_module", lambda kind: _Module)
    with pytest.raises(ValueError, match=r"'cuda:7' is not there: of 'cuda' devices .* sees 2"):
        find("cuda:7")
    with pytest.raises(ValueError, match=r"the accelerator that torch .* is 'cuda'"):
        find("xpu")
    with pytest.raises(ValueError, match=r"the accelerator that torch .* is 'cuda'"):
        find("meta")
    # Nothing may be initialised by asking: workers may still have to be forked.
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 1 / 0)
    for device, name in (
        ("cuda:1", "cuda:1"),
        ("cuda", "cuda:0"),
        (torch.device("cuda"), "cuda:0"),
    ):
        found = find(device)
        assert isinstance(found, TorchAccelerator)
        assert found.name == name
    now = current()
    assert now is not None
    assert now.name == "cuda:0"
    monkeypatch.setattr(_Module, "is_initialized", staticmethod(lambda: True))
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 1)
    now = current()
    assert now is not None
    assert now.name == "cuda:1"


def test_the_cpu_is_no_accelerator_and_none_is_none() -> None:
    assert find("cpu") is find(torch.device("cpu", 0)) is None
    check(None)
    assert pinner_for("cpu", pin_memory=False) is None
    assert pinner_for(None, pin_memory=False) is None


def test_an_accelerator_stands_for_itself_and_its_name_for_it_while_it_is_installed() -> None:
    fake = FakeAccelerator("fake:1")
    assert find(fake) is fake
    with taken_for_current(fake):
        assert find("fake:1") is find("fake") is current() is fake
        pinner = pinner_for(None, pin_memory=True)
        assert type(pinner) is Pinner
    with pytest.raises(ValueError, match="names no device"):
        find("fake")


def test_a_transfer_says_what_may_wait() -> None:
    fake = FakeAccelerator()
    pinner = pinner_for(Transfer(fake, prefetch=5, buffer_bytes=7), pin_memory=True)
    assert type(pinner) is Mover
    assert (pinner.prefetch, pinner.buffer_bytes) == (5, 7)
    for options in ({"prefetch": 0}, {"buffer_bytes": 0}):
        with pytest.raises(ValueError, match="must be at least 1, got 0"):
            Transfer(fake, **options)
    for wrong in (1.5, "2", True, None):
        with pytest.raises(TypeError, match="prefetch must be a whole number"):
            Transfer(fake, prefetch=wrong)  # type: ignore[arg-type]


# -- the queue ---------------------------------------------------------------------------------------


def test_a_relay_lets_in_what_its_limit_allows_and_one_that_is_larger_alone() -> None:
    pulled: list[int] = []
    third = threading.Event()

    def source() -> Iterator[int]:
        for weight in (4, 5, 3, 20, 1, 1):
            pulled.append(weight)
            if len(pulled) == 3:
                third.set()
            yield weight

    relay = Relay(source(), "r", depth=100, weigh=int, limit=10)
    assert third.wait(30)
    assert next(relay) == 4  # makes room for 3, not for 20 behind it
    relay_left = [next(relay) for _ in range(5)]
    assert relay_left == [5, 3, 20, 1, 1]
    with pytest.raises(StopIteration):
        next(relay)
    assert relay.queue.weight == 0


def test_a_relay_never_holds_more_than_its_limit() -> None:
    most: list[int] = []

    def source() -> Iterator[int]:
        for _ in range(200):
            most.append(relay.queue.weight)
            yield 3

    relay = Relay(source(), "r", depth=100, weigh=int, limit=10, start=False)
    relay.start()
    assert list(relay) == [3] * 200
    assert max(most) <= 9


def test_a_relay_that_is_waited_for_too_long_says_so_and_loses_nothing() -> None:
    from hybridloader._support.errors import NotReady

    gate = threading.Event()

    def source() -> Iterator[int]:
        gate.wait(30)
        yield 1

    relay = Relay(source(), "r")
    with pytest.raises(NotReady):
        relay.get(0.01)
    gate.set()
    assert relay.get(30) == 1
    relay.close()
