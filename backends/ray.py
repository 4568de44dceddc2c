"""Workers that are actors of a Ray cluster, on this machine or on others.

Ray places the workers, carries messages and results, and notices deaths. Order, retries and states
stay with the stage. An actor runs the one worker loop in a call that lasts as long as the actor; each
message is a call of its own, which returns the events that came of it. So results come back as what
such a call returns: small ones within Ray's reply, large buffers through its object store, from which
they are copied once, into memory that is used again.
"""

from __future__ import annotations

import os
import sys
import threading
import traceback
from collections import deque
from collections.abc import Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pickle import PickleBuffer, dumps
from queue import SimpleQueue
from typing import Any, ClassVar

from hybridloader import engine

_ASIDE = 1.0
"""Seconds to wait for a worker's stack: a worker in native code that holds the GIL can't answer."""


@dataclass(frozen=True)
class Ray(engine.Backend):
    """Do the work in actors of a Ray cluster.

    Parameters
    ----------
    num_cpus, resources, scheduling_strategy, runtime_env
        What each worker takes of the cluster and where it may be placed, as `options` of a Ray actor.
    address
        Cluster to connect to, as `ray.init` takes it. None takes the one that this process is
        connected to, or that the environment names (RAY_ADDRESS).
    start
        Whether to start a cluster on this machine if there is none.

    Raises
    ------
    BackendUnavailable
        When the loader is iterated: Ray is not installed, or there is no cluster.
    """

    num_cpus: float = 1
    resources: Mapping[str, float] | None = None
    scheduling_strategy: Any = None
    runtime_env: Mapping[str, Any] | None = None
    address: str | None = None
    start: bool = False
    name: ClassVar[str] = "ray"

    @property
    def fresh(self) -> bool:
        return True

    def check(self) -> None:
        try:
            import ray
        except ImportError as error:
            raise engine.BackendUnavailable(
                f"backend 'ray' needs Ray: pip install 'hybridloader[ray]' ({error})"
            ) from error
        if ray.is_initialized() or self.start:
            return
        if self.address is None and not os.environ.get("RAY_ADDRESS"):
            raise engine.BackendUnavailable(
                "backend 'ray' never starts a cluster unasked, and this process is connected to none. "
                "Call ray.init() first, or say Ray(address='auto') for one that runs on this machine, "
                "Ray(address='HOST:6379') for another, or Ray(start=True) to start one here."
            )

    def open(self) -> engine.Crew:
        import ray

        if not ray.is_initialized():
            address = self.address or os.environ.get("RAY_ADDRESS")
            own = {"address": "local", "include_dashboard": False} if address is None else {}
            ray.init(**(own or {"address": address}))
        options = {"num_cpus": self.num_cpus, "max_restarts": 0, "max_task_retries": 0}
        for name in ("resources", "scheduling_strategy", "runtime_env"):
            value = getattr(self, name)
            if value is not None:
                options[name] = dict(value) if isinstance(value, Mapping) else value
        make = _actor_class().options(**options)
        return _RayCrew(
            make, self.memory.bytes(), f"{self.num_cpus:g} CPU and {self.resources or {}}"
        )


class _RayCrew(engine.Crew):
    def __init__(self, make: Any, limit: int, wants: str) -> None:
        self.make, self.limit, self.wants = make, limit, wants
        self.slots = engine.PrivateSlots(limit)
        self.actors: Any = self.handles()  # the list that `place` changes

    def page_lock(self, locks: Any) -> None:
        self.slots.page_lock(locks)

    def start(self, worker: int, spec: engine.WorkerSpec) -> None:
        import ray

        for actor in self.actors:
            if actor.work is not None and actor.work[0] is spec:  # it has not begun yet
                work = actor.work[1]
                break
        else:
            parts: list[PickleBuffer] = []
            packed = dumps(engine.PackedSpec(spec), 5, buffer_callback=parts.append)
            work = ray.put([packed, *parts])
        self.place(worker, _Actor(self, worker, spec, work))

    def send(self, worker: int, message: engine.Message) -> None:
        self.actors[worker].send(message)

    def wait(self, timeout: float | None) -> Any:
        self.slots.warn()
        return super().wait(timeout)

    def stack(self, worker: int) -> str:
        found: str = self.actors[worker].stack()
        return found

    def leave(self) -> None:
        for actor in self.actors:
            actor.leave()
        super().leave()

    def close(self) -> None:
        super().close()
        self.slots.close()


