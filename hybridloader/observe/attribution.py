"""Attribution of a loop's waits to the stages that were busy meanwhile: pure functions.

At each moment of a wait the stall belongs to the stages that are busy then, in proportion to the busy
share of their workers. A moment in which no stage is busy belongs to none; of one in which a worker is
known to work half of the time, half does.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from hybridloader.observe.recording import LoopRecord, Span, Wait


def stall_by_stage(stages: Sequence[Iterable[Span]], waits: Iterable[Wait]) -> list[float]:
    """Return the seconds of `waits` that belong to each of `stages`, given by its spans.

    The waits follow one another. The sum of the result is never more than the sum of the waits.
    """
    # Time, stage (-1: the loop), 1 for begin or -1 for end, part and density.
    moves: list[tuple[float, int, int, float, float]] = []
    for wait in waits:
        if wait.ended > wait.began:
            moves += ((wait.began, -1, 1, 0.0, 0.0), (wait.ended, -1, -1, 0.0, 0.0))
    for number, spans in enumerate(stages):
        for span in spans:
            if span.ended > span.began and span.part > 0:
                moves += (
                    (span.began, number, 1, span.part, span.density),
                    (span.ended, number, -1, -span.part, -span.density),
                )
    moves.sort()
    found = [0.0] * len(stages)
    busy, parts = [0] * len(stages), [0.0] * len(stages)  # open spans of each, and their sum
    waiting, before, active = 0, 0.0, 0.0
    for time, number, step, part, density in moves:
        if waiting and time > before:
            whole = math.fsum(parts)
            if whole > 0:
                took = (time - before) * min(1.0, max(0.0, active))
                for stage, own in enumerate(parts):
                    if own:
                        found[stage] += took * (own / whole)
        before = time
        if number < 0:
            waiting += step
            continue
        busy[number] += step
        active += density
        # Not what is left by rounding, once the last span has ended.
        parts[number] = max(0.0, parts[number] + part) if busy[number] else 0.0
    return found


def between(began: float, ended: float, pauses: Iterable[tuple[float, float]]) -> list[Span]:
    """Return the spans from `began` to `ended` that are in none of the `pauses`."""
    spans, at = [], began
    for first, last in sorted(pauses):
        if first > at:
            spans.append(Span(at, min(first, ended)))
        at = max(at, last)
        if at >= ended:
            return spans
    if at < ended:
        spans.append(Span(at, ended))
    return spans


def overlap(waits: Iterable[Wait], times: Sequence[Wait | Span]) -> float:
    """Return the seconds of `waits` that are in any of the `times`."""
    last = max((time.ended for time in times), default=-math.inf)
    early = [wait for wait in waits if wait.began < last]
    pauses = [time[:2] for time in times]
    return length(early) - math.fsum(length(between(*wait, pauses)) for wait in early)


def within(waits: Iterable[Wait], began: float, ended: float) -> list[Wait]:
    """Return what of `waits` is between two times."""
    cut = (Wait(max(wait.began, began), min(wait.ended, ended)) for wait in waits)
    return [wait for wait in cut if wait.ended > wait.began]


def length(waits: Iterable[Wait | Span]) -> float:
    """Return the seconds of all `waits`."""
    return math.fsum(wait.ended - wait.began for wait in waits)


def percentile(loop: LoopRecord, waits: Sequence[Wait], part: float) -> float:
    """Return the seconds that a call of `next()` did not exceed in `part` of the calls.

    `waits` are those of `loop.waits` that count. Shorter calls take what they take on average.
    """
    longer = len(loop.waits)
    # Those that were dropped had shorter calls among them, too.
    brief = round(loop.brief * longer / (longer + loop.dropped)) if loop.dropped else loop.brief
    shorter = loop.brief_seconds / loop.brief if loop.brief else 0.0
    rank = max(0, math.ceil(part * (brief + len(waits))) - 1)
    if rank >= brief and waits:  # one of these may have been cut to what counts of it
        return max(shorter, sorted(wait.ended - wait.began for wait in waits)[rank - brief])
    return shorter
