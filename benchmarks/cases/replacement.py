"""replace: time from the death of a worker to its replacement's first sample."""

from __future__ import annotations

import tempfile
from contextlib import closing
from pathlib import Path

from benchmarks.case import Answer, Case, Options, Spec, Variant
from benchmarks.names import FRESH
from benchmarks.targets import Target, at_most


def back_to_work(loader: str, spec: Spec) -> Answer:
    """Seconds from a worker's SIGKILL, in a sample, to the first sample of the one in its place.

    Both processes read the machine's monotonic clock themselves. The sample is late enough for every
    worker to have begun: tasks of a worker are at most two ahead of the batch that the loop waits for.
    """
    from benchmarks.datasets.catalogue import DATASETS
    from benchmarks.loaders.dataloaders import open_ours
    from benchmarks.loaders.work import Work

    workers = spec["workers"]
    with tempfile.TemporaryDirectory() as folder:
        note = Path(folder) / "died"
        dataset = DATASETS[spec["dataset"]](20 * workers, 10 * workers, str(note))
        work = Work(dataset, 1, workers)
        with closing(open_ours(loader, work, on_worker_death="restart")) as running:
            since = {int(pid): float(first) for pid, first in running.epoch()}
        died = float(note.read_text())
    (late,) = (first for first in since.values() if first > died)
    return {"value": late - died, "details": {"processes": len(since)}}


def replacement(options: Options) -> Case:
    """Two workers, one of which dies; they need torch, or none."""
    variants = tuple(
        Variant(words, {"dataset": name, "workers": 2}, ("fork", *FRESH))
        for words, name in (("tensors", "dying tensors"), ("ints", "dying"))
    )
    title = "from a worker's death to its replacement's first sample"
    return Case("replace", title, "ms", back_to_work, variants, scale=1e3, check=False)


TARGETS = (Target("replace", "<= 100 ms", at_most(100, FRESH[:1])),)
