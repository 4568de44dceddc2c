"""Workers on threads of this process, and in processes of their own: all but how messages travel.

A backend makes a worker by `thread_worker` or `process_worker`, and runs its loop by `serve`. Both
import no torch and no numpy by themselves.
"""

from __future__ import annotations

import pickle
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
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
from hybridloader.engine.worker import Worker, run
from hybridloader.engine.worker_info import set_process_info, set_worker_info
from hybridloader.memory.packing import pack, pack_in_band, unpack
from hybridloader.memory.shipping import receive, replicate, ship
from hybridloader.seeding.worker_seeds import ProcessSeeds, ThreadSeeds


def thread_worker(number: int, spec: WorkerSpec, *, copies: bool = False) -> Worker:
    """Make a worker that a thread of this process will `serve`; on the thread that starts that one.

    Parameters
    ----------
    copies
        Whether it reads a copy of a map-style dataset. Of an iterable one, each worker does.

    Raises
    ------
    ShippingError
        The dataset can't be copied.
    """
    fetch = spec.fetch
    if copies or fetch.private:
        spec = replace(spec, fetch=fetch.with_dataset(replicate(fetch.dataset, "the dataset")))
    seeds = ThreadSeeds(borrows=spec.init_fn is not None)
    return Worker(number, spec, seeds, ByReference, TaskContext(tracked=spec.tracked))


class PackedSpec:
    """A `WorkerSpec` on its way to a process; an argument of the process as it is started.

    With it go lambdas, what lives in ``__main__``, and locks and queues of multiprocessing.

    Raises
    ------
    ShippingError
        Something in it can't be sent; names the attribute that is to blame.
    """

    def __init__(self, spec: WorkerSpec) -> None:
        shipment = ship(spec, "the loader", share=False)
        self._parts = [bytearray(part) for part in shipment.parts]
        self._inherited = shipment.inherited

    def open(self) -> WorkerSpec:
        """Load it, in the worker."""
        return received([memoryview(part) for part in self._parts], [], self._inherited)


def received(
    parts: list[memoryview], fds: list[int], inherited: Inherited | None = None
) -> WorkerSpec:
    """Load a spec that was shipped. If it can't be loaded here, that is the answer to every task."""
    try:
        spec: WorkerSpec = receive(parts, fds, inherited)
    except ShippingError as error:
        return WorkerSpec("", 1, _Unloadable(error))
    return spec


class _Unloadable(Fetch):
    """The work of a worker that could not load its work."""

    dataset = None

    def __init__(self, error: ShippingError) -> None:
        self._error = error

    def with_dataset(self, dataset: Any) -> _Unloadable:
        return self

    def open(self, shared_seed: int | None, context: TaskContext) -> Fetcher:
        raise self._error


def process_worker(number: int, work: PackedSpec) -> Worker:
    """Make the worker that this process is; the process will `serve` it."""
    one_thread_in_this_process("torch" not in sys.modules)
    spec = work.open()
    worker = Worker(number, spec, ProcessSeeds(), Pickled, TaskContext(tracked=spec.tracked))
    set_process_info(worker.info)
    return worker


class Pickled(Payload):
    """A result that is pickled where it was made, so that it can travel, and loaded where it is opened.

    Raises
    ------
    ResultNotSendable
        It can't be pickled.
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

    Raises
    ------
    ResultNotSendable
        The index of a task can't be pickled. An event whose metadata can't be becomes a `Failed`.
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
    get: Callable[[], Message],
    report: Callable[[Event], None],
    *,
    prepare: Callable[[], None] | None = None,
) -> int:
    """Be a worker on this thread: answer messages until it is told to stop, or nobody waits any more.

    Parameters
    ----------
    get
        Gives the next message, and waits for it. `EOFError`: there will be none.
    report
        Takes events. The last one is an `Exited`, unless nobody is there to take it (`OSError`).
    prepare
        Called first, on this thread. What it raises ends the worker.

    Returns
    -------
    int
        The exit code: 0, or 1 if an exception has ended the worker.
    """
    context, cause, evidence = worker.context, None, ""
    if context.tracked:
        get = _noting(get, context)
    try:
        if prepare is not None:
            prepare()
        if worker.info.worker_method == "thread":
            set_worker_info(worker.info)
            one_thread_on_this_thread()
        run(worker, get, report)
    except BaseException as error:  # whatever ends a worker, its crew must hear of it
        if not context.cancelled:
            evidence = "".join(traceback.format_exception(type(error), error, error.__traceback__))
            cause = f"was ended by {type(error).__name__}: {error}"
    task, at = (context.task, context.at) if context.tracked else (None, None)
    if context.task >= 0 and context.at < 0:
        at = None  # at a task, but at none of its samples alone
    with suppress(OSError):  # of a pipe, for instance, whose other end is gone
        report(Exited(worker.worker, cause, task, at, evidence))
    return int(cause is not None)


def _noting(get: Callable[[], Message], context: TaskContext) -> Callable[[], Message]:
    """`get`, of which `context` notes which task it gave last."""

    def noted() -> Message:
        context.task = -1
        message = get()
        if isinstance(message, Task):
            context.at, context.task = -1, message.seq
        return message

    return noted
