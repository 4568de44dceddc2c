"""Verdict on a recording: the bottleneck of the loop, the evidence, and advice.

Pure functions. `judge` has the rules in their order. docs/decisions.md has the reasons for both. Advice
only names `StageRecord.options`, which the constructor takes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from hybridloader._support.store_use import StoreUse
from hybridloader._support.text import size, time
from hybridloader.engine.meter import EVERY
from hybridloader.observe.figures import (
    CoreUse,
    Figures,
    StageRecord,
    length,
    others_busy,
    stall_by_stage,
    within,
    without_data,
)

# Thresholds are shares of times of the same run, so that a machine ten times as slow gets the same
# verdict. Those in seconds are multiples of one of our periods.

LEAST_CALLS, LEAST_SECONDS = 5, 5 * EVERY
"""Calls of `next()`, and seconds, after the prefetch was full that a verdict needs. With less, a worker
has reported at most five times, and one late batch of four would be a quarter of the stall."""

STALL = 0.05  # below this share of the stall in the time, the loop itself is the bottleneck

LITTLE = 0.2
"""Same threshold if no stage was busy during most of the stall, as taking a prefetched batch costs time
in which none is."""

START, MAINLY = 0.2, 2
"""From this share of the time on, waiting before the prefetch was full matters: persistent workers could
gain at most 25 %. It must be this multiple of the later waits: slow loading has both."""

MOST = 0.5  # share from which a part of the work is most of it

FOR_CORES, MENTIONED = 0.25, 0.05
"""From these shares of a stage's busy time on, waiting for cores means that there are too few, and is
mentioned in the evidence."""

FULL = 0.95
"""Busy share of the cores from which more workers do not help a stage that computes (all busy reads as
0.97 to 1)."""

COMPUTES = 0.5
"""A stage computes, rather than waits, if CPU time is at least this share of its busy time without the
waits for a core."""

ONE_CORE = 1.2
"""Most CPU seconds per second of threads that take turns at the GIL: 1, and work that needs no GIL."""

TURN = 0.5  # threads hold the GIL if they compute for at least this share of their turns

HELD, LOOKS, HELD_AT = 0.5, 3, 0.125
"""Part of a switch interval from which a thread that had released the GIL waited for a holder of it,
fewest samples of such waits for a conclusion, and share of the samples from which the GIL is held: two
threads of Python had 0.56 to 0.94, threads that wait for a disk 0. Half an interval is the mean time
until a holder is asked to release it."""

BESIDE = 0.5
"""CPU seconds per second of a stage's threads from which their use of the GIL matters to the loop's
step, which would have to wait for half of the time."""

OWN_WORK = 5e-4
"""If a coroutine keeps the event loop for fewer seconds, it is overhead of the event loop."""

MORE = 8  # largest multiple of the workers to advise: beyond it another limit is likely

SMALL = 16 * 1024  # bytes of a result below which its size does not determine the time to send it


@dataclass(frozen=True)
class Verdict:
    """Bottleneck of the loop.

    Attributes
    ----------
    cause
        ``"loop"``: your loop, loading is fast enough; ``"stage"``: the stage `stage`; ``"cores"``: too
        few cores for it; ``"source"``: the sampler or a source; ``"store"``: an object store, for which
        the workers of `stage` wait; ``"start"``: the start of the workers, including their first tasks;
        ``"unknown"``: there are too few measurements.
    stage
        Name of the stage that most of the stall belongs to, or whose threads hold the GIL; None for
        ``"loop"``, ``"start"`` and ``"unknown"``.
    kind
        Kind of the stage's work: ``"waits"`` (for a disk or a network), ``"computes"``, ``"holds-gil"``
        (its threads keep each other and the loop from running), ``"transport"`` (packing, sending and
        opening results), ``"blocks-loop"`` (coroutines that block their event loop); None if unknown.
    evidence
        Figures that support the verdict, as a sentence.
    advice
        Changes to try, as a sentence.
    """

    cause: str
    stage: str | None
    kind: str | None
    evidence: str
    advice: str

    def __str__(self) -> str:
        return f"{self.evidence} {self.advice}"


def judge(figures: Figures) -> Verdict:
    """Return the verdict of the first rule that has one."""
    if not figures.recording.loop.items:
        advice = "Call stats() again after the loop has run for a while."
        return Verdict("unknown", None, None, "No batch has come yet.", advice)
    found = _slow_start(figures) or _too_short(figures) or _held_loop(figures)
    if found is not None:
        return found
    idle = max(figures.by_stage, default=0.0) <= figures.rest  # no stage was busy
    if figures.share < (LITTLE if idle else STALL):
        return _fast(figures)
    return _of_none(figures) if idle else _of_stage(figures)


def _slow_start(figures: Figures) -> Verdict | None:
    """Judge a loop that mostly waited before the prefetch was full, as for workers to start."""
    loop, stages, full = figures.recording.loop, figures.recording.stages, figures.full
    whole, warmup = loop.ended - loop.began, figures.warmup
    if full is None:  # of a few slow batches only the time before the first one is the start
        begun = min(
            (stage.first for stage in stages if stage.first is not None), default=loop.began
        )
        warmup = length(within(loop.waits, loop.began, begun))
    if warmup < max(START * whole, LEAST_SECONDS) or warmup < MAINLY * (loop.waited - warmup):
        return None
    waits = within(loop.waits, loop.began, loop.ended if full is None else full)
    shares = stall_by_stage([stage.spans for stage in stages], waits)
    most = max(range(len(stages)), key=lambda at: (shares[at], not stages[at].source))
    part = f", most of it for {figures.names[most]}" if shares[most] >= MOST * warmup else ""
    return Verdict(
        *("start", None, None),
        f"The bottleneck is the start: your loop waited {time(warmup)} of {time(whole)} before the "
        f"prefetch was full{part}, and {time(loop.waited - warmup)} after that.",
        for_start(stages[most]),
    )


def _too_short(figures: Figures) -> Verdict | None:
    calls, seconds = figures.calls, figures.seconds
    if figures.full is not None and calls >= LEAST_CALLS and seconds >= LEAST_SECONDS:
        return None
    evidence = f"Since the prefetch was full, {calls} batches came, in {seconds:.2f} s."
    advice = "That is too short for a verdict; run more batches."
    return Verdict("unknown", None, None, evidence, advice)


def _held_loop(figures: Figures) -> Verdict | None:
    """Judge a loop that waits for no batch while the threads of a stage hold the GIL.

    Three conditions hold then: all threads of the program together use no more CPU than one thread
    could; loading is a large part of that; a thread that releases the GIL waits to get it back.
    """
    recording = figures.recording
    own = None if recording.cores is None else recording.cores.own
    if figures.share >= STALL or own is None or own > ONE_CORE:
        return None
    for name, stage in zip(figures.names, recording.stages, strict=True):
        held = gil_held(stage, recording.switch_interval)
        worked = stage.busy + stage.starved + stage.blocked + stage.other  # seconds of all workers
        rate = stage.num_workers * stage.cpu / worked if stage.cpu and worked > 0 else 0.0
        if rate >= BESIDE and held:
            evidence = (
                f"The bottleneck is {name}, whose threads hold the GIL: they used {rate:.1f} cores, the "
                f"whole program {own:.1f}, and {held}. Your step waits for the GIL in the same way; for "
                f"batches your loop waited for {figures.share:.1%} of the time."
            )
            return Verdict("stage", name, "holds-gil", evidence, LEAVE_THE_GIL)
    return None


def _fast(figures: Figures) -> Verdict:
    """Judge a loop that hardly waits."""
    stages = figures.recording.stages
    fewer = ", or take workers away" if any(stage.num_workers > 1 for stage in stages) else ""
    return Verdict(
        *("loop", None, None),
        f"Your loop is the bottleneck: it waited for {figures.share:.1%} of the time, "
        f"{time(figures.p50)} for a batch at the median.",
        f"Loading is fast enough; make the training step faster{fewer}.",
    )


def _of_none(figures: Figures) -> Verdict:
    """Judge a loop that waits mostly while no stage is busy."""
    waited = (
        f"Your loop waited for {figures.share:.0%} of the time; during most of it no stage was busy"
    )
    cores = figures.recording.cores
    if cores is not None and (busy := _all_busy(cores)):
        return Verdict("cores", None, None, f"{waited}, and {busy}.", for_cores(cores, None))
    advice = "Compare the times in the table, or record a trace."
    return Verdict("unknown", None, None, f"{waited}.", advice)


def _of_stage(figures: Figures) -> Verdict:
    """Judge a run with a stage that most of the stall belongs to."""
    number = figures.by_stage.index(max(figures.by_stage))
    stage, name = figures.recording.stages[number], figures.names[number]
    cores = figures.recording.cores
    kind, why = kind_of(stage, figures.recording.switch_interval, cores)
    held = (
        f"The bottleneck is {name}: your loop waited for {figures.share:.0%} of the time, "
        f"{figures.by_stage[number] / figures.stall:.0%} of it for this stage"
    )
    if stage.source:
        held += ", which makes the input of the others"
    use = max(figures.recording.stores, key=lambda use: use.waited, default=None)
    if stage.reads and use is not None and use.waited >= MOST * stage.busy > 0:
        evidence = f"{held}; its workers waited for {_store(figures, use)}."
        return Verdict("store", name, "waits", evidence, for_store(figures, stage, use))
    if idle := without_data(stage):
        held += f"; {idle} of its {stage.num_workers} workers had next to nothing to read"
    if stage.source and stage.backend in ("caller", "thread"):
        advice = (
            "Make it cheaper, or do its work in a step that has workers: adding workers to later steps "
            "does not help."
        )
        return Verdict("source", name, kind, f"{held}.", advice)
    if stage.source:
        return Verdict("source", name, kind, f"{held}.", advice_on(figures, stage, kind))
    if cores is not None and (short := _few_cores(stage, kind, cores)):
        return Verdict("cores", name, kind, f"{held}; {short}.", for_cores(cores, kind))
    if stage.collating >= MOST * stage.busy > 0:
        held += f"; collate_fn took {stage.collating / stage.busy:.0%} of its busy time"
    evidence = f"{held}; {why}." if why else f"{held}."
    return Verdict("stage", name, kind, evidence, advice_on(figures, stage, kind))


def _store(figures: Figures, use: StoreUse) -> str:
    """Return the name of a store, and the times of its requests."""
    loop, requests = figures.recording.loop, max(1, use.requests)
    whole = loop.ended - loop.began
    why = f"{use.store} for {use.waited:.1f} s"
    if use.requests:
        why += (
            f", whose {use.requests:,} requests of {size(use.bytes // requests)} took "
            f"{time(use.seconds / requests)} each, {use.seconds / whole:.1f} at a time"
        )
    if use.retries:
        why += f"; {use.retries:,} of them were made again after a failure"
    return why


def _few_cores(stage: StageRecord, kind: str | None, cores: CoreUse) -> str:
    """Return evidence that a stage had too few cores; an empty text if it had enough."""
    if kind == "transport":
        return ""
    waited = min(1.0, (stage.wait_for_core or 0.0) / stage.busy) if stage.busy > 0 else 0.0
    # If workers wait for a disk, more of them also wait for a core at the same time.
    if waited >= (MOST if kind in ("waits", "blocks-loop") else FOR_CORES):
        return f"its workers waited for a core for {waited:.0%} of their busy time"
    if cores.throttled >= FOR_CORES:
        return (
            f"the quota of {cores.cores:g} cores had run out for {cores.throttled:.0%} of the time"
        )
    return _all_busy(cores) if kind == "computes" else ""


def _all_busy(cores: CoreUse) -> str:
    """Return evidence that all cores were busy, or an empty text."""
    if cores.busy is None or cores.busy < FULL * cores.cores:
        return ""
    return f"{cores.busy:.1f} of {cores.cores:g} cores were busy"


def kind_of(
    stage: StageRecord, switch_interval: float = 0.005, cores: CoreUse | None = None
) -> tuple[str | None, str]:
    """Return the kind of a stage's work, and the evidence for it."""
    moved = stage.packing + stage.sending
    working = max(0.0, stage.busy - stage.packing)
    if moved > working and not stage.in_process:
        return "transport", (
            f"packing, sending and opening its results took {time(moved)}, making them {time(working)}"
        )
    kind, why = _kind_by_times(stage, switch_interval, cores)
    use = stage.coroutines
    turn = 0.0 if use is None else use.held / max(1, use.begun)
    if use is None or turn < OWN_WORK or not use.held >= MOST * stage.busy > 0:
        return kind, why
    held = (
        f"each coroutine of {use.step} kept the event loop for {time(turn)}, and the loop waited for "
        f"{min(1.0, use.idle / stage.busy):.0%} of the busy time"
    )
    return (kind, f"{why}; {held}") if kind in ("computes", "holds-gil") else ("blocks-loop", held)


