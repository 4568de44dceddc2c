"""resume_pipeline: from a state far within an epoch of a pipeline to its next item."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

from benchmarks.case import Answer, CannotDo, Case, Options, Spec, Variant, check_installed

TORCHDATA, GRAIN = "torchdata nodes", "Grain map"
STEPS = ("map", "filter", "flat_map", "batch_by", "shuffle")
BUFFER = 1000
"""Items in the buffer of a shuffle."""

MOST = 97
"""Greatest cost of a batch."""


class Counting:
    """Function of a user that counts its calls, before the step that is measured."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, item: Any) -> int:
        self.calls += 1
        return int(item)


class Numbers:
    """Iterable of the numbers below `length` with a state, for torchdata."""

    def __init__(self, length: int) -> None:
        self.length, self.at = length, 0

    def __iter__(self) -> Iterator[int]:
        while self.at < self.length:
            self.at += 1
            yield self.at - 1
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


def kept(item: int) -> bool:
    """Tell whether an item is kept: two of three."""
    return item % 3 != 0


def doubled(item: int) -> list[int]:
    """Return two items of one."""
    return [item, -item]


def cost(item: int) -> int:
    """Return the cost of an item within a batch."""
    return item % 7 + 1


Opened = tuple[Any, Callable[[], Any]]
"""Iterator, and the function that returns its state."""


def _ours(step: str, length: int, work: Counting, state: Any) -> Opened:
    from hybridloader import Pipeline, PipelineLoader

    pipe = Pipeline.from_dataset(range(length)).map(work)
    if step == "filter":
        pipe = pipe.filter(kept)
    elif step == "flat_map":
        pipe = pipe.flat_map(doubled)
    elif step == "batch_by":
        pipe = pipe.batch_by(cost, MOST, collate_fn=list)
    elif step == "shuffle":
        pipe = pipe.shuffle(BUFFER)
    loader = PipelineLoader(pipe, seed=0)
    if state is not None:
        loader.load_state_dict(state)
    return iter(loader), loader.state_dict


def _torchdata(step: str, length: int, work: Counting, state: Any) -> Opened:
    from torchdata.nodes import IterableWrapper, Loader, Mapper, Unbatcher

    node: Any = Mapper(IterableWrapper(Numbers(length)), work)
    if step == "flat_map":
        node = Unbatcher(Mapper(node, doubled))
    elif step != "map":
        raise CannotDo(f"no {step}")
    loader = Loader(node)
    if state is not None:
        loader.load_state_dict(state)
    return iter(loader), loader.state_dict


def _grain(step: str, length: int, work: Counting, state: Any) -> Opened:
    import logging

    logging.getLogger("absl").setLevel(logging.ERROR)
    import grain

    dataset: Any = grain.MapDataset.range(length).map(work)
    if step == "filter":
        dataset = dataset.filter(kept)
    elif step == "flat_map":
        dataset = grain.experimental.FlatMapMapDataset(dataset, _fan_out())
    elif step == "shuffle":
        dataset = grain.experimental.WindowShuffleMapDataset(dataset, window_size=BUFFER, seed=0)
    elif step == "batch_by":
        raise CannotDo("packs, but batches by no cost")
    items = iter(dataset.to_iter_dataset(grain.ReadOptions(num_threads=0)))
    if state is not None:
        items.set_state(state)
    return items, items.get_state


def _fan_out() -> Any:
    import grain

    class Doubling(grain.experimental.FlatMapTransform):  # type: ignore[misc]
        max_fan_out = 2

        def flat_map(self, element: int) -> list[int]:
            return doubled(element)

    return Doubling()


def _opener(loader: str) -> Callable[[str, int, Counting, Any], Opened]:
    if loader not in (TORCHDATA, GRAIN):
        return _ours
    check_installed(loader)
    return _torchdata if loader == TORCHDATA else _grain


def next_item_after_a_state(loader: str, spec: Spec) -> Answer:
    """Seconds from loading a state at the last of the `parts` of the data to the next item.

    All are run in the calling thread, so that no start of a worker is measured. The median of `repeats`
    is the value; beside it the time at the first of the parts, and the calls of the user's function
    before that item.
    """
    open_, length, step = _opener(loader), spec["length"], spec["step"]
    work = Counting()
    items, state_dict = open_(step, length, work, None)
    found = []
    for part in spec["parts"]:
        while work.calls < part * length:
            next(items)
        state = state_dict()
        wanted = next(items)
        seconds = []
        for _ in range(spec["repeats"]):
            again = Counting()
            began = time.perf_counter()
            resumed, _ = open_(step, length, again, state)
            item = next(resumed)
            seconds.append(time.perf_counter() - began)
            if item != wanted:
                raise RuntimeError(f"the state led to {item!r}, not to {wanted!r}")
        found.append((statistics.median(seconds), again.calls))
    (first, _), (last, calls) = found[0], found[-1]
    return {"value": last, "details": {"early": first, "calls": calls}}


def resume_pipeline(options: Options) -> Case:
    """resume_pipeline: each step at 90 % of a million items."""
    length = 20_000 if options.quick else 1_000_000
    rivals = options.taking_part(TORCHDATA, GRAIN)
    variants = tuple(
        Variant(
            f"{step}, 90 % of {length:,} items",
            {"step": step, "length": length, "parts": [0.1, 0.9], "repeats": 5},
            ("inline", *rivals),
            most_rounds=options.most(3, quick=1),
        )
        for step in STEPS
    )
    title = "from a state of a pipeline to the next item"
    return Case(
        "resume_pipeline", title, "ms", next_item_after_a_state, variants, scale=1e3, check=False
    )
