"""Workers that are actors of a Ray cluster, on this machine or on others.

Ray places the workers, carries messages and results, and notices deaths. Order, retries and states stay
with the stage. Each message is a call of the actor, whose events the call returns: small ones in Ray's
reply, large buffers by way of its object store. From there they are copied once, into memory that is
used again, so the store is free as soon as a batch is opened.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pickle import PickleBuffer, dumps
from typing import Any, ClassVar

from hybridloader import engine

_ASIDE = 1.0
"""Seconds to wait for a worker's stack. A worker in native code that holds the GIL can't answer."""


@dataclass(frozen=True)
class Ray(engine.Backend):
    """Do the work in actors of a Ray cluster.

    Parameters
    ----------
    num_cpus, resources, scheduling_strategy, runtime_env
        Options of each worker's actor: what it takes of the cluster, where it may be placed, and what
        its process needs. As in Ray.
    address
        Cluster to connect to, as `ray.init` takes it. None takes the one that this process is connected
        to, or that the environment names (RAY_ADDRESS).
    start
        Whether to start a cluster on this machine if there is none.

    Raises
    ------
    BackendUnavailable
        As a loader begins: Ray is not installed, or there is no cluster.
    """

    num_cpus: float = 1
    resources: Mapping[str, float] | None = None
    scheduling_strategy: Any = None
    runtime_env: Mapping[str, Any] | None = None
    address: str | None = None
    start: bool = False
    name: ClassVar[str] = "ray"
    forwards: ClassVar[str] = "ray"

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
        if not (ray.is_initialized() or self._address() or self.start):
            raise engine.BackendUnavailable(
                "backend 'ray' starts no cluster unasked, and this process is connected to none. Call "
                "ray.init() first, or say Ray(address='auto') for one that runs on this machine, "
                "Ray(address='HOST:6379') for another, or Ray(start=True) to start one here."
            )

    def open(self) -> engine.Crew:
        import ray

        if not ray.is_initialized():
            if address := self._address():
                ray.init(address=address)
            else:
                ray.init("local", include_dashboard=False)
        names = "num_cpus", "resources", "scheduling_strategy", "runtime_env"
        wanted = {n: value for n in names if (value := getattr(self, n)) is not None}
        actor = _actor_class().options(max_restarts=0, max_task_retries=0, **wanted)
        return _RayCrew(actor, self.memory.bytes(), ", ".join(f"{n}={wanted[n]}" for n in wanted))

    def _address(self) -> str | None:
        return self.address or os.environ.get("RAY_ADDRESS")


@cache
def _actor_class() -> Any:
    import ray

    return ray.remote(concurrency_groups={"life": 1, "aside": 1})(engine.CalledWorker)


class _Result(engine.Payload):
    """Result that lies with Ray until it is opened, or that another stage's worker gets by reference."""

    forwardable = True

    def __init__(self, sent: engine.Pickled, ref: Any, slots: engine.PrivateSlots) -> None:
        self._sent, self.ref, self.count = sent, ref, sent.count
        sent.slots = slots

    @property
    def nbytes(self) -> int:
        return self._sent.nbytes

    def open(self) -> Any:
        self.ref = None
        return self._sent.open()

    def peek(self) -> Any:
        return self._sent.peek()

    def discard(self) -> None:
        self.ref = None
        self._sent.discard()