def _kind_by_times(
    stage: StageRecord, switch_interval: float, cores: CoreUse | None
) -> tuple[str | None, str]:
    """Return the kind by the times of CPU, cores and GIL, and these as evidence."""
    # `wait_for_core` also counts waits between tasks.
    for_core = min(stage.wait_for_core or 0.0, max(0.0, stage.busy - (stage.cpu or 0.0)))
    held = gil_held(stage, switch_interval)
    turn = (stage.busy - for_core) / stage.num_workers
    if held and (stage.cpu is None or stage.cpu >= TURN * turn > 0):
        return "holds-gil", held
    use = stage.coroutines
    if stage.cpu is None or stage.busy <= 0:
        if use is not None and use.idle >= MOST * stage.busy > 0:
            return "waits", (
                f"its event loop waited for {use.idle / stage.busy:.0%} of its busy time"
            )
        return None, ""
    spent = f"{min(1.0, stage.cpu / stage.busy):.0%} of its busy time was CPU time"
    if for_core >= MENTIONED * stage.busy:
        spent += f", {for_core / stage.busy:.0%} waiting for a core"
    # A runnable thread without a core might have computed or waited, so leave that time out.
    waited = max(0.0, stage.busy - stage.cpu - for_core)
    computed = stage.cpu / (stage.cpu + waited) if stage.cpu else 0.0
    if computed >= COMPUTES:
        return "computes", spent
    if stage.wait_for_core is None and (cores is None or cores.busy is None or _all_busy(cores)):
        return None, f"{spent}; its waits for a core can't be measured on this system"
    return "waits", spent


