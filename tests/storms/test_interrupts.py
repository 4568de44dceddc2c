"""Interrupts of a pipeline that runs: no item is lost silently, and no lock is waited for twice."""

from __future__ import annotations

import inspect
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import count, takewhile
from types import FrameType
from typing import Any

import pytest
from support.platforms import needs_fork

from hybridloader import DataLoader, Pipeline

OURS = ("hybridloader.engine", "hybridloader.running")


@contextmanager
def interrupted(at: int, calls: Iterator[int], *events: str) -> Iterator[None]:
    """Interrupt the block at the event of ours of that number, as `calls` counts them from 1."""

    def interrupt(frame: FrameType, event: str, argument: object) -> None:
        if frame.f_globals.get("__package__") not in OURS or event not in events:
            return
        if frame.f_code.co_flags & inspect.CO_GENERATOR:  # may be on its way to be collected
            return
        if next(calls) == at:
            sys.setprofile(None)
            raise KeyboardInterrupt

    sys.setprofile(interrupt)
    try:
        yield
    finally:
        sys.setprofile(None)


@pytest.mark.parametrize("relayed", [True, False])
def test_an_interrupt_at_any_point_of_the_loop_loses_no_item_silently(relayed: bool) -> None:
    """Python handles signals where a function begins, and where a built-in one has returned."""
    pipe = Pipeline.from_iterable(range(6))
    if relayed:
        pipe = pipe.prefetch(2)

    def run(at: int) -> bool:
        """Interrupt the loop at the call of that number; false if there are not as many."""
        it = pipe.run()
        values: list[int] = []
        calls = count(1)
        try:
            with interrupted(at, calls, "call", "c_return"):
                values.extend(it)
        except KeyboardInterrupt:
            if it.closed:
                values.extend(pipe.run(state=it.state_dict()))
            else:
                values.extend(it)
        finally:
            it.close()
        assert values == list(range(6)), f"interrupted at call {at}"
        return next(calls) > at

    assert sum(1 for _ in takewhile(run, count(1))) > 50


def test_a_close_that_was_interrupted_at_any_point_can_be_done_again() -> None:
    def close(at: int) -> bool:
        run = Pipeline.from_iterable(range(9)).map(abs, backend="threads", num_workers=1).run()
        next(run)
        calls = count(1)
        with suppress(KeyboardInterrupt), interrupted(at, calls, "call"):
            run.close()
        run.close()
        assert run.closed
        return next(calls) > at

    before = threading.active_count()
    assert sum(1 for _ in takewhile(close, count(1))) > 20
    assert threading.active_count() == before


@pytest.mark.parametrize("backend", [pytest.param("fork", marks=needs_fork), "threads"])
def test_a_second_interrupt_while_the_first_closes_the_workers_adds_no_traceback(
    backend: str,
) -> None:
    data: Any = range(10**6)
    batches: Any = iter(DataLoader(data, 4, num_workers=2, backend=backend))
    next(batches)
    crew = batches._stage._crew
    close = crew.close

    def waiting(timeout: float | None) -> None:
        raise KeyboardInterrupt("the first")

    def closing() -> None:
        crew.close = close
        raise KeyboardInterrupt("the second")

    crew.wait, crew.close = waiting, closing
    with pytest.raises(KeyboardInterrupt, match="the first") as caught:
        list(batches)
    assert crew.close is close
    assert caught.value.__context__ is None
    batches.close()
