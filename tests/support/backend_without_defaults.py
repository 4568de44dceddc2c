"""Backend that defines every method of a crew itself, and payloads without a base class."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from queue import Empty, SimpleQueue
from typing import Any, ClassVar

from hybridloader.engine import (
    Backend,
    Crew,
    Done,
    Event,
    Message,
    Stop,
    WorkerHandle,
    WorkerSpec,
    serve,
    thread_worker,
)


class WithoutDefaults(Backend):
    name: ClassVar[str] = "seven-methods"
    in_process: ClassVar[bool] = True

    def __eq__(self, other: object) -> bool:
        return type(other) is WithoutDefaults

    def __hash__(self) -> int:
        return 7

    def open(self) -> Crew:
        return _Crew()


class _Value:
    """A payload by its methods alone."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def open(self) -> Any:
        return self.value

    def discard(self) -> None:
        self.value = None


class _Worker(WorkerHandle):
    def __init__(self, number: int, spec: WorkerSpec, events: SimpleQueue[Event | None]) -> None:
        self.messages: SimpleQueue[Message] = SimpleQueue()
        self.opened = threading.Event()
        worker = thread_worker(number, spec)
        self.context = worker.context

        def report(event: Event) -> None:
            self.opened.set()
            if isinstance(event, Done):
                event = event._replace(payload=_Value(event.payload.open()))  # type: ignore[arg-type]
            events.put(event)

        args = worker, self.messages.get, report
        self.thread = threading.Thread(target=serve, args=args, daemon=True)
        self.thread.start()

    def is_alive(self) -> bool:
        return self.thread.is_alive()

    def terminate(self) -> None:
        self.context.cancelled = True
        self.messages.put(Stop())

    def join(self, timeout: float | None = None) -> None:
        self.thread.join(timeout)


class _Crew(Crew):
    def __init__(self) -> None:  # which calls no other
        self.events: SimpleQueue[Event | None] = SimpleQueue()
        self.workers: list[_Worker] = []

    def start(self, worker: int, spec: WorkerSpec) -> None:
        made = _Worker(worker, spec, self.events)
        self.workers[worker : worker + 1] = [made]
        made.opened.wait()

    def send(self, worker: int, message: Message) -> None:
        self.workers[worker].messages.put(message)

    def wait(self, timeout: float | None) -> Sequence[Event]:
        try:
            event = self.events.get(timeout=timeout)
        except Empty:
            return []
        return [] if event is None else [event]

    def wake(self) -> None:
        self.events.put(None)

    def kill(self, worker: int) -> None:
        self.workers[worker].terminate()

    def close(self) -> None:
        for worker in self.workers:
            worker.terminate()
        for worker in self.workers:
            worker.join()

    def handles(self) -> Sequence[WorkerHandle]:
        return self.workers
