"""Attribution of waits to stages: pure, so checked for any spans."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridloader.observe.figures import (
    LoopRecord,
    Span,
    Wait,
    between,
    length,
    percentile,
    stall_by_stage,
    within,
)

TIMES = st.floats(0, 100, allow_nan=False)
SPANS = st.lists(
    st.builds(lambda at, took, part: Span(at, at + took, part), TIMES, TIMES, st.floats(0, 1)),
    max_size=8,
)


@st.composite
def waits_in_turn(draw: st.DrawFn) -> list[Wait]:
    at, found = 0.0, []
    for pause, took in draw(st.lists(st.tuples(st.floats(0, 10), st.floats(0, 10)), max_size=8)):
        found.append(Wait(at + pause, at + pause + took))
        at = found[-1].ended
    return found


@given(st.lists(SPANS, max_size=4), waits_in_turn())
def test_what_is_attributed_is_never_more_than_the_stall(
    stages: list[list[Span]], waits: list[Wait]
) -> None:
    found = stall_by_stage(stages, waits)
    assert all(seconds >= 0 for seconds in found)
    assert math.fsum(found) <= length(waits) * (1 + 1e-9) + 1e-9
    for spans, seconds in zip(stages, found, strict=True):
        covered = sum(
            length(within(waits, span.began, span.ended)) for span in spans if span.part > 0
        )
        assert seconds <= covered * (1 + 1e-9) + 1e-9, "of a stage only what it was busy in"


@given(SPANS, waits_in_turn())
def test_a_stage_alone_has_all_in_which_it_was_busy(spans: list[Span], waits: list[Wait]) -> None:
    spans = [Span(span.began, span.ended, 1.0) for span in spans]
    (found,) = stall_by_stage([spans], waits)
    idle = between(0.0, 1000.0, [span[:2] for span in spans])
    uncovered = sum(length(within(waits, span.began, span.ended)) for span in idle)
    assert found == pytest.approx(length(waits) - uncovered, abs=1e-6)


def test_stages_that_are_busy_together_share_by_their_load() -> None:
    found = stall_by_stage([[Span(0, 10, 1.0)], [Span(0, 4, 0.25)], [Span(20, 30)]], [Wait(2, 12)])
    assert found == pytest.approx([2 * 0.8 + 6, 2 * 0.2, 0])


@given(st.lists(st.tuples(TIMES, TIMES), max_size=8))
def test_what_is_between_pauses_is_the_rest(pauses: list[tuple[float, float]]) -> None:
    pauses = [(min(pair), max(pair)) for pair in pauses]
    spans = between(10, 90, pauses)
    assert all(10 <= span.began < span.ended <= 90 for span in spans)
    assert all(one.ended <= two.began for one, two in itertools.pairwise(spans))
    (paused,) = stall_by_stage([[Span(*pause) for pause in pauses]], [Wait(10, 90)])
    assert sum(span.ended - span.began for span in spans) == pytest.approx(80 - paused, abs=1e-6)


def test_percentiles_count_short_calls_too() -> None:
    waits = tuple(Wait(at, at + 1 + at / 100) for at in range(0, 100, 10))
    loop = LoopRecord(0, 100, 100, 12.0, waits, brief=90, brief_seconds=0.0009)
    assert percentile(loop, waits, 0.5) == pytest.approx(1e-5)
    assert percentile(loop, waits, 0.91) == pytest.approx(1.0)
    assert percentile(loop, waits, 0.99) == pytest.approx(1.8)
    assert percentile(loop, (), 0.99) == pytest.approx(1e-5)
    assert percentile(LoopRecord(0, 1), (), 0.5) == 0
