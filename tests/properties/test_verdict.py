"""Verdicts on scripted recordings of known truth, and on workloads by their recorded figures.

`workloads.jsonl` has a line for each: its name, and the figures of one run. Of what is measured again
and again, such as latencies, it has quantiles. A busy machine is one with more processes that compute
than cores; so are a few others, as far as other programs happened to run beside them.
"""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.recordings import (
    IDLE,
    LOOP,
    CoreUse,
    CoroutineUse,
    Figures,
    LoopRecord,
    Recording,
    Span,
    StageRecord,
    StoreUse,
    Wait,
    judge,
    length,
    percentile,
    recording,
    slept,
    stage,
    stall_by_stage,
    stats_of,
    within,
)

from hybridloader.observe import Stats

FULL_OF_OTHERS = CoreUse(2.0, 2.0, 0.6)


def from_store(waited: float = 19.0, **counts: Any) -> Recording:
    """A stage whose 2 workers waited for a store for most of 20 s."""
    made = recording(replace(slept(stage()), reads=True))
    return replace(made, stores=(StoreUse("s3://photos", waited=waited, **counts),))


WAITS, COMPUTES, HOLDS = (("stage", "map(f)", kind) for kind in ("waits", "computes", "holds-gil"))
STORE, LOOP_ALONE = ("store", "map(f)", "waits"), ("loop", None, None)

TRUTHS: dict[str, tuple[Recording, tuple[str | None, ...], str]] = {
    "sleep": (recording(slept(stage())), WAITS, "num_workers=4"),
    "sleep, in half of the time": (
        recording(slept(stage(load=0.5))),
        WAITS,
        "num_workers=3 (2 now)",
    ),
    "spin without the GIL": (recording(stage()), COMPUTES, "num_workers=4"),
    "spin with the GIL": (
        recording(replace(stage(), cpu=10.0, gil_waits=(5e-3, 4.8e-3, 5.2e-3))),
        HOLDS,
        "shared-memory",
    ),
    "sleep beside threads that spin with the GIL": (
        recording(replace(slept(stage()), gil_waits=(5e-3,) * 4)),
        WAITS,
        "num_workers=4",
    ),
    "processes that spin, of one rank of four": (
        recording(
            stage(backend="fork", in_process=False),
            cores=CoreUse(8.0, 1.0, 0.9, share=2.0),
        ),
        COMPUTES,
        "a worker for each core",
    ),
    "samples from a store, one by one": (
        from_store(alone=400, requests=400, seconds=19.0),
        STORE,
        "BlockShuffleSampler",
    ),
    "files from a store": (
        from_store(requests=400, seconds=19.0),
        STORE,
        "hybridloader write-shards",
    ),
    "blocks from a store": (
        from_store(requests=48, seconds=100.0, retries=3),
        STORE,
        "keep them for the next epoch by cache_dir=",
    ),
    "blocks from a store, with a cache": (
        from_store(requests=48, seconds=100.0, misses=48),
        STORE,
        "The next epoch finds in cache_dir=",
    ),
    "blocks from a store that is not waited for": (
        from_store(requests=48, seconds=100.0, waited=2.0),
        WAITS,
        "num_workers",
    ),
    "a quota that has run out": (
        recording(slept(stage()), cores=CoreUse(1.5, 1.0, 1.0, throttled=0.5)),
        ("cores", "map(f)", "waits"),
        "1.5 cores",
    ),
    "sleep, a part of it for a core": (
        recording(replace(slept(stage()), wait_for_core=8.0), cores=FULL_OF_OTHERS),
        WAITS,
        "num_workers",
    ),
    "sleep, most of it for a core": (
        recording(replace(slept(stage()), wait_for_core=12.0), cores=FULL_OF_OTHERS),
        ("cores", "map(f)", "waits"),
        "or take more workers",
    ),
    "spin on busy cores of a system that does not count waits for them": (
        recording(replace(stage(), wait_for_core=None, cpu=5.0), cores=CoreUse(2.0)),
        ("stage", "map(f)", None),
        "If other programs keep the cores busy, stop them",
    ),
    "sleep on cores that are free, on such a system": (
        recording(replace(slept(stage()), wait_for_core=None)),
        WAITS,
        "num_workers",
    ),
    "threads with the GIL on busy cores": (
        recording(
            stage(cpu=1.2, wait_for_core=16.0, gil_waits=(5e-3,) * 4),
            cores=FULL_OF_OTHERS,
        ),
        ("cores", "map(f)", "holds-gil"),
        "Its threads also hold the GIL, so processes would do more",
    ),
    "processes that sleep": (
        recording(slept(stage(backend="fork", in_process=False))),
        WAITS,
        "try backend='threads' with num_workers=4 (2 processes now)",
    ),
    "nothing known of CPU time": (
        recording(stage(cpu=None, wait_for_core=None), cores=None),
        ("stage", "map(f)", None),
        "num_workers=4",
    ),
    "a stall too short to be worth it": (
        recording(stage(), wait=0.003, step=0.097),
        LOOP_ALONE,
        "training step",
    ),
    "nobody was busy": (recording(stage(load=0.0)), ("unknown", None, None), "Compare the times"),
    "nobody was busy, and no core free": (
        recording(stage(load=0.0), cores=FULL_OF_OTHERS),
        ("cores", None, None),
        "Other programs",
    ),
    "nobody was busy for a little": (
        recording(stage(load=0.0), wait=0.01, step=0.09),
        LOOP_ALONE,
        "fast enough",
    ),
}


