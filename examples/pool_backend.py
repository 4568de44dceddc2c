"""A backend in one page: ``DataLoader(dataset, num_workers=2, backend=Pool())``."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import connection, get_context
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
        return PoolCrew(get_context(self.start_method))


class PoolCrew(engine.Crew):
    """The running workers of one stage."""

    def __init__(self, context: Any) -> None:
        self.context = context

    def start(self, worker: int, spec: engine.WorkerSpec) -> None:
        self.place(worker, PoolWorker(self, worker, engine.PackedSpec(spec)))

    def send(self, worker: int, message: engine.Message) -> None:
        self.handles[worker].outbox.put(engine.dumps(message))


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

    def read(self, number: int, put: Any) -> None:
        event: Any = None
        pipe, ends = self.pipe, (self.pipe, self.process.sentinel)
        with suppress(Exception):  # the process is gone, or has sent what can't be read
            while connection.wait(ends) and pipe.poll():  # a kill may give no EOF
                if isinstance(event := engine.loads(pipe.recv_bytes()), engine.Exited):
                    break
                put(event)
                event = None  # a batch must not outlive its consumer
        if event is None:
            self.process.kill()
        self.process.join()
        self.outbox.put(None)
        self.writer.join()
        pipe.close()
        put(event or engine.Exited(number, f"exited with code {self.process.exitcode}"))


def work(number: int, ours: Any, pipe: Any, spec: engine.PackedSpec) -> None:
    """The process: a worker that gets its messages from `pipe`, and reports to it."""
    ours.close()  # a fork's copy; if it stays open, `recv` does not end with the parent
    worker = engine.process_worker(number, spec)
    engine.serve(worker, pipe.recv, lambda event: pipe.send_bytes(engine.dumps(event)))
