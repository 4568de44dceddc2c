"""Damaged bytes: what a decoder gives is what was sent, or an error of our own; never anything else."""

from __future__ import annotations

import pickle
import struct
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.packed_values import encoded_message

from hybridloader._support.user_objects import Failure
from hybridloader.backends.process import frames
from hybridloader.backends.process.frames import (
    MOST_BYTES,
    Decoder,
    Unreadable,
    decode_fields,
    decode_message,
    encode,
    encode_event,
    encode_fields,
)
from hybridloader.engine import Done, Exhausted, Failed, Pickled, Ready, Task
from hybridloader.errors import DamagedMessage, HybridLoaderError, ResultPicklingError
from hybridloader.memory.segments import ALIGN, aligned_view
from hybridloader.memory.shared_slots import BufferPlace, SlotMap, SlotReader, SlotWriter

thorough = settings(max_examples=60, deadline=None)


def joined(*parts: bytes, fds: tuple[int, ...] = ()) -> bytes:
    return b"".join(bytes(piece) for piece in encode(parts, fds))


def decoded(stream: bytes, cuts: list[int] | None = None) -> list[list[bytes]]:
    """The frames in `stream`, which arrives in pieces of so many bytes."""
    decoder, found, sizes = Decoder(), [], iter(cuts or [])
    try:
        while stream:
            room = decoder.room()
            most = len(stream) if room is None else min(len(room), len(stream))
            count = min(most, next(sizes, most))
            piece, stream = stream[:count], stream[count:]
            if room is None:
                got = decoder.feed(piece)
            else:
                room[:count] = piece
                got = decoder.advance(count)
            for frame in got:
                found.append([bytes(part) for part in frame.parts])
    except DamagedMessage:
        found.append([b"damaged"])
    return found