@pytest.mark.parametrize("truth", TRUTHS)
def test_the_verdict_names_what_is_known_to_be_so(truth: str) -> None:
    made, expected, advice = TRUTHS[truth]
    verdict = stats_of(made).verdict
    assert (verdict.cause, verdict.stage, verdict.kind) == expected, str(verdict)
    assert advice in verdict.advice, str(verdict)
    assert any(letter.isdigit() for letter in verdict.evidence), "a figure is behind it"


@pytest.mark.parametrize("wait", [0.45, 0.55])
def test_the_loop_is_the_bottleneck_below_a_share_of_waits(wait: float) -> None:
    verdict = stats_of(recording(stage(), wait=wait / 100, step=(10 - wait) / 100)).verdict
    assert verdict.cause == ("loop" if wait < 0.5 else "stage")


SECONDS = (
    *("busy", "starved", "blocked", "other", "cpu", "wait_for_core", "packing", "sending"),
    *("since", "first", "full"),
)
"""Fields of a stage's record that are times."""


def scaled(made: Recording, by: float) -> Recording:
    """The same run on a machine, and with a switch interval, that is so many times as slow."""

    def times(value: float | None) -> float | None:
        return None if value is None else by * value

    stages = tuple(
        replace(
            one,
            **{name: times(getattr(one, name)) for name in SECONDS},
            spans=tuple(replace_times(span, by) for span in one.spans),
            gil_waits=tuple(by * waited for waited in one.gil_waits),
        )
        for one in made.stages
    )
    loop = replace(
        made.loop,
        **{name: by * getattr(made.loop, name) for name in ("began", "ended", "waited")},
        brief_seconds=by * made.loop.brief_seconds,
        waits=tuple(replace_times(wait, by) for wait in made.loop.waits),
    )
    stores = tuple(
        replace(one, waited=by * one.waited, seconds=by * one.seconds) for one in made.stores
    )
    interval = by * made.switch_interval
    return replace(made, stages=stages, loop=loop, stores=stores, switch_interval=interval)


def replace_times(span: Any, by: float) -> Any:
    return span._replace(began=by * span.began, ended=by * span.ended)


@pytest.mark.parametrize("by", [0.1, 10.0])
@pytest.mark.parametrize("truth", TRUTHS)
def test_a_slower_machine_gets_the_same_verdict(truth: str, by: float) -> None:
    """Thresholds are shares, and multiples of periods of the interpreter, not seconds of one machine."""
    made = TRUTHS[truth][0]
    found, other = stats_of(made).verdict, stats_of(scaled(made, by)).verdict
    assert (found.cause, found.stage, found.kind) == (other.cause, other.stage, other.kind)
    assert found.advice == other.advice


@pytest.mark.parametrize("name", TRUTHS)
def test_without_a_gil_nobody_holds_it(name: str) -> None:
    made, (cause, _, kind), _ = TRUTHS[name]
    free = stats_of(replace(made, switch_interval=math.inf)).verdict
    assert free.kind != "holds-gil"
    if kind != "holds-gil":
        assert (free.cause, free.kind) == (cause, kind)


