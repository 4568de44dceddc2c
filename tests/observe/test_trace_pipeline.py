"""Traces of pipelines, by the command, and beside torch.profiler's."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from support.traces import ReadTrace, nanoseconds
from torch.profiler import ProfilerActivity, profile, record_function

import hybridloader
from hybridloader import DataLoader, Pipeline, Skip
from hybridloader.observe import merge
from hybridloader.observe.tracing import Event, chrome_events


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


def test_a_restart_in_a_pipeline(tmp_path: Path) -> None:
    marker = tmp_path / "died"

    def die_once(item: int) -> Any:
        if item == 30 and not marker.exists():
            marker.touch()
            os._exit(3)
        return busy(item)

    pipe = Pipeline.from_iterable(range(60)).map(
        die_once, backend="fork", num_workers=1, on_worker_death="restart"
    )
    with hybridloader.observe.trace(tmp_path / "run.json"), pipe.run() as run:
        assert list(run) == list(range(60))
    trace = ReadTrace(tmp_path / "run.json")
    assert len(trace.instants("worker restarted")) == 1
    assert len({event["pid"] for event in trace.named("task")}) == 2


def test_epochs_of_a_pipeline_go_on_on_the_same_tracks(tmp_path: Path) -> None:
    pipe = Pipeline.from_iterable(range(20)).map(decode, backend="threads", num_workers=1).batch(4)
    with hybridloader.observe.trace(tmp_path / "run.json"), pipe.epochs(2) as epochs:
        for run in epochs:
            list(run)
    trace = ReadTrace(tmp_path / "run.json")
    assert list(trace.tracks.values()).count("map(decode) worker 0") == 1


@contextlib.contextmanager
def profiled(path: Path) -> Any:
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        yield
    profiler.export_chrome_trace(str(path))


def test_merging_with_a_trace_of_torchs_profiler(tmp_path: Path, capfd: Any) -> None:
    ours, theirs, out = tmp_path / "ours.json.gz", tmp_path / "theirs.json", tmp_path / "both.json"
    loader = DataLoader(list(range(64)), 8, num_workers=1, backend="fork")  # type: ignore[arg-type]
    with hybridloader.observe.trace(ours), profiled(theirs):
        for batch in loader:
            with record_function("training step"):
                torch.mm(torch.ones(64, 64), torch.ones(64, 64)).sum() + batch.sum()
    merge(ours, theirs, out)
    whole = json.loads(out.read_text())
    before = json.loads(theirs.read_text())
    shift = before["baseTimeNanoseconds"] - whole["baseTimeNanoseconds"]
    for event, old in zip(whole["traceEvents"], before["traceEvents"], strict=False):
        assert {**event, "ts": 0} == {**old, "ts": 0}
        assert abs(nanoseconds(event["ts"]) - nanoseconds(old["ts"]) - shift) <= 2
    own = [event for event in whole["traceEvents"] if event.get("cat") == "hybridloader"]
    taken = {(event["pid"], event["tid"]) for event in before["traceEvents"]}
    assert own
    assert not {(event["pid"], event["tid"]) for event in own if event["ph"] == "X"} & taken
    named = [
        event
        for event in whole["traceEvents"]
        if "enumerate(DataLoader)#" in event["name"] and event["ph"] == "X"
    ]
    nexts = [event for event in own if event["name"] == "next()"]
    # The same calls, under torch's name and ours, by clocks that agree within a millisecond.
    assert len(named) == 9
    assert nexts
    for event in nexts:
        middle = event["ts"] + event["dur"] / 2
        assert any(n["ts"] - 1e3 <= middle <= n["ts"] + n["dur"] + 1e3 for n in named), event
    capfd.readouterr()  # its notes


def test_merging_moves_tracks_that_are_taken() -> None:
    from hybridloader.observe.tracing import merged

    events = [Event("X", (10, "main"), "next()", 1.0, 2.0, {})]
    made = chrome_events(events, {(10, "main"): "MainThread"}, {10: "your program"})
    ours = {"baseTimeNanoseconds": 5_000, "traceEvents": made}
    theirs = {
        "baseTimeNanoseconds": 2_000,
        "traceEvents": [{"ph": "X", "pid": 10, "tid": 1, "name": "step", "ts": 1.0, "dur": 1.0}],
        "traceName": "theirs",
    }
    both = merged(ours, theirs)
    (moved,) = [event for event in both["traceEvents"] if event["name"] == "next()"]
    assert moved["tid"] != 1
    assert nanoseconds(moved["ts"]) == 1_000_000_000
    (name,) = [event for event in both["traceEvents"] if event["name"] == "thread_name"]
    assert name["tid"] == moved["tid"]
    (step,) = [event for event in both["traceEvents"] if event["name"] == "step"]
    assert step["ts"] == 1.0 - 3.0
    assert both["baseTimeNanoseconds"] == 5_000
    assert both["traceName"] == "theirs"


@pytest.mark.parametrize(
    ("text", "what"),
    [("", "not JSON"), ("[]", "no list"), ('{"traceEvents": []}', "no 'baseTimeNanoseconds'")],
)
def test_merging_what_is_no_trace(tmp_path: Path, text: str, what: str) -> None:
    (tmp_path / "bad.json").write_text(text)
    with pytest.raises(ValueError, match=what):
        merge(tmp_path / "bad.json", tmp_path / "bad.json", tmp_path / "out.json")
    assert not (tmp_path / "out.json").exists()


SCRIPT = """
from torch.utils.data import DataLoader

if __name__ == "__main__":
    for batch in DataLoader(list(range(64)), 8, num_workers=1):
        pass
    raise SystemExit(5)
"""


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "hybridloader", "run", *arguments]
    rank = {**os.environ, "RANK": "3"}  # as torchrun sets it
    return subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=100, env=rank
    )


def test_the_command(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    done = run(tmp_path, "--trace", "run-$RANK.json.gz", "train.py")
    assert done.returncode == 5, done.stderr
    trace = ReadTrace(tmp_path / "run-3.json.gz")
    assert trace.named("next()")
    assert trace.named("task")
    for file, told in (("none/run.json", "can't be written"), ("run.txt", ".json")):
        refused = run(tmp_path, "--trace", file, "train.py")
        assert refused.returncode == 2
        assert told in refused.stderr
        assert len(refused.stderr.splitlines()) == 1
