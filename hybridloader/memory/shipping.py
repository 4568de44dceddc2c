"""Shipping of a stage's work to worker processes, with errors that name the culprit.

It uses cloudpickle, so that lambdas, classes defined in a function and objects of ``__main__`` arrive
without a ``__main__`` guard. Tensors in shared memory stay shared: if a dataset keeps its epoch in such
a tensor, each worker reads the value that the parent writes.
"""

from __future__ import annotations

import functools
import io
import os
import pickle
import sys
import threading
import types
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from operator import methodcaller
from typing import IO, Any, NamedTuple

from hybridloader._support.inheritance import (
    MAIN,
    Inherited,
    Shared,
    as_if_starting,
    found_by_name,
    reducer,
    reducing_pickler,
)
from hybridloader._support.user_objects import repr_of, text_of
from hybridloader.errors import DamagedMessage, WorkerPicklingError
from hybridloader.memory.packing import Tensors, check_leaf, keep_small, reduce_sparse
from hybridloader.memory.segments import ALIGN, map_descriptor, nameless_file

_local = threading.local()

MOST_FDS = 250
"""Maximum number of descriptors in one message; the kernel's limit is 253 (SCM_MAX_FD). Further tensors
in shared memory are copied."""


class _Contents(NamedTuple):
    """Table of contents of the file that is sent with a message."""

    places: list[tuple[int, int]]  # first byte and size of each part, the pickle first
    descriptors: int  # number of descriptors in the message


class _NoRoom(OSError):
    """The file for the pickle can't grow."""