@pytest.mark.parametrize("full", [8.0, None])
def test_workers_that_start_late_are_the_start(full: float | None) -> None:
    late = stage(first=6.0, full=full, spans=(Span(6.0, 10.0, 1.0),))
    loop = LoopRecord(0.0, 10.0, 40, 6.6, (Wait(0.0, 6.5), Wait(8.5, 8.6)), brief=38)
    for by in (0.1, 1.0, 10.0):
        verdict = stats_of(scaled(Recording((late,), loop, IDLE), by)).verdict
        assert (verdict.cause, verdict.stage, verdict.kind) == ("start", None, None), str(verdict)
        assert "persistent_workers" in verdict.advice


@pytest.mark.parametrize("waits", [(Wait(0.0, 0.5),), (Wait(0.0, 3.0), Wait(4.0, 8.0))])
def test_little_waiting_before_the_prefetch_was_full_is_not_the_start(waits: Any) -> None:
    waited = sum(wait.ended - wait.began for wait in waits)
    loop = LoopRecord(0.0, 10.0, 40, waited, waits, brief=40 - len(waits))
    verdict = stats_of(Recording((stage(full=3.0),), loop, IDLE)).verdict
    assert verdict.cause != "start", str(verdict)


@pytest.mark.parametrize(
    "loop",
    [
        LoopRecord(0.0, 0.0),
        LoopRecord(0.0, 5.0),
        LoopRecord(0.0, 0.3, 3, 0.02, (Wait(0, 0.02),)),
        LoopRecord(0.0, 0.04, 40, 0.02, (Wait(0.01, 0.03),), brief=39),
    ],
)
@pytest.mark.parametrize("full", [None, 0.0])
def test_what_is_too_short_is_unknown(loop: LoopRecord, full: float | None) -> None:
    for stages in ((), (stage(full=full),), (stage(full=full, first=None, spans=()),)):
        stats = stats_of(Recording(stages, loop, IDLE))
        assert stats.verdict.cause == "unknown", stats
        assert stats.to_dict()
        assert str(stats)


@st.composite
def recordings(draw: st.DrawFn) -> Recording:
    stages = []
    for _ in range(draw(st.integers(0, 3))):
        spans = []
        at = draw(st.floats(0, 5))
        for took, pause in draw(st.lists(st.tuples(st.floats(0, 2), st.floats(0, 2)), max_size=5)):
            spans.append(Span(at, at + took, draw(st.floats(0, 1))))
            at += took + pause
        full = draw(st.none() | st.floats(0, 10))
        known: dict[str, Any] = {
            "spans": tuple(spans),
            "full": full,
            "name": draw(st.sampled_from("ab")),
        }
        known["load"] = draw(st.floats(0, 1))
        known["since"] = draw(st.none() | st.floats(0, 10))
        known["cpu"], known["wait_for_core"] = draw(st.tuples(*[st.none() | st.floats(0, 30)] * 2))
        stages.append(stage(**known))
    waits, at = [], 0.0
    for pause, took in draw(st.lists(st.tuples(st.floats(0, 3), st.floats(0, 3)), max_size=6)):
        waits.append(Wait(at + pause, at + pause + took))
        at = waits[-1].ended
    brief = draw(st.integers(0, 100))
    seconds = sum(wait.ended - wait.began for wait in waits) + brief * 1e-5
    ended = at + brief * 1e-4 + draw(st.floats(0, 3))
    loop = LoopRecord(
        0.0,
        ended,
        brief + len(waits),
        seconds,
        tuple(waits),
        brief,
        brief * 1e-5,
        draw(st.integers(0, 3)),
    )
    return Recording(tuple(stages), loop, draw(st.none() | st.just(FULL_OF_OTHERS)))


@given(recordings())
def test_figures_of_any_recording_add_up(made: Recording) -> None:
    stats = stats_of(made)
    stall = stats.stall
    assert sum(stall.by_stage.values()) == pytest.approx(stall.seconds, abs=1e-6) or not made.stages
    assert sum(row.stall for row in stats.stages) <= stall.seconds + 1e-6
    assert 0 <= stall.share <= 1
    assert 0 <= stall.p50 <= stall.p99
    assert stall.seconds + stall.warmup == pytest.approx(made.loop.waited, abs=1e-6)
    assert stats.verdict.cause in ("loop", "stage", "cores", "source", "start", "unknown")
    if made.loop.waited > stats.seconds / 2:
        assert stats.verdict.cause != "loop", "it waited for most of the time"
    names = [row.name for row in stats.stages]
    assert len(set(names)) == len(names)
    assert names[-1] == LOOP
    if stats.verdict.stage is not None:
        assert stall.by_stage[stats.verdict.stage] == max(row.stall for row in stats.stages)
    assert isinstance(stats, Stats)


