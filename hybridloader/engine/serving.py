"""Workers on threads of this process, and in processes of their own, without the transport.

A backend makes a worker by `thread_worker` or `process_worker`, and runs its loop by `serve`. Neither
imports torch or numpy by itself.
"""

from __future__ import annotations

import pickle
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from hybridloader._support.errors import Failure, ResultNotSendable, ShippingError
from hybridloader._support.inheritance import Inherited
from hybridloader._support.native_threads import (
    one_thread_in_this_process,
    one_thread_on_this_thread,
)
from hybridloader.engine.fetcher import Fetch, Fetcher, TaskContext
from hybridloader.engine.messages import Done, Event, Exited, Failed, Message, Task, WorkerSpec
from hybridloader.engine.payload import ByReference, Payload
from hybridloader.engine.worker import Incoming, Worker
from hybridloader.engine.worker_info import set_process_info, set_worker_info
from hybridloader.engine.worker_loop import run
from hybridloader.memory.packing import pack, pack_in_band, unpack
from hybridloader.memory.shipping import receive, replicate, ship
from hybridloader.seeding.worker_seeds import ProcessSeeds, ThreadSeeds


def thread_worker(number: int, spec: WorkerSpec, *, copies: bool = False) -> Worker:
    """Make a worker that a thread of this process will `serve`; called by the thread that starts it.

    If `copies`, it reads a copy of a map-style dataset; of an iterable one, each worker does. Raises
    `ShippingError` if the dataset can't be copied.
    """
    fetch = spec.fetch
    if copies or fetch.private:
        spec = replace(spec, fetch=fetch.with_dataset(replicate(fetch.dataset, "the dataset")))
    seeds = ThreadSeeds(borrows=spec.init_fn is not None)
    return Worker(number, spec, seeds, ByReference, TaskContext(tracked=spec.tracked))


class PackedSpec:
    """A `WorkerSpec` on its way to a process; an argument of the process as it is started.

    Lambdas, functions and classes of ``__main__``, and locks and queues of multiprocessing go with it.
    Raises `ShippingError`, which names the attribute, if something in it can't be sent.
    """

    def __init__(self, spec: WorkerSpec) -> None:
        shipment = ship(spec, "the loader", share=False)
        self._parts = [bytearray(part) for part in shipment.parts]
        self._inherited = shipment.inherited

    def open(self) -> WorkerSpec:
        """Return the specification, in the worker."""
        return received([memoryview(part) for part in self._parts], [], self._inherited)


def received(
    parts: list[memoryview], fds: list[int], inherited: Inherited | None = None
) -> WorkerSpec:
    """Load a specification that was sent. If that fails, the error answers every task."""
    try:
        spec: WorkerSpec = receive(parts, fds, inherited)
    except ShippingError as error:
        return WorkerSpec("", 1, _Unloadable(error))
    return spec


@dataclass(frozen=True)
class _Unloadable(Fetch):
    """Work of a worker that could not load its specification."""

    error: ShippingError
    dataset: None = None

    def open(self, shared_seed: int | None, context: TaskContext) -> Fetcher:
        raise self.error


def process_worker(number: int, work: PackedSpec) -> Worker:
    """Make the worker of this process, which will `serve` it."""
    one_thread_in_this_process("torch" not in sys.modules)
    spec = work.open()
    worker = Worker(number, spec, ProcessSeeds(), Pickled, TaskContext(tracked=spec.tracked))
    set_process_info(worker.info)
    return worker


class Pickled(Payload):
    """Result that is pickled when it is made, and loaded when it is opened.

    Making one raises `ResultNotSendable` if the result can't be pickled.
    """

    __slots__ = ("_buffers", "_header")

    def __init__(self, value: Any) -> None:
        self._header, buffers = pack(value)
        self._buffers = [bytearray(buffer) for buffer in buffers]

    @property
    def nbytes(self) -> int:
        return len(self._header) + sum(map(len, self._buffers))

    def open(self) -> Any:
        return unpack(self._header, [memoryview(buffer) for buffer in self._buffers])

    def discard(self) -> None:
        self._buffers = []


def dumps(thing: Message | Event) -> bytes:
    """Pickle a message to a worker in another process, or an event from it.

    An event whose metadata can't be pickled becomes a `Failed`. Raises `ResultNotSendable` if the index
    of a task can't be.
    """
    try:
        return pack_in_band(thing, "what a task holds")
    except ResultNotSendable as error:
        if not isinstance(thing, Done):
            raise
        return dumps(Failed(thing.worker, thing.seq, Failure(error), thing.position))


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
    """Run a worker on this thread until it is told to stop, or nobody waits any more.

    Parameters
    ----------
    get
        Waits for the next message and returns it, or raises `EOFError` if there will be none.
    report
        Takes events. The last one is an `Exited`, unless nobody is there to take it (`OSError`).
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
    except BaseException as error:  # the crew must be told of any end
        if not context.cancelled:
            evidence = "".join(traceback.format_exception(error))
            cause = f"was ended by {type(error).__name__}: {error}"
    known = context.tracked or context.task >= 0
    task, at = (context.task, context.at) if known else (None, None)
    if context.task >= 0 and context.at < 0:
        at = None  # at a task, but at none of its samples alone
    with suppress(OSError):  # of a pipe, for instance, whose other end is gone
        report(Exited(worker.worker, cause, task, at, evidence))
    return int(cause is not None)
