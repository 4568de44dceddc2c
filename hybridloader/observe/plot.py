"""Picture of statistics: the time and the stall of each stage."""

from __future__ import annotations

import os
import textwrap
from collections.abc import Mapping, Sequence

_OF_CAUSES = ("#4c72b0", "#dddddd", "#dd8452", "#999999")
_STALL, _WORST = "#e0a0a2", "#c44e52"


def draw(
    path: str | os.PathLike[str],
    names: Sequence[str],  # of the stages
    parts: Mapping[str, Sequence[float]],  # seconds of each stage by cause; four causes at most
    stalls: Sequence[float],
    worst: str | None,  # name of the stage to mark
    title: str,
) -> None:
    """Draw to a file, in the format of its extension."""
    try:
        # Not pyplot, which would pick a display and keep every figure.
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            "plot() needs matplotlib; install it with: pip install 'hybridloader[plot]'"
        ) from error
    figure = Figure(figsize=(9, 1.9 + 0.45 * len(names)), layout="constrained")
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
