"""metrics: time of a batch that is observed, as a multiple of the time of one that is not."""

from __future__ import annotations

import contextlib
from contextlib import closing
from typing import Any

from benchmarks import measurements, timing
from benchmarks.case import Answer, Case, Options, Spec, Variant
from benchmarks.datasets.plain import ENDLESS
from benchmarks.names import BACKENDS
from benchmarks.targets import Target, at_most

OFF, AGAIN, ON = "off", "off again", "on"


def times_as_long(backend: str, spec: Spec) -> Answer:
    """Ratio of the time of a batch that is observed, to one that is not.

    Two loaders that are not observed, and one that is, stand beside each other, and are asked for some
    batches in turns. The ratio is the median over the turns; that of the two alike is the noise.
    """
    seconds: dict[str, list[float]] = {OFF: [], AGAIN: [], ON: []}
    with contextlib.ExitStack() as stack:
        runs = {
            name: stack.enter_context(closing(running(backend, spec, name))) for name in seconds
        }
        stack.enter_context(measurements.without_collections())
        for _, name in timing.interleaved([*seconds], spec["repeats"]):
            ahead = 4 * max(1, spec["workers"])
            took = timing.window(runs[name], spec["seconds"], warmup=spec["warmup"], ahead=ahead)
            seconds[name].append(took.seconds)

    def against_off(name: str) -> float:
        pairs = zip(seconds[name], seconds[OFF], strict=True)
        return timing.percentile([one / off for one, off in pairs], 0.5)

    details = {
        "noise": against_off(AGAIN),
        "batch_us": timing.percentile(seconds[OFF], 0.5) * 1e6,
    }
    return {"value": against_off(ON), "details": details}


def running(backend: str, spec: Spec, name: str) -> Any:
    """The loader, or the pipeline, of a variant; it is observed if it is `ON`."""
    dataset = measurements.dataset(spec["dataset"], {})
    workers = 0 if backend == "inline" else spec["workers"]
    if not spec["pipeline"]:
        from hybridloader import DataLoader

        return iter(
            DataLoader(
                dataset,
                spec["batch"],
                num_workers=workers,
                backend=backend,
                observe=name == ON,
            )
        )
    from hybridloader import Pipeline

    pipeline = Pipeline.from_dataset(range(ENDLESS))
    pipeline = pipeline.map(dataset.__getitem__, backend=backend, num_workers=workers)
    return pipeline.batch(spec["batch"]).run(observe=name == ON)


def metrics(options: Options) -> Case:
    """Batches of 64 integers and of 8 JPEG files, of loaders and of pipelines of one stage."""
    base: dict[str, Any] = {
        "workers": options.workers,
        "seconds": 0.05 if options.quick else 0.2,
        "repeats": 5 if options.quick else 25,
        "warmup": 10,
    }
    work = {
        "64 ints": {"dataset": "ints", "batch": 64},
        "8 JPEGs": {"dataset": "jpegs", "batch": 8},
    }
    variants = tuple(
        Variant(
            f"{kind}, {name}",
            base | what | {"pipeline": kind == "pipeline"},
            loaders,
            most_rounds=options.most(3),
            seconds=4 * base["seconds"] * base["repeats"],
        )
        for kind, loaders in (("loader", ("inline", *BACKENDS)), ("pipeline", BACKENDS))
        for name, what in work.items()
    )
    title = "the time of a batch that is observed"
    return Case("metrics", title, "times as long", times_as_long, variants, check=False)


TARGETS = (
    Target(
        *("metrics", "<= 1.01 times as long", at_most(1.01, ("inline", *BACKENDS), each=True)),
        why="The two looks at the clock for each `next()` take 0.1 us, which is a hundredth of a batch "
        "of 64 integers. A worker adds up the seconds of each task besides.",
    ),
)
