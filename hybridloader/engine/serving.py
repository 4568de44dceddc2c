"""Workers on threads of this process, and in other processes, without the transport.

A backend makes a worker by `thread_worker` or `process_worker`, and runs its loop by `serve`. Neither
imports torch or numpy by itself.
"""

from __future__ import annotations

import copyreg
import pickle
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, SupportsIndex

from hybridloader._support.inheritance import Inherited
from hybridloader._support.torch_env import one_thread_in_this_process, one_thread_on_this_thread
from hybridloader._support.user_objects import Failure, described, traceback_of
from hybridloader.engine.messages import (
    ByReference,
    Done,
    Event,
    Exited,
    Failed,
    Fetch,
    Fetcher,
    Message,
    Payload,
    Task,
    TaskContext,
    WorkerSpec,
)
from hybridloader.engine.worker import Incoming, Worker, run, set_process_info, set_worker_info
from hybridloader.errors import ResultPicklingError, WorkerPicklingError
from hybridloader.memory.packing import Packed, pack, pack_in_band, unpack
from hybridloader.memory.segments import aligned_view
from hybridloader.memory.shipping import receive, replicate, ship
from hybridloader.memory.slots import OWN, Slots, collate_into
from hybridloader.seeding.worker_seeds import ProcessSeeds, ThreadSeeds


def thread_worker(number: int, spec: WorkerSpec, *, copies: bool = False) -> Worker:
    """Make a worker that a thread of this process will `serve`; called by the thread that starts it.

    If `copies`, it reads a copy of a map-style dataset; of an iterable one, each worker does. Raises
    `WorkerPicklingError` if the dataset can't be copied.
    """
    fetch = spec.fetch
    if copies or fetch.private:
        spec = replace(spec, fetch=fetch.with_dataset(replicate(fetch.dataset, "the dataset")))
    seeds = ThreadSeeds(borrows=spec.init_fn is not None)
    return Worker(number, spec, seeds, ByReference, TaskContext(tracked=spec.tracked))


class PackedSpec:
    """A `WorkerSpec` on its way to a process; an argument of the process as it is started.

    Lambdas, functions and classes of ``__main__``, and locks and queues of multiprocessing go with it;
    these two only while a process of multiprocessing is started. Raises `WorkerPicklingError`, which
    names the attribute, if something in it can't be sent. Its parts are buffers of pickle protocol 5,
    so a `buffer_callback` gets them uncopied.
    """

    def __init__(self, spec: WorkerSpec) -> None:
        shipment = ship(spec, "the loader", share=False)
        self._parts, self._inherited = shipment.parts, shipment.inherited

    def __reduce_ex__(self, protocol: SupportsIndex) -> Any:
        state = {"_parts": [*_buffers(self._parts, protocol)], "_inherited": self._inherited}
        return copyreg.__newobj__, (PackedSpec,), state  # type: ignore[attr-defined]

    def open(self) -> WorkerSpec:
        """Return the specification, in the worker. Once: the worker's arrays are over these bytes."""
        parts, self._parts = [own(part) for part in self._parts], []
        return received(parts, [], self._inherited)


def _buffers(parts: Iterable[Any], protocol: SupportsIndex) -> Iterable[Any]:
    """Return `parts` for pickle; multiprocessing starts processes with protocol 4 before Python 3.14."""
    return map(bytes if int(protocol) < 5 else pickle.PickleBuffer, parts)


def own(buffer: Any, slots: Slots | None = None) -> memoryview:
    """Return a view of `buffer` that may be written to: of a copy, if it is read-only itself.

    A copy of 256 KB or more is made in a slot, if there is one.
    """
    view = memoryview(buffer).cast("B")
    if not view.readonly:
        return view
    slot = None if slots is None or view.nbytes < OWN else slots.empty(view.nbytes)
    copy = aligned_view(view.nbytes) if slot is None else memoryview(slot).cast("B")
    copy[:] = view
    return copy


def received(
    parts: list[memoryview], fds: list[int], inherited: Inherited | None = None
) -> WorkerSpec:
    """Load a specification that was sent. If that fails, the error answers every task."""
    try:
        spec: WorkerSpec = receive(parts, fds, inherited)
    except WorkerPicklingError as error:
        return WorkerSpec("", 1, _Unloadable(error))
    return spec


@dataclass(frozen=True)
class _Unloadable(Fetch):
    """Work of a worker that could not load its specification."""

    error: WorkerPicklingError
    dataset: None = None

    def open(self, shared_seed: int | None, context: TaskContext) -> Fetcher:
        raise self.error