class _RayCrew(engine.Crew):
    def __init__(self, actor: Any, memory: int, wanted: str) -> None:
        self.actor, self.memory, self.wanted = actor, memory, wanted
        self.slots = engine.PrivateSlots(memory)
        self.upkeep = self.slots.warn

    def page_lock(self, locks: Any) -> None:
        self.slots.page_lock(locks)

    def start(self, worker: int, spec: engine.WorkerSpec) -> None:
        import ray

        waiting = (actor.work for actor in self.handles() if actor.work is not None)
        work = next((work for sent, work in waiting if sent is spec), None)
        if work is None:  # else those that start together share it
            parts: list[PickleBuffer] = []
            packed = dumps(engine.PackedSpec(spec), 5, buffer_callback=parts.append)
            work = ray.put([packed, *parts])
        share = max(1, self.memory // max(1, spec.workers))
        self.place(
            worker, _Actor(self, worker, self.actor.remote(worker, work, share), (spec, work))
        )

    def send(self, worker: int, message: engine.Message) -> None:
        self.handles()[worker].send(message)

    def stack(self, worker: int) -> str:
        return self.handles()[worker].stack()

    def handles(self) -> Sequence[_Actor]:
        return super().handles()  # type: ignore[return-value]

    def leave(self) -> None:
        for actor in self.handles():
            actor.aside("leave")
        super().leave()

    def close(self) -> None:
        super().close()
        self.slots.close()


class _Actor(engine.WorkerHandle):
    """Driver's end of an actor: its calls, in the order in which they were made.

    Calls end on threads of Ray's, and in any order.
    """

    name = "Ray actor"

    def __init__(self, crew: _RayCrew, number: int, actor: Any, work: Any) -> None:
        self.crew, self.number, self.actor = crew, number, actor
        self.work: Any = work  # in the store until the worker is ready
        self.cause: str | None = None
        self.doomed = ""  # reason why it is killed
        self.process: int | None = None
        self.over = threading.Event()
        self.lock = threading.RLock()
        self.calls: deque[tuple[Any, Future[Any]]] = deque()
        self.name = f"Ray actor {actor._actor_id.hex()}"
        self.aside("where").future().add_done_callback(self.placed)
        self.life = actor.run.options(concurrency_group="life").remote().future()
        self.call(None)
        self.life.add_done_callback(self.deliver)

    @property
    def pid(self) -> int | None:
        return self.process

    @property
    def known_pid(self) -> int | None:
        return None  # it may be a number of another machine; `name` has it

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

        with suppress(Exception):  # it is gone already, and Ray perhaps with it
            ray.kill(self.actor)

    def send(self, message: engine.Message) -> None:
        if not self.is_alive():
            return
        if isinstance(message, engine.Task) and isinstance(message.index, _Result):
            self.call(engine.parts_of(engine.Task(message.seq, None)), message.index.ref)
        else:
            self.call(engine.parts_of(message, other_main=True))

    def call(self, *arguments: Any) -> None:
        actor = self.actor
        if actor is not None:  # else it has just ended
            ref = actor.step.remote(*arguments)
            future = ref.future()
            self.calls.append((ref, future))
            future.add_done_callback(self.deliver)

    def aside(self, method: str) -> Any:
        """Call a method now, beside the one that is under way."""
        with suppress(Exception):
            if self.is_alive():
                return getattr(self.actor, method).options(concurrency_group="aside").remote()
        return None

    def stack(self) -> str:
        import ray

        if self.process is None:
            has, free = ray.cluster_resources(), ray.available_resources()
            return f"Ray has not started it: it takes {self.crew.wanted}, of {has} free are {free}."
        try:
            return str(ray.get(self.aside("stack"), timeout=_ASIDE))
        except Exception as error:
            return f"Its stack could not be had: {error!r}"

    def placed(self, told: Future[Any]) -> None:
        with suppress(Exception):  # it has died
            self.process, node = told.result()
            self.name = f"{self.name} on {node}, process {self.process}"

    def deliver(self, _: Any) -> None:
        """Report what has come and whose turn it is; at last the exit."""
        with self.lock:
            while self.calls and self.calls[0][1].done():
                self.take(*self.calls.popleft())
            if self.life.done() and not self.calls and not self.over.is_set():
                self.crew.report(self.exit())
                self.actor = self.work = None  # Ray ends an actor that nobody refers to
                self.over.set()

    def take(self, ref: Any, call: Future[Any]) -> None:
        try:
            for data, *buffers in call.result():
                event = engine.loads(data, buffers=buffers)
                if isinstance(event, engine.Done):
                    event = event._replace(payload=_Result(event.payload, ref, self.crew.slots))
                self.work = None
                self.crew.report(event)
        except Exception as error:
            if not self.life.done() and not self.doomed:  # this task would never have an answer
                self.doomed = f"gave no answer: {error!r}"
                threading.Thread(target=self.terminate, daemon=True).start()

    def exit(self) -> engine.Exited:
        try:
            event: engine.Exited = engine.loads(self.life.result())
        except Exception as error:
            said, _, guesses = str(error).partition("Some common causes")
            why = said.strip().rpartition("\n")[2].rstrip(". ")
            what = f"is gone: {why}"
            if self.doomed and "ray.kill" in why:  # by us
                what = self.doomed
            event = engine.Exited(self.number, what, evidence=guesses)
        self.cause = event.cause
        return event
