"""Packing of a value into a small header and large buffers, and back.

The header is an ordinary pickle. It omits the large flat memory of the value (tensors, numpy arrays,
objects that support the buffers of pickle protocol 5). That memory is returned as buffers, which can
be sent without another copy. The caller sends header and buffers.
"""

from __future__ import annotations

import copyreg
import gc
import pickle
import re
import threading
from collections.abc import Callable, Sequence
from functools import lru_cache
from operator import methodcaller
from typing import Any

from hybridloader._support.user_objects import text_of
from hybridloader.errors import DamagedMessage, ResultPicklingError
from hybridloader.memory.tensors import Blocks, Tensors, TensorsInBlocks, is_mark, rebuild_block

IN_BAND = 32 * 1024
"""Bytes below which a buffer stays in the header.

Buffers share their memory with the rest of the batch: code that keeps the labels would keep the images.
Copying 32 KB costs about 3 microseconds, less than handling one buffer.
"""

Packed = tuple[bytes, list[memoryview]]


def pack(value: Any, what: str = "a result", *, other_main: bool = False) -> Packed:
    """Split `value` into a header and the buffers left out of it.

    The buffers are views of the memory of `value`: use them before it changes. `other_main` is True if
    the reader has another ``__main__``; objects from ``__main__`` are then pickled by value. Raises
    `ResultPicklingError`, with the name `what`, if a part of the value can't be pickled.
    """
    try:
        packer = _idle.pop()
    except IndexError:  # the first call, or other threads use the rest
        packer = _Packer(_Plain)
    if packer.functions != copyreg.dispatch_table:
        packer = _Packer(_Plain)
    try:
        packed = packer.pack(value)
        if len(packed[0]) < _LARGE_HEADER:
            _idle.append(packer)
        if not (other_main and _MAIN in packed[0]):
            return packed
    except Exception:  # pickle's own errors are of many types: PicklingError, TypeError, ...
        pass
    try:  # lambdas, classes defined in a function, things from __main__
        return _Packer(_cloud()).pack(value)
    except Exception as error:
        raise ResultPicklingError(
            f"{what} of type {type(value).__qualname__!r} can't be sent to another process: "
            f"{text_of(error)}. Use something that can be pickled, or backend='threads'."
        ) from error


def pack_in_band(value: Any, what: str) -> bytes:
    """Pickle `value` with all its buffers in the pickle. Raises as `pack` does."""
    header, buffers = pack(value, what)
    if not buffers:
        return header
    import cloudpickle

    whole: bytes = cloudpickle.dumps(value, protocol=5)
    return whole


_MAIN = b"_main__"  # of `__main__`, and of `__mp_main__`
_NAMES_OF_ONE_PROCESS = re.compile(_MAIN), re.compile(b"cloudpickle")


def reads_the_same_everywhere(header: bytes | memoryview) -> bool:
    """Return True if a process with another ``__main__`` loads the same objects from this header.

    A class that cloudpickle sent by value is the original in one process and a copy in another. The
    search takes a millisecond for a megabyte; loading and packing take several times as long.
    """
    return not any(name.search(header) for name in _NAMES_OF_ONE_PROCESS)


def unpack(header: bytes | memoryview, buffers: Sequence[memoryview]) -> Any:
    """Load a value from the result of `pack`; the value shares memory with `buffers`.

    Raises `DamagedMessage` if the header is no complete pickle. Errors that its objects raise are
    raised unchanged.
    """
    try:
        return pickle.loads(header, buffers=buffers)
    except _NO_PICKLE as error:
        # In no variable: this frame is in that traceback, and the cycle would keep the buffers.
        if getattr(error.__traceback__, "tb_next", None) is not None:
            raise  # the code of an object raised it
        raise DamagedMessage(f"a pickle of {len(header):,} bytes is damaged: {error!r}") from error


_NO_PICKLE = (
    pickle.UnpicklingError, EOFError, ValueError, LookupError, OverflowError, MemoryError, StopIteration
)  # fmt: skip
"""Errors of the unpickler itself for bytes that are no pickle. `AttributeError`, `ImportError` and
`TypeError` are left out: they mean that a class is missing or has changed."""


class Around:
    """Outer pickle with blocks of small tensors, which are loaded before the inner pickle."""

    def __init__(self, header: bytes, buffers: list[Any]) -> None:
        self._parts = header, buffers

    def __reduce__(self) -> Any:
        return _open, self._parts


