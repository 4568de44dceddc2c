"""Statistics that a function is called with while a loop runs."""

from __future__ import annotations

import sys
import threading
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
from support.manual_clock import Clock
from support.platforms import REPOSITORY

from hybridloader import DataLoader, Observe, Pipeline
from hybridloader.observe import Stats

THREADS: dict[str, Any] = {"backend": "threads", "num_workers": 2}


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Clock of all reporters."""
    clock = Clock()
    for module in ("observe.observation", "loader.iterator", "running.run"):
        monkeypatch.setattr(f"hybridloader.{module}.perf_counter", clock)
    return clock


def loader(policy: Any, **others: Any) -> DataLoader:
    return DataLoader(range(12), 2, observe=policy, **{**THREADS, **others})  # type: ignore[arg-type]


def pipeline(policy: Any) -> Any:
    return Pipeline.from_iterable(range(6)).map(abs, **THREADS).run(observe=policy)


BOTH = pytest.mark.parametrize("make", [loader, pipeline])


@BOTH
def test_it_is_called_when_due_and_at_the_end(make: Any, clock: Clock) -> None:
    seen = list[tuple[float, int, str]]()

    def note(stats: Stats) -> None:
        seen.append((clock.now, stats.items, threading.current_thread().name))

    for _ in make(Observe(note, every=10.0)):
        clock.now += 4.0
    # Batches come at 100, 104, ...; it is due at 110, and 10 s after each call.
    mine = threading.current_thread().name
    assert seen == [(112.0, 3, mine), (124.0, 6, mine), (124.0, 6, mine)]


@BOTH
def test_one_that_raises_is_reported_once_and_stops_nothing(make: Any, clock: Clock) -> None:
    calls = list[int]()

    def fail(stats: Stats) -> None:
        calls.append(stats.items)
        raise ConnectionError("no network")

    def loop() -> int:
        count = 0
        for _ in make(Observe(fail, every=1.0)):
            clock.now += 2.0
            count += 1
        return count

    with pytest.warns(UserWarning, match="on_stats raised ConnectionError: no network") as caught:
        assert loop() == 6
    assert len(calls) == 7
    assert len(caught) == 1


def test_each_epoch_begins_anew_and_ends_with_a_call(clock: Clock) -> None:
    seen = list[int]()
    made = loader(Observe(lambda stats: seen.append(stats.items)), persistent_workers=True)
    for _ in range(3):
        clock.now += 100.0  # between epochs nothing is due
        list(made)
    assert seen == [6, 6, 6]
    made._iterator.close()  # type: ignore[union-attr]
    with Pipeline.from_iterable(range(4)).epochs(
        2, observe=Observe(lambda stats: seen.append(stats.items))
    ) as epochs:
        for run in epochs:
            list(run)
            with pytest.raises(StopIteration):
                next(run)
    assert seen[3:] == [4, 8], "once for each epoch"


@pytest.mark.parametrize(
    ("make", "kind", "says"),
    [
        (lambda: Observe(3), TypeError, "on_stats must be a function that takes one Stats, got 3"),
        (lambda: Observe(print, every=0), ValueError, "every is seconds, above 0, not 0"),
        (lambda: Observe(print, every="1"), ValueError, "every is seconds"),
        (lambda: loader(print), TypeError, "observe must be True or False"),
        (lambda: pipeline(print), TypeError, "observe must be True or False"),
    ],
)
def test_bad_input(make: Any, kind: type[Exception], says: str) -> None:
    with pytest.raises(kind, match=says):
        make()


# -- the recipes of docs/why-is-it-slow.md, with writers that only note ------------------------------


class Writer:
    """Stands for torch's SummaryWriter, and for prometheus_client's Gauge."""

    def __init__(self) -> None:
        self.values: dict[str, float] = {}
        self._at = ""

    def add_scalar(self, tag: str, value: float, step: int) -> None:
        self.values[tag] = value

    def labels(self, *labels: str) -> Writer:
        self._at = " ".join(labels)
        return self

    def set(self, value: float) -> None:
        self.values[self._at] = value


def run_recipe(title: str, **names: Any) -> None:
    page = (REPOSITORY / "docs" / "why-is-it-slow.md").read_text()
    blocks = [part.split("```", 1)[0] for part in page.split("```python\n")[1:]]
    (block,) = (block for block in blocks if block.startswith(f"# {title}"))
    names |= {"Observe": Observe, "dataset": range(12), "DataLoader": DataLoader}
    exec(block, names)
    list(names["loader"])


def test_the_recipes_run(monkeypatch: pytest.MonkeyPatch) -> None:
    writer = Writer()
    run_recipe("TensorBoard", writer=writer)
    assert any(tag.startswith("loader/stall") for tag in writer.values)
    assert any(tag.startswith("loader/rate") for tag in writer.values)
    gauges = defaultdict[str, Writer](Writer)
    fake: Any = SimpleNamespace(
        Gauge=lambda name, text, labels=(): gauges[name], start_http_server=lambda port: None
    )
    monkeypatch.setitem(sys.modules, "prometheus_client", fake)
    run_recipe("Prometheus")
    assert gauges["loader_stall_share"].values
    assert "DataLoader" in gauges["loader_stage_load"].values
