"""A clock and a backend that a test scripts: events and times without any worker."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from hybridloader.engine import Backend, Crew, Event, Message, WorkerSpec


class FakeClock:
    """Clock that a test sets: ``clock()`` returns `now`, in seconds."""

    def __init__(self, now: float = 0.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


@dataclass
class ScriptedBackend(Backend):
    """Backend whose workers follow a script.

    Parameters
    ----------
    script
        Events that successive calls of `wait` return. An item may be a function of the crew, which may
        look at `crew.sent`, and move a `FakeClock`.
    """

    script: Iterable[Sequence[Event] | Callable[[ScriptedCrew], Sequence[Event]]] = ()
    crews: list[ScriptedCrew] = field(default_factory=list)
    name: ClassVar[str] = "scripted"
    in_process: ClassVar[bool] = True

    def open(self) -> Crew:
        crew = ScriptedCrew(iter(self.script))
        self.crews.append(crew)
        return crew


class ScriptedCrew(Crew):
    """Crew that records its calls in `started`, `sent`, `killed`, `woken` and `closed`."""

    def __init__(
        self, script: Iterator[Sequence[Event] | Callable[[ScriptedCrew], Sequence[Event]]]
    ) -> None:
        self._script = script
        self.started: list[int] = []
        self.sent: list[tuple[int, Message]] = []
        self.killed: list[int] = []
        self.woken = self.closed = 0

    def start(self, worker: int, spec: WorkerSpec) -> None:
        self.started.append(worker)

    def send(self, worker: int, message: Message) -> None:
        self.sent.append((worker, message))

    def wait(self, timeout: float | None) -> Sequence[Event]:
        for step in self._script:
            return step(self) if callable(step) else step
        raise AssertionError(f"the script has ended, but wait was called again; sent: {self.sent}")

    def wake(self) -> None:
        self.woken += 1

    def kill(self, worker: int) -> None:
        self.killed.append(worker)

    def close(self) -> None:
        self.closed += 1
