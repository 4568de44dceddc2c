"""Draw docs/overview.svg, the picture of README.md: python .ci/site/overview.py"""

from __future__ import annotations

from pathlib import Path

PICTURE = Path(__file__).parents[2] / "docs" / "overview.svg"
WIDTH, HEIGHT = 760, 236
STYLE = """
    text { font: 14px system-ui, sans-serif; fill: #1f2430; text-anchor: middle }
    .small { font-size: 12px; fill: #5a6172 }
    .left { text-anchor: start; font-weight: 600 }
    .box { fill: #fff; stroke: #5c6bc0; stroke-width: 1.5 }
    .loop { fill: #e8eaf6; stroke: #5c6bc0; stroke-width: 1.5 }
    .worker { fill: #26a69a } .process { fill: #ef6c00 }
    .arrow { stroke: #5a6172; stroke-width: 1.5; fill: none; marker-end: url(#head) }
    .head { fill: #5a6172 }
    @media (prefers-color-scheme: dark) {
      text { fill: #e6e8ef } .small { fill: #aab0c0 }
      .box { fill: #23262f } .loop { fill: #303552 } .arrow { stroke: #aab0c0 } .head { fill: #aab0c0 }
    }
"""
ROWS = (
    ("DataLoader: one stage", 28, [("samples and batches", "threads", 4)]),
    (
        "Pipeline: each step has its workers",
        140,
        [("read", "threads", 4), ("decode", "threads", 2), ("augment", "processes", 2)],
    ),
)
"""Title, position from the top, and for each stage its name, kind of workers and number of them."""


def stage(x: int, y: int, width: int, name: str, kind: str, workers: int) -> list[str]:
    """Return a box with a name, and a mark for each worker."""
    mark = "worker" if kind == "threads" else "process"
    middle, first = x + width // 2, x + width // 2 - 8 * (workers - 1)
    return [
        f'<rect class="box" x="{x}" y="{y}" width="{width}" height="62" rx="6"/>',
        f'<text x="{middle}" y="{y + 20}">{name}</text>',
        *(
            f'<circle class="{mark}" cx="{first + 16 * n}" cy="{y + 34}" r="5"/>'
            for n in range(workers)
        ),
        f'<text class="small" x="{middle}" y="{y + 55}">{workers} {kind}</text>',
    ]


def draw() -> str:
    """Return the picture."""
    lines = []
    for title, top, stages in ROWS:
        lines.append(f'<text class="left" x="10" y="{top - 8}">{title}</text>')
        width = (560 - 30 * (len(stages) - 1)) // len(stages)
        for n, (name, kind, workers) in enumerate(stages):
            x = 10 + n * (width + 30)
            lines += stage(x, top + 4, width, name, kind, workers)
            lines.append(f'<path class="arrow" d="M{x + width} {top + 35} h24"/>')
        lines += [
            f'<rect class="loop" x="602" y="{top + 4}" width="148" height="62" rx="6"/>',
            f'<text x="676" y="{top + 31}">your training loop</text>',
            f'<text class="small" x="676" y="{top + 50}">batches in order</text>',
        ]
    head = '<marker id="head" markerWidth="7" markerHeight="7" refX="5" refY="3" orient="auto">'
    alt = "A DataLoader has one stage of workers; each step of a Pipeline has workers that suit it."
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img">',
            f"<title>{alt}</title>",
            f"<style>{STYLE}</style>",
            f'<defs>{head}<path class="head" d="M0 0 L6 3 L0 6 z"/></marker></defs>',
            *lines,
            "</svg>\n",
        ]
    )


if __name__ == "__main__":
    PICTURE.write_text(draw(), encoding="utf-8")
