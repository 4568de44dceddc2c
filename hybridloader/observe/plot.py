"""Pictures: the time and the stall of each stage, and a part of a trace."""

from __future__ import annotations

import os
import textwrap
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from hybridloader.observe.trace_files import read

_OF_CAUSES = ("#4c72b0", "#dddddd", "#dd8452", "#999999")
_STALL, _WORST = "#e0a0a2", "#c44e52"


def new_figure(asked: str, size: tuple[float, float]) -> Any:
    """Return an empty figure of `size` inches; `asked` names the caller in the error."""
    try:
        # Not pyplot, which would pick a display and keep every figure.
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            f"{asked} needs matplotlib; install it with: pip install 'hybridloader[plot]'"
        ) from error
    figure = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def draw(
    path: str | os.PathLike[str],
    names: Sequence[str],  # of the stages
    parts: Mapping[str, Sequence[float]],  # seconds of each stage by cause; four causes at most
    stalls: Sequence[float],
    worst: str | None,  # name of the stage to mark
    title: str,
) -> None:
    """Draw to a file, in the format of its extension."""
    figure = new_figure("plot()", (9, 1.9 + 0.45 * len(names)))
    times, waits = figure.subplots(1, 2, sharey=True, width_ratios=(2, 1))
    wholes = [sum(seconds) or 1.0 for seconds in zip(*parts.values(), strict=True)]
    left = [0.0] * len(names)
    for (cause, seconds), colour in zip(parts.items(), _OF_CAUSES, strict=False):
        shares = [100 * part / whole for part, whole in zip(seconds, wholes, strict=True)]
        times.barh(names, shares, left=left, color=colour, label=cause)
        left = [before + share for before, share in zip(left, shares, strict=True)]
    times.invert_yaxis()
    times.set_xlabel("% of the workers' time")
    times.legend(ncols=4, loc="lower center", bbox_to_anchor=(0.5, 1.0), frameon=False)
    waits.barh(names, stalls, color=[_WORST if name == worst else _STALL for name in names])
    waits.set_xlabel("s that your loop waited for it")
    figure.suptitle("\n".join(textwrap.wrap(title, 110)), fontsize=9)
    figure.savefig(path)


_OF_SLICES = {
    "next()": "#c44e52",
    "iter()": "#c44e52",
    "open": "#8172b3",
    "task": "#c6d3e8",
    "tasks": "#c6d3e8",
    "samples": "#8fb08c",
    "fetch": "#4c72b0",
    "collate": "#dd8452",
    "pack": "#937860",
    "send": "#ccb974",
    "sampler": "#da8bc3",
    "start": "#999999",
    "wait": "#e8e8e8",
    "wait for room": "#d8d8d8",
}
_OTHERS = ("#55a868", "#64b5cd", "#4878a8", "#b47cc7", "#8fb08c")
"""Colours of the other slices, such as the steps of pipelines."""


def plot_trace(
    trace: str | os.PathLike[str],
    path: str | os.PathLike[str],
    *,
    begin: float = 0.0,
    seconds: float | None = None,
) -> None:
    """Draw a part of a trace of `hybridloader.observe.trace`.

    Parameters
    ----------
    trace
        File written by `hybridloader.observe.trace`.
    path
        Picture to write; the extension picks its format, such as ``.png`` or ``.svg``.
    begin, seconds
        Begin of the part to draw, in seconds since the first slice, and its length; None is until the
        end. A picture can show a few tenths of a second.

    Raises
    ------
    ImportError
        matplotlib is not installed; ``pip install 'hybridloader[plot]'`` installs it.
    ValueError
        The file is not a trace, or that part of the trace has no slices.
    """
    events = read(trace)["traceEvents"]
    slices = [event for event in events if event["ph"] == "X"]
    zero = min((event["ts"] for event in slices), default=0.0) + begin * 1e6
    until = float("inf") if seconds is None else zero + seconds * 1e6
    shown = [event for event in slices if event["ts"] < until and _end(event) > zero]
    if not shown:
        raise ValueError(f"{os.fspath(trace)}: no slices in that part of the trace")
    until = min(until, max(map(_end, shown)))
    names = {
        (event["pid"], event["tid"]): event["args"]["name"]
        for event in events
        if event["ph"] == "M" and event["name"] == "thread_name"
    }
    present = {(event["pid"], event["tid"]) for event in shown}
    processes = list(dict.fromkeys(pid for pid, _ in names))
    places = sorted(present, key=lambda place: (processes.index(place[0]), place[1]))
    rows = {place: at for at, place in enumerate(places)}
    figure = new_figure("plot_trace()", (9, 1.1 + 0.5 * len(rows)))
    axes = figure.subplots()
    colours: dict[str, str] = {}
    for event, depth in _with_depths(shown):
        name, row = event["name"], rows[event["pid"], event["tid"]]
        label = None if name in colours else name
        if label is not None:
            others = len(colours.keys() - _OF_SLICES.keys())
            colours[name] = _OF_SLICES.get(name, _OTHERS[others % len(_OTHERS)])
        left, right = max(zero, event["ts"]), min(until, _end(event))
        height = max(0.2, 0.84 - 0.26 * depth)
        axes.barh(
            row,
            (right - left) / 1e3,
            left=(left - zero) / 1e3,
            height=height,
            color=colours[name],
            label=label,
            linewidth=0,
        )
    for start, finish in _arrows(events):
        if zero <= start["ts"] and finish["ts"] <= until:
            ends = [
                ((event["ts"] - zero) / 1e3, rows[event["pid"], event["tid"]])
                for event in (start, finish)
            ]
            arrow = {"arrowstyle": "->", "linewidth": 0.6, "color": "#444444"}
            axes.annotate("", ends[1], ends[0], arrowprops=arrow)
    axes.set_yticks(range(len(rows)), [names[place] for place in rows])
    axes.invert_yaxis()
    axes.set_xlim(0, (until - zero) / 1e3)
    axes.set_xlabel("ms")
    axes.legend(ncols=8, loc="lower center", bbox_to_anchor=(0.45, 1.0), frameon=False, fontsize=8)
    figure.savefig(path, dpi=110)


def _end(event: dict[str, Any]) -> float:
    return float(round(event["ts"] + event["dur"], 3))


def _with_depths(slices: list[dict[str, Any]]) -> list[tuple[dict[str, Any], int]]:
    """Return each slice with the number of slices around it; `slices` are sorted by begin."""
    found, around = [], defaultdict[Any, list[float]](list)
    for event in slices:
        ends = around[event["pid"], event["tid"]]
        while ends and ends[-1] <= round(event["ts"], 3):
            ends.pop()
        found.append((event, len(ends)))
        ends.append(_end(event))
    return found


def _arrows(events: list[dict[str, Any]]) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    ends: defaultdict[Any, dict[str, Any]] = defaultdict(dict)
    for event in events:
        if event["ph"] in "sf":
            ends[event["id"]][event["ph"]] = event
    return [(pair["s"], pair["f"]) for pair in ends.values() if len(pair) == 2]
