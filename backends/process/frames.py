"""Frames: the form of messages on a byte stream between parent and worker.

A frame is some parts (buffers) and some descriptors. On the wire: a head of 16 bytes (the numbers of
parts and of descriptors, a check, the bytes of all parts together); the sizes of the parts if they are
several; then the parts. Each part begins at a multiple of `ALIGN`, so that tensors can use it where it
lies. Descriptors travel with the first byte.

The check finds bytes that are not ours (docs/security.md); the parts themselves are not looked at.
"""

from __future__ import annotations

import pickle
import struct
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import Any, NamedTuple

from hybridloader._support.user_objects import Failure, repr_of
from hybridloader.engine.dataset_state import ShardStart
from hybridloader.engine.messages import (
    Begin,
    Done,
    Event,
    Exhausted,
    Failed,
    Message,
    Ready,
    Stop,
    Task,
)
from hybridloader.errors import DamagedMessage, ResultPicklingError
from hybridloader.memory.packing import pack_in_band, unpack
from hybridloader.memory.segments import ALIGN, aligned_view
from hybridloader.memory.shared_slots import SlotMap, SlotReader, SlotWriter
from hybridloader.memory.slots import OWN

MOST_BYTES = 1 << 40  # most bytes of one frame: a thousand times the largest batch that makes sense

MOST_FDS = 253  # most descriptors of one frame: the kernel's limit (SCM_MAX_FD)

_COUNTED = 24
"""Bits of the number of parts; the rest of the 32 bits count descriptors. A buffer below 32 KB is not a
separate part (`packing.IN_BAND`), so as many parts would take half of `MOST_BYTES`."""

_HEAD = struct.Struct("<IIQ")
_FOLD = 1 << 32
_SIGN = 0x9E3779B9  # any number that is neither text nor small, so that zeros are not a head
_SIGN_OF_ONE = _SIGN ^ 1
_PADDING = bytes(ALIGN)

Buffer = Any  # bytes, bytearray or memoryview; collections.abc.Buffer needs Python 3.12


class Frame(NamedTuple):
    """Frame that arrived. The parts are views of one block of memory that is the frame's own."""

    parts: list[memoryview]
    fds: list[int]


_new = tuple.__new__  # without a call of `Frame.__new__`, which takes as long as the rest


def _check(counts: int, total: int) -> int:
    """Checksum that differs for any two heads of which one is the other with one byte changed."""
    return (total ^ total >> 32 ^ counts ^ _SIGN) & (_FOLD - 1)


def encode(parts: Sequence[Buffer], fds: Sequence[int] = ()) -> list[Buffer]:
    """Give the pieces to write, in order, without copying the parts."""
    if len(parts) == 1 and not fds:
        part = parts[0]
        size = len(part) if type(part) is bytes else memoryview(part).nbytes
        if size < _FOLD:  # the path of nearly all frames: inlined, without a call
            return [_HEAD.pack(1, size ^ _SIGN_OF_ONE, size), part, _PADDING[: -size % ALIGN]]
    sizes = [memoryview(part).nbytes for part in parts]
    total, counts = sum(sizes), len(parts) | len(fds) << _COUNTED
    head = _HEAD.pack(counts, _check(counts, total), total)
    pieces: list[Buffer] = [head]
    if len(parts) > 1:
        pieces[0] = head + struct.pack(f"<{len(parts)}Q", *sizes)
    for part, size in zip(parts, sizes, strict=True):
        pieces.append(part)
        if size % ALIGN:
            pieces.append(_PADDING[size % ALIGN :])
    return pieces


