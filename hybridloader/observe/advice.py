"""Advice of a verdict: what to change, of what may be changed. Pure functions.

`StageRecord.options` says what a constructor takes, so that no advice is refused.
"""

from __future__ import annotations

import math

from hybridloader.observe.figures import Figures, load_of, without_data
from hybridloader.observe.recording import CoreUse, StageRecord

OTHERS = 0.25
"""Share of the cores that other programs keep busy, from which the advice is about them."""

MORE = 8
"""Multiple of the workers that is advised at most: the figures tell nothing of what is in the way then,
such as a disk or the loop's own thread."""

MOST = 0.5
"""Share from which a part of the work is most of it."""

SMALL = 16 * 1024
"""Bytes of a result below which it is not its size that takes time to send."""

LEAVE_THE_GIL = (
    "Use processes (backend='shared-memory' or 'spawn'), or functions that release the GIL."
)


def advice_on(figures: Figures, stage: StageRecord, kind: str | None) -> str:
    """Return what to change of the stage that most of the stall belongs to."""
    if kind == "blocks-loop":
        return (
            "If it waits, await that: by an asynchronous library, or asyncio.to_thread. If it computes, "
            "do that in a map() of an ordinary function, with workers."
        )
    coroutines = _more_coroutines(figures, stage) if kind == "waits" else None
    if coroutines is not None:
        return coroutines
    if stage.backend in ("caller", "thread"):
        if "backend" in stage.options:
            return "It runs on one thread: make it cheaper, or give the step a backend and workers."
        return (
            "It runs on one thread: make it cheaper, or do its work in a map() that has a backend and "
            "workers."
        )
    if kind == "holds-gil":
        return LEAVE_THE_GIL
    if kind == "transport":
        return _smaller(stage)
    if without_data(stage):
        return (
            "Split the data into as many parts of one size as there are workers, or more: until then "
            "more workers will not help."
        )
    return _more_workers(figures, stage, kind)


def for_loop(figures: Figures) -> str:
    """Return what to change if loading is fast enough."""
    workers = any(stage.workers > 1 for stage in figures.recording.stages)
    fewer = ", or take workers away" if workers else ""
    return f"Loading is fast enough; make the training step faster{fewer}."


def for_start(stage: StageRecord, *, late: bool) -> str:
    """Return what to change if workers start `late`, or are slow with their first tasks."""
    less = "load less at their start" if late else "open or load less with the first sample"
    if stage.backend == "inline" or stage.options.get("persistent_workers"):
        kept = "Later epochs do not wait for it" if late else "Keep it from one epoch to the next"
        return f"{kept}, or {less}."
    how = "epochs() of a pipeline"
    if "persistent_workers" in stage.options:
        how = "persistent_workers=True"
    found = [f"Keep workers from one epoch to the next ({how})", less]
    if late and not stage.in_process and "backend" in stage.options:
        found.append("use threads")
    return f"{', '.join(found[:-1])}, or {found[-1]}."


def for_cores(cores: CoreUse, kind: str | None) -> str:
    """Return what to change if cores are too few."""
    more = "more workers will not help"
    if kind == "waits":
        more = "or take more workers, which wait at the same time"
    others = None if cores.busy is None or cores.own is None else cores.busy - cores.own
    if others is not None and others >= OTHERS * cores.cores:
        return (
            f"Other programs kept {others:.1f} of the {cores.cores:g} cores busy: end them, or go where "
            f"cores are free; {more}."
        )
    return (
        f"This program needs more than the {cores.cores:g} cores that it may use: make the work cheaper "
        f"or use more cores; {more}."
    )


def _more_coroutines(figures: Figures, stage: StageRecord) -> str | None:
    use = stage.coroutines
    if use is None or use.idle < MOST * stage.busy:
        return None
    wanted = math.ceil(use.concurrency * _workers_wanted(figures, stage) / stage.workers)
    return (
        f"More coroutines wait at the same time: try concurrency={wanted} ({use.concurrency} now) of "
        f"{use.step}; read ahead, or from a nearer place."
    )


def _smaller(stage: StageRecord) -> str:
    threads = ", or use threads" if "backend" in stage.options else ""
    if stage.arrays >= MOST:
        return (
            "Its results are tensors or arrays already: make them smaller, with a smaller dtype or "
            f"fewer of them{threads}."
        )
    if stage.bytes is not None and stage.items and stage.bytes < SMALL * stage.items:
        return f"Its results are small, and so is the work: make batches larger{threads}."
    return (
        "Return tensors or arrays, which go through shared memory, and fewer of them; do the part "
        f"that makes results large or slow to pickle after the workers{threads}."
    )


def _more_workers(figures: Figures, stage: StageRecord, kind: str | None) -> str:
    inline, cores = stage.backend == "inline", figures.recording.cores
    workers = 0 if inline else stage.workers
    wanted = _workers_wanted(figures, stage)
    if kind == "waits":
        if inline:
            each = ", each of which reads a part of the data" if stage.parts else ""
            return f"Give it workers that wait: num_workers={wanted} with backend='threads'{each}."
        more = f"try num_workers={wanted} ({workers} now)"
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
            f"({workers} now). If other programs keep the cores busy, end them."
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
    """Return the number of workers that would keep up with the loop, if more of them were as fast."""
    own = figures.seconds - figures.stall  # that the loop needs itself
    # It was the bottleneck, so its workers were busy for most of the time, whatever was not told yet.
    load = max(load_of(stage), 0.5) * stage.workers
    if own <= 0:
        return 2 * stage.workers
    # A tenth of a worker is less than the figures are good for.
    wanted = math.ceil(load * figures.seconds / own - 0.1)
    return max(stage.workers + 1, min(wanted, MORE * stage.workers))
