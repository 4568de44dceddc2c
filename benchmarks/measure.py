"""Measurements of one loader, in a separate process that the runner starts and asks.

Each function takes the loader's name, the parameters of the case, and True for a rehearsal, which is not
timed. It returns a value, and a hash of the batches where loaders are compared by them. Nothing large is
imported before a measurement, because fresh workers import this module too.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import itertools
import json
import math
import os
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from benchmarks.loaders import Opened

Spec = dict[str, Any]
Answer = dict[str, Any]
CLOCK = time.perf_counter

_kept: dict[str, Any] = {}
"""What a rehearsal leaves for the rounds: the dataset, lengths of epochs, a store, a state."""


@contextlib.contextmanager
def opened(loader: str, spec: Spec, **more: Any) -> Iterator[Opened]:
    """Open a loader for the work of a case, and close it in the end."""
    from benchmarks.loaders import LOADERS, Work

    names = ("batch", "workers", "start", "keep")
    if loader == "torch" and "torch_workers" in spec:
        spec = spec | {"workers": spec["torch_workers"]}
    options = {name: spec[name] for name in names if name in spec} | more
    running = LOADERS[loader](Work(dataset(spec), **options))
    with contextlib.closing(running):
        yield running


def dataset(spec: Spec) -> Any:
    """Return the dataset of a case, made once in a process, at its length of now."""
    from benchmarks.datasets import DATASETS

    if spec["dataset"] not in DATASETS:
        from benchmarks.tensors import DATASETS
    if "dataset" not in _kept:
        length = [spec["length"]] if "length" in spec else []
        _kept["dataset"] = DATASETS[spec["dataset"]](*length)
    return _kept["dataset"]


@contextlib.contextmanager
def no_collections() -> Iterator[None]:
    """Let the garbage collector leave out the objects that exist now: those of torch take 100 ms."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def digest(batches: Any) -> str:
    """Return a hash of batches: types of numbers, shapes and every byte."""
    import torch

    found = hashlib.blake2b(digest_size=12)

    def add(value: Any) -> None:
        if isinstance(value, torch.Tensor):
            found.update(f"{value.dtype}{tuple(value.shape)}".encode())
            raw: Any = value.contiguous().reshape(-1).view(torch.uint8).numpy()
            found.update(raw)
        elif isinstance(value, (list, tuple)):
            for item in value:
                add(item)
        else:
            found.update(repr(value).encode())

    add(batches)
    return found.hexdigest()


def pace(loader: str, spec: Spec, rehearsal: bool) -> Answer:
    """Seconds a batch, or an item: what a long whole epoch takes more than a short one.

    Batches that were prefetched when the clock started are as many in both, so they cancel.
    """
    short = spec.get("short", 8 * spec["workers"] + 8)
    if rehearsal:
        with opened(loader, spec) as running:
            first = digest(list(itertools.islice(running.epoch(), 2)))
        each = _epoch(loader, spec, 3 * short) / (3 * short)
        _kept["long"] = 2 * short + math.ceil(spec["seconds"] / each)
        return {"digest": first}
    long = _kept["long"]
    seconds = _epoch(loader, spec, long) - _epoch(loader, spec, short)
    return {"value": seconds / (long - short) / (spec["batch"] if spec.get("items") else 1)}


def _epoch(loader: str, spec: Spec, batches: int) -> float:
    """Return the seconds of a whole epoch of so many batches, from the first one to the last one."""
    dataset(spec).length = batches * spec["batch"]
    with no_collections(), opened(loader, spec) as running:
        items = running.epoch()
        next(items)
        began = CLOCK()
        count = 1 + sum(1 for _ in items)
        seconds = CLOCK() - began
    if count != batches:
        raise RuntimeError(f"an epoch of {batches} batches had {count}")
    return seconds


def whole(loader: str, spec: Spec, rehearsal: bool) -> Answer:
    """Seconds of an epoch, from making the loader to its last batch; each sample must come once."""
    with no_collections():
        began = CLOCK()
        with opened(loader, spec) as running:
            batches = list(running.epoch())
            seconds = CLOCK() - began
    found = [int(index) for batch in batches for index in batch]
    ordered = sorted(found) if loader.endswith("any order") else found
    return {"value": seconds, "digest": digest(ordered)}


