"""Kind of a stage's work, and the figures that show it: pure functions."""

from __future__ import annotations

from collections.abc import Sequence

from hybridloader.observe.advice import MOST
from hybridloader.observe.display import time
from hybridloader.observe.recording import CoreUse, StageRecord

FULL = 0.95
"""Share of the cores that are busy, from which no worker more helps a stage that computes. The kernel
counts ticks of 10 ms, and a core idles for a moment at each switch: all busy reads as 0.97 to 1."""

COMPUTES = 0.5
"""Share of CPU time in the busy time, less the waits for a core, from which a stage computes and does
not wait: the larger part."""

MENTIONED = 0.05
"""Share of the busy time that a wait for a core takes, from which it is mentioned."""

TURN = 0.5
"""Least part of their turns for which threads compute if they hold the GIL. They take turns then, and
the turns of all of them together last as long as they are busy, less their waits for a core."""

HELD = 0.5
"""Part of the interpreter's switch interval by which results of threads are late, if another holds the
GIL: whoever waits for it asks after one interval. It may be asked for already, so it is half on average.
What else makes a thread late (to wake it takes 0.1 ms) is no multiple of the interval."""

AT_ONCE, LATE = 1.2, 0.1
"""Threads that are busy at once, and part of the switch interval by which their results are late, or
they wait for the GIL, if they take turns: more than one, and more than it takes to wake a thread."""

OWN_WORK = 5e-4
"""Seconds for which a coroutine keeps the event loop, below which that is the loop's own work."""

LOOKS = 3
"""Looks at the GIL from which they tell something."""

HELD_AT = 0.125
"""Share of the looks at which the GIL was held, from which it is in the way. Of two threads that compute
in Python and a loop it was 0.24 to 0.68, of threads that wait for a disk 0."""

ONE_CORE = (0.7, 1.2)
"""CPU seconds a second of several threads that take turns at the GIL: 1, less what they leave it for and
what passing it on costs, and more where a part of the work is done without it."""


def kind_of(
    stage: StageRecord, switch_interval: float = 0.005, cores: CoreUse | None = None
) -> tuple[str | None, str]:
    """Return the kind of a stage's work, and the figure that shows it."""
    moved = stage.packing + stage.sending
    working = max(0.0, stage.busy - stage.packing)
    if moved > working and moved > 0 and not stage.in_process:
        return "transport", (
            f"packing, sending and opening its results took {time(moved)}, making them {time(working)}"
        )
    kind, why = _kind_by_times(stage, switch_interval, cores)
    use = stage.coroutines
    if use is None or use.held < MOST * stage.busy or stage.busy <= 0:
        return kind, why
    turn = use.held / max(1, use.begun)
    if turn < OWN_WORK:  # it is the event loop's
        return kind, why
    held = (
        f"each coroutine of {use.step} kept the event loop for {time(turn)}, and the loop waited for "
        f"{min(1.0, use.idle / stage.busy):.0%} of the busy time"
    )
    return (kind, f"{why}; {held}") if kind in ("computes", "holds-gil") else ("blocks-loop", held)


def _kind_by_times(
    stage: StageRecord, switch_interval: float, cores: CoreUse | None
) -> tuple[str | None, str]:
    """Return the kind as the times of CPU, cores and GIL show it, and these."""
    if _holds_gil(stage, switch_interval):
        return (
            "holds-gil",
            f"of its results a quarter were heard {time(_late_by(stage))} late, as the GIL was held",
        )
    use = stage.coroutines
    if stage.cpu is None or stage.busy <= 0:
        if use is not None and use.idle >= MOST * stage.busy > 0:
            return (
                "waits",
                f"its event loop waited for {use.idle / stage.busy:.0%} of its busy time",
            )
        return None, ""
    spent = f"{min(1.0, stage.cpu / stage.busy):.0%} of its busy time was CPU time"
    for_core = _without_core(stage)
    if for_core >= MENTIONED * stage.busy:
        spent += f", {for_core / stage.busy:.0%} a wait for a core"
    # Of a thread that could run and had no core, it is not known what it would have done.
    waited = max(0.0, stage.busy - stage.cpu - for_core)
    computed = stage.cpu / (stage.cpu + waited) if stage.cpu else 0.0
    elapsed = elapsed_of(stage)
    if stage.in_process and stage.workers > 1 and elapsed > 0:
        at_once, rate = stage.busy / elapsed, stage.cpu / elapsed
        taking_turns = at_once >= AT_ONCE and ONE_CORE[0] <= rate <= ONE_CORE[1]
        overdue = _late_by(stage) > LATE * switch_interval
        if taking_turns and overdue and computed < 1 / ONE_CORE[1]:
            return "holds-gil", f"{at_once:.1f} busy threads computed as much as {rate:.1f}"
    if computed >= COMPUTES:
        return "computes", spent
    full = cores is None or cores.busy is None or cores.busy >= FULL * cores.cores
    if stage.wait_for_core is None and full:
        return None, f"{spent}, and it is not known here how long it waited for a core"
    return "waits", spent


def _holds_gil(stage: StageRecord, switch_interval: float) -> bool:
    """Return True if threads take turns at the GIL: one computes, or waits for a core that has it."""
    # Where all wait for a core at once, none of them holds the others up.
    for_core, waits = _without_core(stage), stage.gil_waits
    turn = stage.busy / stage.workers - for_core
    if turn <= 0:
        turn = (stage.busy - for_core) / stage.workers
    # Late as cores were busy: whoever let go of the GIL has got it back at once.
    free = (
        stage.workers > 1
        and len(waits) >= LOOKS
        and len(late_of(waits, LATE * switch_interval)) < HELD_AT * len(waits)
    )
    return (
        stage.in_process
        and _late_by(stage) >= HELD * switch_interval
        and not free
        and (stage.cpu is None or stage.cpu >= TURN * turn > 0)
    )


def _without_core(stage: StageRecord) -> float:
    """Return the busy seconds in which workers had no core: they wait for one between tasks, too."""
    return min(stage.wait_for_core or 0.0, max(0.0, stage.busy - (stage.cpu or 0.0)))


def _late_by(stage: StageRecord) -> float:
    """Return the upper quartile of how late results were heard."""
    known = sorted(stage.latencies)
    return known[3 * len(known) // 4] if len(known) >= 3 else 0.0


def late_of(waits: Sequence[float], seconds: float) -> list[float]:
    return sorted(wait for wait in waits if wait >= seconds)


def elapsed_of(stage: StageRecord) -> float:
    """Return the seconds that a stage ran."""
    whole = stage.busy + stage.starved + stage.blocked + stage.other
    return whole / stage.workers
