"""Picture of statistics: the time of each stage, and what the loop waited for."""

from __future__ import annotations

import os
import textwrap
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hybridloader.observe.stats import Stats

_COLOURS = {"busy": "#4c72b0", "starved": "#dddddd", "blocked": "#dd8452", "other": "#999999"}


def draw(stats: Stats, path: str | os.PathLike[str]) -> None:
    """Draw `stats` to a file, of the kind that the end of its name says."""
    try:
        # Not pyplot: that would choose a display, and keep every figure.
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            "plot() needs matplotlib; install it with: pip install 'hybridloader[plot]'"
        ) from error
    names = [stage.name for stage in stats.stages]
    figure = Figure(figsize=(9, 1.9 + 0.45 * len(names)), layout="constrained")
    FigureCanvasAgg(figure)
    times, waits = figure.subplots(1, 2, sharey=True, width_ratios=(2, 1))
    left = [0.0] * len(names)
    for cause, colour in _COLOURS.items():
        shares = [
            100 * getattr(stage, cause) / (_whole(stage) or 1.0)  # type: ignore[arg-type]
            for stage in stats.stages
        ]
        times.barh(names, shares, left=left, color=colour, label=cause)
        left = [before + share for before, share in zip(left, shares, strict=True)]
    times.invert_yaxis()
    times.set_xlabel("% of the workers' time")
    times.legend(ncols=4, loc="lower center", bbox_to_anchor=(0.5, 1.0), frameon=False)
    colours = ["#c44e52" if name == stats.verdict.stage else "#e0a0a2" for name in names]
    waits.barh(names, [stage.stall for stage in stats.stages], color=colours)
    waits.set_xlabel("s that your loop waited for it")
    figure.suptitle("\n".join(textwrap.wrap(str(stats.verdict), 110)), fontsize=9)
    figure.savefig(path)


def _whole(stage: object) -> float:
    return sum(float(getattr(stage, cause)) for cause in _COLOURS)
