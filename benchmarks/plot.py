"""The figure: ours beside torch's loader and beside the best rival; error bars are the noise."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import machine
from benchmarks.display import number
from benchmarks.names import family
from benchmarks.registry import TARGETS
from benchmarks.report import compared
from benchmarks.results import Results, ratio

OTHERS = {"torch": "#3182bd", "best rival": "#e6550d"}
"""Panel -> its colour."""

_LATENESS = "tick"
"""Case whose value is no speed, and which has no place in the figure."""


@dataclass(frozen=True)
class Line:
    """A line of the figure.

    Attributes
    ----------
    ratios
        Panel -> the other's value over ours, and the other's name.
    noise
        Noise of the line; 0 if it was not measured.
    target
        Factor to torch's that is asked for.
    """

    label: str
    ratios: dict[str, tuple[float, str]]
    noise: float
    target: float | None


def lines(results: Results) -> list[Line]:
    """A line for each variant in which the best of ours can be compared."""
    found = []
    for case in results.cases():
        if case == _LATENESS:
            continue
        for variant in results.variants(case):
            line = _line(results, case, variant)
            if line is not None:
                found.append(line)
    return found


def _line(results: Results, case: str, variant: str) -> Line | None:
    beside = compared(results, case, variant)
    if beside is None:
        return None
    ratios = {}
    if beside.ours.versus_torch and beside.ours.versus_torch > 0:
        ratios["torch"] = (beside.ours.versus_torch, "")
    rival = ratio(beside.rival, beside.ours)
    if beside.rival is not None and rival is not None and rival > 0:
        ratios["best rival"] = (rival, family(beside.rival.loader))
    if not ratios:
        return None
    asked = [t.factor for t in TARGETS if t.case == case and variant.startswith(t.variant)]
    target = max((factor for factor in asked if factor), default=None)
    label = f"{case}  {variant}  ({beside.ours.loader})"
    return Line(label, ratios, results.noise(case, variant) or 0.0, target)


def draw(results: Results, file: Path) -> None:
    """Write the figure as PNG or SVG, whatever `file` ends in."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib.figure import Figure

    found = lines(results)
    figure = Figure(figsize=(10, 1.6 + 0.22 * len(found)), layout="constrained")
    panels: Any = figure.subplots(1, 2, sharey=True)
    for axes, (other, colour) in zip(panels, OTHERS.items(), strict=True):
        _panel(axes, found, other, colour)
    panels[0].set_yticks(range(len(found)), [line.label for line in found], fontsize=7)
    panels[0].invert_yaxis()
    quick = " (a quick run)" if results.about.get("quick") else ""
    about = machine.sentence({**results.about, "versions": {}}).replace("; ;", ";")
    figure.suptitle(
        f"hybridloader beside others{quick}: how many times faster "
        f"(P7: smaller, P9: less CPU time)\n{about}",
        fontsize=8,
    )
    noise = any(line.noise for line in found)
    figure.supxlabel(
        "dotted: target"
        + (", error bars: noise of the machine in that line" if noise else "; noise not measured"),
        fontsize=7,
    )
    figure.savefig(file, dpi=150)


def _panel(axes: Any, found: list[Line], other: str, colour: str) -> None:
    for place, line in enumerate(found):
        if other not in line.ratios:
            continue
        value, name = line.ratios[other]
        error = [[value - value / (1 + line.noise)], [value * line.noise]]
        axes.barh(place, value - 1, 0.8, left=1, color=colour, alpha=0.8)
        if line.noise:
            axes.errorbar(value, place, xerr=error, color="black", lw=0.8, capsize=2)
        side = "left" if value >= 1 else "right"
        edge = value * (1 + line.noise) if value >= 1 else value / (1 + line.noise)
        text = f"  {number(value)} {name} "
        axes.text(edge, place, text, va="center", ha=side, fontsize=6)
        if other == "torch" and line.target:
            axes.plot([line.target] * 2, [place - 0.5, place + 0.5], color="#d62728", ls=":")
    axes.set_xscale("log")
    axes.axvline(1, color="black", lw=0.8)
    axes.margins(0.55, 0.01)
    axes.locator_params(axis="x", numticks=5)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}x")
    axes.tick_params(axis="x", labelsize=7)
    axes.set_title(f"than {'torch' if other == 'torch' else 'the best rival'}", fontsize=9)
