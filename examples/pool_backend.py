"""A backend in one page: ``DataLoader(dataset, num_workers=2, backend=Pool())``."""

from __future__ import annotations

import multiprocessing
from contextlib import suppress
from dataclasses import dataclass
from queue import SimpleQueue
from threading import Thread
from typing import Any, ClassVar

from hybridloader import engine


@dataclass(frozen=True)
class Pool(engine.Backend):
    """Backend that the user chooses; its fields are its options."""

    start_method: str | None = None
    name: ClassVar[str] = "pool"
    children: ClassVar[bool] = True

    def open(self) -> PoolCrew:
        return PoolCrew(multiprocessing.get_context(self.start_method))


class PoolCrew(engine.Crew):
    """The running workers of one stage."""

    def __init__(self, context: Any) -> None:
        self.context = context

    def start(self, worker: int, spec: engine.WorkerSpec) -> None:
        self.place(worker, PoolWorker(self, worker, engine.PackedSpec(spec)))

    def send(self, worker: int, message: engine.Message) -> None:
        self.handles()[worker].outbox.put(engine.dumps(message))


class PoolWorker(engine.WorkerHandle):
    """One process; it counts as alive until each event that it sent was read."""

    def __init__(self, crew: PoolCrew, number: int, spec: engine.PackedSpec) -> None:
        self.pipe, theirs = crew.context.Pipe()
        args = number, self.pipe, theirs, spec
        self.process = crew.context.Process(target=work, args=args, daemon=True)
        self.process.start()
        theirs.close()
        self.outbox: SimpleQueue[bytes | None] = SimpleQueue()
        self.writer = Thread(target=self.write, daemon=True)
        self.reader = Thread(target=self.read, args=(number, crew.report), daemon=True)
        self.writer.start()
        self.reader.start()

    @property
    def pid(self) -> int | None:
        return self.process.pid

    @property
    def exitcode(self) -> int | None:
        return None if self.is_alive() else self.process.exitcode

    def is_alive(self) -> bool:
        return self.reader.is_alive()

    def terminate(self) -> None:
        self.process.kill()

    def join(self, timeout: float | None = None) -> None:
        self.reader.join(timeout)

    def write(self) -> None:
        with suppress(OSError):  # the process is gone; `read` reports it
            while (message := self.outbox.get()) is not None:
                self.pipe.send_bytes(message)  # waits while the pipe is full

    def read(self, number: int, report: Any) -> None:
        event: Any = None
        receive = self.pipe.recv_bytes
        with suppress(Exception):  # the process is gone, or has sent what can't be read
            while not isinstance(event := engine.loads(receive()), engine.Exited):
                report(event)
                event = None  # a batch must not outlive its consumer
        if event is None:
            self.process.kill()
        self.process.join()
        self.outbox.put(None)
        self.writer.join()
        self.pipe.close()
        exited = engine.Exited(number, f"exited with code {self.process.exitcode}")
        report(event or exited)


def work(number: int, ours: Any, pipe: Any, spec: engine.PackedSpec) -> None:
    """The process: a worker that gets its messages from `pipe`, and reports to it."""
    # A fork has a copy; while that is open, `recv` would not end with the parent
    ours.close()
    worker = engine.process_worker(number, spec)
    engine.serve(worker, pipe.recv, lambda event: pipe.send_bytes(engine.dumps(event)))