HOLDING = stage(cpu=9.0, gil_waits=(5e-3, 6e-3, 5e-3))


@pytest.mark.parametrize(
    ("record", "own", "held"),
    [
        (HOLDING, 1.1, True),
        (HOLDING, 1.9, False),
        (replace(HOLDING, gil_waits=(1e-5,) * 9), 1.1, False),
        (replace(HOLDING, gil_waits=(5e-3,) * 2), 1.1, False),
        (replace(HOLDING, cpu=3.0), 1.1, False),
        (replace(HOLDING, cpu=None), 1.1, False),
        (replace(HOLDING, gil_waits=()), 1.1, False),
    ],
    ids=["so", "several cores", "GIL free", "few looks", "little", "unknown", "no looks"],
)
def test_a_loop_whose_step_waits_for_the_gil_is_reported(
    record: StageRecord, own: float, held: bool
) -> None:
    verdict = stats_of(recording(record, wait=0.0, cores=CoreUse(2.0, 1.2, own))).verdict
    if held:
        assert (verdict.cause, verdict.stage, verdict.kind) == ("stage", "map(f)", "holds-gil")
        assert "in 3 of 3 samples" in verdict.evidence
        assert "processes" in verdict.advice
    else:
        assert verdict.cause == "loop"


# -- attribution of waits to stages, for any spans ---------------------------------------------------

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


def test_stages_that_are_busy_together_share_by_their_load() -> None:
    found = stall_by_stage([[Span(0, 10, 1.0)], [Span(0, 4, 0.25)], [Span(20, 30)]], [Wait(2, 12)])
    assert found == pytest.approx([2 * 0.8 + 6, 2 * 0.2, 0])


def test_percentiles_count_short_calls_too() -> None:
    waits = tuple(Wait(at, at + 1 + at / 100) for at in range(0, 100, 10))
    loop = LoopRecord(0, 100, 100, 12.0, waits, brief=90, brief_seconds=0.0009)
    assert percentile(loop, waits, 0.5) == pytest.approx(1e-5)
    assert percentile(loop, waits, 0.91) == pytest.approx(1.0)
    assert percentile(loop, waits, 0.99) == pytest.approx(1.8)
    assert percentile(loop, (), 0.99) == pytest.approx(1e-5)
    assert percentile(LoopRecord(0, 1), (), 0.5) == 0


# -- workloads, by the figures that were recorded of them ---------------------------------------------

WORKLOADS: dict[str, Any] = dict(
    json.loads(line)
    for line in (Path(__file__).parent / "workloads.jsonl").read_text().splitlines()
)


class Truth(NamedTuple):
    """What is to be said: cause, kind, words of evidence and advice, and words that would mislead."""

    cause: str
    kind: str | None
    words: tuple[str, ...] = ()
    never: tuple[str, ...] = ()


def truth(cause: str, kind: str | None, *words: str, never: str = "") -> Truth:
    return Truth(cause, kind, words, tuple(never.split()))


OTHERS = "Other programs kept"
OPTIONS = "num_workers= threads_per_worker= concurrency= backend="
SLEEPS = truth("stage", "waits", "num_workers=", "threads_per_worker=", never="computes")
SLEEPS_ALONE = truth("stage", "waits", "num_workers=", never="threads_per_worker")
AWAITS = truth("stage", "waits", "concurrency=", never="num_workers threads_per_worker")
BLOCKS = truth("stage", "blocks-loop", "kept the event loop", "await that", never=OPTIONS)
COMPUTES_BETWEEN = truth(
    "stage", "blocks-loop", "kept the event loop", "If it computes", never=OPTIONS
)
NO_CORE = truth("cores", "computes", OTHERS, never=OPTIONS)
OPENS = truth("start", None, "persistent_workers=True")
COLLATES = truth("stage", "waits", "collate_fn took", "num_workers=", never="threads_per_worker")
NO_PARTS = truth("stage", "waits", "next to nothing", "Split the data", never=OPTIONS)
LOOP_IS = truth("loop", None, "Loading is fast enough", "training step", never=OPTIONS)
ONE_THREAD = truth("stage", None, "runs on one thread", "backend", never=OPTIONS)