def gil_held(stage: StageRecord, switch_interval: float) -> str:
    """Return evidence that threads wait for the GIL beside those of a stage, or an empty text."""
    waits = stage.gil_waits
    late = sorted(wait for wait in waits if wait >= HELD * switch_interval)
    if len(late) < max(LOOKS, HELD_AT * len(waits)):
        return ""
    return (
        f"in {len(late)} of {len(waits)} samples a thread that had released the GIL waited for it, "
        f"{time(late[len(late) // 2])} at the median"
    )


LEAVE_THE_GIL = (
    "Use processes (backend='shared-memory' or 'spawn'), or functions that release the GIL."
)


def advice_on(figures: Figures, stage: StageRecord, kind: str | None) -> str:
    """Return the advice for the stage that most of the stall belongs to."""
    if kind == "blocks-loop":
        return (
            "If it waits, await that with an asynchronous library or asyncio.to_thread. If it computes, "
            "move that to a map() of an ordinary function, with workers."
        )
    use = stage.coroutines
    if kind == "waits" and use is not None and use.idle >= MOST * stage.busy:
        wanted = math.ceil(use.concurrency * _workers_wanted(figures, stage) / stage.num_workers)
        return (
            f"More coroutines wait at the same time: try concurrency={wanted} ({use.concurrency} now) "
            f"of {use.step}; read ahead, or from a nearer place."
        )
    if stage.backend in ("caller", "thread"):
        instead = (
            "give the step a backend and workers"
            if "backend" in stage.options
            else "do its work in a map() that has a backend and workers"
        )
        return f"It runs on one thread: make it cheaper, or {instead}."
    if kind == "holds-gil":
        return LEAVE_THE_GIL
    if kind == "transport":
        return _smaller(stage)
    if without_data(stage):
        return (
            "Split the data into parts of equal size, at least one for each worker: until then more "
            "workers will not help."
        )
    return _more_workers(figures, stage, kind)


