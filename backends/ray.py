"""Workers that are actors of a Ray cluster, on this machine or on others.

Ray places the workers, carries messages and results, and notices deaths. Order, retries and states stay
with the stage. Each message is a call of the actor, whose events the call returns: small ones in Ray's
reply, large buffers by way of its object store. From there they are copied once, into memory that is
used again, so the store is free as soon as a batch is opened.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any, ClassVar

from hybridloader import engine

_SHUT_DOWN = "is gone: Ray was shut down"
"""Cause of an end: this process left the cluster while it had workers there."""

_LOOKS = 1.0  # seconds between two checks of the cluster


@dataclass(frozen=True)
class Ray(engine.Backend):
    """Do the work in actors of a Ray cluster.

    Parameters
    ----------
    num_cpus, resources, scheduling_strategy, runtime_env
        Options of each worker's actor, as in Ray: its resources, its placement, and the environment of
        its process.
    address
        Cluster to connect to, as `ray.init` takes it. None takes the one that this process is connected
        to, or that the environment names (RAY_ADDRESS).
    start
        True starts a cluster on this machine if none is running.

    Raises
    ------
    BackendUnavailable
        When the iterator is made: Ray is not installed, or there is no cluster.
    ValueError
        When the iterator is made: Ray does not accept an option.
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
        _check(self.address, start=self.start)
        try:
            self._actor_type()
        except (TypeError, ValueError) as error:
            raise ValueError(f"{self}: Ray does not take these options: {error}") from error

    def open(self) -> engine.Crew:
        _connect(self.address)
        wanted = ", ".join(f"{name}={value}" for name, value in self._options().items())
        return _RayCrew(self._actor_type(), self.memory.bytes(), wanted)

    def _options(self) -> dict[str, Any]:
        names = "num_cpus", "resources", "scheduling_strategy", "runtime_env"
        return {name: value for name in names if (value := getattr(self, name)) is not None}

    def _actor_type(self) -> Any:
        return _actor_class().options(max_restarts=0, max_task_retries=0, **self._options())


@cache
def _actor_class() -> Any:
    return _package().remote(concurrency_groups={"life": 1, "aside": 1})(engine.CalledWorker)


class _Result(engine.Pickled):
    """Result that lies with Ray until it is opened, or that another stage's worker gets by reference."""

    forwardable = True

    def __init__(
        self, sent: engine.Pickled, place: engine.Place, slots: engine.PrivateSlots
    ) -> None:
        self.packed, self.count, self.slots = sent.packed, sent.count, slots
        self.place: engine.Place | None = place

    def discard(self) -> None:
        self.place = None
        super().discard()