class _Actor(engine.WorkerHandle):
    """The driver's end of one actor: its calls in the order in which they were made."""

    name = "Ray actor without a place yet"

    def __init__(self, crew: _RayCrew, number: int, spec: engine.WorkerSpec, work: Any) -> None:
        self.crew, self.number = crew, number
        self.work: Any = spec, work
        self.cause: str | None = None
        self.known: int | None = None
        self.over = threading.Event()
        self.lock = threading.RLock()
        self.calls: deque[Future[Any]] = deque()
        share = max(1, crew.limit // max(1, spec.workers))
        self.actor = crew.make.remote(number, work, share)
        self.step = self.actor.step
        self.life = self.actor.run.options(concurrency_group="life").remote().future()
        self.call(self.step.remote())
        self.life.add_done_callback(self.deliver)

    @property
    def pid(self) -> int | None:
        return self.known

    @property
    def exitcode(self) -> int | None:
        return None if self.is_alive() else int(self.cause is not None)

    def is_alive(self) -> bool:
        import ray

        return not self.over.is_set() and ray.is_initialized()

    def join(self, timeout: float | None = None) -> None:
        if self.is_alive():
            self.over.wait(timeout)

    def terminate(self) -> None:
        import ray

        with suppress(Exception):  # gone already, and Ray perhaps with it
            ray.kill(self.actor)

    def call(self, ref: Any) -> None:
        future = ref.future()
        self.calls.append(future)
        future.add_done_callback(self.deliver)

    def send(self, message: engine.Message) -> None:
        if self.is_alive():
            buffers: list[Any] = []
            data = engine.dumps(message, buffers, other_main=True)
            self.call(self.step.remote(data, *map(PickleBuffer, buffers)))

    def leave(self) -> None:
        self.aside("leave")

    def aside(self, method: str) -> Any:
        """Call a method that is not behind those before it."""
        if not self.is_alive():
            return None
        with suppress(Exception):
            return getattr(self.actor, method).options(concurrency_group="aside").remote()

    def stack(self) -> str:
        import ray

        if self.work is not None:
            return (
                f"It has not begun: Ray has yet to place it, or to start its process. It takes "
                f"{self.crew.wants}; of {ray.cluster_resources()} there are free: "
                f"{ray.available_resources()}."
            )
        try:
            found: str = ray.get(self.aside("stack"), timeout=_ASIDE)
        except Exception as error:
            return f"Its stack could not be had: {error!r}"
        return found

    def deliver(self, _: Any) -> None:
        """Report what has come, in the order of the calls, on any thread; at last the exit."""
        with self.lock:
            while self.calls and self.calls[0].done():
                self.take(self.calls.popleft())
            if self.life.done() and not self.calls and not self.over.is_set():
                self.crew.report(self.ended())
                self.step = self.actor = None  # Ray ends an actor that nobody refers to
                self.over.set()

    def take(self, call: Future[Any]) -> None:
        try:
            for data, *buffers in call.result():
                event = engine.loads(data, buffers=buffers)
                if isinstance(event, engine.Ready):
                    self.work = None
                elif isinstance(event, engine.Done):
                    event.payload.slots = self.crew.slots
                self.crew.report(event)
        except Exception as error:
            if self.cause is None and not self.life.done():  # the actor may live, but not answer
                self.cause = f"gave no answer: {error}"
                threading.Thread(target=self.terminate, daemon=True).start()

    def ended(self) -> engine.Exited:
        self.work = None
        try:
            event: engine.Exited = engine.loads(self.life.result())
            self.cause = event.cause
        except Exception as error:
            self.cause = self.cause or f"is gone: {error}"
            event = engine.Exited(self.number, self.cause)
        return event


@cache
def _actor_class() -> Any:
    import ray

    return ray.remote(concurrency_groups={"life": 1, "aside": 1})(_Worker)


class _Worker:
    """The actor's end: the worker loop in `run`, and the messages to it, each a call."""

    def __init__(self, number: int, work: list[Any], share: int) -> None:
        self.number, self.share = number, share
        self.work: Any = engine.loads(work[0], buffers=work[1:])
        self.inbox: SimpleQueue[Any] = SimpleQueue()
        self.outbox: SimpleQueue[Any] = SimpleQueue()
        self.thread = 0
        self.worker: engine.Worker | None = None
        self.last = b""

    def run(self) -> bytes:
        """Run the worker loop; return its `Exited`."""
        try:
            self.thread = threading.get_ident()
            slots = engine.PrivateSlots(self.share)
            work, self.work = self.work, None
            self.worker = engine.process_worker(self.number, work, slots=slots)
            del work
            engine.serve(self.worker, self.get, self.report)
            return self.last
        finally:
            self.outbox.put("ended")

    def get(self) -> Any:
        self.outbox.put(None)  # done with the message before
        return self.inbox.get()

    def report(self, event: engine.Event) -> None:
        if isinstance(event, engine.Exited):
            self.last = engine.dumps(event)
        else:
            buffers: list[Any] = []
            self.outbox.put([engine.dumps(event, buffers), *map(PickleBuffer, buffers)])

    def step(self, data: bytes | None = None, *buffers: Any) -> list[Any]:
        """Hand over a message; return the events until the loop asks for the next."""
        if data is not None:
            own = [bytearray(buffer) for buffer in buffers]
            self.inbox.put(engine.loads(data, buffers=own))
        events: list[Any] = []
        while (found := self.outbox.get()) is not None:
            if found == "ended":
                self.outbox.put(found)  # for the next call
                break
            events.append(found)
        return events

    def leave(self) -> None:
        """Leave out what is left of a batch, and end."""
        if self.worker is not None:
            self.worker.context.cancelled = True
        self.inbox.put(engine.Stop())

    def stack(self) -> str:
        frame = sys._current_frames().get(self.thread)
        return "The actor (most recent call last):\n" + "".join(traceback.format_stack(frame))