MEASURED = {
    "waits: 2 threads": SLEEPS,
    "waits: inline": truth("stage", "waits", "num_workers=", "backend='threads'"),
    "waits: busy machine, threads": SLEEPS,
    "python: 2 threads": truth("stage", "holds-gil", "Use processes", never="num_workers="),
    "python: 2 threads, busy machine": truth("cores", "holds-gil", OTHERS, never=OPTIONS),
    "python: inline": truth("stage", "computes", "and a backend", never="'threads'"),
    "python: inline, busy machine": NO_CORE,
    "python: 1 forked": truth("stage", "computes", "num_workers=2", never="threads"),
    "python: 2 forked": truth("cores", "computes", "This program needs more than the 2 cores"),
    "python: 2 forked, busy machine": NO_CORE,
    "native: 2 threads": NO_CORE,
    "collate waits": COLLATES,
    "collate python": truth("cores", "holds-gil", OTHERS, never=OPTIONS),
    "slow step": LOOP_IS,
    "steady start": SLEEPS,
    "objects over fork": truth("stage", "transport", "Return tensors", "threads"),
    "tensors of 80 MB over fork": truth("stage", "transport", "already", "smaller", never="Return"),
    "lazy open: forked": OPENS,
    "lazy open: import in python, forked": OPENS,
    "lazy open: inline": truth("start", None, "Keep what it opens", never="persistent"),
    "lazy open: pipeline": truth("start", None, "epochs()", never="persistent"),
    "late init_fn": truth("start", None, "before the prefetch", "persistent_workers=True"),
    "pipe: source slow at first": truth("start", None, "before the prefetch was full"),
    "iterable waits: threads": SLEEPS_ALONE,
    "iterable waits: inline": truth("stage", "waits", "each of which reads a part"),
    "iterable, one shard: threads": NO_PARTS,
    "pipe: readers, one shard": NO_PARTS._replace(cause="source"),
    "pipe: readers wait": SLEEPS_ALONE._replace(cause="source"),
    "samples alone, batch_size=None": SLEEPS_ALONE,
    "slow sampler": truth("source", None, "Make it cheaper", never=OPTIONS),
    "pipe: one slow step waits": SLEEPS,
    "pipe: python on threads": truth("cores", "holds-gil", OTHERS, never=OPTIONS),
    "pipe: python inline, busy machine": ONE_THREAD,
    "pipe: waits inline": ONE_THREAD,
    "pipe: map + map(async): threads": AWAITS,
    "async overhead alone: inline": ONE_THREAD,
    **{
        f"async {what}: {where}, concurrency=8": said
        for what, said in (("sleep", AWAITS), ("blocks", BLOCKS), ("mixed", BLOCKS))
        for where in ("inline", "threads", "fork")
    },
    "async computes: inline, concurrency=8": COMPUTES_BETWEEN,
    "async computes: threads, concurrency=8": truth(
        "stage",
        "holds-gil",
        "kept the event loop",
        "Use processes",
        never="num_workers= concurrency=",
    ),
    "async computes: fork, concurrency=8": truth("cores", "computes", never=OPTIONS),
}


def figures_of(measured: dict[str, Any]) -> Figures:
    stages = []
    for fields in measured["stages"]:
        made = {
            name: tuple(value) if isinstance(value, list) else value
            for name, value in fields.items()
        }
        if "coroutines" in made:
            made["coroutines"] = CoroutineUse(*made["coroutines"])
        stages.append(StageRecord(**made))
    loop = LoopRecord(0.0, **measured["loop"])
    recording = Recording(tuple(stages), loop, CoreUse(**measured["cores"]))
    names = tuple(stage.name for stage in stages)
    return Figures(recording=recording, names=names, **measured["figures"])


@pytest.mark.parametrize("name", MEASURED)
def test_the_verdict_on_what_was_measured_is_the_truth(name: str) -> None:
    expected, verdict = MEASURED[name], judge(figures_of(WORKLOADS[name]))
    assert (verdict.cause, verdict.kind) == (expected.cause, expected.kind), str(verdict)
    assert all(words in str(verdict) for words in expected.words), str(verdict)
    assert not any(words in verdict.advice for words in expected.never), str(verdict)


def test_nothing_was_recorded_for_nothing() -> None:
    assert set(WORKLOADS) == set(MEASURED)
