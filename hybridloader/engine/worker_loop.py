"""Worker loop of threads and processes: takes messages for a `Worker`, and reports its events."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from typing import Any

from hybridloader.engine.messages import Event, Stop
from hybridloader.engine.under_way import TasksUnderWay
from hybridloader.engine.worker import Worker


def run(
    worker: Worker,
    get: Callable[[], Any],  # waits for an `Incoming`
    report: Callable[[Event], None],
    # Gives a function by which any thread has `get` return None; None: one task at a time.
    listen: Callable[[], Callable[[], None]] | None = None,
) -> None:
    """Answer messages until `Stop`, or until nobody waits: the worker loop of threads and processes."""
    under_way = None
    if listen is not None and worker.overlaps:
        under_way = TasksUnderWay(
            worker.begin, worker.context, get, report, listen, early=worker.wakes
        )
        get, report = under_way.next, under_way.report
    meter = worker.meter
    if meter is not None:
        meter.open()
    try:
        began = perf_counter()
        ready = worker.open()
        if meter is not None:
            meter.opened(began)
        report(ready)
        while True:
            message = get()
            if isinstance(message, Stop) or worker.context.cancelled:
                return
            event = worker.step(message)
            del message  # slots of what it held go back with the event
            if event is not None:
                if meter is None or not meter.reports:
                    report(event)
                else:
                    meter.report(report, event)
            del event  # a batch must not outlive its sending
    finally:
        if under_way is not None:
            under_way.close()
        worker.close()
