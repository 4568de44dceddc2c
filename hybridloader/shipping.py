"""Sending a stage's work to processes that share no memory: what, how, and why it can't be done.

cloudpickle does the work, so that lambdas, classes defined in a function and whatever lives in
``__main__`` arrive, without a ``__main__`` guard. Tensors that are in shared memory stay shared: a
dataset that keeps its epoch in such a tensor sees in every worker what the parent writes to it.
"""

from __future__ import annotations

import functools
import io
import os
import pickle
import sys
import threading
import types
import weakref
from collections.abc import Iterator
from typing import IO, Any, NamedTuple

from hybridloader.buffers.arena import ALIGN
from hybridloader.buffers.packing import Tensors, keep_small
from hybridloader.buffers.segments import anonymous_file, map_descriptor
from hybridloader.errors import DamagedMessage, ShippingError

_local = threading.local()

MOST_FDS = 250
"""Descriptors that go along in one message; the kernel's limit is 253 (SCM_MAX_FD). More tensors in
shared memory than that are copied."""


class _Contents(NamedTuple):
    """Where the pickle and its buffers lie in the file that goes along, and how many descriptors do."""

    places: list[tuple[int, int]]  # where each begins, and its bytes; the pickle first
    descriptors: int


class Shipment:
    """Pickled once, sent to any number of workers.

    Attributes
    ----------
    parts
        What goes through the line: a table of contents where the pickle and its buffers lie in a
        file, else these themselves.
    fds
        Descriptors that must go along, owned by the shipment; the first is that of the file.
    """

    def __init__(self, parts: list[Any], fds: list[int]) -> None:
        self.parts, self.fds = parts, fds

    def close(self) -> None:
        while self.fds:
            os.close(self.fds.pop())


def ship(thing: Any, what: str, *, share: bool) -> Shipment:
    """Pickle `thing`.

    Parameters
    ----------
    what
        What it is, for the error.
    share
        Whether descriptors can be sent along. Then the pickle goes once into a file without a name,
        which all workers map: its large arrays and tensors are not copied, until one is written to.
        And tensors in shared memory stay shared. Else each worker gets a copy of everything.

    Raises
    ------
    ShippingError
        It can't be pickled; names the attribute that is to blame.
    """
    shipment = Shipment([], [])
    try:
        if share:
            shipment.fds.append(anonymous_file(0))
            with open(shipment.fds[0], "wb", closefd=False) as file:
                places = _write(thing, file, shipment.fds)
            shipment.parts = [pickle.dumps(_Contents(places, len(shipment.fds)))]
        else:
            whole = io.BytesIO()
            ((_, size), *buffers) = _write(thing, whole, None)
            view = whole.getbuffer()
            shipment.parts = [view[:size], *(view[at : at + n] for at, n in buffers)]
    except Exception as error:  # pickle's own errors are of many types
        shipment.close()
        culprit = _culprit(thing, what)
        raise ShippingError(
            f"{culprit} can't be pickled, so it can't be sent to a worker process: {error}. "
            "Open it in worker_init_fn or in __getitem__ instead of __init__, or use "
            "backend='threads' (nothing is sent) or, where there is fork, backend='fork'."
        ) from error
    return shipment


def receive(parts: list[memoryview], fds: list[int]) -> Any:
    """The inverse of `ship`, in the worker; closes `fds`.

    Raises
    ------
    ShippingError
        Not all of it has arrived, or something in it can't be loaded in this process; the cause says
        what.
    """
    _local.fds = fds
    try:
        found = pickle.loads(parts[0], buffers=parts[1:])
        if not isinstance(found, _Contents):
            return found
        if len(fds) != found.descriptors:  # the kernel leaves out those for which there is no room
            raise DamagedMessage(
                f"{len(fds)} of {found.descriptors} descriptors have arrived; raise the limit for this "
                "process (ulimit -n)"
            )
        whole = _mapped(fds[0])
        if any(min(at, size) < 0 or at + size > len(whole) for at, size in found.places):
            raise DamagedMessage(f"it is cut off, at {len(whole):,} bytes")
        pickled, *buffers = (whole[at : at + size] for at, size in found.places)
        return pickle.loads(pickled, buffers=buffers)
    except Exception as error:  # also EOFError, which to a worker would mean that it may go
        raise ShippingError(
            f"what the parent has sent can't be loaded in this worker process: {error!r}. The worker "
            "imports it anew: is its module, and all that it needs, there and the same?"
        ) from error
    finally:
        _local.fds = []
        for fd in fds:
            os.close(fd)


def _take_main_along() -> None:
    """Have cloudpickle send what is in the main module also where that has another name.

    In a process that multiprocessing spawned it is ``__mp_main__``, which no worker can import.
    """
    import cloudpickle

    if "__mp_main__" in sys.modules:
        cloudpickle.register_pickle_by_value(sys.modules["__mp_main__"])


