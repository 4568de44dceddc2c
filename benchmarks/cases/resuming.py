"""P10 and resume: the time of a state at every step, and of going on in the middle."""

from __future__ import annotations

import statistics
import time
from typing import Any

from benchmarks.case import Answer, Case, Options, Spec, Variant, check_installed
from benchmarks.datasets.plain import Ints

TORCHDATA = "torchdata stateful"

BATCH = 256


def _loader(name: str, length: int, workers: int, *, shuffled: bool) -> Any:
    if name == TORCHDATA:
        check_installed(name)
        from torchdata.stateful_dataloader import StatefulDataLoader

        return StatefulDataLoader(Ints(length), BATCH, num_workers=workers, shuffle=shuffled)
    from hybridloader import DataLoader
    from hybridloader.sampling import ShuffleSampler

    form, _, sampler = name.partition(", ")
    backend = None if workers == 0 else form
    options: dict[str, Any] = {"num_workers": workers, "backend": backend}
    if sampler:
        options["sampler"] = ShuffleSampler(length, seed=0)
    else:
        options["shuffle"] = shuffled
    return DataLoader(Ints(length), BATCH, **options)  # type: ignore[arg-type]  # it need not be torch's


def state_every_step(loader: str, spec: Spec) -> Answer:
    """Seconds that ``state_dict()`` takes, called after every batch: the median of the calls.

    Beside it the whole step, because torchdata does its part of the work there.
    """
    opened = _loader(loader, spec["length"], spec["workers"], shuffled=True)
    items, taken, steps = iter(opened), [], []
    for _ in range(spec["steps"]):
        before = time.perf_counter()
        next(items)
        began = time.perf_counter()
        opened.state_dict()
        now = time.perf_counter()
        taken.append(now - began)
        steps.append(now - before)
    _close(items)
    details = {"longest": max(taken), "step": statistics.median(steps)}
    return {"value": statistics.median(taken), "details": details}


def go_on_in_the_middle(loader: str, spec: Spec) -> Answer:
    """Seconds from a state in the middle of the samples to the first batch."""
    length = spec["length"]
    opened = _loader(loader, length, 0, shuffled=False)
    items = iter(opened)
    next(items)
    middle = length // 2 // BATCH
    state = _moved(opened.state_dict(), middle)
    other = _loader(loader, length, 0, shuffled=False)
    began = time.perf_counter()
    other.load_state_dict(state)
    first = next(iter(other))
    seconds = time.perf_counter() - began
    if "," not in loader and first.tolist()[0] != middle * BATCH:  # in order, but for our sampler
        raise RuntimeError(f"the state led to sample {first.tolist()[0]}, not to the middle")
    return {"value": seconds}


def _moved(state: dict[str, Any], batches: int) -> dict[str, Any]:
    """The state of a run that is `batches` further, edited, as a run that long would take minutes."""
    state = dict(state)
    within = state["_index_sampler_state"] or {}
    for holder, name, value in (
        (state, "_sampler_iter_yielded", batches),
        (state, "_num_yielded", batches),
        (within, "samples_yielded", batches * BATCH),
        (state.get("_sampler_iter_state") or {}, "samples_yielded", batches * BATCH),
        (within.get("sampler_state") or {}, "position", batches * BATCH),
    ):
        if name in holder:
            holder[name] = value
    own = state.get("_hybridloader")
    if own is not None:  # not an edit: as it would have been written there
        own.update(counts=[batches, batches], samples=batches * BATCH, check=None)
    return state


def _close(items: Any) -> None:
    for name in ("close", "_shutdown_workers"):
        close = getattr(items, name, None)
        if close is not None:
            close()
            return


def states(options: Options) -> Case:
    """P10: a state at every step."""
    length = 100_000 if options.quick else 10_000_000
    loaders = ("threads", "threads, ours", *options.taking_part(TORCHDATA))
    variants = tuple(
        Variant(
            f"{length:,} samples, {workers} workers",
            {"length": length, "workers": workers, "steps": 50 if options.quick else 300},
            loaders,
            most_rounds=options.most(3, quick=1),
        )
        for workers in (0, 2)
    )
    title = "a state at every step, shuffled"
    return Case("P10", title, "us / state", state_every_step, variants, scale=1e6, check=False)


def resume(options: Options) -> Case:
    """resume: from a state in the middle to the first batch."""
    length = 1_000_000 if options.quick else 100_000_000
    variant = Variant(
        f"the middle of {length:,} samples",
        {"length": length},
        ("threads", "threads, ours", *options.taking_part(TORCHDATA)),
        most_rounds=options.most(3, quick=1),
    )
    title = "from a state to the first batch"
    return Case("resume", title, "ms", go_on_in_the_middle, (variant,), scale=1e3, check=False)
