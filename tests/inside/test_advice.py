"""Advice is taken: each constructor accepts what is advised."""

from __future__ import annotations

import ast
import multiprocessing
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch.utils.data
from support import platforms
from support.recordings import Figures, StageRecord, advice_on, for_start, judge

from hybridloader import DataLoader, Pipeline, StatefulDataLoader, get_worker_info

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")

ITEMS = list(range(24))


class Whole:
    """Samples of which the dataset makes a batch in one call."""

    def __len__(self) -> int:
        return len(ITEMS)

    def __getitem__(self, index: int) -> int:
        return index

    def __getitems__(self, indices: list[int]) -> list[int]:
        return indices


class Stream(torch.utils.data.IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(ITEMS)


def loader(dataset: Any, batch_size: int | None = 2, cls: Any = DataLoader, **given: Any) -> Any:
    return lambda **changed: cls(dataset, batch_size, observe=True, **{**given, **changed})


def pipe(add: Callable[..., Pipeline], **given: Any) -> Any:
    return lambda **changed: add(Pipeline.from_iterable(ITEMS), **{**given, **changed})


def same(item: Any) -> Any:
    return item


async def later(item: Any) -> Any:
    return item


def part() -> list[int]:
    info: Any = get_worker_info()
    return ITEMS[info.id :: info.num_workers]


THREADS: dict[str, Any] = {"backend": "threads", "num_workers": 2}
FORK: dict[str, Any] = {"backend": "fork", "num_workers": 2}
FORKING = {
    "multiprocessing_context": multiprocessing.get_context("fork" if platforms.FORK else "spawn"),
    "num_workers": 2,
}
BOTH, WORKERS = {"num_workers", "threads_per_worker"}, {"num_workers"}

MAKERS: dict[str, tuple[Any, set[str]]] = {
    "threads": (loader(ITEMS, **THREADS), BOTH),
    "fork": (loader(ITEMS, **FORK), BOTH),
    "threads in a worker": (loader(ITEMS, threads_per_worker=2, **THREADS), BOTH),
    "kept workers": (loader(ITEMS, persistent_workers=True, **THREADS), BOTH),
    "a context": (loader(ITEMS, **FORKING), BOTH),
    "with states": (loader(ITEMS, cls=StatefulDataLoader, **THREADS), BOTH),
    "without workers": (loader(ITEMS), {"num_workers", "backend"}),
    "samples alone": (loader(ITEMS, None, **THREADS), WORKERS),
    "whole batches": (loader(Whole(), **THREADS), WORKERS),
    "iterable": (loader(Stream(), **THREADS), WORKERS),
    "iterable, without workers": (loader(Stream()), {"num_workers", "backend"}),
    "step": (pipe(lambda p, **where: p.map(same, **where), **THREADS), BOTH),
    "step in processes": (pipe(lambda p, **where: p.map(same, **where), **FORK), BOTH),
    "step without workers": (pipe(lambda p, **where: p.map(same, **where)), {"backend"}),
    "coroutines": (pipe(lambda p, **where: p.map(later, **where), **THREADS), {"concurrency"}),
    "coroutines without workers": (
        pipe(lambda p, **where: p.map(later, **where)),
        {"concurrency"},
    ),
    "several coroutines": (
        pipe(lambda p, **where: p.map(later, **where), concurrency=4, **FORK),
        {"concurrency"},
    ),
    "readers": (lambda **more: Pipeline.from_iterable(part, **{**THREADS, **more}), WORKERS),
    "an operator": (pipe(lambda p, **where: p.batch(2, **where)), set()),
}


def recorded(made: Any, monkeypatch: pytest.MonkeyPatch) -> Figures:
    """Figures of a short run."""
    found: list[Figures] = []
    monkeypatch.setattr(
        "hybridloader.observe.stats.judge", lambda figures: found.append(figures) or judge(figures)
    )
    if isinstance(made, Pipeline):
        with made.run(observe=True) as run:
            list(run)
            run.stats()
    else:
        iterator = iter(made)
        list(iterator)
        made.stats()
        iterator.close()
    return found[-1]


def changes(advice: str) -> list[dict[str, Any]]:
    """What the advice is to change: options that belong together, or each by itself."""
    named = re.findall(r"(\w+)=('[\w-]+'|\w+)", advice)
    named += [("backend", name) for name in re.findall(r"or ('[\w-]+')\)", advice)]
    if "use threads" in advice:
        named.append(("backend", "'threads'"))
    if "a backend and workers" in advice and "map()" not in advice:
        return [dict(THREADS)]
    found = [(name, ast.literal_eval(value)) for name, value in named]
    if " with backend=" in advice or " and a backend" in advice:
        return [{"backend": "fork", **dict(found)}]
    return [{name: value} for name, value in found]


def may_be(stage: StageRecord, kind: str | None) -> bool:
    if kind == "transport":
        return not stage.in_process
    if kind == "holds-gil":
        return stage.backend == "threads"
    if kind == "blocks-loop":
        return stage.coroutines is not None
    return True


@pytest.mark.parametrize("name", MAKERS)
def test_what_is_advised_is_accepted(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make, waiting = MAKERS[name]
    figures = recorded(make(), monkeypatch)
    stages = [one for one in figures.recording.stages if one.name != "sampler"]
    stage = stages[0] if name == "readers" else stages[-1]
    if stage.coroutines is not None:
        stage = replace(stage, coroutines=stage.coroutines._replace(idle=stage.busy))
    stage = replace(stage, collating=0.0, cpu=0.0, parts=tuple(1.0 for _ in stage.parts))
    taken = set[str]()
    for kind in ("waits", "computes", "holds-gil", "transport", "blocks-loop", None):
        if not may_be(stage, kind):
            continue
        for arrays in (0.0, 1.0):
            advice = advice_on(figures, replace(stage, arrays=arrays), kind)
            for change in changes(advice):
                make(**change)
                if kind == "waits":
                    taken |= set(change)
    assert waiting <= taken, "and these are advised where it waits"
    for change in changes(for_start(stage)):
        make(**change)
