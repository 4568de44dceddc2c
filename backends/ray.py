"""Workers that are actors of a Ray cluster, on this machine or on others.

Ray places the workers, carries messages and results, and notices deaths. Order, retries and states stay
with the stage. Each message is a call of the actor, whose events the call returns: small ones in Ray's
reply, large buffers by way of its object store. From there they are copied once, into memory that is
used again, so the store is free as soon as a batch is opened.
"""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any, ClassVar

from hybridloader import engine

_LATE = 30.0
"""Seconds after which a worker that Ray has not started is warned of. Starting one takes 1 to 5 s."""


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
            ray = _ray()
        except ImportError as error:
            raise engine.BackendUnavailable(
                f"backend 'ray' needs Ray: pip install 'hybridloader[ray]' ({error})"
            ) from error
        if (self._address() or "").startswith("ray://") or ray.util.client.ray.is_connected():
            raise engine.BackendUnavailable(
                "backend 'ray' does not run behind Ray Client (ray://): Ray would keep all batches at "
                "the other end of the connection. Run the script on a machine of the cluster, such as "
                "by `ray job submit`."
            )
        if not (ray.is_initialized() or self._address() or self.start):
            raise engine.BackendUnavailable(
                "backend 'ray' starts no cluster unasked, and this process is connected to none. Call "
                "ray.init() first, or say Ray(address='auto') for one that runs on this machine, "
                "Ray(address='HOST:6379') for another, or Ray(start=True) to start one here."
            )

    def open(self) -> engine.Crew:
        ray = _ray()
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


def _ray() -> Any:
    return import_module("ray")  # not typed throughout, and only there if it is used


@cache
def _actor_class() -> Any:
    ray = _ray()
    return ray.remote(concurrency_groups={"life": 1, "aside": 1})(engine.CalledWorker)


class _Result(engine.Payload):
    """Result that lies with Ray until it is opened, or that another stage's worker gets by reference."""

    forwardable = True

    def __init__(self, sent: Any, ref: Any, slots: engine.PrivateSlots) -> None:
        self._sent, self.ref, self.count = sent, ref, sent.count
        sent.slots = slots

    @property
    def nbytes(self) -> int:
        found: int = self._sent.nbytes
        return found

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
        self.upkeep = self.look
        self.late = time.monotonic() + _LATE

    def look(self) -> None:
        """Warn of memory, and once of workers that Ray has not started."""
        self.slots.warn()
        if self.late and time.monotonic() > self.late:
            self.late = 0.0
            late = [actor for actor in self.actors if actor.placed is None and actor.is_alive()]
            if late:
                warnings.warn(
                    f"{len(late)} of {len(self.actors)} workers have no place yet. {late[0].stack()} "
                    "Ask for less (Ray(num_cpus=...), num_workers=), or add nodes.",
                    stacklevel=2,
                )

    def page_lock(self, locks: Any) -> None:
        self.slots.page_lock(locks)

    def start(self, worker: int, spec: engine.WorkerSpec) -> None:
        ray = _ray()
        starting = (actor.work for actor in self.actors if not actor.ready)
        work = next((work for sent, work in starting if sent is spec), None)
        if work is None:  # else those that start together share it
            work = ray.put(engine.work_of(spec))
        share = max(1, self.memory // max(1, spec.workers))
        actor = self.actor.remote(worker, work, share)
        self.place(worker, _Actor(self, worker, actor, (spec, work)))

    def send(self, worker: int, message: engine.Message) -> None:
        if isinstance(message, engine.Task) and isinstance(message.index, _Result):
            empty = engine.parts_of(engine.Task(message.seq, None))
            self.actors[worker].step(empty, message.index.ref)
        else:
            self.actors[worker].step(engine.parts_of(message, other_main=True))

    def stack(self, worker: int) -> str:
        return self.actors[worker].stack()

    def leave(self) -> None:
        for actor in self.actors:
            actor.leave()
        super().leave()

    def close(self) -> None:
        super().close()
        self.slots.close()

    @property
    def actors(self) -> Sequence[_Actor]:
        return self.handles()  # type: ignore[return-value]


class _Actor(engine.CallingHandle):
    def __init__(self, crew: _RayCrew, number: int, actor: Any, work: Any) -> None:
        super().__init__(number, crew.report)
        self.id = actor._actor_id.hex()
        self.crew, self.actor = crew, actor
        self.work: Any = work  # stays in the store until the worker is ready
        self.begin()

    @property
    def name(self) -> str:  # type: ignore[override]
        where = "" if self.placed is None else " on {1}, process {0}".format(*self.placed)
        return f"Ray actor {self.id}{where}"

    @property
    def pid(self) -> int | None:
        return None if self.placed is None else self.placed[0]

    known_pid = None  # on this machine; `name` has the other

    def call(self, method: str, *arguments: Any) -> Future[Any]:
        if method == "step":
            ref = self.actor.step.remote(*arguments)
        else:
            group = "life" if method == "run" else "aside"
            bound = getattr(self.actor, method)
            ref = bound.options(concurrency_group=group).remote(*arguments)
        future: Future[Any] = ref.future()
        return future

    def is_alive(self) -> bool:
        ray = _ray()
        return super().is_alive() and ray.is_initialized()

    def end(self) -> None:
        _ray().kill(self.actor)

    def stack(self, timeout: float = 1.0) -> str:
        ray = _ray()
        if self.placed is not None:
            return super().stack(timeout)
        has, free = ray.cluster_resources(), ray.available_resources()
        return f"Ray has not started it: it takes {self.crew.wanted}; of {has} free are {free}."

    def started(self) -> None:
        self.work = None, None

    def received(self, done: engine.Done, step: Future[Any]) -> engine.Done:
        ref = step.object_ref  # type: ignore[attr-defined]  # Ray's future holds it
        return done._replace(payload=_Result(done.payload, ref, self.crew.slots))

    def died(self, error: Exception) -> engine.Exited:
        said, _, guesses = str(error).partition("Some common causes")
        why = said.strip().rpartition("\n")[2].rstrip(". ")
        return engine.Exited(self._number, f"is gone: {why}", evidence=guesses)

    def over(self) -> None:
        self.actor, self.work = None, (None, None)  # Ray ends an actor that nobody refers to