def for_start(stage: StageRecord) -> str:
    """Return the advice for a run that mostly waited for its start."""
    kept = "Later epochs of epochs() do not wait for it"
    if stage.backend == "inline" or stage.options.get("persistent_workers"):
        kept = "Keep what it opens for later epochs"
    elif "persistent_workers" in stage.options:
        kept = "Keep workers for later epochs (persistent_workers=True)"
    return f"{kept}, or open and load less at the start and with the first samples."


def for_cores(cores: CoreUse, kind: str | None) -> str:
    """Return the advice if there are too few cores."""
    more = "more workers will not help"
    if kind == "holds-gil":
        more += ". Its threads also hold the GIL, so processes would do more"
    elif kind == "waits":
        more = "or take more workers, which wait at the same time"
    if others := others_busy(cores):
        return (
            f"Other programs kept {others:.1f} of the {cores.cores:g} cores busy: stop them, or use "
            f"a machine with free cores; {more}."
        )
    return (
        f"This program needs more than the {cores.cores:g} cores that it may use: make the work cheaper "
        f"or use more cores; {more}."
    )


def for_store(figures: Figures, stage: StageRecord, use: StoreUse) -> str:
    """Return the advice if a stage waits for a store."""
    nearer = "or run nearer to the store"
    ahead = "by a larger ahead_bytes= or a smaller block_size=,"
    if use.alone >= MOST * max(1, use.requests):
        return (
            "Read blocks instead of samples: give the loader sampler=BlockShuffleSampler(source, seed), "
            f"whose window fits in ahead_bytes=; {nearer}."
        )
    if use.waited >= MOST * use.seconds > 0:  # no blocks: each worker waits for its own requests
        return (
            f"{_more_workers(figures, stage, 'waits')} Or write small files into archives (hybridloader "
            "write-shards), which are read in blocks."
        )
    if use.hits + use.misses:
        return (
            "The next epoch finds in cache_dir= the blocks that have room in cache_bytes=; for this one "
            f"have more blocks in flight, {ahead} {nearer}."
        )
    return (
        f"Have more blocks in flight, {ahead} keep them for the next epoch by cache_dir=, {nearer}."
    )


