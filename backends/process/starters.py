"""Starters: the ways to start the worker processes of a crew, with the work that each way must send.

A worker is a fork of this process, which has the work. Or it is a fresh process of multiprocessing or
loky, which loads the work. Or a zygote, a fresh process that has loaded the work, forks it: that way has
its own module, because Windows can't import it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from multiprocessing import spawn
from typing import Any, ClassVar, NamedTuple

from hybridloader.backends.process.child import FirstFrame, main
from hybridloader.backends.process.first_step import FirstStep
from hybridloader.backends.process.frames import Frame
from hybridloader.backends.process.handles import (
    ProcessHandle,
    starting,
)
from hybridloader.backends.process.pipe_transport import PipeTransport
from hybridloader.backends.process.postmortem import PostmortemRecord
from hybridloader.backends.process.socket_transport import SocketTransport
from hybridloader.engine.messages import WorkerSpec
from hybridloader.engine.refresh import Change
from hybridloader.memory.descriptors import ours
from hybridloader.memory.shipping import Shipment, ship

ZYGOTE = -1
"""Number, in a crew's transport, of the connection to the process that forks workers."""

Transport = SocketTransport | PipeTransport


class WorkerStart(NamedTuple):
    """One worker that is to be started."""

    worker: int
    spec: WorkerSpec
    slots: tuple[int, str | None]  # as `child.main` takes it
    record: int | None  # descriptor of its postmortem record
    # Gets its handle before a signal is acted on. If the worker must be started another way later, it
    # gets another handle.
    note: Callable[[ProcessHandle], None]

    @property
    def name(self) -> str:
        return f"hybridloader-{self.spec.stage}-{self.worker}"


class Starter:
    """Starter of fresh processes for one crew, each of which loads the work in its first frame."""

    forks: ClassVar[bool] = False
    """True if workers are forks of this process, with its work."""

    def __init__(self, method: str, transport: Transport, *, runs_script: bool = False) -> None:
        """Take one of multiprocessing's methods, or ``"loky"``, and the transport of the crew.

        If `runs_script`, the processes of loky run the top of the script, as multiprocessing's do.
        """
        if method == "loky":
            from loky.backend import get_context
        else:
            from multiprocessing import get_context
        self.transport = transport
        self._method, self._context = method, get_context(method)
        known = _script() if runs_script or method in ("spawn", "forkserver") else None
        self._script = known if method == "loky" else None
        self._by_name = known is not None  # workers have the script's objects, too
        # All the mutable state: the work of workers that have not loaded it yet.
        self._shipments: dict[int, tuple[WorkerSpec, Shipment]] = {}

    def start(self, start: WorkerStart) -> None:
        """Start a worker with a connection of the transport, without waiting for it."""
        shipment = self._shipment(start.spec)
        if shipment is not None:
            self._shipments[start.worker] = start.spec, shipment
        connection, theirs = self._context.Pipe(duplex=True)
        self.transport.connect(start.worker, connection)
        try:
            self._launch(start, theirs)
        finally:
            theirs.close()
        parts, fds = ([b""], []) if shipment is None else (shipment.parts, shipment.fds)
        fds = fds if start.record is None else [*fds, start.record]
        self.transport.send(start.worker, parts, duplicates(fds))

    def _shipment(self, spec: WorkerSpec) -> Shipment | None:
        """Pack a spec, once for all workers that start together; None if the worker will have it."""
        for sent, shipment in self._shipments.values():
            if sent is spec:
                return shipment
        share = self.transport.carries_descriptors
        return ship(spec, "the loader", share=share, by_name=self._by_name)

    def _launch(self, start: WorkerStart, connection: Any) -> None:
        """Start a worker at this end of its connection, which the caller closes."""
        process = self._context.Process(
            target=main if self.forks else FirstStep(main, connection, start.record is not None),
            args=(
                start.worker,
                self.transport.endpoint,
                connection,
                self._first(start),
                os.getpid(),
                start.slots,
                tuple(ours) if self.forks else (),
                not self.forks,
            ),
            name=start.name,
            daemon=True,
        )
        with starting(self._method):
            process.start()
            start.note(ProcessHandle(process))

    def _first(self, start: WorkerStart) -> FirstFrame:
        _, shipment = self._shipments.get(start.worker, (None, None))
        inherited = None if shipment is None else shipment.inherited
        return FirstFrame(start.record is not None, inherited=inherited, script=self._script)

    def arrived(self, worker: int) -> None:
        """Let go of a worker's work: the worker has mapped it, or is gone."""
        _, shipment = self._shipments.pop(worker, (None, None))
        if shipment is not None and all(s is not shipment for _, s in self._shipments.values()):
            shipment.close()

    def hear(self, frame: Frame | None) -> Callable[[], None] | None:
        """Take in a frame of `ZYGOTE`; None: it is gone. May return a function for the next `wait` to
        call."""
        return None

    def change(self, changes: tuple[Change, ...]) -> None:
        """Apply changes, which the workers have got, to the dataset for workers yet to start."""

    def end_of(self, record: PostmortemRecord) -> tuple[str, str]:
        """Describe the end of a worker with this record, as `PostmortemRecord.end` does."""
        end = record.end()
        if self.forks or record.begun or any(end):
            return end
        runs = " It runs the top of the script first." if self._by_name else ""
        return (
            "",
            f"It had not begun its work.{runs} If an error ended it, its stderr shows the error.",
        )

    def stack(self) -> str:
        """Return the stack of the process that starts workers; "" if there is none."""
        return ""

    def close(self) -> None:
        """End the process that starts workers, once the crew has hung up. Idempotent."""
        for worker in list(self._shipments):
            self.arrived(worker)

    def disown(self) -> None:
        """Leave the process that starts workers to the parent, in a fork by the user's code."""


class ForkStarter(Starter):
    """Starter of workers that are forks of this process."""

    forks: ClassVar[bool] = True

    def _shipment(self, spec: WorkerSpec) -> None:
        return None

    def _first(self, start: WorkerStart) -> FirstFrame:
        return FirstFrame(start.record is not None, start.spec)


def _script() -> dict[str, str] | None:
    """Return how a process finds the script; None if it can't run it again, as in a notebook."""
    found: dict[str, Any] = spawn.get_preparation_data("")
    name, path = found.get("init_main_from_name"), found.get("init_main_from_path")
    if name is not None:  # of a package's `__main__` multiprocessing runs nothing
        return None if name.rpartition(".")[2] == "__main__" else {"init_main_from_name": name}
    return None if path is None else {"init_main_from_path": path}


def duplicates(fds: Sequence[int]) -> list[int]:
    """Duplicate descriptors, all or none."""
    found: list[int] = []
    try:
        for fd in fds:
            found.append(os.dup(fd))
    except OSError:
        for fd in found:
            os.close(fd)
        raise
    return found
