"""Numbers that workers are told under ``seeding="sample"``."""

from __future__ import annotations

from typing import Any

from hybridloader.engine.feed import items_in
from hybridloader.engine.fetcher import GivenUp, PartlyGivenUp
from hybridloader.engine.messages import First, Task, WorkerSpec
from hybridloader.engine.numbering import ItemCounter, NumberedSending
from hybridloader.seeding.sample_seeds import Origin
from hybridloader.testing import Call


class Noting:
    """Crew that notes what is started."""

    def __init__(self) -> None:
        self.specs: list[WorkerSpec] = []

    def start(self, worker: int, spec: WorkerSpec) -> None:
        self.specs.append(spec)


def test_workers_that_start_in_the_same_epoch_get_the_same_spec_which_is_packed_once() -> None:
    crew: Any = Noting()
    counter = ItemCounter()
    sending = NumberedSending(crew, counter)
    spec = WorkerSpec("stage", 2, Call(lambda index: index), seeding=Origin(1))
    for worker in range(2):
        sending.start(worker, spec)
    assert all(found is spec for found in crew.specs)
    counter.begin(3)
    sending.start(0, spec)
    seeding = crew.specs[-1].seeding
    assert seeding is not None
    assert seeding.epoch == 3


class Sharing:
    """Crew that notes its messages, and has its workers share the tasks of the `shared` numbers."""

    def __init__(self, *shared: int) -> None:
        self.shared, self.sent = shared, list[Any]()
        self.first: int | None = None

    def send(self, worker: int, message: Any) -> None:
        self.sent.append(message if isinstance(message, First) else (message.seq, self.first))
        if isinstance(message, Task) and message.seq in self.shared:
            self.first = None


def test_a_worker_gets_the_number_again_after_a_task_that_another_may_have_counted() -> None:
    crew: Any = Sharing(1)
    sending = NumberedSending(crew, ItemCounter())
    for seq in range(4):
        sending.send(0, Task(seq, [seq, seq]))
    assert crew.sent == [First(0, 0), (0, 0), (1, 2), First(4, 0), (2, 4), (3, 6)]


def test_items_that_were_given_up_are_counted_with_the_others_of_their_task() -> None:
    assert items_in(PartlyGivenUp([1, GivenUp(2, "it killed two workers"), 3])) == 3