class _RayCrew(engine.Crew):
    handles: Sequence[_Actor]

    def __init__(self, actor: Any, memory: int, wanted: str) -> None:
        self.actor, self.memory, self.wanted = actor, memory, wanted
        self.slots = engine.PrivateSlots(memory)
        self.connection = _connection()
        # All the mutable state:
        self.closed = False
        self.next_look = 0.0
        self.upkeep = self.look

    def look(self) -> None:
        """Warn of memory; report the end of the connection."""
        self.slots.warn()
        now = time.monotonic()
        if now >= self.next_look:
            self.next_look = now + _LOOKS
            self._lost()

    def start(self, worker: int, spec: engine.WorkerSpec) -> None:
        if _connection() != self.connection:  # otherwise Ray would start a cluster unasked
            raise engine.BackendUnavailable(
                "Ray was shut down while the loader had workers there; connect again, and make a "
                "new iterator"
            )
        starting = (actor.work for actor in self.handles if not actor.ready)
        work = next((work for sent, work in starting if sent is spec), None)
        if work is None:  # otherwise workers that start together share it
            work = _package().put(engine.work_of(spec))
        share = max(1, self.memory // max(1, spec.workers))
        actor = self.actor.remote(worker, work, share)
        self.place(worker, _Actor(self, worker, actor, (spec, work)))

    def send(self, worker: int, message: engine.Message) -> None:
        index = message.index if isinstance(message, engine.Task) else None
        self.handles[worker].send(message, index.place if isinstance(index, _Result) else None)

    def stack(self, worker: int) -> str:
        return self.handles[worker].stack()

    def leave(self) -> None:
        for actor in self.handles:
            actor.leave()
        super().leave()

    def close(self) -> None:
        self.closed, self.upkeep = True, None
        self._lost()  # no worker can answer any more
        super().close()
        self.slots.close()

    def _lost(self) -> None:
        if _connection() != self.connection:
            for actor in self.handles:
                actor.lost(_SHUT_DOWN)


class _Actor(engine.CallingHandle):
    def __init__(self, crew: _RayCrew, number: int, actor: Any, work: Any) -> None:
        super().__init__(number, crew.report, alone=work[0].timed)
        self.id = actor._actor_id.hex()
        self.crew, self.actor = crew, actor
        self.work: Any = work  # kept in the store until the worker is ready
        self.begin()

    @property
    def name(self) -> str:  # type: ignore[override]
        where = "" if self.placed is None else " on {1}, process {0}".format(*self.placed)
        return f"Ray actor {self.id}{where}"

    @property
    def pid(self) -> int | None:
        return None if self.placed is None else self.placed[0]

    known_pid = None  # there is none on this machine; `name` contains the remote one

    def call(self, method: str, *arguments: Any) -> Future[Any]:
        actor = self.actor
        if actor is None:  # another thread has ended it
            raise RuntimeError(f"{self.name} has ended")
        if method == "step":
            ref = actor.step.remote(*arguments)
        else:
            group = "life" if method == "run" else "aside"
            bound = getattr(actor, method)
            ref = bound.options(concurrency_group=group).remote(*arguments)
        future: Future[Any] = ref.future()
        return future

    def is_alive(self) -> bool:
        return super().is_alive() and _package().is_initialized()

    def end(self) -> None:
        _package().kill(self.actor)

    def stack(self, timeout: float = 1.0) -> str:
        ray = _package()
        if self.placed is not None or not ray.is_initialized():
            return super().stack(timeout)
        has, free = ray.cluster_resources(), ray.available_resources()
        return f"Ray has not started it: it requests {self.crew.wanted}; of {has}, {free} are free."

    def started(self) -> None:
        self.work = None, None

    def received(self, done: engine.Done, step: Future[Any], at: int) -> engine.Done:
        ref = step.object_ref  # type: ignore[attr-defined]
        assert isinstance(done.payload, engine.Pickled)
        result = _Result(done.payload, engine.Place(ref, at), self.crew.slots)
        if self.crew.closed:  # the result will not be used
            result.discard()
        return done._replace(payload=result)

    def died(self, error: Exception) -> engine.Exited:
        return exited(self._number, error)

    def over(self) -> None:
        self.actor, self.work = None, (None, None)  # Ray ends an actor without references


def _package() -> Any:
    """Import Ray. It is not typed throughout, and only there if it is used."""
    return import_module("ray")


def _check(address: str | None, *, start: bool) -> None:
    """Raise `BackendUnavailable` if Ray is not installed, or there is no cluster to connect to."""
    try:
        ray = _package()
        # A folder `ray` beside the script, such as Ray's own in /tmp, lacks it.
        ray.init  # noqa: B018
    except (ImportError, AttributeError) as error:
        raise engine.BackendUnavailable(
            f"backend 'ray' needs Ray: pip install ray ({error})"
        ) from error
    wanted = _wanted(address)
    if (wanted or "").startswith("ray://") or ray.util.client.ray.is_connected():
        raise engine.BackendUnavailable(
            "backend 'ray' does not run through Ray Client (ray://), because Ray would keep all "
            "batches at the remote end of the connection. Run the script on a machine of the "
            "cluster, for example by `ray job submit`."
        )
    if not (ray.is_initialized() or wanted or start):
        raise engine.BackendUnavailable(
            "backend 'ray' starts no cluster unasked, and this process is connected to none. Call "
            "ray.init() first, or set Ray(address='auto') for a cluster on this machine, "
            "Ray(address='HOST:6379') for another, or Ray(start=True) to start one here."
        )


def _connect(address: str | None) -> None:
    """Connect this process to a cluster, if it is not: to that which runs here, or else a new one.

    With an address it is that cluster or an error.
    """
    ray = _package()
    if ray.is_initialized():
        return
    if wanted := _wanted(address):
        ray.init(address=wanted)
    else:
        ray.init(include_dashboard=False)


def _connection() -> Any:
    """Return an identifier of this connection to a cluster; None if there is no connection."""
    ray = _package()
    if ray.is_initialized():
        with suppress(Exception):  # another thread may be shutting Ray down
            context = ray.get_runtime_context()
            return context.get_job_id(), context.get_node_id()  # job ids start at 1 in each cluster
    return None


def exited(number: int, error: Exception) -> engine.Exited:
    """Return the end of a worker, by the error of the call in which it was.

    Ray's text has a headline, indented lines on the actor, the cause, and then advice. That of an
    error in the actor's own code ends with that error.
    """
    text = str(error).strip()
    lines = text.splitlines() or [repr(error)]
    at = 1
    while at < len(lines) and lines[at].startswith("\t"):
        at += 1
    at = at if 1 < at < len(lines) else len(lines) - 1
    why, common, causes = lines[at].partition("Some common causes")
    if "its owner has died" in why:  # this process has left the cluster
        return engine.Exited(number, _SHUT_DOWN)
    # A lost machine is not a fault of any sample.
    blameless = -1 if "its node has died" in text else None
    node = re.search(r"Node Id: (\w+)", text) if blameless else None
    return engine.Exited(
        number,
        f"is gone: {why.strip().rstrip('. ')}",
        at=blameless,
        evidence="\n".join([common + causes, *lines[at + 1 :]]).strip(),
        with_it=None if node is None else f"node {node[1]}",
    )


def _wanted(address: str | None) -> str | None:
    return address or os.environ.get("RAY_ADDRESS")
