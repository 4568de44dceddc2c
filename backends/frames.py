"""Frames: how messages lie on a byte stream between parent and worker.

A frame is some parts (buffers) and some descriptors. On the wire: the number of parts and of
descriptors, the sizes of the parts, then the parts, each beginning at a multiple of `ALIGN` so that
arrays can be used where they lie. Descriptors travel with the first byte.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

ALIGN = 16
_HEAD = struct.Struct("<II")
_ONE = struct.Struct("<IIQ")  # the head of a frame of one part
_PADDING = bytes(ALIGN)

Buffer = Any  # bytes, bytearray or memoryview; collections.abc.Buffer needs Python 3.12


class Frame(NamedTuple):
    """What arrived. The parts are views of one block of memory that is the frame's own."""

    parts: list[memoryview]
    fds: list[int]


def encode(parts: Sequence[Buffer], fds: Sequence[int] = ()) -> list[Buffer]:
    """The pieces to write, in order, without copying the parts."""
    if len(parts) == 1 and not fds:
        size = memoryview(parts[0]).nbytes
        return [_ONE.pack(1, 0, size), parts[0], _PADDING[: -size % ALIGN]]
    sizes = [memoryview(part).nbytes for part in parts]
    pieces: list[Buffer] = [
        _HEAD.pack(len(parts), len(fds)) + struct.pack(f"<{len(parts)}Q", *sizes)
    ]
    for part, size in zip(parts, sizes, strict=True):
        pieces.append(part)
        if size % ALIGN:
            pieces.append(_PADDING[size % ALIGN :])
    return pieces


class Decoder:
    """Takes bytes as they come, gives frames as they become whole.

    Small frames are cut out of what was read; for a large one `room` offers its own memory, so that
    the reader can read straight into it.
    """

    def __init__(self) -> None:
        self._pending = bytearray()
        self._sizes: list[int] = []
        self._fd_count = 0
        self._body: bytearray | None = None
        self._filled = 0
        self.fds: list[int] = []
        """Descriptors that came in, not yet claimed by a frame."""

    def room(self) -> memoryview | None:
        """Where the next bytes of a frame under way belong; None if none is under way."""
        if self._body is None or self._filled == len(self._body):
            return None
        return memoryview(self._body)[self._filled :]

    def advance(self, count: int) -> Iterator[Frame]:
        """`count` bytes were read into `room`."""
        self._filled += count
        yield from self._frames()

    def feed(self, data: Buffer) -> Iterator[Frame]:
        """`data` was read elsewhere."""
        if self._body is None and not self._pending:
            whole = memoryview(data)
            start = 0
            # Frames of one part, which is most of them, are used where they were read.
            while len(whole) - start >= _ONE.size:
                count, fd_count, size = _ONE.unpack_from(whole, start)
                end = start + _ONE.size + -(-size // ALIGN) * ALIGN
                if count != 1 or fd_count or end > len(whole):
                    break
                begin = start + _ONE.size
                yield Frame([whole[begin : begin + size]], [])
                start = end
            data = whole[start:]
        self._pending += data
        yield from self._frames()

    def _frames(self) -> Iterator[Frame]:
        while True:
            if self._body is None and not self._begin():
                return
            body = self._body
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
        count, fd_count = _HEAD.unpack_from(pending)
        end = _HEAD.size + 8 * count
        if len(pending) < end:
            return False
        self._sizes = list(struct.unpack_from(f"<{count}Q", pending, _HEAD.size))
        self._fd_count = fd_count
        del pending[:end]
        self._body = bytearray(sum(-(-size // ALIGN) * ALIGN for size in self._sizes))
        self._filled = 0
        return True

    def _finish(self, body: bytearray) -> Frame:
        whole, parts, start = memoryview(body), [], 0
        for size in self._sizes:
            parts.append(whole[start : start + size])
            start += -(-size // ALIGN) * ALIGN
        fds, self.fds = self.fds[: self._fd_count], self.fds[self._fd_count :]
        self._body = None
        return Frame(parts, fds)
