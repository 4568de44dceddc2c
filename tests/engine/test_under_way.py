"""`TasksUnderWay`, with scripted messages and samples."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from hybridloader.engine import Begin, ByReference, Done, Event, Stop, Task, TaskContext
from hybridloader.engine.worker import Fetched, TasksUnderWay


class Samples:
    """Samples of one task, which end when the test says so."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.ended = self.stopped = False

    def result(self) -> list[Any]:
        return []

    def stop(self) -> bool:
        self.stopped = True
        return True

    def leave(self) -> bool:
        return True

    def wait_here(self) -> bool:
        return False


class Script:
    """Messages of a crew in their order; a function among them is called, as if threads rang."""

    def __init__(self, *messages: Any) -> None:
        self.messages = deque(messages)
        self.samples: dict[int, Samples] = {}
        self.context = TaskContext(tracked=False)
        self.under_way = TasksUnderWay(
            self._begin, self.context, self._get, self._report, self._listen
        )

    def _begin(self, task: Task, ring: Callable[[], None]) -> Samples:
        return self.samples.setdefault(task.seq, Samples())

    def _get(self) -> Any:
        message = self.messages.popleft()
        return message() if callable(message) else message

    def _report(self, event: Event) -> None:
        pass

    def _listen(self) -> Callable[[], None]:
        return lambda: None

    def end(self, seq: int) -> Callable[[], None]:
        def ring() -> None:
            self.samples[seq].ended = True

        return ring

    def learn(self, seconds: float) -> None:
        self.under_way.report(Done(0, 0, ByReference(None), seconds))


def test_short_tasks_are_the_workers_own() -> None:
    script = Script(Task(0, [0]), Task(1, [1]))
    script.learn(1e-6)
    assert [script.under_way.next(), script.under_way.next()] == [Task(0, [0]), Task(1, [1])]
    assert not script.samples


def test_long_tasks_are_begun_as_they_come_and_answered_in_their_order() -> None:
    script = Script(Task(0, [0]), Task(1, [1]))
    script.learn(1.0)
    script.messages += [script.end(1), script.end(0)]
    first, second = script.under_way.next(), script.under_way.next()
    assert isinstance(first, Fetched)
    assert isinstance(second, Fetched)
    assert [first.task.seq, second.task.seq] == [0, 1]


class OnThisThread(Samples):
    """Samples that are fetched on the worker's own thread, while it waits: task 0 ends at the third."""

    waits = 0

    def wait_here(self) -> bool:
        self.waits += 1
        self.ended = self.waits == 3
        return True


def test_messages_are_looked_for_whenever_the_samples_have_been_waited_for() -> None:
    script = Script(Task(0, [0]), Task(1, [1]), None, None, Task(2, [2]), None)
    script.samples[0] = OnThisThread()
    script.learn(1.0)
    first = script.under_way.next()
    assert isinstance(first, Fetched)
    assert first.task.seq == 0
    assert list(script.samples) == [0, 1]
    assert not script.messages


def test_tasks_behind_an_epoch_that_begins_in_the_middle_are_begun_early_too() -> None:
    begin = Begin(1)
    script = Script(Task(0, [0]), begin, Task(1, [1]), Task(2, [2]))
    script.learn(1.0)
    script.messages.append(script.end(0))
    first = script.under_way.next()
    assert isinstance(first, Fetched)
    assert list(script.samples) == [0]  # those behind it are of the next epoch
    assert script.under_way.next() is begin
    script.messages.append(script.end(1))
    second = script.under_way.next()
    assert isinstance(second, Fetched)
    assert second.task.seq == 1
    assert list(script.samples) == [0, 1, 2]


def test_a_task_of_one_slow_sample_is_long_for_any_number_of_threads() -> None:
    script = Script(*(Task(seq, [seq]) for seq in range(100)))
    script.learn(1.0)
    for seq in range(100):
        script.samples[seq] = Samples()
        script.samples[seq].seconds, script.samples[seq].ended = [5e-3], True
        assert isinstance(script.under_way.next(), Fetched)
        script.learn(5e-3 / 16)


def test_a_cancelled_worker_is_told_at_once_and_stops_what_is_under_way() -> None:
    script = Script(Task(0, [0]))
    script.learn(1.0)

    def cancel() -> Stop:
        script.context.cancelled = True
        return Stop()

    script.messages.append(cancel)
    assert isinstance(script.under_way.next(), Stop)
    script.under_way.close()
    assert script.samples[0].stopped
