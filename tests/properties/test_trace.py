"""Traces of loaders and pipelines: events, tracks and refusals."""

from __future__ import annotations

import gc
import json
import math
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.failing_datasets import Samples
from support.platforms import needs_fork
from support.recordings import Event, chrome_events
from support.traces import ReadTrace

import hybridloader
from hybridloader import DataLoader, Pipeline, Retry, Skip


class Work:
    """Samples of which each takes half a millisecond."""

    def __init__(self, length: int = 64, bad: int = -1, deadly: str = "") -> None:
        self.length, self.bad, self.deadly = length, bad, deadly

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        if index == self.bad and self.deadly:
            if not os.path.exists(self.deadly):
                open(self.deadly, "w").close()
                os._exit(3)
        elif index == self.bad:
            raise ValueError(index)
        until = time.perf_counter() + 5e-4
        while time.perf_counter() < until:
            pass
        return torch.full((64,), index)


def loaded(path: Path, dataset: Any = None, **options: Any) -> ReadTrace:
    with hybridloader.observe.trace(path):
        for _ in DataLoader(Work() if dataset is None else dataset, 4, **options):
            pass
    return ReadTrace(path)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run.json.gz"


@pytest.mark.parametrize(
    ("backend", "workers"),
    [
        ("inline", 0),
        ("threads", 2),
        ("fork", 2),
        pytest.param("spawn", 1, marks=pytest.mark.full),
    ],
)
def test_a_trace_of_each_backend(path: Path, backend: str, workers: int) -> None:
    trace = loaded(path, num_workers=workers, backend=backend)
    assert len(trace.named("iter()")) == 1
    assert len(trace.named("next()")) == 17, "16 batches and the end"
    tasks = trace.named("task")
    # Threads share the samples of tasks; the last task of a worker may never be reported.
    assert 16 - 2 * workers <= len(tasks) <= 16
    assert all("task" in trace.within(event) for event in trace.named("collate"))
    assert all(trace.within(event)[0] == "task" for event in trace.named("fetch"))
    tracks = {trace.track(event) for event in tasks}
    if workers == 0:
        assert tracks == {"MainThread"}
        assert all("next()" in trace.within(event) for event in tasks)
        return
    assert tracks <= {f"DataLoader worker {worker}" for worker in range(workers)}
    opened = {event["args"]["task"]: event for event in trace.named("open")}
    assert {event["args"]["task"] for event in tasks} <= opened.keys()
    assert all(trace.within(event)[0] == "next()" for event in opened.values())
    processes = {event["pid"] for event in tasks}
    assert (os.getpid() in processes) == (backend == "threads")
    assert trace.whole["otherData"]["dropped_events"] == 0


def test_short_tasks_are_reported_together(path: Path) -> None:
    trace = loaded(path, list(range(40_000)), num_workers=1, backend="fork")
    tasks, others = trace.named("task"), trace.named("tasks")
    reported = len(tasks) + sum(event["args"]["tasks"] for event in others)
    assert others
    assert reported <= 10_000
    assert len(tasks) < reported / 2, "one in 10 ms, besides the ones that a busy machine made long"


def test_several_loaders_and_epochs_have_names_of_their_own(path: Path) -> None:
    with hybridloader.observe.trace(path):
        one = DataLoader(Work(8), 4, num_workers=1, backend="threads")
        other = DataLoader(Work(8), 4, num_workers=1, backend="threads")
        for loader in (one, other, one):
            list(loader)
        del one, other, loader
        gc.collect()
        list(DataLoader(Work(8), 4, num_workers=1, backend="threads"))
    names = {name for name in ReadTrace(path).tracks.values() if "worker" in name}
    assert names == {f"DataLoader{number} worker 0" for number in ("", " 2", " 3")}


def test_a_restart(path: Path, tmp_path: Path) -> None:
    dataset = Work(bad=20, deadly=str(tmp_path / "died"))
    trace = loaded(path, dataset, num_workers=2, backend="fork", on_worker_death="restart")
    (replaced,) = trace.instants("worker restarted")
    assert replaced["args"]["stage"] == "DataLoader"
    assert len({event["pid"] for event in trace.named("task")}) == 3
    assert len(trace.named("next()")) == 17


def test_retried_calls_and_samples_of_other_threads(path: Path) -> None:
    failed: list[int] = []

    def flaky(index: int) -> int:
        if index == 5 and len(failed) < 2:
            failed.append(index)
            raise OSError(index)
        time.sleep(5e-4)
        return index

    words: Any = {"num_workers": 1, "backend": "threads", "threads_per_worker": 2}
    trace = loaded(path, Samples(flaky, 64), on_error=Retry(3, 0), **words)
    (retried,) = trace.instants("retried")
    assert retried["args"] == {"stage": "DataLoader", "calls": 2}
    assert "DataLoader worker 0, more threads" in map(trace.track, trace.named("sample"))