def process_worker(number: int, work: PackedSpec, *, slots: Slots | None = None) -> Worker:
    """Make the worker of this process, on the thread that will `serve` it.

    With `slots`, large batches are collated into recycled memory of this process. That is for a
    transport that copies a result before it takes the next message.
    """
    one_thread_in_this_process("torch" not in sys.modules)
    if slots is not None:
        collate_into(slots)
    spec = work.open()
    worker = Worker(number, spec, ProcessSeeds(), Pickled, TaskContext(tracked=spec.tracked))
    set_process_info(worker.info)
    return worker


class Pickled(Payload):
    """Result that is pickled when it is made, and loaded when it is opened.

    Its buffers are views of the result's memory: send it before the worker takes its next message. They
    are buffers of pickle protocol 5, so a transport may send them apart (`dumps`). If it delivers them
    as read-only memory, `open` copies them, the large ones into `slots`, and lets go of them.

    Making one raises `ResultPicklingError` if the result can't be pickled.
    """

    __slots__ = ("count", "packed", "slots")

    def __init__(self, value: Any) -> None:
        self.packed: Packed = pack(value)
        self.count = len(value) if type(value) is list else None
        self.slots: Slots | None = None
        """Source of memory for copies; the crew that delivers the result sets it."""

    def __reduce_ex__(self, protocol: SupportsIndex) -> Any:
        header, buffers = self.packed
        packed = header, [*_buffers(buffers, protocol)]
        state = {"packed": packed, "count": self.count, "slots": None}
        return copyreg.__newobj__, (Pickled,), (None, state)  # type: ignore[attr-defined]

    @property
    def nbytes(self) -> int:
        return len(self.packed[0]) + self.array_bytes

    @property
    def array_bytes(self) -> int:
        return sum(memoryview(buffer).nbytes for buffer in self.packed[1])

    def open(self) -> Any:
        buffers = [own(buffer, self.slots) for buffer in self.packed[1]]
        self.discard()
        return unpack(self.packed[0], buffers)

    def peek(self) -> Any:
        """Load the value without taking it, over other memory."""
        header, buffers = self.packed
        return unpack(header, [own(bytes(buffer)) for buffer in buffers])

    def discard(self) -> None:
        self.packed = self.packed[0], []


def dumps(
    thing: Message | Event, buffers: list[Any] | None = None, *, other_main: bool = False
) -> bytes:
    """Pickle a message to a worker in another process, or an event from it.

    An event whose metadata can't be pickled becomes a `Failed`. Raises `ResultPicklingError` if the
    index of a task can't be.

    Parameters
    ----------
    buffers
        List that takes the large flat buffers, which are left out of the pickle, for a transport that
        carries memory: give them to ``loads(data, buffers=...)``. They are views: send them before
        anything changes. None: they are in the pickle.
    other_main
        True for a reader with another ``__main__``: objects from there are sent whole.
    """
    what = "the content of a task"
    try:
        if buffers is None:
            return pack_in_band(thing, what, other_main=other_main)
        header, found = pack(thing, what, other_main=other_main)
    except ResultPicklingError as error:
        if not isinstance(thing, Done):
            raise
        return dumps(Failed(thing.worker, thing.seq, Failure(error), thing.position))
    buffers.extend(found)
    return header


loads = pickle.loads
"""The inverse of `dumps`."""


def serve(
    worker: Worker,
    get: Callable[[], Incoming | None],
    report: Callable[[Event], None],
    *,
    listen: Callable[[], Callable[[], None]] | None = None,
    prepare: Callable[[], None] | None = None,
) -> int:
    """Run a worker on this thread until it gets a `Stop`, or no one waits any more.

    Parameters
    ----------
    get
        Waits for the next message and returns it, or raises `EOFError` if there will be none.
    report
        Takes events. The last one is an `Exited`, unless its reader is gone (`OSError`).
    listen
        Gives a function by which any thread has `get` return None. Without it a worker that has threads
        works at one task at a time.
    prepare
        Called first, on this thread. An exception in it ends the worker.

    Returns
    -------
    int
        Exit code: 0, or 1 if an exception has ended the worker.
    """
    context, cause, evidence = worker.context, None, ""

    def tracked() -> Incoming | None:
        context.task = -1
        message = get()
        if isinstance(message, Task):
            context.at, context.task = -1, message.seq
        return message

    try:
        if prepare is not None:
            prepare()
        if worker.info.worker_method == "thread":
            set_worker_info(worker.info)
            one_thread_on_this_thread()
        run(worker, tracked if context.tracked else get, report, listen)
    except BaseException as error:  # each end must be reported to the crew
        if not context.cancelled:
            evidence = traceback_of(error)
            cause = f"was ended by {described(error)}"
    known = context.tracked or context.task >= 0
    task, at = (context.task, context.at) if known else (None, None)
    if context.task >= 0 and context.at < 0:
        at = None  # it was doing a task, but no single sample of it
    with suppress(OSError):  # the other end, for example of a pipe, is gone
        report(Exited(worker.worker, cause, task, at, evidence))
    return int(cause is not None)