DAMAGED = [b"damaged"]
SMALL = st.lists(st.lists(st.binary(max_size=60), min_size=1, max_size=3), min_size=1, max_size=4)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of the memory that the decoder asked for at once."""
    sizes: list[int] = []

    def ask(size: int) -> memoryview:
        sizes.append(size)
        if size > 1 << 30:
            raise MemoryError
        return aligned_view(size)

    monkeypatch.setattr(frames, "aligned_view", ask)
    return sizes


# -- frames ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("parts", [(b"",), (b"x" * 70,), (b"a" * 16, b"b" * 17), (b"c",) * 5])
def test_every_bit_of_a_head_counts(parts: tuple[bytes, ...], asked: list[int]) -> None:
    stream = joined(*parts)
    head = 16 + (8 * len(parts) if len(parts) > 1 else 0)
    behind = bytes(4096)  # so that what claims too much is not merely waited for
    for bit in range(8 * head):
        damaged = bytearray(stream + behind)
        damaged[bit // 8] ^= 1 << bit % 8
        assert decoded(bytes(damaged)) == [DAMAGED], f"bit {bit}"
    assert not asked


@given(
    st.lists(st.lists(st.binary(max_size=200), max_size=4), min_size=1, max_size=5),
    st.lists(st.integers(1, 90)),
)
def test_frames_survive_any_cutting_of_the_stream(sent: list[list[bytes]], cuts: list[int]) -> None:
    assert decoded(b"".join(joined(*parts) for parts in sent), cuts) == sent


def test_descriptors_go_to_the_frame_they_belong_to() -> None:
    decoder = Decoder()
    decoder.fds.extend([7, 8])
    stream = joined(b"a", fds=(7,)) + joined(b"b") + joined(b"c", fds=(8,))
    assert [frame.fds for frame in decoder.feed(stream)] == [[7], [], [8]]


@thorough
@given(SMALL, st.data())
def test_bytes_that_are_lost_or_doubled_spoil_one_frame_at_most(
    sent: list[list[bytes]], data: st.DataObject
) -> None:
    streams = [joined(*parts) for parts in sent]
    stream = b"".join(streams)
    start = data.draw(st.integers(0, len(stream) - 1))
    end = data.draw(st.integers(start + 1, len(stream)))
    times = data.draw(st.sampled_from([0, 2]))
    found = decoded(stream[:start] + stream[start:end] * times + stream[end:])
    whole = 0
    while whole < len(sent) and len(b"".join(streams[: whole + 1])) <= start:
        whole += 1
    assert found[:whole] == sent[:whole]
    if b"".join(streams[whole:])[: end - start] not in {
        b"".join(streams[whole:n]) for n in range(whole, len(sent) + 1)
    }:  # else a whole frame was lost or doubled, and that cannot be seen here
        wrong = [frame for frame in found[whole:] if frame != DAMAGED and frame not in sent]
        assert len(wrong) <= 1


def head(count: int, fds: int, total: int) -> bytes:
    """A head whose check is right."""
    counts = count | fds << 24
    return struct.pack("<IIQ", counts, frames._check(counts, total), total)


def test_a_head_makes_nobody_ask_for_memory_or_parts_before_they_come(asked: list[int]) -> None:
    for total in (MOST_BYTES + 1, (1 << 64) - 1):
        assert decoded(head(1, 0, total)) == [DAMAGED]
    for count in (2, (1 << 24) - 1):
        assert decoded(head(count, 0, 1 << 30) + bytes(8)) == []
    assert not asked


def test_more_descriptors_than_the_kernel_sends_are_refused() -> None:
    assert decoded(head(1, 253, 1) + bytes(ALIGN)) == [[b"\0"]]
    assert decoded(head(1, 254, 1) + bytes(ALIGN)) == [DAMAGED]


def test_no_memory_for_a_frame_is_the_end_of_the_stream_and_says_so(asked: list[int]) -> None:
    decoder = Decoder()
    with pytest.raises(DamagedMessage, match="no memory for a message of 2,147,483,648 bytes"):
        list(decoder.feed(head(1, 0, 1 << 31)))
    assert asked == [1 << 31]


def test_a_damaged_stream_stays_damaged() -> None:
    decoder = Decoder()
    for _ in range(3):
        with pytest.raises(DamagedMessage, match="no message begins with 6c6f7267"):
            list(decoder.feed(b"lorg ipsum dolor"))
    with pytest.raises(DamagedMessage):
        list(decoder.feed(joined(b"good")))
    assert issubclass(DamagedMessage, HybridLoaderError)


# -- first parts of frames ------------------------------------------------------------------------

SLOT_MAP = SlotMap((BufferPlace(3, 0, 70_000), None), (), (5,), "too much is kept")
SLOTS = SlotWriter(1)
FIRST_PARTS: list[bytes] = [
    bytes(encode_event(Ready(0), (), SLOTS)[0][0]),
    bytes(encode_event(Exhausted(0, 7), [1, -2], SLOTS)[0][0]),
    bytes(encode_event(Failed(0, 3, Failure(KeyError("k"))), [9], SLOTS)[0][0]),
    bytes(encode_event(Done(0, 1 << 40, Pickled([1, "two"]), 0.5), (), SLOTS)[0][0]),
    bytes(encode_event(Done(0, 4, Pickled(None), extras={}), [4, 5], SLOTS, "why")[0][0]),
    bytes(encoded_message(Task(1 << 40, [1, 2, 3]), [1, 2])[0]),
]


@pytest.mark.parametrize(
    "whole", FIRST_PARTS, ids=["ready", "exhausted", "failed", "done", "refusal", "task"]
)
def test_every_bit_of_the_fixed_bytes_counts(whole: bytes) -> None:
    decode_fields([memoryview(whole)])
    for bit in range(8 * frames._BEGIN):
        damaged = bytearray(whole)
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(DamagedMessage):
            decode_fields([memoryview(damaged)])
    for size in range(frames._BEGIN):
        with pytest.raises(DamagedMessage):
            decode_fields([memoryview(whole)[:size]])


def test_a_first_part_is_read_as_it_was_written() -> None:
    written = frames.DONE, 1 << 40, b"body", (3, -4), SLOT_MAP, b"extras", 7, 0.25, 1 << 50
    assert decode_fields([memoryview(encode_fields(*written))]) == written
    plain = frames.FAILED, 0, b"", (), None, None, -1, 0.0, 0
    assert decode_fields([memoryview(encode_fields(*plain))]) == (*plain[:6], None, *plain[7:])


META = pickle.dumps((SLOT_MAP, b"extras"), 5)


@pytest.mark.parametrize(
    ("meta", "words"),
    [
        (b"\x80\x05no pickle", "the metadata of a message can't be read"),
        (pickle.dumps([SLOT_MAP, None], 5), "the metadata of a message is of <class 'list'>"),
        (pickle.dumps((5, None), 5), r"invalid metadata: \(5, None\)"),
    ],
    ids=["no pickle", "no pair", "no map"],
)
def test_metadata_that_nobody_wrote_is_damage(meta: bytes, words: str) -> None:
    size = len(META)
    whole = encode_fields(frames.DONE, 1, b"body", (3,), SLOT_MAP, b"extras")
    assert whole[-4 - size :] == META + b"body"
    with pytest.raises(DamagedMessage, match=words):
        decode_fields([memoryview(whole[: -4 - size] + meta.ljust(size, b".") + b"body")])
    with pytest.raises(DamagedMessage, match=f"a message of {len(whole) - 5} bytes is cut off"):
        decode_fields([memoryview(whole[:-5])])


@pytest.mark.parametrize(
    ("kind", "body", "words"),
    [
        (frames.OTHER, b"no pickle", "a message from the parent can't be read: .*UnpicklingError"),
        (frames.OTHER, pickle.dumps("begin"), "the parent sent a message of an unknown kind"),
        (frames.DONE, b"", "the parent sent a message of an unknown kind"),
    ],
)
def test_what_is_no_message_of_the_parent_is_damage(kind: int, body: bytes, words: str) -> None:
    with pytest.raises(DamagedMessage, match=words):
        decode_message([memoryview(encode_fields(kind, 0, body))])


def test_a_batch_in_memory_that_does_not_exist_is_damage() -> None:
    header = memoryview(pickle.dumps("value"))
    for unknown in (SLOT_MAP, SlotMap((None,), (), (), None)):  # a slot; a buffer of the stream
        with pytest.raises(DamagedMessage, match="a batch names memory that does not exist: "):
            frames.open_packed(header, [], SlotReader(1), unknown)


def test_a_result_whose_metadata_can_not_be_sent_fails() -> None:
    extras = {"measures": (each for each in "abc")}
    parts, _ = encode_event(Done(0, 5, Pickled(1), extras=extras, position=9), (), SLOTS)
    found = decode_fields([memoryview(parts[0])])
    assert (found.kind, found.seq, found.position) == (frames.FAILED, 5, 9)
    error = pickle.loads(found.body).to_exception("")
    assert isinstance(error, ResultPicklingError)
    assert "metadata of a result" in str(error)


class Explosive:
    def __reduce__(self) -> Any:
        return eval, ("1 / 0",)


@pytest.mark.parametrize("returned", [(), (1, 70_000, 1 << 40)])
def test_an_index_that_fails_to_load_among_others_is_known_by_its_task(returned: Any) -> None:
    parts = encoded_message(Task(1 << 33, [0, 5, Explosive(), 6]), returned)
    with pytest.raises(Unreadable) as caught:
        decode_message([memoryview(part) for part in parts])
    assert (caught.value.seq, caught.value.returned) == (1 << 33, returned)
    assert isinstance(caught.value.error, ZeroDivisionError)
