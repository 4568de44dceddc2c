"""Frames: the form of messages on a byte stream between parent and worker.

A frame is some parts (buffers) and some descriptors. On the wire: a head of 16 bytes (the numbers of
parts and of descriptors, a check, the bytes of all parts together); the sizes of the parts if they are
several; then the parts. Each part begins at a multiple of `ALIGN`, so that tensors can use it where it
lies. Descriptors travel with the first byte.

The check finds bytes that are not ours (docs/security.md); the parts themselves are not looked at.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import Any, NamedTuple

from hybridloader.errors import DamagedMessage
from hybridloader.memory.segments import ALIGN, aligned_view

MOST_BYTES = 1 << 40
"""Most bytes of one frame: a thousand times the largest batch that makes sense."""

MOST_FDS = 253
"""Most descriptors of one frame: the kernel's limit (SCM_MAX_FD)."""

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