def _smaller(stage: StageRecord) -> str:
    threads = ", or use threads" if "backend" in stage.options else ""
    if stage.arrays >= MOST:
        return (
            "Its results are tensors or arrays already: make them smaller, with a smaller dtype or "
            f"fewer of them{threads}."
        )
    if stage.bytes is not None and stage.items and stage.bytes < SMALL * stage.items:
        return f"Its results are small and so is their work: make batches larger{threads}."
    return (
        "Return tensors or arrays, which go through shared memory, and fewer of them; do the part "
        f"that makes results large or slow to pickle after the workers{threads}."
    )


def _more_workers(figures: Figures, stage: StageRecord, kind: str | None) -> str:
    inline, cores = stage.backend == "inline", figures.recording.cores
    workers = 0 if inline else stage.num_workers
    wanted = _workers_wanted(figures, stage)
    if kind == "waits":
        if inline:
            each = ", each of which reads a part of the data" if stage.parts else ""
            return f"Give it workers that wait: num_workers={wanted} with backend='threads'{each}."
        more = f"try num_workers={wanted} ({workers} now)"
        if not stage.in_process and "backend" in stage.options:
            more = f"try backend='threads' with num_workers={wanted} ({workers} processes now)"
        threads = stage.options.get("threads_per_worker")
        if stage.parts:
            more += ", if the data has as many parts"
        elif threads and stage.collating < MOST * stage.busy:
            wanted = math.ceil(threads * wanted / workers)
            more += f", or threads_per_worker={wanted} ({threads} now)"
        return f"More workers wait at the same time: {more}; read ahead, or from a nearer place."
    if kind is None and stage.cpu is not None:
        return (
            f"If cores are free, more workers wait at the same time: try num_workers={wanted} "
            f"({workers} now). If other programs keep the cores busy, stop them."
        )
    if cores is not None:
        most = cores.cores if cores.share is None else cores.share
        wanted = min(wanted, max(workers, math.floor(most)))
    if wanted > workers:
        which = f" ({workers} now)"
        if inline:
            threads = math.isinf(figures.recording.switch_interval)  # they share no GIL
            which = " with backend='threads'" if threads else " and a backend"
        return f"Give it more workers: try num_workers={wanted}{which}; or make its work cheaper."
    return "It has a worker for each core: make its work cheaper, or use more cores."


def _workers_wanted(figures: Figures, stage: StageRecord) -> int:
    """Return the number of workers that would keep up with the loop, if the stage scaled linearly."""
    own = figures.seconds - figures.stall  # seconds that the loop needs itself
    # The bottleneck's workers were busy for most of the time, even if they have not reported all yet.
    load = max(stage.load, 0.5) * stage.num_workers
    if own <= 0:
        return 2 * stage.num_workers
    # The figures are not precise to a tenth of a worker.
    wanted = math.ceil(load * figures.seconds / own - 0.1)
    return max(stage.num_workers + 1, min(wanted, MORE * stage.num_workers))