def stored(loader: str, spec: Spec, rehearsal: bool) -> Answer:
    """Seconds of an epoch over stored samples; each must come once, in order where the case has one."""
    import torch

    from benchmarks.store import ObjectStore
    from benchmarks.stored import EPOCHS, archives, numbers

    torch.set_num_threads(1)
    spec = dict(spec)
    if spec["storage"] == "store":
        if "store" not in _kept:
            _kept["store"] = ObjectStore(os.path.dirname(archives(spec)[0]))
        spec["url"] = _kept["store"].url
    found: list[int] = []
    with no_collections():
        began = CLOCK()
        for batch in EPOCHS[spec["storage"]][loader](spec):
            found += numbers(batch)
        seconds = CLOCK() - began
    if spec["storage"] == "disk" and loader != "webdataset":  # its workers take turns by archive
        return {"value": seconds, "digest": digest(found)}
    return {"value": seconds, "digest": digest(sorted(found))}


def first_batch(loader: str, spec: Spec, rehearsal: bool) -> Answer:
    """Seconds from making the loader to its first batch; rehearsed with one worker, for the imports."""
    spec = spec | {"workers": 1} if rehearsal else spec
    dataset(spec)
    gc.collect()
    began = CLOCK()
    with opened(loader, spec) as running:
        first = next(running.epoch())
        seconds = CLOCK() - began
    return {"value": seconds, "digest": digest(first)}


def turn(loader: str, spec: Spec, rehearsal: bool) -> Answer:
    """Median seconds from the last batch of an epoch to the first one of the next, workers kept."""
    found, until = [], CLOCK() + spec["seconds"]
    with no_collections(), opened(loader, spec) as running:
        seen = list(running.epoch())
        batches = running.epoch()
        while len(found) < 3 or CLOCK() < until:
            last = 0.0
            for _ in batches:
                last = CLOCK()  # finding out that there are no more is part of the turn
            batches = running.epoch()
            next(batches)
            found.append(CLOCK() - last)
    return {"value": statistics.median(found), "digest": digest(seen)}


def worker_memory(loader: str, spec: Spec, rehearsal: bool) -> Answer:
    """MB of PSS that each worker after the first adds, when each has delivered two batches."""
    from benchmarks.usage import memory_mb

    found = []
    for workers in (1, spec["workers"]):
        with opened(loader, spec, workers=workers) as running:
            for _ in itertools.islice(running.epoch(), 2 * workers):
                pass
            found.append(memory_mb(os.getpid(), files=True))
    return {"value": (found[1] - found[0]) / (spec["workers"] - 1)}


def resume(loader: str, spec: Spec, rehearsal: bool) -> Answer:
    """Seconds from nothing to the batch after a state; torch's loader has none, and loads all before."""
    import torch

    made, grain = _with_states(loader, spec), loader == "Grain threads"
    if rehearsal:
        batches = iter(made)
        for _ in itertools.islice(batches, spec["at"]):
            pass
        if loader != "torch":
            _kept["state"] = batches.get_state() if grain else made.state_dict()
        return {}
    began = CLOCK()
    if not grain and loader != "torch":
        made.load_state_dict(_kept["state"])
    batches = iter(made)
    if grain:
        batches.set_state(_kept["state"])
    for _ in itertools.islice(batches, spec["at"] if loader == "torch" else 0):
        pass
    batch = next(batches)
    seconds = CLOCK() - began
    return {"value": seconds, "digest": digest(torch.as_tensor(batch))}


def _with_states(loader: str, spec: Spec) -> Any:
    data, batch, workers = dataset(spec), spec["batch"], spec["workers"]
    if loader == "Grain threads":
        from benchmarks.loaders import Work, grain_dataset

        return grain_dataset(Work(data, batch, workers), 0, workers)
    more = {} if loader.startswith("torch") else {"backend": loader}
    if loader == "torch":
        from torch.utils.data import DataLoader as Loader
    elif loader == "torchdata stateful":
        from torchdata.stateful_dataloader import StatefulDataLoader as Loader
    else:
        from hybridloader import DataLoader as Loader
    return Loader(data, batch, num_workers=workers, **more)


MEASURES: dict[str, Callable[[str, Spec, bool], Answer]] = {
    function.__name__: function
    for function in (pace, whole, stored, first_batch, turn, worker_memory, resume)
}


def main() -> None:
    """Answer the runner's questions, a line of JSON each, until there are no more."""
    warnings.simplefilter("ignore")
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a loader prints is no answer
    for line in sys.stdin:
        asked = json.loads(line)
        try:
            measure = MEASURES[asked["measure"]]
            answer = measure(asked["loader"], asked["spec"], asked["rehearsal"])
        except Exception as error:
            answer = {"failed": f"{type(error).__name__}: {error}".splitlines()[0][:200]}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
