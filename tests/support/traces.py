"""Reader of traces for tests: it checks what any trace must be, and finds slices by name."""

from __future__ import annotations

import gzip
import json
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
