"""What parent and worker write to each other: messages one way, events the other, as parts of a frame.

A small task and a small result are one part: a few fixed bytes and a pickle. That is the path of
every index and of every batch without a large array, so it is kept short. What is large lies in
slots, and the letter tells where; without slots it follows as further parts.

Whatever is wrong with a letter is a `DamagedMessage`: the fixed bytes have a check of their own, as a
wrong number there would be a wrong batch. Pickles have none; they are code, and come from our own
processes only.
"""

from __future__ import annotations

import os
import pickle
import struct
from collections.abc import Sequence
from typing import Any
from zlib import crc32

from hybridloader.buffers.arena import Parcel, Reader, Writer
from hybridloader.buffers.packing import IN_BAND, Packed, pack, unpack
from hybridloader.buffers.slots import OWN
from hybridloader.errors import DamagedMessage, Failure, ResultNotSendable
from hybridloader.messages import Begin, Exhausted, Failed, First, Message, Ready, Stop, Task
from hybridloader.states.carried import DatasetState

READY, DONE, FAILED, EXHAUSTED, DONE_WITH_EXTRAS = range(5)

_PREFIX = struct.Struct("<BQIIqdq")
"""Kind, seq, bytes of the parcel's pickle, slots returned (their numbers follow, 8 bytes each), items in
the result (-1: no list), seconds, position in the shard."""

_CHECK = struct.Struct("<I")  # crc32 of these
_CHECKED = struct.Struct(_PREFIX.format + _CHECK.format[1:])
_BEGIN = _CHECKED.size

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
                return pickle.dumps((message.seq, returned, index), 5)
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
    DamagedMessage
        It is no message; `fds` were closed.
    """
    try:
        found = unpack(parts[0], parts[1:])
        if len(found) == 3:
            seq, returned, index = found
            if type(seq) is int and type(returned) is list:
                return Task(seq, index), returned
        if len(found) == 2 and isinstance(found[0], (Task, Begin, First, Stop)):
            message, returned = found
            return message, returned
        seq, returned, parcel, header = found
        buffers = parts[1:]
        if header is None:
            header, buffers = parts[1], parts[2:]
        if type(seq) is not int or type(returned) is not list or not _is_parcel(parcel):
            raise TypeError("its fields are of other types")
    except Exception as error:  # whatever a pickle that is none may raise
        _close_all(fds)
        if not isinstance(error, DamagedMessage) and (known := _before_the_index(parts)):
            raise Unreadable(*known, error) from error
        raise DamagedMessage(f"a message from the parent can't be read: {error!r}") from error
    try:
        return Task(seq, open_packed(header, buffers, slots, parcel, fds)), returned
    except Exception as error:
        raise Unreadable(seq, returned, error) from error


def _before_the_index(parts: Sequence[memoryview]) -> tuple[int, list[int]] | None:
    """Task and slots of a small message whose index, a mixed list, has an object that fails to load."""
    import pickletools

    seq, returned, lists = -1, list[int](), 0
    try:
        for opcode, argument, _ in pickletools.genops(bytes(parts[0])):
            if opcode.name == "EMPTY_LIST":  # that of the slots, then the index
                lists += 1
                if lists == 2:
                    return seq, returned
            elif opcode.name.startswith(("BININT", "LONG")):
                number = int(str(argument))
                if lists:
                    returned.append(number)
                else:
                    seq = number
    except Exception:  # no pickle, then
        pass
    return None


def _is_parcel(found: Any) -> bool:
    return found is None or type(found) is Parcel


def _close_all(fds: list[int] | None) -> None:
    while fds:
        os.close(fds.pop())


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
        try:
            buffers = slots.buffers(parcel, buffers)
            if not header:  # it was so large that it has a slot too
                header = buffers.pop()
        except (LookupError, StopIteration) as error:  # a StopIteration would end the user's loop
            raise DamagedMessage(f"a batch names memory that nobody has: {error!r}") from error
    return unpack(header, buffers)


# -- events ----------------------------------------------------------------------------------------


def _prefix(*fields: float) -> bytes:
    told = _PREFIX.pack(*fields)
    return told + _CHECK.pack(crc32(told))


def encode_ready(event: Ready) -> list[Any]:
    return [_prefix(READY, 0, 0, 0, -1, 0.0, 0) + _told(event.told)]


def encode_exhausted(event: Exhausted, returned: Sequence[int] = ()) -> list[Any]:
    prefix = _prefix(EXHAUSTED, event.seq, 0, len(returned), -1, 0.0, event.position)
    return [prefix + _numbers(returned) + _told(event.told)]


def _told(told: DatasetState | Failure | None) -> bytes:
    return b"" if told is None else pickle.dumps(told, 5)  # both are made to be sent


def decode_told(rest: memoryview) -> Any:
    """Decode what a worker told besides its results. Raises `DamagedMessage`."""
    if not len(rest):
        return None
    try:
        told = unpack(rest, ())
    except Exception as error:  # whatever a pickle that is none may raise
        raise DamagedMessage(f"what a worker told can't be read: {error!r}") from error
    if not isinstance(told, (DatasetState, Failure)):
        raise DamagedMessage(f"a worker told {type(told)} of itself")
    return told


def encode_failed(event: Failed, returned: Sequence[int] = ()) -> list[Any]:
    try:
        failure = pickle.dumps(event.failure)
    except Exception as error:  # Failure guards against this; a hang would be worse than a guess
        lost = Failure(ResultNotSendable(f"an exception could not be sent: {error!r}"))
        failure = pickle.dumps(lost)
    prefix = _prefix(FAILED, event.seq, 0, len(returned), -1, 0.0, event.position)
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
    position: int = 0,
    extras: bytes | None = None,
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
    position
        Where the worker is in its shard.
    extras
        Metadata of the result, pickled: the last part.
    """
    header, buffers = packed
    items = -1 if count is None else count
    if not (buffers or returned or refusal or extras or len(header) >= OWN):
        told = _PREFIX.pack(
            DONE, seq, 0, 0, items, seconds, position
        )  # `_prefix`, without the call
        return [told + _CHECK.pack(crc32(told)) + header], []
    parcel, header, buffers, fds = into_slots(header, buffers, slots)
    if refusal is not None:
        parcel = (parcel or Parcel((None,) * len(buffers), (), (), None))._replace(refusal=refusal)
    meta = b"" if parcel is None else pickle.dumps(parcel, 5)
    kind = DONE if extras is None else DONE_WITH_EXTRAS
    prefix = _prefix(kind, seq, len(meta), len(returned), items, seconds, position)
    parts = [prefix + _numbers(returned) + meta + header, *buffers]
    return parts if extras is None else [*parts, extras], fds


