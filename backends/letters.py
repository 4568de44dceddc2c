"""What parent and worker write to each other: messages one way, events the other, as parts of a frame.

A small task and a small result are one part: a few fixed bytes and a pickle. That is the path of
every index and of every batch without a large array, so it is kept short. What is large lies in
slots, and the letter tells where; without slots it follows as further parts.
"""

from __future__ import annotations

import pickle
import struct
from collections.abc import Sequence
from typing import Any

from hybridloader.arena import Parcel, Reader, Writer
from hybridloader.errors import Failure, ResultNotSendable
from hybridloader.messages import Failed, Message, Task
from hybridloader.packing import IN_BAND, Packed, pack, unpack
from hybridloader.slots import OWN

READY, DONE, FAILED, EXHAUSTED = range(4)

_PREFIX = struct.Struct("<BQIIqd")
"""Kind, seq, bytes of the parcel's pickle, slots returned (their numbers follow, 8 bytes each), items in
the result (-1: no list), seconds."""

_SIMPLE = (int, str)


class Unreadable(Exception):
    """The index of task `seq` could not be loaded here, because of `error`; `returned` came along."""

    def __init__(self, seq: int, returned: list[int], error: Exception) -> None:
        super().__init__(seq, returned, error)
        self.seq, self.returned, self.error = seq, returned, error


# -- messages --------------------------------------------------------------------------------------


def encode_small(message: Message, returned: list[int]) -> bytes | None:
    """A task whose index is what a sampler gives; None for every other message."""
    if type(message) is Task:
        index = message.index
        kind = type(index[0]) if type(index) is list and index else type(index)
        if kind in _SIMPLE:
            try:
                return pickle.dumps((message.seq, index, returned), 5)
            except Exception:  # a mixed list with something in it that plain pickle can't do
                pass
    return None


def encode_message(message: Message, returned: list[int], *, other_main: bool = False) -> list[Any]:
    """`message`, and the slots that the worker may use again, without slots for what is large."""
    small = encode_small(message, returned)
    if small is not None:
        return [small]
    if type(message) is Task:
        header, buffers = pack(message.index, "a task", other_main=other_main)
        return encode_task(message.seq, returned, None, header, buffers)
    header, buffers = pack((message, returned), "a message", other_main=other_main)
    return [header, *buffers]


def encode_task(
    seq: int, returned: list[int], parcel: Parcel | None, header: Any, buffers: Sequence[Any]
) -> list[Any]:
    """A task whose index is packed: `buffers` are those that go through the stream."""
    if buffers or len(header) >= IN_BAND:
        return [pickle.dumps((seq, returned, parcel, None), 5), header, *buffers]
    return [pickle.dumps((seq, returned, parcel, bytes(header)), 5)]


def decode_message(
    parts: Sequence[memoryview], slots: Reader | None = None, fds: list[int] | None = None
) -> tuple[Message, list[int]]:
    """The inverse of `encode_message` and `encode_task`: the message, and the slots to use again.

    Raises
    ------
    Unreadable
        The index of a task can't be loaded.
    """
    found = unpack(parts[0], parts[1:])
    if len(found) == 3:
        return Task(found[0], found[1]), found[2]
    if len(found) == 2:
        return found  # type: ignore[no-any-return]
    seq, returned, parcel, header = found
    buffers = parts[1:]
    if header is None:
        header, buffers = parts[1], parts[2:]
    try:
        return Task(seq, open_packed(header, buffers, slots, parcel, fds)), returned
    except Exception as error:
        raise Unreadable(seq, returned, error) from error


def open_packed(
    header: bytes | memoryview,
    buffers: Sequence[memoryview],
    slots: Reader | None,
    parcel: Parcel | None,
    fds: list[int] | None = None,
) -> Any:
    """The value; `fds` came with a parcel that `slots` has not learnt yet."""
    if parcel is not None:
        assert slots is not None
        if fds is not None:
            slots.learn(parcel, fds)
        buffers = slots.buffers(parcel, buffers)
        if not header:  # it was so large that it has a slot too
            header = buffers.pop()
    return unpack(header, buffers)


