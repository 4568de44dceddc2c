"""All cases by name, in the order in which they run, and their targets."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from benchmarks.case import Case, Options
from benchmarks.cases import (
    cluster,
    endurance,
    epochs,
    fresh_start,
    hybrid,
    image_batches,
    jpegs,
    many_workers,
    memory,
    observing,
    replacement,
    resuming,
    resuming_pipelines,
    seeding,
    slow_samples,
    small_batches,
    small_tensors,
    stages,
    stored,
    stores,
    training_loop,
    tuning,
    worker_memory,
)
from benchmarks.targets import Target

CASES: dict[str, Callable[[Options], Case]] = {
    "P1": image_batches.large_batches,
    "P2": small_batches.small_batches,
    "P3": jpegs.jpegs,
    "P4": hybrid.hybrid,
    "P5": epochs.start,
    "P6": epochs.turn,
    "P7": memory.memory,
    "P8": epochs.table,
    "P9": image_batches.cpu_time,
    "P12": small_batches.many,
    "P13": slow_samples.slow_samples,
    "P14": stored.objects,
    "P15": stored.archives,
    "P16": stored.tables,
    "stores": stores.stores,
    "P17": many_workers.many_workers,
    "P19": small_tensors.small_tensors,
    "fresh": fresh_start.fresh_start,
    "footprint": worker_memory.worker_memory,
    "replace": replacement.replacement,
    "stage": stages.stage,
    "tick": training_loop.tick,
    "metrics": observing.metrics,
    "P10": resuming.states,
    "resume": resuming.resume,
    "resume_pipeline": resuming_pipelines.resume_pipeline,
    "seeding": seeding.seeding,
    "tune": tuning.tuning,
    "ray": cluster.cluster,
    "descriptors": endurance.descriptors,
    "devshm": endurance.devshm,
    "endurance": endurance.endurance,
}

_WITH_TARGETS = (
    *(image_batches, small_batches, jpegs, hybrid, epochs, memory),
    *(stages, observing, endurance),
    *(fresh_start, worker_memory, replacement, many_workers, slow_samples, small_tensors),
    *(stored, stores, cluster),
)

TARGETS: tuple[Target, ...] = tuple(
    sorted(
        (target for module in _WITH_TARGETS for target in module.TARGETS),
        key=lambda target: list(CASES).index(target.case),
    )
)


class UnknownCase(ValueError):
    """There is no such case; the message lists those there are."""


def choose(names: Sequence[str], options: Options) -> list[Case]:
    """The cases to run for these names, all of them for none. P9 is worked out from P1's runs.

    Raises
    ------
    UnknownCase
        There is no such case.
    """
    by_lower = {name.lower(): name for name in CASES}
    wanted = []
    for name in names or CASES:
        if name.lower() not in by_lower:
            raise UnknownCase(f"no case {name!r}; there are: {', '.join(CASES)}")
        wanted.append(by_lower[name.lower()])
    wanted = list(dict.fromkeys(wanted))
    if "P1" in wanted and "P9" in wanted:
        wanted.remove("P9")
    return [CASES[name](options) for name in wanted]
