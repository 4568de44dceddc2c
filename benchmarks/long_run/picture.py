"""The picture of a long run: a panel for each quantity over time, a line for each backend."""

from __future__ import annotations

from pathlib import Path

from benchmarks.long_run.record import Run, beside_reference

COLOURS = {
    "inline": "#9ecae1",
    "threads": "#3182bd",
    "fork": "#31a354",
    "spawn": "#e6550d",
    "shared-memory": "#756bb1",
}
PANELS = {
    "memory_mb": "memory of all processes, MB of PSS",
    "descriptors": "descriptors",
    "threads": "threads",
    "processes": "processes",
    "segments": "named segments in /dev/shm",
    "p50_us": "next(), median, times the reference loop",
    "p99_us": "next(), 99th percentile, times the reference loop",
}


def draw(run: Run, file: Path) -> None:
    """Write the picture as PNG or SVG, whatever `file` ends in."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 10), layout="constrained")
    panels = figure.subplots(4, 2).flat
    for axes, (name, title) in zip(panels, PANELS.items(), strict=False):
        for part in run.parts:
            if not part.looks:
                continue
            latency = f"reference_{name}" in part.looks
            values = beside_reference(part, name) if latency else part.looks[name]
            minutes = [at / 60 for at in part.looks["at"]]
            axes.plot(minutes, values, lw=1, color=COLOURS[part.backend], label=part.backend)
        axes.set_title(title, loc="left", fontsize=9)
        axes.set_ylim(bottom=0)
        axes.tick_params(labelsize=7)
        axes.grid(alpha=0.3)
    last = figure.axes[-1]
    last.axis("off")
    last.legend(*figure.axes[0].get_legend_handles_labels(), loc="center", title="backend")
    for axes in figure.axes[-3:-1]:
        axes.set_xlabel("minutes", fontsize=8)
    about = f"{run.minutes:g} minutes a backend, seed {run.seed}; {run.about['date']}"
    figure.suptitle(f"a long run of mixed work with faults: {about}", fontsize=11)
    figure.savefig(file, dpi=130)