def decode_extras(part: memoryview) -> dict[str, Any]:
    """Metadata of a result. Raises `DamagedMessage`."""
    try:
        extras = unpack(part, ())
    except Exception as error:  # whatever a pickle that is none may raise
        raise DamagedMessage(f"the metadata of a result can't be read: {error!r}") from error
    if type(extras) is not dict:
        raise DamagedMessage(f"a result has {type(extras)} for metadata")
    return extras


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
) -> tuple[int, int, Parcel | None, memoryview, int | None, float, Sequence[int], int]:
    """Kind, sequence number, parcel, the rest, items, seconds, the slots that are
    returned, and the position.

    The rest is a header, a pickled failure, or nothing.

    Raises
    ------
    DamagedMessage
        It is no event.
    """
    if len(part) < _BEGIN:
        raise DamagedMessage(f"an event from a worker has {len(part)} bytes, fewer than any")
    kind, seq, size, back, count, seconds, position, check = _CHECKED.unpack_from(part)
    if check != crc32(part[: _PREFIX.size]) or kind > DONE_WITH_EXTRAS:
        raise DamagedMessage("an event from a worker does not begin as one")
    items = None if count < 0 else count
    if not (size or back):
        return kind, seq, None, part[_BEGIN:], items, seconds, (), position
    start = _BEGIN + 8 * back
    end = start + size
    if end > len(part):
        raise DamagedMessage(f"an event of {len(part):,} bytes from a worker is cut off")
    returned: Sequence[int] = struct.unpack_from(f"<{back}q", part, _BEGIN)
    parcel = None
    if size:
        try:
            parcel = unpack(part[start:end], ())
        except Exception as error:  # whatever a pickle that is none may raise
            raise DamagedMessage(f"an event from a worker can't be read: {error!r}") from error
        if not _is_parcel(parcel):
            raise DamagedMessage(f"an event from a worker has {type(parcel)} for a parcel")
    return kind, seq, parcel, part[end:], items, seconds, returned, position


def decode_failure(rest: memoryview) -> Failure:
    """What a worker said of the task that it failed at. Raises `DamagedMessage`."""
    try:
        failure = unpack(rest, ())
    except Exception as error:  # as above
        raise DamagedMessage(f"a worker's error can't be read: {error!r}") from error
    if not isinstance(failure, Failure):
        raise DamagedMessage(f"a worker sent {type(failure)} for an error")
    return failure


def _numbers(returned: Sequence[int]) -> bytes:
    if not returned:
        return b""
    return struct.pack(f"<{len(returned)}q", *returned)
