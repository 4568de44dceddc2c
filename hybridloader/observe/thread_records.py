"""Records of threads that no meter measures: those of relays, and the loop's own."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from hybridloader._support.snapshots import snapshot
from hybridloader.engine.relay import REMEMBERED, RelayQueue
from hybridloader.observe.attribution import between
from hybridloader.observe.loop_waits import BRIEF, LoopWaits
from hybridloader.observe.recording import StageRecord

Pause = tuple[float, float]
"""Begin and end of a time in which a thread slept."""


class TimedPulls:
    """Time that a thread waits for what it pulls. That thread writes, another may read."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self.began = clock()
        # All the mutable state:
        self.waited = 0.0  # seconds
        self.waits: deque[Pause] = deque(maxlen=REMEMBERED)  # the longer ones

    def timed(self, pull: Callable[..., Any]) -> Callable[..., Any]:
        """Return `pull`, whose calls are measured."""
        clock = self._clock

        def measured(*arguments: Any, **keywords: Any) -> Any:
            began = clock()
            try:
                return pull(*arguments, **keywords)
            finally:
                ended = clock()
                self.waited += ended - began
                if ended - began >= BRIEF:
                    self.waits.append((began, ended))

        return measured


def record_of_relay(
    name: str,
    queue: RelayQueue,
    began: float,
    ended: float,
    *,
    waited: float,  # seconds that its thread waited for what it pulls
    waits: Sequence[Pause] = (),  # begin and end of these
    **others: Any,  # of the record
) -> StageRecord:
    """Return the record of a relay's thread, which is busy when it does not sleep."""
    blocks: tuple[Pause, ...] = snapshot(queue.blocks)
    if queue.ended_at is not None:
        ended = min(ended, queue.ended_at)
    since = max((ring[0][0] for ring in (blocks, waits) if len(ring) >= REMEMBERED), default=began)
    return StageRecord(
        name=name,
        backend="thread",
        items=queue.count,
        busy=max(0.0, ended - began - queue.blocked - waited),
        starved=waited,
        blocked=queue.blocked,
        queued=len(queue.items),
        spans=tuple(between(since, ended, [*blocks, *waits])),
        since=None if since == began else since,
        **others,
    )


def record_of_caller(
    name: str,
    loop: LoopWaits,
    *,
    waited: float,  # seconds that it waited for what it pulls
    waits: Iterable[Pause] = (),  # begin and end of these
    **others: Any,  # of the record
) -> StageRecord:
    """Return the record of what the loop's own thread does in `next()`, when it does not wait there."""
    made = loop.record()
    away = between(made.began, made.ended, made.waits)
    pauses = [*((span.began, span.ended) for span in away), *waits]
    return StageRecord(
        name=name,
        backend="caller",
        items=made.items,
        busy=max(0.0, made.waited - waited),
        starved=waited,
        other=max(0.0, made.ended - made.began - made.waited),
        spans=tuple(between(made.began, made.ended, pauses)),
        **others,
    )
