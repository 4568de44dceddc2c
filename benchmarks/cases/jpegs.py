"""P3: JPEG files decoded and resized, where the work dominates."""

from __future__ import annotations

from benchmarks.case import Case, Options, Variant
from benchmarks.cases.image_batches import IMAGE, most_loaders
from benchmarks.measurements import whole_epochs
from benchmarks.names import PROCESS_BACKENDS, WITH_WORKERS
from benchmarks.targets import Target, ahead_of, at_least


def jpegs(options: Options) -> Case:
    spec = {
        "dataset": "jpegs",
        "batch": 32,
        "batch_bytes": 32 * IMAGE,
        "workers": options.workers,
        "limit_workers": options.cores,
        "seconds": 0.5 if options.quick else 1.5,
    }
    variant = Variant("500x375, batch 32", spec, ("together", *most_loaders(options)))
    return Case("P3", "decode and resize JPEGs", "ms / batch", whole_epochs, (variant,), scale=1e3)


_NOT_THE_LOADER = (
    "In one process, in turn, the loader's threads took 21.0 and 22.8 ms a batch in two runs, two bare "
    "threads that hand nothing over 21.4 and 23.1 ms, two processes together 23.4 and 24.9 ms: before "
    "the threads shared their batches. Where this case, with a process for each loader, loses the rest "
    "was not found."
)
TARGETS = (
    Target(
        "P3",
        "threads >= 0.95 of all together",
        at_least(0.95, ("threads",), "together"),
        why=_NOT_THE_LOADER,
    ),
    Target(
        *("P3", "processes >= 0.95 of all together"),
        at_least(0.95, PROCESS_BACKENDS, "together"),
        why="It is 2 to 4 ms of a batch of 32 photographs, and was not found, as with threads.",
    ),
    Target("P3", "ahead of every rival", ahead_of(1, WITH_WORKERS)),
)
