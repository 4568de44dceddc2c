"""ray: batches from actors of a Ray cluster that is this machine alone."""

from __future__ import annotations

from benchmarks.case import Case, Options, Variant
from benchmarks.cases.image_batches import IMAGE, SIZES
from benchmarks.measurements import whole_epochs
from benchmarks.names import BARE_CALLS, RAY, RAY_DATA
from benchmarks.results import Results
from benchmarks.targets import NOT_MEASURED, Found, Judge, Target, ahead_of, short

DEEP = "64 ints, 32 ahead"
"""Variant in which workers may be as far ahead as Ray Data's, which hand over whole blocks."""


def cluster(options: Options) -> Case:
    """Batches of 64 integers, and of 38 MB; beside processes of this machine without a cluster."""
    loaders = ("shared-memory", RAY, BARE_CALLS, *options.taking_part(RAY_DATA))
    # Ray Data hands nothing over before a block of 128 MB is full, or the dataset ends.
    ints = {"dataset": "ints", "arguments": {"length": 64 << 15}, "batch": 64}
    base = {"workers": options.workers, "seconds": 1.0 if options.quick else 3.0}
    images = {
        "dataset": "images",
        "arguments": {"dtype": "uint8"},
        "batch": SIZES["38 MB"],
        "batch_bytes": SIZES["38 MB"] * IMAGE,
    }
    variants = tuple(
        Variant(
            *(name, base | spec, tuple(name for name in loaders if name not in without)),
            again=RAY,
            most_rounds=options.most(3, quick=1),
            seconds=15.0,
        )
        for name, spec, without in (
            ("64 ints", ints, ()),
            (DEEP, ints | {"prefetch": 32, "short": 1024}, (BARE_CALLS,)),
            ("38 MB uint8", images, ()),
        )
    )
    title = "workers on a Ray cluster of one machine"
    return Case("ray", title, "ms / batch", whole_epochs, variants, scale=1e3, check=False)


def within(milliseconds: float, variant: str) -> Judge:
    """A batch takes at most so long."""

    def judge(results: Results, case: str) -> Found:
        for row in results.of(case, variant):
            if row.loader == RAY:
                return f"{short(row.median)} ms", row.median <= milliseconds
        return NOT_MEASURED

    return judge


_CALL = "A bare call of an actor, which returns one such batch, takes longer than that."
TARGETS = (
    Target("ray", "64 ints: <= 0.8 ms a batch", within(0.8, "64 ints"), why=_CALL),
    Target("ray", "38 MB: <= 25 ms a batch", within(25, "38 MB uint8")),
    Target("ray", f"{DEEP}: ahead of Ray Data", ahead_of(1, (RAY,), RAY_DATA, DEEP)),
    Target("ray", "38 MB: ahead of Ray Data", ahead_of(1, (RAY,), RAY_DATA, "38 MB")),
)
