"""Verdict on a recording: what holds the loop up, by what evidence, and what to change.

Pure functions. The rules, and why they are in this order, are in decision 30.
"""

from __future__ import annotations

from dataclasses import dataclass

from hybridloader.engine.meter import EVERY
from hybridloader.observe.advice import (
    LEAVE_THE_GIL,
    MOST,
    advice_on,
    for_cores,
    for_loop,
    for_start,
)
from hybridloader.observe.attribution import length, stall_by_stage, within
from hybridloader.observe.display import time
from hybridloader.observe.figures import Figures, slow_firsts, without_data
from hybridloader.observe.kinds import (
    FULL,
    HELD,
    HELD_AT,
    LOOKS,
    ONE_CORE,
    elapsed_of,
    kind_of,
    late_of,
)
from hybridloader.observe.recording import CoreUse, StageRecord

# Shares of a time that was measured in the same run, so that a machine that is ten times as slow gets
# the same verdict. What is in seconds is a multiple of a period of our own.

LEAST_CALLS = 5
LEAST_SECONDS = 5 * EVERY
"""Less than this, after the prefetch was full, tells nothing: a worker has told its measures five times
at most, and one late batch of four would be a quarter of the stall."""

STALL = 0.05
"""Share of the stall in the time below which the loop itself is what takes the time: if loading cost
nothing, the loop would be 1 / (1 - 0.05) times as fast, which is 5 %."""

LITTLE = 0.2
"""The same, if no stage was busy for most of it. To take a batch that is there costs time, too, in which
no stage is busy: of a step that takes as little as a few of these, it is that share."""

START = 0.2
"""Share of the time that is waited for the start, or before the prefetch was full, from which it
matters: it is the most that workers which are kept could win, 1 / (1 - 0.2) is 25 %."""

FOR_CORES = 0.25
"""Share of a stage's busy time that it waits for cores, from which these are too few: cores of its own
would make it 1 / (1 - 0.25) times as fast. Below it, the stage itself is most of what is to be won."""

BESIDE = 0.5
"""CPU seconds a second of threads, from which it matters to a loop's step whether they hold the GIL: it
would have to wait for half of the time."""


@dataclass(frozen=True)
class Verdict:
    """Answer to what holds the loop up.

    Attributes
    ----------
    cause
        ``"loop"``: your loop, loading is fast enough; ``"stage"``: the stage `stage`; ``"cores"``: too
        few cores for it; ``"source"``: the sampler or a source; ``"start"``: the time until workers
        have started, their first tasks included; ``"unknown"``: there is too little to tell.
    stage
        Name of the stage that most of the stall belongs to, or whose threads hold the GIL; None for
        ``"loop"``, ``"start"`` and ``"unknown"``.
    kind
        Kind of its work: ``"waits"`` (for a disk or a network), ``"computes"``, ``"holds-gil"`` (its
        threads keep each other and the loop from running), ``"transport"`` (packing, sending and
        opening results), ``"blocks-loop"`` (coroutines that keep their event loop from the others);
        None where it is not known.
    evidence
        Figure behind it, as a sentence.
    advice
        What to change, as a sentence.
    """

    cause: str
    stage: str | None
    kind: str | None
    evidence: str
    advice: str

    def __str__(self) -> str:
        return f"{self.evidence} {self.advice}"


def judge(figures: Figures) -> Verdict:
    """Return the verdict on a recording."""
    loop = figures.recording.loop
    whole = loop.ended - loop.began
    if not loop.items:
        return _plain(
            "unknown",
            "No batch has come yet.",
            "Ask again once the loop has run for a while.",
        )
    start = _of_start(figures, whole)
    if start is not None:
        return start
    if figures.full is None or figures.calls < LEAST_CALLS or figures.seconds < LEAST_SECONDS:
        return _plain(
            "unknown",
            f"Since the prefetch was full, {figures.calls} batches came, in {figures.seconds:.2f} s.",
            "That is too short to tell; take more batches.",
        )
    if figures.share < STALL:
        return _of_held_loop(figures) or _of_loop(figures, whole)
    if not figures.by_stage or max(figures.by_stage) <= figures.rest:
        return _of_none(figures, whole)
    number = max(range(len(figures.by_stage)), key=figures.by_stage.__getitem__)
    return _of_stage(figures, number)


def _plain(cause: str, evidence: str, advice: str) -> Verdict:
    return Verdict(cause, None, None, evidence, advice)


def _of_loop(figures: Figures, whole: float) -> Verdict:
    if figures.warmup >= START * whole and figures.warmup > figures.stall:
        return _of_beginning(figures, whole)
    return _plain(
        "loop",
        f"Your loop is the bottleneck: it waited for {figures.share:.1%} of the time, "
        f"{time(figures.p50)} for a batch at the median.",
        for_loop(figures),
    )


def _of_beginning(figures: Figures, whole: float) -> Verdict:
    """Judge a loop that waited before the prefetch was full, and hardly since."""
    loop, stages = figures.recording.loop, figures.recording.stages
    waits = within(loop.waits, loop.began, figures.full or loop.ended)
    shares = dict(
        zip(figures.names, stall_by_stage([stage.spans for stage in stages], waits), strict=True)
    )
    most = max(shares, key=shares.__getitem__, default=None)
    what = f", most of it for {most}" if most and shares[most] >= MOST * figures.warmup else ""
    return _plain(
        "start",
        f"Your loop waited {time(figures.warmup)} of {time(whole)} before the prefetch was full{what}, "
        f"and {time(figures.stall)} since.",
        "Loading was fast enough since, so a longer epoch waits for a smaller share of its time; make "
        "the first batches come sooner.",
    )