def _write(thing: Any, file: IO[bytes], fds: list[int] | None) -> list[tuple[int, int]]:
    """Write the pickle, then the buffers; give where each begins and how long it is."""
    tensors = Tensors()
    while True:
        buffers: list[memoryview] = []
        file.seek(0)
        _pickler(file, buffers, tensors, fds).dump(thing)
        if not tensors.several_over_one_storage():
            break
        if fds is not None:
            while len(fds) > 1:
                os.close(fds.pop())
    contents = [(0, file.tell())]
    for buffer in buffers:
        start = -(-file.tell() // ALIGN) * ALIGN
        file.seek(start)
        file.write(buffer)
        contents.append((start, buffer.nbytes))
    return contents


def _mapped(fd: int) -> memoryview:
    """The whole file: what is written to it stays with this process."""
    size = os.fstat(fd).st_size
    mapping = map_descriptor(fd, size, private=True)
    holder = mapping.view()
    weakref.finalize(
        holder, id, mapping
    ).atexit = False  # keeps the mapping as long as a view of it
    return memoryview(holder).cast("B")


def replicate(thing: Any, what: str) -> Any:
    """A private copy of `thing` within this process, as if it had been sent to another.

    Functions, classes and modules are not copied, and neither are tensors in shared memory.

    Raises
    ------
    ShippingError
        It can't be copied; names the attribute that is to blame.
    """
    import cloudpickle

    _take_main_along()

    kept: list[Any] = []

    class Copier(cloudpickle.Pickler):  # type: ignore[misc]
        def persistent_id(self, obj: Any) -> int | None:
            if isinstance(obj, (types.FunctionType, types.ModuleType, type)) or _is_shared(obj):
                kept.append(obj)
                return len(kept) - 1
            return None

    class Pasting(pickle.Unpickler):
        def persistent_load(self, pid: int) -> Any:
            return kept[pid]

    out = io.BytesIO()
    try:
        Copier(out, protocol=5).dump(thing)
    except Exception as error:
        raise ShippingError(
            f"{_culprit(thing, what)} can't be copied, and each worker needs a copy of its own: "
            f"{error}"
        ) from error
    out.seek(0)
    return Pasting(out).load()


def _is_shared(obj: Any) -> bool:
    torch = sys.modules.get("torch")
    if torch is None:
        return False
    return type(obj) is torch.Tensor and obj.device.type == "cpu" and bool(obj.is_shared())


def _pickler(
    file: IO[bytes], buffers: list[memoryview], tensors: Tensors, fds: list[int] | None
) -> Any:
    import cloudpickle

    _take_main_along()

    class Pickler(cloudpickle.Pickler):  # type: ignore[misc]
        def reducer_override(self, obj: Any) -> Any:
            torch = sys.modules.get("torch")
            if torch is not None and type(obj) is torch.Tensor:
                if fds is not None and len(fds) < MOST_FDS and _is_shared(obj):
                    return _reduce_shared(obj, fds)
                return tensors.reduce(obj)
            return super().reducer_override(obj)

    return Pickler(file, protocol=5, buffer_callback=keep_small(buffers))


def _reduce_shared(tensor: Any, fds: list[int]) -> Any:
    # torch.multiprocessing.reductions does the same over a socket of its own
    # (_share_fd_cpu_ / _new_shared_fd_cpu; torch 2.13).
    fd, size = tensor.untyped_storage()._share_fd_cpu_()[:2]
    fds.append(os.dup(fd))
    where = tensor.storage_offset(), tuple(tensor.shape), tensor.stride()
    return _rebuild_shared, (len(fds) - 1, size, str(tensor.dtype).removeprefix("torch."), *where)


def _rebuild_shared(
    number: int, size: int, dtype: str, offset: int, shape: tuple[int, ...], stride: tuple[int, ...]
) -> Any:
    import torch

    cls: Any = torch.UntypedStorage
    storage = cls._new_shared_fd_cpu(os.dup(_local.fds[number]), size)
    return torch.empty(0, dtype=getattr(torch, dtype)).set_(storage, offset, shape, stride)


_DEEPEST = 25
"""Steps of the path that an error shows. What is nested without an end would be looked into for minutes,
and more than a line or two helps nobody."""


def _culprit(thing: Any, path: str) -> str:
    """The deepest part of `thing` that can't be pickled, as a path of attributes."""
    import cloudpickle

    _take_main_along()

    deepest, seen = (path, thing), {id(thing)}
    for _ in range(_DEEPEST):
        for step, part in _parts(deepest[1]):
            if id(part) in seen:
                continue
            seen.add(id(part))
            try:
                cloudpickle.dumps(part)
            except Exception:
                deepest = (deepest[0] + step, part)
                break
        else:
            break
    return f"{deepest[0]} (a {type(deepest[1]).__qualname__})"


def _parts(thing: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(thing, dict):
        yield from ((f"[{key!r}]", value) for key, value in thing.items())
    elif isinstance(thing, (list, tuple)):
        yield from ((f"[{i}]", value) for i, value in enumerate(thing))
    elif isinstance(thing, types.FunctionType):
        code = thing.__code__
        for name, cell in zip(code.co_freevars, thing.__closure__ or (), strict=True):
            if cell != types.CellType():  # an empty cell can be pickled, but not looked into
                yield f".<closure>.{name}", cell.cell_contents
        for name in code.co_names:
            if name in thing.__globals__:
                yield f".<global>.{name}", thing.__globals__[name]
    elif isinstance(thing, types.MethodType):
        yield ".__self__", thing.__self__
    elif isinstance(thing, functools.partial):
        yield from ((".func", thing.func), (".args", thing.args), (".keywords", thing.keywords))
    else:
        slots = [slot for kind in type(thing).__mro__ for slot in getattr(kind, "__slots__", ())]
        names = [*getattr(thing, "__dict__", ()), *slots]
        yield from ((f".{name}", getattr(thing, name)) for name in names if hasattr(thing, name))
