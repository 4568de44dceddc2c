"""Starters: the ways to start a worker process, each with the same interface for the crew."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from hybridloader.backends.process.child import FirstFrame, main
from hybridloader.backends.process.frames import Frame
from hybridloader.backends.process.handles import ProcessHandle
from hybridloader.backends.process.starting import starting
from hybridloader.engine.messages import WorkerSpec
from hybridloader.engine.refresh import Change
from hybridloader.memory import descriptors
from hybridloader.memory.shipping import Shipment

ZYGOTE = -1
"""Number, in a crew's transport, of the connection to a process that starts workers."""

Note = Callable[[ProcessHandle], None]
"""Takes the handle of a worker that was started."""


class WorkerStart(NamedTuple):
    """One worker that is to be started."""

    worker: int
    spec: WorkerSpec
    connection: Any  # the worker's end, which stays the caller's
    slots: tuple[int, str | None] | None  # as `child.main` takes it
    record: int | None  # descriptor of its postmortem record
    shipment: Shipment | None  # the work, packed; None if the worker will have it already

    @property
    def name(self) -> str:
        return f"hybridloader-{self.spec.stage}-{self.worker}"


class Starter(ABC):
    """Way to start the workers of one crew."""

    forks: bool = False  # workers are forks of this process, which have the work already

    def ships(self, spec: WorkerSpec) -> bool:  # the first frame to a new worker must bring `spec`
        return not self.forks

    @abstractmethod
    def start(self, start: WorkerStart, note: Note) -> None:
        """Start a worker, without waiting for it.

        `note` gets its handle, before a signal is acted on; and another handle if later the worker must
        be started another way.
        """

    def hear(self, frame: Frame | None) -> Callable[[], None] | None:
        """Take in what `ZYGOTE` says; None: it is gone. May return what the next `wait` is to call."""
        return None

    def change(self, changes: tuple[Change, ...]) -> None:  # noqa: B027  # most keep no dataset
        """Apply changes, of which the workers were told, to the dataset for workers yet to start."""

    def evidence(self) -> str:
        """Return the stack at which the process that starts workers has crashed; "" if there is none."""
        return ""

    def stack(self) -> str:
        """Return the stack of the process that starts workers; "" if there is none."""
        return ""

    def close(self) -> None:  # noqa: B027
        """End what starts workers, once the crew has hung up. Idempotent."""

    def disown(self) -> None:  # noqa: B027
        """Leave what starts workers, in a fork that the user's own code made, to the parent."""


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


class ContextStarter(Starter):
    """Starter that has a context of multiprocessing, or loky's, start each worker."""

    def __init__(self, context: Any, endpoint_class: Any) -> None:
        self._context, self._endpoint_class = context, endpoint_class
        self._method = context.get_start_method()
        self.forks = self._method == "fork"

    def start(self, start: WorkerStart, note: Note) -> None:
        work: WorkerSpec | FirstFrame = start.spec
        record, strays = start.record, descriptors.ours - {start.record}
        if not self.forks:
            work = FirstFrame(None if start.shipment is None else start.shipment.inherited)
            strays = set()
            record = None if record is None else -1
        process = self._context.Process(
            target=main,
            args=(
                start.worker,
                self._endpoint_class,
                start.connection,
                work,
                os.getpid(),
                start.slots,
                tuple(strays),
                record,
            ),
            name=start.name,
            daemon=True,
        )
        with starting(self._method):
            process.start()
            note(ProcessHandle(process))
