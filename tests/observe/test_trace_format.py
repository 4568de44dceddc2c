"""Chrome's form of a trace: what nests in seconds nests in whole nanoseconds."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.traces import ReadTrace

from hybridloader.observe.tracing import Event, chrome_events

TRACK = (7, "main")


@given(
    st.floats(0, 1e6),
    st.lists(st.tuples(st.integers(0, 3), st.floats(0, 1e-3)), min_size=2, max_size=60),
)
def test_slices_stay_within_one_another(
    tmp_path_factory: pytest.TempPathFactory, clock: float, steps: list[tuple[int, float]]
) -> None:
    """Looks at a clock, each of which ends some slices and begins another."""
    events: list[Event] = []
    begun: list[float] = []
    for ends, seconds in steps:
        clock += seconds
        for _ in range(min(ends, len(begun))):
            events.append(Event("X", TRACK, f"{len(begun)}", begun.pop(), clock, {}))
        begun.append(clock)
    while begun:
        events.append(Event("X", TRACK, f"{len(begun)}", begun.pop(), clock, {}))
    made = chrome_events(events, {TRACK: "MainThread"}, {7: "your program"})
    path = tmp_path_factory.mktemp("trace") / "run.json"
    path.write_text(json.dumps({"traceEvents": made}))
    assert len(ReadTrace(path).slices) == len(events), "and it has looked at how they nest"
