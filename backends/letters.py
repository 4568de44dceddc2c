"""What parent and worker write to each other: messages one way, events the other, as parts of a frame.

A small result is one part: a few fixed bytes and its pickle. That is the path of every batch without a
large array, so it is kept short.
"""

from __future__ import annotations

import pickle
import struct
from collections.abc import Sequence
from typing import Any

from hybridloader.arena import Parcel, Writer
from hybridloader.errors import Failure, ResultNotSendable
from hybridloader.messages import Failed, Message, Task
from hybridloader.packing import Packed, pack, unpack
from hybridloader.slots import OWN

READY, DONE, FAILED, EXHAUSTED = range(4)

_PREFIX = struct.Struct("<BQI")  # kind, seq, bytes of the parcel's pickle

_SIMPLE = (int, str)


def encode_message(message: Message, returned: list[int]) -> list[Any]:
    """`message`, and the slots that the worker may use again."""
    if type(message) is Task:
        index = message.index
        kind = type(index[0]) if type(index) is list and index else type(index)
        if kind in _SIMPLE:
            try:
                return [pickle.dumps((message.seq, index, returned), 5)]
            except Exception:  # a mixed list with something in it that plain pickle can't do
                pass
    header, buffers = pack((message, returned))
    return [header, *buffers]


def decode_message(parts: Sequence[memoryview]) -> tuple[Message, list[int]]:
    """The inverse of `encode_message`."""
    found = unpack(parts[0], parts[1:])
    if len(found) == 3:
        return Task(found[0], found[1]), found[2]
    return found  # type: ignore[no-any-return]


def encode_ready() -> list[Any]:
    return [_PREFIX.pack(READY, 0, 0)]


def encode_exhausted(seq: int) -> list[Any]:
    return [_PREFIX.pack(EXHAUSTED, seq, 0)]


def encode_failed(event: Failed) -> list[Any]:
    try:
        failure = pickle.dumps(event.failure)
    except Exception as error:  # Failure guards against this; a hang would be worse than a guess
        lost = Failure(ResultNotSendable(f"an exception could not be sent: {error!r}"))
        failure = pickle.dumps(lost)
    return [_PREFIX.pack(FAILED, event.seq, 0) + failure]


def encode_done(seq: int, packed: Packed, slots: Writer | None) -> tuple[list[Any], list[int]]:
    """A result; what can go through slots does. Gives parts and descriptors."""
    header, buffers = packed
    meta, fds = b"", list[int]()
    if slots is not None and (buffers or len(header) >= OWN):
        if len(header) >= OWN:
            buffers, header = [*buffers, memoryview(header)], b""
        parcel, fds = slots.write(buffers)
        meta = pickle.dumps(parcel, 5)
        buffers = [b for b, span in zip(buffers, parcel.spans, strict=True) if span is None]
    return [_PREFIX.pack(DONE, seq, len(meta)) + meta + header, *buffers], fds


def decode_event(part: memoryview) -> tuple[int, int, Parcel | None, memoryview]:
    """Kind, sequence number, parcel and the rest: a header, a pickled failure, or nothing."""
    kind, seq, size = _PREFIX.unpack_from(part)
    start = _PREFIX.size + size
    parcel = pickle.loads(part[_PREFIX.size : start]) if size else None
    return kind, seq, parcel, part[start:]