class _File(io.FileIO):
    """File whose lack of room raises `_NoRoom`, unlike errors of the pickled objects."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError as error:
            raise _NoRoom(
                error.errno, f"no room to send it to workers: {error.strerror}"
            ) from error


class Shipment:
    """Pickle of an object, made once and sent to any number of workers.

    `parts` is a table of contents if a file holds the pickle and its buffers; otherwise it is the pickle
    and the buffers.
    """

    def __init__(self) -> None:
        self.parts: list[Any] = []
        self.fds: list[int] = []  # owned descriptors to be sent too; the first is the file's
        self.inherited: Inherited | None = None  # passed to each process at its start

    def close(self) -> None:
        while self.fds:
            os.close(self.fds.pop())


def ship(thing: Any, what: str, *, share: bool, by_name: bool = False) -> Shipment:
    """Pickle `thing`, named `what` in errors.

    If descriptors can be sent (`share`), the pickle is written once into a file without a name. All
    workers map that file. Its large arrays and tensors are not copied until a worker writes to them, and
    tensors in shared memory stay shared. Without `share`, each worker gets a copy of everything.

    `by_name` is for workers that have run the top of the script: they have its classes and functions.

    Raises `WorkerPicklingError` with the attribute that can't be pickled, and `OSError` if there is no
    room for the pickle or no free descriptor.
    """

    def blame(error: Exception, *, starting: bool) -> WorkerPicklingError:
        def attempt(part: Any) -> None:
            with open(os.devnull, "wb") as nowhere:
                _write(part, nowhere, None, Inherited(at_once=starting), by_name)

        return WorkerPicklingError(
            f"{culprit(thing, what, attempt)} can't be pickled, so it can't be sent to a worker "
            f"process: {text_of(error)}. Open it in worker_init_fn or in __getitem__ instead of "
            "__init__, or use backend='threads' (nothing is sent) or, where there is fork, "
            "backend='fork'."
        )

    shipment = Shipment()
    inherited = Inherited(partial(blame, starting=True))
    file = nameless_file() if share else -1
    try:
        if share:
            shipment.fds.append(file)
            with io.BufferedWriter(_File(file, "wb", closefd=False)) as buffered:
                places = _write(thing, buffered, shipment.fds, inherited, by_name)
            shipment.parts = [pickle.dumps(_Contents(places, len(shipment.fds)))]
        else:
            whole = io.BytesIO()
            ((_, size), *buffers) = _write(thing, whole, None, inherited, by_name)
            # Not `getbuffer`: from Python 3.13 on, a file that is collected before its view is reported.
            view = memoryview(whole.getvalue())
            shipment.parts = [view[:size], *(view[at : at + n] for at, n in buffers)]
    except BaseException as error:
        shipment.close()
        if isinstance(error, _NoRoom) or not isinstance(error, Exception):
            raise
        raise blame(error, starting=False) from error  # pickle's own errors are of many types
    shipment.inherited = inherited if inherited.objects else None
    return shipment


def receive(parts: list[memoryview], fds: list[int], inherited: Inherited | None = None) -> Any:
    """Load a shipment in the worker; closes `fds`.

    Raises `WorkerPicklingError` if a part has not arrived or can't be loaded in this process; its
    ``__cause__`` is the reason.
    """
    _local.fds = fds
    try:
        if inherited is not None:
            if inherited.error is not None:
                raise inherited.error
            _local.inherited = inherited.objects
        found = pickle.loads(parts[0], buffers=parts[1:])
        if not isinstance(found, _Contents):
            return found
        if len(fds) != found.descriptors:  # the kernel omits descriptors beyond the limit
            raise DamagedMessage(
                f"{len(fds)} of {found.descriptors} descriptors have arrived; raise the limit for this "
                "process (ulimit -n)"
            )
        whole = map_descriptor(fds[0], os.fstat(fds[0]).st_size, private=True).lasting_view()
        if any(min(at, size) < 0 or at + size > len(whole) for at, size in found.places):
            raise DamagedMessage(f"it is truncated, at {len(whole):,} bytes")
        pickled, *buffers = (whole[at : at + size] for at, size in found.places)
        return pickle.loads(pickled, buffers=buffers)
    except Exception as error:  # also EOFError, which would end the worker without an error
        advice = "imports it again: check that it finds the same module and the same dependencies"
        if isinstance(error, AttributeError) and "<module '__mp_main__'" in text_of(error):
            advice = (
                "has run the script down to `if __name__ == '__main__':`. Define it above that line, as "
                "torch requires it, or pass backend='spawn', which sends it"
            )
        raise WorkerPicklingError(
            f"the work from the parent can't be loaded in this worker process: {repr_of(error)}. The "
            f"worker {advice}"
        ) from error
    finally:
        _local.fds, _local.inherited = [], []
        for fd in fds:
            os.close(fd)


def _take_main_along() -> None:
    """Make cloudpickle send objects of the main module by value if that is named ``__mp_main__``.

    That is its name in a process that multiprocessing spawned, and no worker can import it.
    """
    import cloudpickle

    if "__mp_main__" in sys.modules:
        cloudpickle.register_pickle_by_value(sys.modules["__mp_main__"])


def _write(
    thing: Any, file: IO[bytes], fds: list[int] | None, inherited: Inherited, by_name: bool
) -> list[tuple[int, int]]:
    """Write the pickle, then the buffers; return the first byte and the size of each."""
    import cloudpickle

    _take_main_along()
    tensors = Tensors()

    def shares(obj: Any) -> bool:
        if not _is_shared(obj):
            return False
        if fds is not None:
            return len(fds) < MOST_FDS
        from torch import multiprocessing  # which names the memory that it shares on Windows

        strategy: str = multiprocessing.get_sharing_strategy()  # type: ignore[no-untyped-call]
        return strategy == "file_system"

    def send(storage: Any) -> Any:
        return _reduce_shared(storage, fds) if shares(storage) else _as_bytes(storage)

    def reduce(obj: Any) -> Any:
        if (
            by_name
            and isinstance(obj, _DEFINED)
            and getattr(obj, "__module__", None) in MAIN
            and found_by_name(obj)
        ):
            return obj.__qualname__
        if _is_tensor(obj):
            if not shares(obj):
                return tensors.reduce(obj)
            check_leaf(obj)
            return None  # torch's own pickle of it has its storage
        found = _reduce_storage(obj, send)
        if found is not None:
            return found
        number = inherited.take(obj)
        if number is not None:
            return _inherited, (number,)
        way = reducer(obj) or tensors.way_of(type(obj))
        return None if way is None else way(obj)

    pickler = reducing_pickler(cloudpickle.Pickler)
    while True:
        buffers: list[memoryview] = []
        file.seek(0)
        with as_if_starting():
            pickler(file, reduce, protocol=5, buffer_callback=keep_small(buffers)).dump(thing)
        if not tensors.several_over_one_storage():
            break
        inherited.objects.clear()
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


def replicate(thing: Any, what: str) -> Any:
    """Make a private copy of `thing` within this process, as if it were sent to another.

    Functions, classes and modules are not copied, nor are objects that processes would share: tensors in
    shared memory, multiprocessing's locks, values, queues and proxies. Raises `WorkerPicklingError` with
    the attribute that can't be copied.
    """
    import cloudpickle

    _take_main_along()

    shared = Shared()
    kept: list[Any] = []

    def keep(obj: Any) -> Any:
        kept.append(obj)
        return _kept, (len(kept) - 1,)

    def reduce(obj: Any) -> Any:
        if obj is _kept:  # the unpickler imports it by name
            return None
        if isinstance(obj, _NEVER_COPIED) or obj in shared or _is_shared(obj):
            return keep(obj)
        found = _reduce_storage(obj, lambda storage: keep(storage.clone()))
        return reduce_sparse(obj) if found is None and _is_tensor(obj) else found

    def copy(part: Any) -> Any:
        out = io.BytesIO()
        before, _local.kept = getattr(_local, "kept", None), kept
        try:
            reducing_pickler(cloudpickle.Pickler)(out, reduce, protocol=5).dump(part)
            return pickle.loads(out.getvalue())
        finally:
            kept.clear()
            _local.kept = before

    try:
        return copy(thing)
    except Exception as error:
        raise WorkerPicklingError(
            f"{culprit(thing, what, copy)} can't be copied, and each worker needs its own copy: "
            f"{text_of(error)}"
        ) from error


_DEFINED = (types.FunctionType, type)
_NEVER_COPIED = (*_DEFINED, types.ModuleType)


def _kept(number: int) -> Any:
    return _local.kept[number]


def _inherited(number: int) -> Any:
    return _local.inherited[number]


def _is_tensor(obj: Any) -> bool:
    """Return True if `obj` is a tensor, and of no subclass."""
    torch = sys.modules.get("torch")
    return torch is not None and type(obj) is torch.Tensor


def _is_shared(obj: Any) -> bool:
    """Return True if `obj` is a tensor, or the storage of one, in shared memory."""
    torch = sys.modules.get("torch")
    # A sparse tensor consists of dense ones, which are checked separately.
    dense = _is_tensor(obj) and obj.layout is torch.strided  # type: ignore[union-attr]
    if not dense and (torch is None or type(obj) is not torch.UntypedStorage):
        return False
    return obj.device.type == "cpu" and bool(obj.is_shared())


def _reduce_shared(storage: Any, fds: list[int] | None) -> Any:
    """Reduce a storage by a descriptor, or by the name of its memory.

    The dataset keeps the storage, and so the memory, until its workers have opened it.
    """
    # torch.multiprocessing.reductions does the same over its own socket.
    if fds is None:
        from torch.multiprocessing import reductions

        return reductions.reduce_storage(storage)  # type: ignore[no-untyped-call]
    fd, size = storage._share_fd_cpu_()[:2]
    fds.append(os.dup(fd))
    return _shared, (len(fds) - 1, size)


def _shared(number: int, size: int) -> Any:
    import torch

    cls: Any = torch.UntypedStorage
    return cls._new_shared_fd_cpu(os.dup(_local.fds[number]), size)


def _reduce_storage(obj: Any, untyped: Callable[[Any], Any]) -> Any:
    """Reduce `obj` by `untyped` if it is an untyped storage; a typed storage contains one.

    Tensors of a subclass are pickled with their storage. torch can't load an untyped storage that it
    has pickled, and it pickles a storage once for each tensor over it.
    """
    torch: Any = sys.modules.get("torch")
    if torch is None:
        return None
    if type(obj) is torch.UntypedStorage:
        return untyped(obj) if obj.device.type == "cpu" else None
    if type(obj) is torch.TypedStorage and obj._untyped_storage.device.type == "cpu":
        cls: Callable[..., Any] = torch.TypedStorage
        return partial(cls, wrap_storage=obj._untyped_storage, dtype=obj.dtype, _internal=True), ()
    return None


def _as_bytes(untyped: Any) -> Any:
    """Reduce a storage to a tensor over it, which this module can pickle."""
    import torch

    tensor = torch.empty(0, dtype=torch.uint8, device="cpu").set_(untyped)
    return methodcaller("untyped_storage"), (tensor,)


_DEEPEST = 25
"""Maximum number of steps in the path that an error shows. A search in endlessly nested objects would
take minutes, and a path of more than two lines helps no reader."""


def culprit(thing: Any, path: str, attempt: Callable[[Any], None]) -> str:
    """Find the deepest part of `thing` for which `attempt` raises, as a path of attributes."""
    deepest, seen, shared = (path, thing), {id(thing): thing}, Shared()
    for _ in range(_DEEPEST):
        if deepest[1] in shared:  # made by a library: the user does not know its parts
            break
        for step, part in _parts(deepest[1]):
            if id(part) in seen:
                continue
            seen[id(part)] = part  # kept: the search makes some parts, whose ids could be reused
            try:
                attempt(part)
            except Exception:
                deepest = (deepest[0] + step, part)
                break
        else:
            break
    where = deepest[0].removeprefix("the loader.fetch.")  # as users name a part: "dataset.lock"
    return f"{where} (a {type(deepest[1]).__qualname__})"


def _parts(thing: Any) -> Iterator[tuple[str, Any]]:
    """Yield each object that is pickled with `thing`, with the path from `thing` to it."""
    if isinstance(thing, dict):
        yield from ((f"[{key!r}]", value) for key, value in thing.items())
        yield from ((f".<key>[{i}]", key) for i, key in enumerate(thing))
    elif isinstance(thing, (list, tuple, deque)):
        yield from ((f"[{i}]", value) for i, value in enumerate(thing))
    elif isinstance(thing, (set, frozenset)):
        yield from ((f".<element>[{i}]", value) for i, value in enumerate(thing))
    if isinstance(thing, types.FunctionType):
        yield from _parts_of_function(thing)
    elif isinstance(thing, types.MethodType):
        yield ".__self__", thing.__self__
    elif isinstance(thing, functools.partial):
        yield from ((".func", thing.func), (".args", thing.args), (".keywords", thing.keywords))
    elif isinstance(thing, type):  # a class that can't be imported is pickled with its contents
        members = (item for item in vars(thing).items() if type(item[1]) not in _MADE_BY_PYTHON)
        yield from ((f".{name}", value) for name, value in members)
        yield from ((f".<base>.{base.__name__}", base) for base in thing.__bases__)
    elif type(thing) not in _CONTAINERS:
        yield from _parts_of_state(thing)


_CONTAINERS = (dict, list, tuple, deque, set, frozenset)

_MADE_BY_PYTHON = (types.MemberDescriptorType, types.GetSetDescriptorType)
"""Members of each class: slots, ``__dict__``, ``__weakref__``."""


def _parts_of_function(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    code = function.__code__
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        if cell != types.CellType():  # an empty cell can be pickled, but has no contents
            yield f".<closure>.{name}", cell.cell_contents
    for name in code.co_names:
        if name in function.__globals__:
            yield f".<global>.{name}", function.__globals__[name]
    yield from ((f".<default>[{i}]", value) for i, value in enumerate(function.__defaults__ or ()))
    named = {**(function.__kwdefaults__ or {}), **vars(function)}
    yield from ((f".{name}", value) for name, value in named.items())


def _parts_of_state(thing: Any) -> Iterator[tuple[str, Any]]:
    """Yield the parts that an object pickles; ``__getstate__`` may omit attributes."""
    try:
        reduced = thing.__reduce_ex__(5)
    except Exception:  # the object itself is the culprit
        return
    if not isinstance(reduced, tuple):
        return
    arguments, state = reduced[1], reduced[2] if len(reduced) > 2 else None
    # The state of an object with slots is a pair: its `__dict__` and its slots.
    for named in state if isinstance(state, tuple) and len(state) == 2 else (state,):
        if isinstance(named, dict):
            yield from ((f".{name}", value) for name, value in named.items())
        elif named is not None:
            yield ".<state>", named
    yield ".<class>", type(thing)
    yield from ((f".<argument>[{i}]", value) for i, value in enumerate(arguments))
