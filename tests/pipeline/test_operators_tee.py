"""Forks: every branch gets everything once, whoever pulls, from whatever thread."""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.scripts import Oops, Script, drain, no_deadline, scripted

from hybridloader import Pipeline
from hybridloader.errors import NotReady
from hybridloader.testing import Gate

errors = st.builds(Oops, st.integers(0, 99))
scripts = st.lists(st.one_of(st.integers(), st.none(), errors), max_size=10)


@no_deadline
@given(scripts, st.integers(1, 4), st.integers(1, 3))
def test_every_branch_gets_everything_however_unevenly_they_are_pulled(
    script: list[Any], count: int, block: int
) -> None:
    source = Script(*script)
    first, *others = Pipeline.from_iterable(lambda: source).tee(count)
    found = drain(first.interleave(*others, block_length=block).run())
    turns = [script[at : at + block] for at in range(0, len(script), block)]
    assert found == [step for turn in turns for _ in range(count) for step in turn]
    met = [step for step in found if isinstance(step, Oops)]
    assert len({id(error) for error in met}) == len(met)  # each raises one of its own
    assert source.pulled == len(script) + 1


def test_a_pipeline_that_cannot_be_opened_may_be_opened_again() -> None:
    tries: list[int] = []

    def broken() -> list[int]:
        tries.append(1)
        if len(tries) == 1:
            raise Oops("open")
        return [5]

    one, other = Pipeline.from_iterable(broken).tee()
    assert drain(one.concat(other).run()) == [Oops("open"), 5]
    with pytest.raises(StopIteration):
        next(Pipeline.from_iterable([]).tee(1)[0].run())


class Item:
    """An item that can be watched."""


def test_nothing_waits_for_a_branch_that_is_gone_and_the_source_is_closed_with_the_last() -> None:
    alive = weakref.WeakSet[Item]()

    class Made(Script):
        def __next__(self) -> Item:
            super().__next__()
            item = Item()
            alive.add(item)
            return item

    source = Made(*range(100))
    one, other = Pipeline.from_iterable(lambda: source).tee()
    run = other.take(1).concat(one.take(99)).run()
    next(run)
    assert source.closed == 0
    for _ in range(99):
        next(run)
        gc.collect()
        assert len(alive) <= 3
    assert next(run, None) is None
    assert source.closed == 1


def test_threads_that_pull_as_they_like_all_get_everything() -> None:
    script = [Oops(at) if at % 7 == 0 else at for at in range(2000)]
    branches = scripted(*script).tee(4)
    first, *others = (branch.prefetch(number) for number, branch in enumerate(branches, 1))
    found = drain(first.interleave(*others).run())
    assert found == [step for step in script for _ in range(4)]


def test_branches_pull_one_at_a_time() -> None:
    gate = Gate()

    class Gated(Script):
        inside = most = 0

        def __next__(self) -> Any:
            self.inside += 1
            self.most = max(self.most, self.inside)
            if self.pulled == 10:  # all branches are open by now
                gate.arrive()
            try:
                return super().__next__()
            finally:
                self.inside -= 1

    source = Gated(*range(50))
    branches = Pipeline.from_iterable(lambda: source).tee(4)
    first, *others = (branch.prefetch(1) for branch in branches)
    with first.zip(*others).run() as run:
        assert [next(run) for _ in range(9)] == [(number,) * 4 for number in range(9)]
        gate.await_arrivals()
        before = sys.getswitchinterval()
        sys.setswitchinterval(1e-5)  # so that the others come, and wait for it
        try:
            found = [*_polled(run, 100)]
        finally:
            sys.setswitchinterval(before)
        gate.open()
        assert [*found, *run] == [(number,) * 4 for number in range(9, 50)]
    assert source.most == 1


def _polled(run: Any, times: int) -> Iterator[Any]:
    for _ in range(times):
        with suppress(NotReady):
            yield run.next_nowait()


def test_the_traceback_of_an_error_says_where_it_was_raised() -> None:
    one, other = scripted(Oops(1)).tee()
    run = one.concat(other).run()
    for _ in range(2):
        with pytest.raises(Oops) as caught:
            next(run)
        assert caught.traceback[-1].name == "__next__"
        assert caught.traceback[-1].path.name == "scripts.py"
