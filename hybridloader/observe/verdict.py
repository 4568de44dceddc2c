"""Verdict on a recording: what holds the loop up, by what evidence, and what to change.

Pure functions. The rules, and why they are in this order, are in decision 30.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from hybridloader.engine.meter import EVERY
from hybridloader.observe.display import time
from hybridloader.observe.figures import Figures, load_of
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
"""Share of the time before the prefetch was full, from which it matters: it is the most that workers
which are kept could win, 1 / (1 - 0.2) is 25 %."""

FOR_CORES = 0.25
"""Share of a stage's busy time that it waits for cores, from which these are too few: cores of its own
would make it 1 / (1 - 0.25) times as fast. Below it, the stage itself is most of what is to be won."""

OTHERS = 0.25
"""Share of the cores that other programs keep busy, from which the advice is about them."""

FULL = 0.95
"""Share of the cores that are busy, from which no worker more helps a stage that computes. The kernel
counts ticks of 10 ms, and a core idles for a moment at each switch: all busy reads as 0.97 to 1."""

COMPUTES = 0.5
"""Share of CPU time in the busy time, from which a stage computes and does not wait: the larger part."""

MORE = 8
"""Multiple of the workers that is advised at most: the figures tell nothing of what is in the way then,
such as a disk or the loop's own thread."""

TURN = 0.5
"""Least part of their turns for which threads compute if they hold the GIL. They take turns then, and
the turns of all of them together last as long as they are busy, less their waits for a core."""

HELD = 0.5
"""Part of the interpreter's switch interval by which results of threads are late, if another holds the
GIL: whoever waits for it asks after one interval. It may be asked for already, so it is half on average.
What else makes a thread late (to wake it takes 0.1 ms) is no multiple of the interval."""

BESIDE = 0.5
"""CPU seconds a second of threads, from which it matters to a loop's step whether they hold the GIL: it
would have to wait for half of the time."""

AT_ONCE, LATE = 1.2, 0.1
"""Threads that are busy at once, and part of the switch interval by which their results are late, or
they wait for the GIL, if they take turns: more than one, and more than it takes to wake a thread."""

LOOKS = 3
"""Looks at the GIL from which they tell something."""

HELD_AT = 0.125
"""Share of the looks at which the GIL was held, from which it is in the way. Of two threads that compute
in Python and a loop it was 0.24 to 0.68, of threads that wait for a disk 0."""

ONE_CORE = (0.7, 1.2)
"""CPU seconds a second of several threads that take turns at the GIL: 1, less what they leave it for and
what passing it on costs, and more where a part of the work is done without it."""


