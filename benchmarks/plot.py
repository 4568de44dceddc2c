"""The figure: how many times faster than torch's loader, a bar for each loader, by case."""

from __future__ import annotations

from pathlib import Path

from benchmarks import machine
from benchmarks.display import best, column_names, number
from benchmarks.names import LIMITS, PIPELINE
from benchmarks.registry import TARGETS
from benchmarks.results import Measurement, Results

COLOURS = {
    "inline": "#9ecae1",
    "threads": "#3182bd",
    "fork": "#31a354",
    "shared-memory": "#006d2c",
    "shared-memory (loky)": "#74c476",
    "spawn": "#a1d99b",
    PIPELINE: "#006d2c",
    "torchdata.nodes": "#e6550d",
    "SPDL": "#fdae6b",
    "Grain": "#756bb1",
}


def draw(results: Results, file: Path) -> None:
    """Write the figure as PNG or SVG, whatever `file` ends in."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    groups = _groups(results)
    bars = sum(len(rows) for _, _, rows in groups)
    figure = Figure(figsize=(9, 1.8 + 0.14 * bars + 0.15 * len(groups)), layout="constrained")
    axes = figure.add_subplot()
    position, ticks, labels, used = 0.0, [], [], []
    for case, variant, rows in groups:
        top = position
        for column, row in rows:
            value = row.versus_torch or 0.0
            axes.barh(position, value - 1, 0.9, left=1, color=COLOURS.get(column, "#636363"))
            side = "left" if value >= 1 else "right"
            axes.text(value, position, f" {number(value)} ", va="center", ha=side, fontsize=6)
            used.append(column)
            position += 1
        ticks.append((top + position - 1) / 2)
        labels.append(f"{case}  {variant}")
        asked = [t for t in TARGETS if t.case == case and variant.startswith(t.variant)]
        for factor in {t.factor for t in asked if t.factor}:
            axes.plot([factor] * 2, [top - 0.5, position - 0.5], color="#d62728", lw=1.5, ls=":")
        position += 1
    axes.set_xscale("log")
    axes.axvline(1, color="black", lw=0.8)
    axes.margins(0.08, 0.01)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}x")
    axes.set_yticks(ticks, labels, fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel("times faster than torch's DataLoader (P7: smaller, P9: less CPU time)")
    quick = "  (a quick run)" if results.about.get("quick") else ""
    axes.set_title(f"hybridloader beside others{quick}", loc="left", fontsize=11)
    handles = [Patch(color=c, label=name) for name, c in COLOURS.items() if name in used]
    handles.append(Patch(fill=False, edgecolor="#d62728", ls=":", label="target"))
    figure.legend(handles=handles, fontsize=7, loc="outside lower center", ncols=6)
    about = {**results.about, "versions": {}}
    figure.suptitle(machine.sentence(about).replace("; ;", ";"), fontsize=6, color="#636363")
    figure.savefig(file, dpi=150)


def _groups(results: Results) -> list[tuple[str, str, list[tuple[str, Measurement]]]]:
    """Case, variant and bars of all that have a ratio to torch's."""
    groups = []
    for case in results.cases():
        if case == "tick":
            continue  # its value is lateness, not speed
        for variant in _shown(case, results.variants(case)):
            group = results.of(case, variant)
            rows = []
            for column in column_names(group):
                row = best(group, column)
                if (
                    column not in ("torch", *LIMITS)
                    and row is not None
                    and row.versus_torch
                    and row.passed is None
                ):
                    rows.append((column, row))
            if rows:
                groups.append((case, variant, rows))
    return groups


def _shown(case: str, variants: list[str]) -> list[str]:
    """Not every variant: float32 looks as uint8 does, and of P12's sizes the largest will do."""
    if case == "P12":
        last = {variant.split(" ")[1]: variant for variant in variants}
        return list(last.values())
    return [variant for variant in variants if not variant.endswith("float32")] or variants