def _of_held_loop(figures: Figures) -> Verdict | None:
    """Judge a loop that waits for no batch, and whose step waits for the GIL that threads hold.

    All threads of the program compute no more than one would, loading is much of that, and a thread
    that lets go of the GIL has to wait for it.
    """
    cores = figures.recording.cores
    if cores is None or cores.own is None or cores.own > ONE_CORE[1]:
        return None
    for number, stage in enumerate(figures.recording.stages):
        waits, elapsed = stage.gil_waits, elapsed_of(stage)
        if len(waits) < LOOKS or not stage.cpu or elapsed <= 0:
            continue
        late = late_of(waits, HELD * figures.recording.switch_interval)
        rate = stage.cpu / elapsed
        if rate >= BESIDE and len(late) >= max(LOOKS, HELD_AT * len(waits)):
            name = figures.names[number]
            return Verdict(
                "stage",
                name,
                "holds-gil",
                f"The bottleneck is {name}, whose threads hold the GIL: they computed as much as "
                f"{rate:.1f} cores, the whole program {cores.own:.1f}, and at "
                f"{len(late)} of {len(waits)} looks a thread that had let go of the GIL waited "
                f"{time(late[len(late) // 2])} for it, at the median. So does your step; for batches "
                f"your loop waited for {figures.share:.1%} of the time.",
                LEAVE_THE_GIL,
            )
    return None


def _of_none(figures: Figures, whole: float) -> Verdict:
    """Judge a stall in most of which no stage was busy."""
    if figures.share < LITTLE:
        return _of_loop(figures, whole)
    waited = (
        f"Your loop waited for {figures.share:.0%} of the time, for most of that no stage was busy"
    )
    cores = figures.recording.cores
    if cores is not None and cores.busy is not None and cores.busy >= FULL * cores.cores:
        told = f"{waited}, and {cores.busy:.1f} of {cores.cores:g} cores were."
        return Verdict("cores", None, None, told, for_cores(cores, None))
    return _plain("unknown", f"{waited}.", "Look for what the times of the table have in common.")


def _of_start(figures: Figures, whole: float) -> Verdict | None:
    """Judge a loop that mostly waited until workers had started, and for slow first tasks of theirs."""
    recording, waited = figures.recording, figures.late + figures.opening
    rest = max(0.0, recording.loop.waited - waited)
    if waited < max(START * whole, LEAST_SECONDS) or waited <= rest:
        return None
    held = f"The bottleneck is the start of the workers: the loop waited {time(waited)} of {time(whole)}"
    if figures.late >= figures.opening:
        met = [stage for stage in recording.stages if stage.first is not None]
        first = min(met, key=lambda stage: stage.first or 0.0)
        why, advice = (
            f"until the first began with its work, {time(rest)} for all else",
            for_start(first, late=True),
        )
    else:
        slowest = max(recording.stages, key=lambda stage: length(slow_firsts(stage)))
        firsts = sorted(wait.ended - wait.began for wait in slow_firsts(slowest))
        why, advice = (
            f"for their first tasks, {time(rest)} for all else; these took "
            f"{time(firsts[len(firsts) // 2])}, others {time(slowest.later or 0.0)}, as if they opened "
            "or loaded something then",
            for_start(slowest, late=False),
        )
    return _plain("start", f"{held} {why}.", advice)


def _of_stage(figures: Figures, number: int) -> Verdict:
    stage, name = figures.recording.stages[number], figures.names[number]
    cores = figures.recording.cores
    part = figures.by_stage[number] / figures.stall
    held = (
        f"The bottleneck is {name}: your loop waited for {figures.share:.0%} of the time, "
        f"{part:.0%} of it for this stage"
    )
    kind, why = kind_of(stage, figures.recording.switch_interval, cores)
    if stage.source:
        held += ", which gives what the others work on"
    idle = without_data(stage)
    if idle:
        held += f"; {idle} of its {stage.workers} workers had next to nothing to read"
    if stage.source:
        advice = (
            "Make it cheaper, or do its work in a step that has workers: no worker more behind it helps."
            if stage.backend in ("caller", "thread")
            else advice_on(figures, stage, kind)
        )
        return Verdict("source", name, kind, f"{held}.", advice)
    short = _short_of_cores(stage, kind, cores)
    if short is not None and cores is not None:
        return Verdict("cores", name, kind, f"{held}; {short}.", for_cores(cores, kind))
    if stage.collating >= MOST * stage.busy > 0:
        held += f"; collate_fn took {stage.collating / stage.busy:.0%} of its busy time"
    told = f"{held}; {why}." if why else f"{held}."
    return Verdict("stage", name, kind, told, advice_on(figures, stage, kind))


def _short_of_cores(stage: StageRecord, kind: str | None, cores: CoreUse | None) -> str | None:
    """Return the figure that shows that a stage had too few cores; None if it had enough."""
    if cores is None or kind == "transport":
        return None
    if stage.wait_for_core is not None and stage.busy > 0:
        part = min(1.0, stage.wait_for_core / stage.busy)
        # Of workers that wait for a disk, more wait for a core at the same time, too.
        least = MOST if kind in ("waits", "blocks-loop") else FOR_CORES
        if part >= least:
            return f"its workers waited for a core for {part:.0%} of their busy time"
    if cores.throttled >= FOR_CORES:
        return (
            f"the quota of {cores.cores:g} cores had run out for {cores.throttled:.0%} of the time"
        )
    if kind == "computes" and cores.busy is not None and cores.busy >= FULL * cores.cores:
        return f"{cores.busy:.1f} of {cores.cores:g} cores were busy"
    return None
