"""Verdicts on workloads of known truth, by what was measured of them: no clock, and no workers.

`workloads.jsonl` has a line for each: its name, and the figures of one run. Of what is measured again
and again, such as latencies, it has quantiles. A busy machine is one with more processes that compute
than cores; so are a few others, as far as other programs happened to run beside them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from hybridloader.observe.figures import (
    CoreUse,
    CoroutineUse,
    Figures,
    LoopRecord,
    Recording,
    StageRecord,
    Wait,
)
from hybridloader.observe.verdict import judge

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
WAITS = truth("stage", "waits", "num_workers=", "threads_per_worker=", never="computes")
WAITS_ALONE = truth("stage", "waits", "num_workers=", never="threads_per_worker")
AWAITS = truth("stage", "waits", "concurrency=", never="num_workers threads_per_worker")
BLOCKS = truth("stage", "blocks-loop", "kept the event loop", "await that", never=OPTIONS)
COMPUTES_BETWEEN = truth(
    "stage", "blocks-loop", "kept the event loop", "If it computes", never=OPTIONS
)
NO_CORE = truth("cores", "computes", OTHERS, never=OPTIONS)
OPENS = truth("start", None, "for their first tasks", "persistent_workers=True", never="fast")
COLLATES = truth("stage", "waits", "collate_fn took", "num_workers=", never="threads_per_worker")
NO_PARTS = truth("stage", "waits", "next to nothing", "Split the data", never=OPTIONS)
LOOP = truth("loop", None, "Loading is fast enough", "training step", never=OPTIONS)
ONE_THREAD = truth("stage", None, "runs on one thread", "backend", never=OPTIONS)

TRUTHS = {
    "waits: 2 threads": WAITS,
    "waits: 2 forked": WAITS,
    "waits: inline": truth("stage", "waits", "num_workers=", "backend='threads'"),
    "waits: busy machine, threads": WAITS,
    "waits: busy machine, inline": truth("stage", "waits", "num_workers=", "waiting for a core"),
    "python: 2 threads": truth("stage", "holds-gil", "Use processes", never="num_workers="),
    "python: 2 threads, busy machine": truth("cores", "holds-gil", OTHERS, never=OPTIONS),
    "python: inline": truth("stage", "computes", "and a backend", never="'threads'"),
    "python: inline, busy machine": NO_CORE,
    "python: inline, very busy machine": NO_CORE,
    "python: inline, busy machine, step": NO_CORE,
    "python: inline, busy machine, short": NO_CORE,
    "python: 1 forked": truth("stage", "computes", "num_workers=2", never="threads"),
    "python: 2 forked": truth("cores", "computes", "This program needs more than the 2 cores"),
    "python: 2 forked, busy machine": NO_CORE,
    "python: 2 forked, very busy machine": NO_CORE,
    "python: 2 forked, busy machine, short": NO_CORE,
    "native: 2 threads": NO_CORE,
    "collate waits": COLLATES,
    "collate waits, forked": COLLATES,
    "collate python": truth("cores", "holds-gil", OTHERS, never=OPTIONS),
    "collate python, forked": NO_CORE,
    "slow step": LOOP,
    "slow step, inline": truth(*LOOP[:2], "training step", never="away"),
    "steady start": WAITS,
    "objects over fork": truth("stage", "transport", "Return tensors", "threads"),
    "tensors of 80 MB over fork": truth("stage", "transport", "already", "smaller", never="Return"),
    "tensors of 80 MB made, fork": truth("stage", "transport", "already", never="Return"),
    "lazy open: forked": OPENS,
    "lazy open: threads": OPENS,
    "lazy open: threads, 8": OPENS,
    "lazy open: import in python, forked": OPENS,
    "lazy open: one after the other": OPENS,
    "lazy open: inline": truth("start", None, "first tasks", "Keep it", never="persistent"),
    "lazy open: pipeline": truth("start", None, "first tasks", "epochs()", never="persistent"),
    "late init_fn": truth("start", None, "until the first worker began", "persistent_workers=True"),
    "pipe: source slow at first": truth("start", None, "Loading was fast enough after"),
    "iterable waits: threads": WAITS_ALONE,
    "iterable waits: forked": WAITS_ALONE,
    "iterable waits: inline": truth("stage", "waits", "each of which reads a part"),
    "iterable, one shard: threads": NO_PARTS,
    "iterable, one shard: forked": NO_PARTS,
    "iterable, one shard: forked, python": NO_CORE,
    "pipe: readers, one shard": NO_PARTS._replace(cause="source"),
    "pipe: readers wait": WAITS_ALONE._replace(cause="source"),
    "samples alone, batch_size=None": WAITS_ALONE,
    "slow sampler": truth("source", None, "Make it cheaper", never=OPTIONS),
    "pipe: one slow step waits": WAITS,
    "pipe: python on threads": truth("cores", "holds-gil", OTHERS, never=OPTIONS),
    "pipe: python inline, busy machine": ONE_THREAD,
    "pipe: waits inline": ONE_THREAD,
    "pipe: map + map(async): threads": AWAITS,
    "async overhead alone: inline": ONE_THREAD,
    **{
        f"async {what}: {where}, concurrency={concurrency}": said
        for what, said in (("sleep", AWAITS), ("blocks", BLOCKS), ("mixed", BLOCKS))
        for where in ("inline", "threads", "fork")
        for concurrency in (None, 8)
    },
    "async computes: inline, concurrency=None": COMPUTES_BETWEEN,
    "async computes: inline, concurrency=8": COMPUTES_BETWEEN,
    "async computes: threads, concurrency=None": truth("cores", "holds-gil", OTHERS),
    "async computes: threads, concurrency=8": truth(
        "stage",
        "holds-gil",
        "kept the event loop",
        "Use processes",
        never="num_workers= concurrency=",
    ),
    "async computes: fork, concurrency=None": truth("cores", "computes", never=OPTIONS),
    "async computes: fork, concurrency=8": truth("cores", "computes", never=OPTIONS),
}


def figures_of(measured: dict[str, Any]) -> Figures:
    stages = []
    for fields in measured["stages"]:
        made = {
            name: tuple(value) if isinstance(value, list) else value
            for name, value in fields.items()
        }
        if "firsts" in made:
            made["firsts"] = tuple(Wait(*pair) for pair in made["firsts"])
        if "coroutines" in made:
            made["coroutines"] = CoroutineUse(*made["coroutines"])
        stages.append(StageRecord(**made))
    loop = LoopRecord(0.0, **measured["loop"])
    recording = Recording(tuple(stages), loop, CoreUse(**measured["cores"]))
    names = tuple(stage.name for stage in stages)
    return Figures(recording=recording, names=names, **measured["figures"])


@pytest.mark.parametrize("name", TRUTHS)
def test_the_verdict_on_what_was_measured_is_the_truth(name: str) -> None:
    expected, verdict = TRUTHS[name], judge(figures_of(WORKLOADS[name]))
    assert (verdict.cause, verdict.kind) == (expected.cause, expected.kind), str(verdict)
    assert all(words in str(verdict) for words in expected.words), str(verdict)
    assert not any(words in verdict.advice for words in expected.never), str(verdict)


def test_nothing_was_recorded_for_nothing() -> None:
    assert set(WORKLOADS) == set(TRUTHS)