def test_a_trace_that_is_lost_gives_way_to_the_programs_error(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    with pytest.raises(FileNotFoundError), hybridloader.observe.trace(folder / "run.json"):
        folder.rmdir()
    folder.mkdir()
    running = hybridloader.observe.trace(folder / "run.json")
    with pytest.warns(match="the trace was lost: "), pytest.raises(KeyError), running:
        raise KeyError(folder.rmdir())


def test_skipped_samples_and_errors(path: Path) -> None:
    trace = loaded(path, Work(bad=5), num_workers=1, backend="threads", on_error=Skip())
    (skipped,) = trace.instants("skipped")
    assert skipped["args"]["index"] == 5
    assert "ValueError" in skipped["args"]["error"]


@needs_fork  # its worker
def test_a_trace_that_an_error_ends_is_written(path: Path) -> None:
    with pytest.raises(ValueError, match="5"):
        loaded(path, Work(bad=5), num_workers=1, backend="fork")
    trace = ReadTrace(path)
    assert trace.instants("error")[0]["args"]["task"] == 1
    assert trace.instants("ValueError")
    assert len(trace.named("task")) >= 1


def test_a_trace_keeps_the_latest_events_and_counts_the_others(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    with hybridloader.observe.trace(path, max_events=10):
        list(DataLoader(Work(), 4, num_workers=0, backend="inline"))
    trace = ReadTrace(path)
    assert len([event for event in trace.events if event["ph"] in "Xi"]) == 10
    assert trace.whole["otherData"]["dropped_events"] > 50


def test_details_are_json_whatever_they_are(path: Path) -> None:
    class Odd(Exception):
        def __str__(self) -> str:
            raise RuntimeError("not today")

    running = hybridloader.observe.trace(path)
    with pytest.raises(Odd), running:
        raise Odd(running.instant("odd", index={(1, 2): 3}, share=math.nan, sizes=[1]))
    (odd,) = ReadTrace(path).instants("odd")
    assert odd["args"] == {"index": "{(1, 2): 3}", "share": "nan", "sizes": "[1]"}
    assert ReadTrace(path).instants("Odd")


def test_what_is_refused_begins_no_trace(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"\.json or \.json\.gz"):
        hybridloader.observe.trace(tmp_path / "run.html")
    missing = hybridloader.observe.trace(tmp_path / "none" / "run.json")
    with pytest.raises(FileNotFoundError, match="the trace can't be written"), missing:
        raise AssertionError("the block was begun")
    with hybridloader.observe.trace(tmp_path / "a.json") as outer:
        inner = hybridloader.observe.trace(tmp_path / "b.json")
        with pytest.raises(RuntimeError, match="runs already"), inner:
            raise AssertionError("the block was begun")
        list(DataLoader(Work(4), 4, num_workers=0))
        assert not (tmp_path / "a.json").exists()
    assert len(ReadTrace(tmp_path / "a.json").named("next()")) == 2, "the outer one went on"
    with pytest.raises(RuntimeError, match="has begun before"):
        outer.__enter__()
    assert not (tmp_path / "b.json").exists()


# -- pipelines, and torch.profiler ------------ ------------------------------------------------------


def busy(item: Any) -> Any:
    until = time.perf_counter() + 3e-4
    while time.perf_counter() < until:
        pass
    return item


def decode(item: int) -> int:
    return int(busy(item))


def crop(item: int) -> int:
    if item == 7:
        raise ValueError(item)
    return int(busy(item))


def inline(item: int) -> int:
    return int(busy(item))


PIPE = (
    Pipeline.from_iterable(range(60))
    .map(decode, backend="threads", num_workers=2)
    .map(crop, backend="fork", num_workers=2, on_error=Skip())
    .map(inline)
    .batch(4)
)


def test_a_hybrid_pipeline(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    with hybridloader.observe.trace(path), PIPE.run() as run:
        assert len(list(run)) == 15
    trace = ReadTrace(path)
    for name, worker in (("map(decode)", "map(decode) worker"), ("map(crop)", "map(crop) worker")):
        steps = trace.named(name)
        assert len(steps) >= 15  # 60 items; of short ones on a busy machine not each has a slice
        assert all(trace.track(event).startswith(worker) for event in steps)
        assert all(trace.within(event) == ["fetch", "task"] for event in steps)
    assert all(trace.track(event) == "MainThread" for event in trace.named("next()"))
    assert len(trace.named("map(inline)")) == 59
    (skipped,) = trace.instants("skipped")
    assert skipped["args"]["stage"] == "map(crop)"
    assert {trace.track(task).rpartition(" worker")[0] for task in trace.named("task")} == {
        "map(decode)",
        "map(crop)",
    }
    assert os.getpid() in {event["pid"] for event in trace.named("map(decode)")}
    assert os.getpid() not in {event["pid"] for event in trace.named("map(crop)")}


# -- Chrome's form: slices that nest in seconds nest in whole nanoseconds ----------------------------

LOOKS = st.lists(st.tuples(st.integers(0, 3), st.floats(0, 1e-3)), min_size=2, max_size=60)


@given(st.floats(0, 1e6), LOOKS)
def test_slices_stay_within_one_another(
    tmp_path_factory: pytest.TempPathFactory, clock: float, looks: list[tuple[int, float]]
) -> None:
    """Each look at the clock ends some slices and begins another."""
    events: list[Event] = []
    begun: list[float] = []
    for ends, seconds in [*looks, (len(looks), 0.0)]:
        clock += seconds
        for _ in range(min(ends, len(begun))):
            events.append(Event("X", (7, "main"), f"{len(begun)}", begun.pop(), clock, {}))
        begun.append(clock)
    made = chrome_events(events, {(7, "main"): "MainThread"}, {7: "your program"})
    path = tmp_path_factory.mktemp("trace") / "run.json"
    path.write_text(json.dumps({"traceEvents": made}))
    assert len(ReadTrace(path).slices) == len(events) > 0, "and it has looked at how they nest"