# -- events ----------------------------------------------------------------------------------------


def encode_ready() -> list[Any]:
    return [_PREFIX.pack(READY, 0, 0, 0, -1, 0.0)]


def encode_exhausted(seq: int, returned: Sequence[int] = ()) -> list[Any]:
    return [_PREFIX.pack(EXHAUSTED, seq, 0, len(returned), -1, 0.0) + _numbers(returned)]


def encode_failed(event: Failed, returned: Sequence[int] = ()) -> list[Any]:
    try:
        failure = pickle.dumps(event.failure)
    except Exception as error:  # Failure guards against this; a hang would be worse than a guess
        lost = Failure(ResultNotSendable(f"an exception could not be sent: {error!r}"))
        failure = pickle.dumps(lost)
    prefix = _PREFIX.pack(FAILED, event.seq, 0, len(returned), -1, 0.0)
    return [prefix + _numbers(returned) + failure]


def encode_done(
    seq: int,
    packed: Packed,
    slots: Writer | None,
    *,
    count: int | None = None,
    seconds: float = 0.0,
    returned: Sequence[int] = (),
    refusal: str | None = None,
) -> tuple[list[Any], list[int]]:
    """A result; what can go through slots does. Gives parts and descriptors.

    Parameters
    ----------
    count
        Items in the result, if it is a list.
    seconds
        How long it took.
    returned
        Slots of the parent's that this worker is done with.
    refusal
        What the parent shall warn of.
    """
    header, buffers = packed
    items = -1 if count is None else count
    if not (buffers or returned or refusal or len(header) >= OWN):
        return [_PREFIX.pack(DONE, seq, 0, 0, items, seconds) + header], []
    parcel, header, buffers, fds = into_slots(header, buffers, slots)
    if refusal is not None:
        parcel = (parcel or Parcel((None,) * len(buffers), (), (), None))._replace(refusal=refusal)
    meta = b"" if parcel is None else pickle.dumps(parcel, 5)
    prefix = _PREFIX.pack(DONE, seq, len(meta), len(returned), items, seconds)
    return [prefix + _numbers(returned) + meta + header, *buffers], fds


def into_slots(
    header: Any, buffers: list[memoryview], slots: Writer | None
) -> tuple[Parcel | None, Any, list[memoryview], list[int]]:
    """Bring into slots what is large: the parcel, if there is one, and what goes through the stream.

    A header that has gone into a slot, as the last buffer, is empty here.
    """
    if slots is None or not (buffers or len(header) >= OWN):
        return None, header, buffers, []
    if len(header) >= OWN:
        buffers, header = [*buffers, memoryview(header)], b""
    parcel, fds = slots.write(buffers)
    streamed = [b for b, span in zip(buffers, parcel.spans, strict=True) if span is None]
    return parcel, header, streamed, fds


def decode_event(
    part: memoryview,
) -> tuple[int, int, Parcel | None, memoryview, int | None, float, Sequence[int]]:
    """Kind, sequence number, parcel, the rest, items, seconds and the slots that are returned.

    The rest is a header, a pickled failure, or nothing.
    """
    kind, seq, size, back, count, seconds = _PREFIX.unpack_from(part)
    start = _PREFIX.size
    items = None if count < 0 else count
    if not (size or back):
        return kind, seq, None, part[start:], items, seconds, ()
    returned: Sequence[int] = ()
    if back:
        returned = struct.unpack_from(f"<{back}q", part, start)
        start += 8 * back
    parcel = pickle.loads(part[start : start + size]) if size else None
    return kind, seq, parcel, part[start + size :], items, seconds, returned


def _numbers(returned: Sequence[int]) -> bytes:
    if not returned:
        return b""
    return struct.pack(f"<{len(returned)}q", *returned)
