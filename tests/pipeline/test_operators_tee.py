"""Forks: every branch gets everything once, whoever pulls, from whatever thread."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.operator_context import Oops, ScriptedContext, drain, no_deadline, scripted

from hybridloader.pipeline.operators.joins import Branch, TeePoint
from hybridloader.running.operator import Chain

PATIENCE = 30.0
"""Seconds after which a test gives up waiting for what should have come at once."""

errors = st.builds(Oops, st.integers(0, 99))
scripts = st.lists(st.one_of(st.integers(), st.none(), errors), max_size=10)


def branches(source: Any, count: int, stand: ScriptedContext | None = None) -> list[Any]:
    fork, stand = TeePoint(source, count), stand or ScriptedContext()
    return [Branch(fork, number).start(stand) for number in range(count)]


class Gated(Chain, Iterator[Any]):
    """Tells when it is asked for an item, and gives it when it is allowed to."""

    length = None
    operators = ()

    def __init__(self, *steps: Any) -> None:
        self._steps = iter(steps)
        self.asked = threading.Semaphore(0)
        self.allowed = threading.Semaphore(0)
        self.closed = 0

    def __call__(self) -> Gated:
        return self

    def __next__(self) -> Any:
        self.asked.release()
        assert self.allowed.acquire(timeout=PATIENCE)
        step = next(self._steps)
        if isinstance(step, Exception):
            raise step
        return step

    def close(self) -> None:
        self.closed += 1


class WatchedLock:
    """A lock that tells who comes to take it."""

    def __init__(self, lock: threading.Lock) -> None:
        self._lock = lock
        self.came = threading.Semaphore(0)

    def __enter__(self) -> None:
        self.came.release()
        assert self._lock.acquire(timeout=PATIENCE)

    def __exit__(self, *exc: object) -> None:
        self._lock.release()


@pytest.fixture
def start() -> Iterator[Callable[[Callable[[], Any]], Future[Any]]]:
    with ThreadPoolExecutor(4) as threads:
        yield threads.submit


# -- in one thread -----------------------------------------------------------------------------------


@no_deadline
@given(scripts, st.integers(1, 4), st.data())
def test_every_branch_gets_everything_in_any_order_of_pulls(
    script: list[Any], count: int, data: st.DataObject
) -> None:
    stand = ScriptedContext()
    pulled = branches(scripted(*script), count, stand)
    found: list[list[Any]] = [[] for _ in range(count)]
    met: list[BaseException] = []
    for number in data.draw(st.lists(st.integers(0, count - 1), max_size=30)):
        try:
            found[number].append(next(pulled[number]))
        except StopIteration:
            assert found[number] == script
        except Oops as error:
            found[number].append(error)
            met.append(error)
    for number in range(count):
        found[number] += drain(pulled[number])
        met += [step for step in found[number] if isinstance(step, Oops)]
    assert found == [script] * count
    assert (
        len({id(error) for error in met}) == len([s for s in script if isinstance(s, Oops)]) * count
    )
    assert stand.opened[0].pulled <= len(script) + 1


def test_the_end_is_the_end_for_all() -> None:
    one, other = branches(scripted(1, StopIteration(), 2), 2)
    assert drain(one) == [1]
    assert drain(other) == [1]


def test_all_get_the_same_objects() -> None:
    item = object()
    one, other = branches(scripted(item), 2)
    assert next(one) is next(other) is item


def test_a_branch_that_is_opened_late_lacks_nothing() -> None:
    stand, fork = ScriptedContext(), TeePoint(scripted(1, 2, 3), 2)
    assert drain(Branch(fork, 0).start(stand)) == [1, 2, 3]
    assert drain(Branch(fork, 1).start(stand)) == [1, 2, 3]
    assert len(stand.opened) == 1


def test_a_branch_is_opened_once_in_a_pass() -> None:
    stand, branch = ScriptedContext(), Branch(TeePoint(scripted(1), 2), 1)
    kept = branch.start(stand)
    with pytest.raises(ValueError, match="branch 1 of a tee was opened twice in one pass"):
        branch.start(stand)
    assert drain(kept) == drain(branch.start(ScriptedContext())) == [1]


def test_forks_of_one_pipeline_have_passes_of_their_own() -> None:
    stand, source = ScriptedContext(), scripted(1, 2)
    one = Branch(TeePoint(source, 1), 0).start(stand)
    other = Branch(TeePoint(source, 1), 0).start(stand)
    assert drain(one) == drain(other) == [1, 2]
    assert len(stand.opened) == 2


def test_a_pipeline_that_cannot_be_opened_may_be_opened_again() -> None:
    class Broken(Chain):
        length = 1
        operators = ()
        tries = 0

        def __call__(self) -> Iterator[Any]:
            self.tries += 1
            if self.tries == 1:
                raise Oops("open")
            return iter([5])

    broken: Any = Broken()
    stand, branch = ScriptedContext(), Branch(TeePoint(broken, 1), 0)
    with pytest.raises(Oops):
        branch.start(stand)
    assert drain(branch.start(stand)) == [5]
    assert branch.length(None) == 1
    assert branch.branches() == (broken,)


def test_what_comes_before_is_closed_with_the_last_branch() -> None:
    stand = ScriptedContext()
    one, other = branches(scripted(1, 2, 3), 2, stand)
    next(one)
    one.close()
    one.close()
    (source,) = stand.opened
    assert source.closed == 0
    assert drain(one) == []
    assert drain(other) == [1, 2, 3]
    other.close()
    assert source.closed == 1


def test_nothing_waits_for_a_branch_that_is_gone() -> None:
    one, other, third = branches(scripted(*range(5)), 3)
    trunk = one._trunk
    other.close()
    del third
    assert drain(one) == list(range(5))
    assert trunk.queues[1:] == [None, None]


# -- in several threads ------------------------------------------------------------------------------


def test_a_branch_takes_what_waits_for_it_while_another_pulls(start: Any) -> None:
    source = Gated(1, 2)
    one, other = branches(source, 2)
    source.allowed.release()
    assert next(one) == 1
    assert source.asked.acquire(timeout=PATIENCE)
    pulling = start(lambda: next(one))
    assert source.asked.acquire(timeout=PATIENCE)  # it is inside, with the lock
    assert next(other) == 1
    assert not pulling.done()
    source.allowed.release()
    assert pulling.result(PATIENCE) == 2
    assert next(other) == 2


@pytest.mark.parametrize("step", [7, None, Oops(1), "end"])
def test_a_branch_that_waits_gets_what_another_pulled(start: Any, step: Any) -> None:
    source = Gated() if step == "end" else Gated(step)
    one, other = branches(source, 2)
    lock = one._trunk._pulling = WatchedLock(one._trunk._pulling)

    def pull(branch: Any) -> Any:
        try:
            return next(branch)
        except StopIteration:
            return "end"
        except Oops as error:
            return error

    first = start(lambda: pull(one))
    assert source.asked.acquire(timeout=PATIENCE)  # it is inside, with the lock
    second = start(lambda: pull(other))
    for _ in range(2):
        assert lock.came.acquire(timeout=PATIENCE)  # the other has found nothing and waits for it
    source.allowed.release()
    assert first.result(PATIENCE) == second.result(PATIENCE) == step
    if isinstance(step, Oops):
        assert first.result() is not second.result()
    assert not source.asked.acquire(blocking=False)  # it was asked once for both


def test_a_branch_is_closed_without_waiting_for_one_that_pulls(start: Any) -> None:
    source = Gated(1, 2)
    one, other = branches(source, 2)
    pulling = start(lambda: next(one))
    assert source.asked.acquire(timeout=PATIENCE)
    other.close()
    assert not pulling.done()
    source.allowed.release()
    assert pulling.result(PATIENCE) == 1
    one.close()
    assert source.closed == 1


def test_threads_that_pull_as_they_like_all_get_everything(start: Any) -> None:
    script = [Oops(at) if at % 7 == 0 else at for at in range(3000)]
    pulled = branches(scripted(*script), 4)
    together = threading.Barrier(4)

    def pull(branch: Any) -> list[Any]:
        together.wait(PATIENCE)
        return drain(branch)

    tasks = [start(pull, branch) for branch in pulled]
    for task in tasks:
        assert task.result(PATIENCE) == script


def test_the_traceback_of_an_error_says_where_it_was_raised() -> None:
    one, other = branches(scripted(Oops(1)), 2)
    for branch in (one, other):
        with pytest.raises(Oops) as caught:
            next(branch)
        assert caught.traceback[-1].name == "__next__"
        assert "operator_context" in str(caught.traceback[-1].path)
