"""A backend in one page: every worker is a `ThreadPoolExecutor` with a single thread.

Register it by name with the entry-point group ``hybridloader.backends``, or pass an instance:
``DataLoader(dataset, num_workers=2, backend=Pool())``.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from queue import Empty, SimpleQueue
from typing import ClassVar

from hybridloader.contract import Backend, ByReference, Crew, WorkerHandle
from hybridloader.fetcher import TaskContext
from hybridloader.messages import Event, Exited, Message, Stop, WorkerSpec
from hybridloader.seeds.seeding import ThreadSeeds
from hybridloader.shipping import replicate
from hybridloader.worker import Worker
from hybridloader.worker_info import set_worker_info


@dataclass(frozen=True)
class Pool(Backend):
    """What the user chooses. Options would be its fields."""

    name: ClassVar[str] = "pool"
    in_process: ClassVar[bool] = True

    def open(self) -> Crew:
        return PoolCrew()


class PoolWorker(WorkerHandle):
    """One worker and its thread."""

    name = "pool"

    def __init__(self, number: int, spec: WorkerSpec) -> None:
        if spec.fetch.private:  # iterable datasets: each worker reads a copy of its own
            dataset = replicate(spec.fetch.dataset, "the dataset")
            spec = replace(spec, fetch=spec.fetch.with_dataset(dataset))
        self.number = number
        self.ended = TaskContext()
        seeds = ThreadSeeds(borrows=spec.init_fn is not None)
        self.worker = Worker(number, spec, seeds, ByReference, self.ended)
        self.executor = ThreadPoolExecutor(1, f"pool-{spec.stage}-{number}")

    def is_alive(self) -> bool:
        return not self.ended.cancelled

    def terminate(self) -> None:
        self.ended.cancelled = True

    def join(self, timeout: float | None = None) -> None:
        self.executor.shutdown()


class PoolCrew(Crew):
    """The running workers of one stage."""

    def __init__(self) -> None:
        self.events: SimpleQueue[Event | None] = SimpleQueue()  # None wakes
        self.workers: list[PoolWorker] = []

    def start(self, worker: int, spec: WorkerSpec) -> None:
        mine = PoolWorker(worker, spec)
        for former in self.workers[worker : worker + 1]:  # which has exited
            former.executor.shutdown(wait=False, cancel_futures=True)
        self.workers[worker : worker + 1] = [mine]

        def open_worker() -> None:
            set_worker_info(mine.worker.info)
            self.events.put(mine.worker.open())

        opened = mine.executor.submit(open_worker)
        if spec.init_fn is not None:  # it borrows the global generators: the caller waits
            opened.result()

    def send(self, worker: int, message: Message) -> None:
        mine = self.workers[worker]
        if not mine.ended.cancelled:
            mine.executor.submit(self._act, mine, message)

    def _act(self, mine: PoolWorker, message: Message) -> None:
        if mine.ended.cancelled:
            return
        if isinstance(message, Stop):
            self._end(mine, None)
            return
        event = mine.worker.step(message)
        if event is not None:
            self.events.put(event)

    def _end(self, mine: PoolWorker, cause: str | None) -> None:
        if not mine.ended.cancelled:
            mine.ended.cancelled = True
            self.events.put(Exited(mine.number, cause))

    def wait(self, timeout: float | None) -> Sequence[Event]:
        found: list[Event] = []
        try:
            event = self.events.get(timeout=timeout)
            while event is not None:
                found.append(event)
                event = self.events.get_nowait()
        except Empty:
            pass
        return found

    def wake(self) -> None:
        self.events.put(None)

    def kill(self, worker: int) -> None:
        self._end(self.workers[worker], "was told to end")

    def close(self) -> None:
        for mine in self.workers:
            mine.ended.cancelled = True
        for mine in self.workers:
            mine.executor.shutdown(cancel_futures=True)

    def handles(self) -> Sequence[WorkerHandle]:
        return self.workers