class Decoder:
    """Takes bytes as they come, gives frames as they become whole.

    Small frames are cut out of the bytes that were read; for a large one `room` offers its own memory,
    so that the reader can read straight into it. After the first `DamagedMessage`, each call raises
    one: the start of the next frame is unknown.
    """

    def __init__(self) -> None:
        self._pending = bytearray()
        self._sizes: list[int] = []
        self._fd_count = 0
        self.body: memoryview | None = None
        """Memory of the incomplete frame; None if no frame is incomplete."""
        self._filled = 0
        self.fds: list[int] = []
        """Descriptors that have arrived and belong to no frame yet."""

    def room(self) -> memoryview | None:
        """Return memory for the next bytes of an incomplete frame; None if no frame is incomplete."""
        if self.body is None or self._filled == len(self.body):
            return None
        return self.body[self._filled :]

    def advance(self, count: int) -> Iterator[Frame]:
        """Take in `count` bytes that were read into `room`."""
        self._filled += count
        yield from self._frames()

    def feed(self, data: Buffer) -> Iterable[Frame]:
        """Take in `data`, which was read elsewhere."""
        found: list[Frame] = []
        if self.body is None and not self._pending:
            whole, start, length = memoryview(data), 0, len(data)
            # Frames of one part, the usual case, are used in the memory into which they were read.
            while length - start >= _HEAD.size:
                counts, check, size = _HEAD.unpack_from(whole, start)
                begin = start + _HEAD.size
                end = begin + -(-size // ALIGN) * ALIGN
                if counts != 1 or check != size ^ _SIGN_OF_ONE or end > length:
                    break
                found.append(_new(Frame, ([whole[begin : begin + size]], [])))
                start = end
            if start == length:
                return found
            data = whole[start:]
        self._pending += data
        return chain(found, self._frames())

    def _frames(self) -> Iterator[Frame]:
        while True:
            if self.body is None and not self._begin():
                return
            body = self.body
            assert body is not None
            missing = len(body) - self._filled
            if missing and self._pending:
                taken = min(missing, len(self._pending))
                body[self._filled : self._filled + taken] = self._pending[:taken]
                del self._pending[:taken]
                self._filled += taken
            if self._filled < len(body):
                return
            yield self._finish(body)

    def _begin(self) -> bool:
        pending = self._pending
        if len(pending) < _HEAD.size:
            return False
        counts, check, total = _HEAD.unpack_from(pending)
        count, fd_count = counts & (1 << _COUNTED) - 1, counts >> _COUNTED
        if check != _check(counts, total) or total > MOST_BYTES or fd_count > MOST_FDS:
            raise DamagedMessage(
                f"no message begins with {bytes(pending[: _HEAD.size]).hex(' ', 4)}: another program or "
                "library wrote to this descriptor, or read from it"
            )
        end = _HEAD.size
        sizes = [total] if count else []
        if count > 1:
            end += 8 * count
            if len(pending) < end:
                return False
            sizes = list(struct.unpack_from(f"<{count}Q", pending, _HEAD.size))
        if sum(sizes) != total:
            raise DamagedMessage(
                f"a message of {total:,} bytes has {count} parts of {sum(sizes):,} bytes together"
            )
        try:
            self.body = aligned_view(sum(-(-size // ALIGN) * ALIGN for size in sizes))
        except MemoryError:
            raise DamagedMessage(
                f"there is no memory for a message of {total:,} bytes; make smaller batches, or fewer "
                "workers"
            ) from None
        del pending[:end]
        self._sizes, self._fd_count, self._filled = sizes, fd_count, 0
        return True

    def _finish(self, body: memoryview) -> Frame:
        parts, start = [], 0
        for size in self._sizes:
            parts.append(body[start : start + size])
            start += -(-size // ALIGN) * ALIGN
        fds, self.fds = self.fds[: self._fd_count], self.fds[self._fd_count :]
        self.body = None
        return Frame(parts, fds)


# -- Codec of the frames between parent and worker: messages one way, events the other.
#
# All have one form. The first part of a frame contains fixed fields, the numbers of returned slots, and
# a body, which is a pickle. Small tasks and results have no other part. Each index and each batch
# without large arrays takes this path, so it is short. Large buffers are in slots, and the first part
# contains their places; without slots they follow as further parts. The codec never writes to a stream.
#
# Any error in a frame raises `DamagedMessage` (docs/security.md). The fixed fields have a separate
# check, because a wrong number there would give a wrong batch.


READY, DONE, FAILED, EXHAUSTED, TASK, OTHER = range(6)
"""Kinds of frames: the events, a task, and all other messages."""

_FIELDS = struct.Struct("<BQIIqqqI")
"""Kind, number of the task, bytes of the pickled slot map and metadata, number of returned slots (their
numbers follow, 8 bytes each), items in the result (-1: no list), nanoseconds, position in the shard,
and a check of these."""

_BEGIN = _FIELDS.size
_CODEC_SIGN, _MASK = (
    0x85EBCA6B,
    0xFFFFFFFF,
)  # the sign is any number but 0, so that zeros are refused

_METAS = ((SlotMap, type(None)), (SlotMap, bytes), (type(None), bytes))
"""Allowed types of the slot map and the metadata together."""


class Unreadable(Exception):
    """Error for the index of task `seq`, which raised `error` when loaded; `returned` came along."""

    def __init__(self, seq: int, returned: Sequence[int], error: Exception) -> None:
        super().__init__(seq, returned, error)
        self.seq, self.returned, self.error = seq, returned, error


def encode_fields(
    kind: int,
    seq: int,
    body: Any,  # a pickle, as bytes or a view; empty if it is the last of the buffers
    returned: Sequence[int] = (),  # slots of the reader that the writer no longer uses
    slot_map: SlotMap | None = None,  # places of the buffers; None: all follow as further parts
    extras: bytes | None = None,  # metadata of the result, pickled
    items: int = -1,  # of a result: number of items, -1: no list; of a task: `Task.item`
    seconds: float = 0.0,  # seconds of the task
    position: int = 0,  # position of the worker in its shard
) -> bytes:
    """Make the first part of a frame."""
    meta = b"" if slot_map is None and extras is None else pickle.dumps((slot_map, extras), 5)
    size, back, spent = len(meta), len(returned), int(seconds * 1e9)
    folded = kind ^ seq ^ size ^ back ^ items ^ spent ^ position
    check = (folded ^ folded >> 32 ^ _CODEC_SIGN) & _MASK
    fields = _FIELDS.pack(kind, seq, size, back, items, spent, position, check)
    if size or back:
        fields += struct.pack(f"<{back}q", *returned) + meta
    whole: bytes = fields + body
    return whole


class Fields(NamedTuple):
    """Parameters of `encode_fields`; `items` is None where there is no list."""

    kind: int
    seq: int
    body: memoryview
    returned: Sequence[int]
    slot_map: SlotMap | None
    extras: bytes | None
    items: int | None
    seconds: float
    position: int


def decode_fields(parts: Sequence[memoryview]) -> Fields:
    """Read the parameters of `encode_fields`.

    Raises `DamagedMessage` if `encode_fields` has not written it.
    """
    part = parts[0] if parts else memoryview(b"")
    if len(part) < _BEGIN:
        raise DamagedMessage(f"a message has {len(part)} bytes, fewer than its head")
    kind, seq, size, back, count, spent, position, check = _FIELDS.unpack_from(part)
    folded = kind ^ seq ^ size ^ back ^ count ^ spent ^ position
    if check != (folded ^ folded >> 32 ^ _CODEC_SIGN) & _MASK or kind > OTHER:
        raise DamagedMessage("a message has no valid head")
    items = None if count < 0 else count
    if not (size or back):
        return Fields(kind, seq, part[_BEGIN:], (), None, None, items, spent * 1e-9, position)
    start = _BEGIN + 8 * back
    end = start + size
    if end > len(part):
        raise DamagedMessage(f"a message of {len(part):,} bytes is cut off")
    returned: Sequence[int] = struct.unpack_from(f"<{back}q", part, _BEGIN)
    slot_map = extras = None
    if size:
        meta = loaded(part[start:end], tuple, "the metadata of a message")
        if tuple(map(type, meta)) not in _METAS:
            raise DamagedMessage(f"a message has invalid metadata: {meta!r:.100}")
        slot_map, extras = meta
    body = part[end:]
    return Fields(kind, seq, body, returned, slot_map, extras, items, spent * 1e-9, position)


def loaded(pickled: Any, kind: type | tuple[type, ...], what: str) -> Any:
    """Load a pickle of an object of one of these types. Raises `DamagedMessage`."""
    try:
        found = unpack(pickled, ())
    except Exception as error:  # damaged bytes may raise any error
        raise DamagedMessage(f"{what} can't be read: {repr_of(error)}") from error
    if not isinstance(found, kind):
        raise DamagedMessage(f"{what} is of {type(found)}")
    return found


# -- messages --------------------------------------------------------------------------------------


def decode_message(
    parts: Sequence[memoryview], slots: SlotReader | None = None, fds: list[int] | None = None
) -> tuple[Message, Sequence[int]]:
    """Decode a message, and the slots to use again. Takes over `fds` if it is a task.

    Raises `Unreadable` if the index of a task can't be loaded, and `DamagedMessage`.
    """
    found = decode_fields(parts)
    body, returned = found.body, found.returned
    if found.kind == OTHER:
        try:
            message = unpack(body, parts[1:])
        except Exception as error:  # damaged bytes may raise any error
            raise DamagedMessage(
                f"a message from the parent can't be read: {repr_of(error)}"
            ) from error
        if isinstance(message, (Begin, Stop)):
            return message, returned
    if found.kind != TASK:
        raise DamagedMessage("the parent sent a message of an unknown kind")
    try:
        if found.slot_map is None:
            index = unpack(body, parts[1:])
        else:
            index = open_packed(body, parts[1:], slots, found.slot_map, fds)
        return Task(found.seq, index, found.items or 0), returned
    except Exception as error:
        raise Unreadable(found.seq, returned, error) from error


def open_packed(
    header: bytes | memoryview,
    buffers: Sequence[memoryview],
    slots: SlotReader | None,
    slot_map: SlotMap | None,
    fds: list[int] | None = None,
) -> Any:
    """Load a value; `fds` came with a slot map that `slots` has not learnt yet."""
    if slot_map is not None:
        assert slots is not None
        if fds is not None:
            slots.learn(slot_map, fds)
        try:
            buffers = slots.buffers(slot_map, buffers)
            if not header:  # a large header has a slot, too
                header = buffers.pop()
        except (LookupError, StopIteration) as error:  # a StopIteration would end the user's loop
            raise DamagedMessage(
                f"a batch names memory that does not exist: {repr_of(error)}"
            ) from error
    return unpack(header, buffers)


# -- events ----------------------------------------------------------------------------------------


def encode_event(
    event: Event,
    returned: Sequence[int],
    slots: SlotWriter,  # for the large buffers of a result
    refusal: str | None = None,  # text of a warning that the parent shows, with a result
) -> tuple[list[Any], Sequence[int]]:
    """Encode an event. Gives parts and descriptors."""
    if isinstance(event, Done):
        try:
            extras = event.extras
            packed = None if extras is None else pack_in_band(extras, "metadata of a result")
        except ResultPicklingError as error:
            event = Failed(event.worker, event.seq, Failure(error), event.position)
        else:
            payload: Any = event.payload  # a `Pickled`
            (header, buffers), slot_map, fds = payload.packed, None, list[int]()
            if buffers or len(header) >= OWN:
                slot_map, header, buffers, fds = into_slots(header, buffers, slots)
            if refusal is not None:
                slot_map = slot_map or SlotMap((None,) * len(buffers), (), (), None)
                slot_map = slot_map._replace(refusal=refusal)
            items = -1 if payload.count is None else payload.count
            rest = slot_map, packed, items, event.seconds, event.position
            return [encode_fields(DONE, event.seq, header, returned, *rest), *buffers], fds
    if isinstance(event, Failed):
        body = pickle.dumps(event.failure)
        return [encode_fields(FAILED, event.seq, body, returned, position=event.position)], ()
    assert isinstance(event, Ready | Exhausted)
    body = b"" if event.shard_start is None else pickle.dumps(event.shard_start, 5)
    if isinstance(event, Ready):
        return [encode_fields(READY, 0, body, returned)], ()
    return [encode_fields(EXHAUSTED, event.seq, body, returned, position=event.position)], ()


def decode_shard_start(body: memoryview) -> Any:
    return loaded(body, (ShardStart, Failure), "a worker's dataset state") if len(body) else None


def into_slots(
    header: Any, buffers: list[memoryview], slots: SlotWriter
) -> tuple[SlotMap, Any, list[memoryview], list[int]]:
    """Copy large buffers into slots.

    Gives the slot map, the header, the buffers that go through the stream, and descriptors. A header of
    `OWN` bytes goes into a slot too, as the last buffer, and is empty here.
    """
    if len(header) >= OWN:
        buffers, header = [*buffers, memoryview(header)], b""
    slot_map, fds = slots.write(buffers)
    streamed = [b for b, span in zip(buffers, slot_map.spans, strict=True) if span is None]
    return slot_map, header, streamed, fds