@dataclass(frozen=True)
class Verdict:
    """Answer to what holds the loop up.

    Attributes
    ----------
    cause
        ``"loop"``: your loop, loading is fast enough; ``"stage"``: the stage `stage`; ``"cores"``: too
        few cores for it; ``"source"``: the sampler or a source; ``"start"``: the time until workers
        have started; ``"unknown"``: there is too little to tell.
    stage
        Name of the stage that most of the stall belongs to, or whose threads hold the GIL; None for
        ``"loop"``, ``"start"`` and ``"unknown"``.
    kind
        Kind of its work: ``"waits"`` (for a disk or a network), ``"computes"``, ``"holds-gil"`` (its
        threads keep each other and the loop from running), ``"transport"`` (packing, sending and
        opening results); None where it is not known.
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
    if (
        figures.warmup > figures.stall
        and figures.warmup >= START * whole
        and _started_late(figures)
    ):
        return _start(figures, whole)
    if figures.full is None or figures.calls < LEAST_CALLS or figures.seconds < LEAST_SECONDS:
        return _plain(
            "unknown",
            f"Since the prefetch was full, {figures.calls} batches came, in {figures.seconds:.2f} s.",
            "That is too short to tell; take more batches.",
        )
    if figures.share < STALL:
        return _of_held_loop(figures) or _of_loop(figures)
    if not figures.by_stage or max(figures.by_stage) <= figures.rest:
        return _of_none(figures)
    number = max(range(len(figures.by_stage)), key=figures.by_stage.__getitem__)
    return _of_stage(figures, number)


def _plain(cause: str, evidence: str, advice: str) -> Verdict:
    return Verdict(cause, None, None, evidence, advice)


def _of_loop(figures: Figures) -> Verdict:
    return _plain(
        "loop",
        f"Your loop is the bottleneck: it waited for {figures.share:.1%} of the time, "
        f"{time(figures.p50)} for a batch at the median.",
        "Loading is fast enough; make the training step faster, or take workers away.",
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
        waits, elapsed = stage.gil_waits, _elapsed(stage)
        if len(waits) < LOOKS or not stage.cpu or elapsed <= 0:
            continue
        late = _late(waits, HELD * figures.recording.switch_interval)
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
                _LEAVE_THE_GIL,
            )
    return None


def _of_none(figures: Figures) -> Verdict:
    """Judge a stall in most of which no stage was busy."""
    if figures.share < LITTLE:
        return _of_loop(figures)
    waited = (
        f"Your loop waited for {figures.share:.0%} of the time, for most of that no stage was busy"
    )
    cores = figures.recording.cores
    if cores is not None and cores.busy is not None and cores.busy >= FULL * cores.cores:
        told = f"{waited}, and {cores.busy:.1f} of {cores.cores:g} cores were."
        return Verdict("cores", None, None, told, _for_cores(cores))
    return _plain("unknown", f"{waited}.", "Look for what the times of the table have in common.")


def _started_late(figures: Figures) -> bool:
    """True if most of the stall before the prefetch was full was before the first task began."""
    began = figures.started
    if began is None:
        return True
    return began - figures.recording.loop.began >= figures.warmup / 2


def _start(figures: Figures, whole: float) -> Verdict:
    began = figures.started
    loop = figures.recording.loop
    took = (loop.ended if began is None else began) - loop.began
    return _plain(
        "start",
        f"The bottleneck is the start of the workers: the first began with its work after "
        f"{time(took)}, and the loop waited {time(figures.warmup)} of {time(whole)} before the "
        f"prefetch was full, {time(figures.stall)} after.",
        "Keep workers from one epoch to the next (persistent_workers=True, or epochs() of a pipeline), "
        "make what they load at their start smaller, or use threads.",
    )


def _of_stage(figures: Figures, number: int) -> Verdict:
    stage, name = figures.recording.stages[number], figures.names[number]
    cores = figures.recording.cores
    part = figures.by_stage[number] / figures.stall
    held = (
        f"The bottleneck is {name}: your loop waited for {figures.share:.0%} of the time, "
        f"{part:.0%} of it for this stage"
    )
    kind, why = kind_of(stage, figures.recording.switch_interval)
    if stage.source:
        return Verdict(
            "source",
            name,
            kind,
            f"{held}, which gives what the others work on.",
            "Make it cheaper, or do its work in a step that has workers: no worker more behind it helps."
            if stage.backend in ("caller", "thread")
            else _advice(figures, stage, kind),
        )
    short = _short_of_cores(stage, kind, cores)
    if short is not None and cores is not None:
        return Verdict("cores", name, kind, f"{held}; {short}.", _for_cores(cores))
    told = f"{held}; {why}." if why else f"{held}."
    return Verdict("stage", name, kind, told, _advice(figures, stage, kind))


def kind_of(stage: StageRecord, switch_interval: float = 0.005) -> tuple[str | None, str]:
    """Return the kind of a stage's work, and the figure that shows it."""
    moved = stage.packing + stage.sending
    working = max(0.0, stage.busy - stage.packing)
    if moved > working and moved > 0 and not stage.in_process:
        return "transport", (
            f"packing, sending and opening its results took {time(moved)}, making them {time(working)}"
        )
    known = sorted(stage.latencies)
    late = known[3 * len(known) // 4] if len(known) >= 3 else 0.0
    # Of threads that take turns at the GIL, one computes, or waits for a core with the GIL in its hands.
    # Where several wait for a core at once, none of them holds the others up.
    turn = stage.busy / stage.workers - (stage.wait_for_core or 0.0)
    waits = stage.gil_waits
    # Late as cores were busy: whoever let go of the GIL has got it back at once.
    free = (
        stage.workers > 1
        and len(waits) >= LOOKS
        and len(_late(waits, LATE * switch_interval)) < HELD_AT * len(waits)
    )
    if (
        stage.in_process
        and late >= HELD * switch_interval
        and not free
        and (stage.cpu is None or stage.cpu >= TURN * turn > 0)
    ):
        return (
            "holds-gil",
            f"of its results a quarter were heard {time(late)} late, as the GIL was held",
        )
    if stage.cpu is None or stage.busy <= 0:
        return None, ""
    computed = min(1.0, stage.cpu / stage.busy)
    spent = f"{computed:.0%} of its busy time was CPU time"
    elapsed = _elapsed(stage)
    if stage.in_process and stage.workers > 1 and elapsed > 0:
        at_once, rate = stage.busy / elapsed, stage.cpu / elapsed
        taking_turns = at_once >= AT_ONCE and ONE_CORE[0] <= rate <= ONE_CORE[1]
        overdue = late > LATE * switch_interval
        if taking_turns and overdue and computed < 1 / ONE_CORE[1]:
            return "holds-gil", f"{at_once:.1f} busy threads computed as much as {rate:.1f}"
    return ("computes" if computed >= COMPUTES else "waits"), spent


def _late(waits: Sequence[float], seconds: float) -> list[float]:
    return sorted(wait for wait in waits if wait >= seconds)


def _elapsed(stage: StageRecord) -> float:
    """Return the seconds that a stage ran."""
    whole = stage.busy + stage.starved + stage.blocked + stage.other
    return whole / stage.workers


def _short_of_cores(stage: StageRecord, kind: str | None, cores: CoreUse | None) -> str | None:
    """Return the figure that shows that a stage had too few cores; None if it had enough."""
    if cores is None or kind == "transport":
        return None
    if stage.wait_for_core is not None and stage.busy > 0:
        part = stage.wait_for_core / stage.busy
        if part >= FOR_CORES:
            return f"its workers waited for a core for {part:.0%} of their busy time"
    if cores.throttled >= FOR_CORES:
        return (
            f"the quota of {cores.cores:g} cores had run out for {cores.throttled:.0%} of the time"
        )
    if kind == "computes" and cores.busy is not None and cores.busy >= FULL * cores.cores:
        return f"{cores.busy:.1f} of {cores.cores:g} cores were busy"
    return None


def _for_cores(cores: CoreUse) -> str:
    others = None if cores.busy is None or cores.own is None else cores.busy - cores.own
    if others is not None and others >= OTHERS * cores.cores:
        return (
            f"Other programs kept {others:.1f} of the {cores.cores:g} cores busy: end them, or go where "
            "cores are free; more workers will not help."
        )
    return (
        f"This program needs more than the {cores.cores:g} cores that it may use: make the work cheaper "
        "or use more cores; more workers will not help."
    )


def _advice(figures: Figures, stage: StageRecord, kind: str | None) -> str:
    if stage.backend in ("caller", "thread"):
        return "It runs on one thread: make it cheaper, or give the step a backend and workers."
    inline = stage.backend == "inline"
    workers = 0 if inline else stage.workers
    wanted = _workers_wanted(figures, stage)
    if kind == "waits":
        if inline:
            return f"Give it workers that wait: num_workers={wanted} with backend='threads'."
        return (
            f"More workers wait at the same time: try num_workers={wanted} ({workers} now), or "
            "threads_per_worker; read ahead, or from a nearer place."
        )
    if kind == "holds-gil":
        return _LEAVE_THE_GIL
    if kind == "transport":
        return (
            "Return tensors or arrays, which go through shared memory, and fewer of them; do the part "
            "that makes results large or slow to pickle behind the workers, or use threads."
        )
    cores = figures.recording.cores
    if cores is not None:
        most = cores.cores if cores.share is None else cores.share
        wanted = min(wanted, max(workers, math.floor(most)))
    if wanted > workers:
        which = " and a backend" if inline else f" ({workers} now)"
        return f"Give it more workers: try num_workers={wanted}{which}; or make its work cheaper."
    return "It has a worker for each core: make its work cheaper, or use more cores."


_LEAVE_THE_GIL = (
    "Use processes (backend='shared-memory' or 'spawn'), or functions that release the GIL."
)


def _workers_wanted(figures: Figures, stage: StageRecord) -> int:
    """Return the number of workers that would keep up with the loop, if more of them were as fast."""
    own = figures.seconds - figures.stall  # that the loop needs itself
    # It was the bottleneck, so its workers were busy for most of the time, whatever was not told yet.
    load = max(load_of(stage), 0.5) * stage.workers
    if own <= 0:
        return 2 * stage.workers
    # A tenth of a worker is less than the figures are good for.
    wanted = math.ceil(load * figures.seconds / own - 0.1)
    return max(stage.workers + 1, min(wanted, MORE * stage.workers))
