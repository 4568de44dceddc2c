"""Reader of traces for tests: it checks what any trace must be, and finds slices by name."""

from __future__ import annotations

import gzip
import json
from bisect import bisect_right
from collections import defaultdict
from pathlib import Path
from typing import Any

Place = tuple[Any, Any]


def nanoseconds(microseconds: float) -> int:
    """Return nanoseconds as Perfetto does: what is below one is cut off."""
    return int(microseconds * 1000.0)


class ReadTrace:
    """Trace from a file; making one asserts that it is sound."""

    def __init__(self, path: Path) -> None:
        data = path.read_bytes()
        self.whole: dict[str, Any] = json.loads(
            gzip.decompress(data) if path.suffix == ".gz" else data
        )
        self.events: list[dict[str, Any]] = self.whole["traceEvents"]
        self.slices = [event for event in self.events if event["ph"] == "X"]
        self.processes = self._named("process_name")
        self.tracks = self._named("thread_name")
        self._check_names()
        self._check_nesting()
        self._check_flows()
        self._check_counters()

    def _named(self, kind: str) -> dict[Place, str]:
        found: dict[Place, str] = {}
        for event in self.events:
            if event["ph"] == "M" and event["name"] == kind:
                place = event["pid"], event["tid"]
                assert place not in found, f"{place} has two names"
                found[place] = event["args"]["name"]
        return found

    def _check_names(self) -> None:
        for event in self.slices:
            assert (event["pid"], event["tid"]) in self.tracks, f"no track for {event}"
            assert (event["pid"], 0) in self.processes, f"no process for {event}"
            assert event["tid"] < 2**31, "Perfetto takes 32 bits"

    def _check_nesting(self) -> None:
        """Slices of a track come in their order, and are within one another or apart."""
        self.parents: dict[int, dict[str, Any] | None] = {}
        stacks: defaultdict[Place, list[dict[str, Any]]] = defaultdict(list)
        last: defaultdict[Place, int] = defaultdict(int)
        for event in self.slices:
            place = event["pid"], event["tid"]
            stack, began = stacks[place], nanoseconds(event["ts"])
            assert began >= last[place], f"not in their order: {event}"
            last[place] = began
            assert event["dur"] >= 0
            while stack and end(stack[-1]) <= began and not (end(event) == began == end(stack[-1])):
                stack.pop()
            if stack:
                assert end(event) <= end(stack[-1]), f"{event} is not within {stack[-1]}"
            self.parents[id(event)] = stack[-1] if stack else None
            stack.append(event)

    def _check_flows(self) -> None:
        """Each arrow has one begin in a task, and one later end in an opening."""
        flows: defaultdict[Any, list[dict[str, Any]]] = defaultdict(list)
        for event in self.events:
            if event["ph"] in "sf":
                flows[event["id"]].append(event)
        self.flows = []
        self._slices: dict[str, defaultdict[Any, list[Any]]] = {}
        for ends in flows.values():
            assert sorted(event["ph"] for event in ends) == ["f", "s"], ends
            start, finish = sorted(ends, key=lambda event: event["ph"] == "f")
            assert start["ts"] <= finish["ts"]
            self.flows.append((self._around(start, "task"), self._around(finish, "open")))

    def _around(self, flow: dict[str, Any], name: str) -> dict[str, Any]:
        at = nanoseconds(flow["ts"])
        if name not in self._slices:  # a busy machine has thousands of both
            by_thread = self._slices[name] = defaultdict(list)
            for event in self.named(name):
                by_thread[event["pid"], event["tid"]].append((nanoseconds(event["ts"]), event))
            for slices in by_thread.values():
                slices.sort(key=lambda one: one[0])
        slices = self._slices[name][flow["pid"], flow["tid"]]
        last = bisect_right(slices, at, key=lambda one: one[0]) - 1
        found = [event for _, event in slices[max(0, last - 1) : last + 1] if at <= end(event)]
        assert found, f"{flow} is in no {name}"
        return found[0]

    def _check_counters(self) -> None:
        last: defaultdict[str, float] = defaultdict(float)
        for event in self.events:
            if event["ph"] == "C":
                assert event["ts"] >= last[event["name"]]
                last[event["name"]] = event["ts"]
                assert event["args"]["value"] >= 0
        self.counters = set(last)

    def named(self, name: str) -> list[dict[str, Any]]:
        """Return the slices called `name`."""
        return [event for event in self.slices if event["name"] == name]

    def instants(self, name: str) -> list[dict[str, Any]]:
        """Return the instants called `name`."""
        return [event for event in self.events if event["ph"] == "i" and event["name"] == name]

    def within(self, event: dict[str, Any]) -> list[str]:
        """Return the names of the slices around one, the innermost first."""
        names = []
        parent = self.parents[id(event)]
        while parent is not None:
            names.append(parent["name"])
            parent = self.parents[id(parent)]
        return names

    def track(self, event: dict[str, Any]) -> str:
        return self.tracks[event["pid"], event["tid"]]


def end(event: dict[str, Any]) -> int:
    return nanoseconds(event["ts"]) + nanoseconds(event["dur"])