def _around(blocks: Blocks, header: bytes, buffers: list[memoryview]) -> Packed:
    """Pack the header and the buffers that `_take` returned for a value with blocks."""
    large: list[memoryview] = []
    around = Around(header, [*map(blocks.part, buffers)])
    return pickle.dumps(around, 5, buffer_callback=keep_small(large)), large


def _open(header: bytes, buffers: list[Any]) -> Any:
    """Load the inner pickle; those of its buffers that are tuples are blocks.

    The garbage collector is paused, because no garbage arises. It would examine each of thousands of new
    tensors several times, which takes longer than making them (docs/decisions.md).
    """
    pauses = gc.isenabled() and threading.current_thread() is threading.main_thread()
    if pauses:
        gc.disable()
    try:
        found: list[Any] = [rebuild_block(*b) if type(b) is tuple else b for b in buffers]
        return unpack(header, found)
    finally:
        if pauses:
            gc.enable()


_LARGE_HEADER = 64 * 1024
"""Bytes of a header above which its packer is not reused: it would keep that much memory."""

_CLASSES = 1000  # maximum number of classes that a packer remembers and so keeps alive


class _Packer:
    """Pickler with the pieces that it writes and the buffers that it leaves out, for one caller.

    Making a packer takes longer than packing a small batch, so `_idle` keeps packers for reuse.
    """

    def __init__(self, pickler: Callable[..., Any]) -> None:
        self.functions = dict(copyreg.dispatch_table)
        self._tensors = TensorsInBlocks()
        self._pieces: list[bytes] = []
        self._buffers: list[memoryview] = []
        self.write = self._pieces.append  # the pickler takes this object for its file
        self._pickler = pickler(self, keep_small(self._buffers), self._tensors)

    def pack(self, value: Any) -> Packed:
        self._pickler.dump(value)
        tensors, blocks = self._tensors, self._tensors.blocks
        if len(tensors.met) > 1 or blocks:
            while tensors.another_pass():
                self._take()
                self._pickler.dump(value)
        packed = self._take()
        if blocks.made:
            packed = _around(blocks, *packed)
        if tensors.met:
            tensors.forget()
        if blocks or blocks.closed:
            blocks.forget()
        tensors.numbers = 0
        return packed

    def _take(self) -> Packed:
        self._pickler.clear_memo()
        header = self._pieces[0] if len(self._pieces) == 1 else b"".join(self._pieces)
        self._pieces.clear()
        buffers = self._buffers[:]
        self._buffers.clear()
        return header, buffers


_idle: list[_Packer] = []


def keep_small(buffers: list[memoryview]) -> Callable[[pickle.PickleBuffer], bool]:
    """Return a `buffer_callback` that puts buffers into `buffers`, except small ones."""

    def keep(buffer: pickle.PickleBuffer) -> bool:
        raw = buffer.raw()
        if raw.nbytes < IN_BAND and not is_mark(raw):
            return True
        buffers.append(raw)
        return False

    return keep


class _Plain(pickle.Pickler):
    """C pickler that reduces tensors by `Tensors`."""

    def __init__(self, out: Any, keep: Callable[..., bool], tensors: Tensors) -> None:
        super().__init__(out, protocol=5, buffer_callback=keep)
        self.dispatch_table = _Table(tensors)


class _Table(dict[type, Callable[[Any], Any]]):
    """Table of reducers by class; `Tensors.way_of` is called once for each class.

    A `reducer_override` would do the same, but takes a microsecond more for every object.
    """

    def __init__(self, tensors: Tensors) -> None:
        super().__init__(copyreg.dispatch_table)
        self._way_of = tensors.way_of

    def __missing__(self, kind: type) -> Callable[[Any], Any]:
        if issubclass(kind, type):  # classes are pickled by name, unless in the table
            raise KeyError(kind)
        if len(self) > _CLASSES:  # a dataset makes classes all the time
            self.clear()
            self.update(copyreg.dispatch_table)
        found = self[kind] = self._way_of(kind) or _as_it_says
        return found


_as_it_says = methodcaller("__reduce_ex__", 5)


@lru_cache(maxsize=1)
def _cloud() -> Any:
    import cloudpickle

    class Cloud(cloudpickle.Pickler):  # type: ignore[misc]
        def __init__(self, out: Any, keep: Callable[..., bool], tensors: Tensors) -> None:
            super().__init__(out, protocol=5, buffer_callback=keep)
            self._tensors = tensors

        def reducer_override(self, obj: Any) -> Any:
            way = self._tensors.way_of(type(obj))
            return super().reducer_override(obj) if way is None else way(obj)

    return Cloud
