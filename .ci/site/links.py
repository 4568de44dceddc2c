#!/usr/bin/env python3
"""Report dead links, missing pictures and missing anchors of a built site, and paths instead of links.

    python .ci/site/links.py SITE

mkdocs checks the links of Markdown; this also reads what mkdocstrings and the theme made.
"""

import re
import sys
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit


class Page(HTMLParser):
    """Targets and anchors of a page."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.targets: list[str] = []
        self.anchors: set[str] = set()
        self.paths: list[str] = []
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name in ("href", "src") and value:
                self.targets.append(value)
            elif name in ("id", "name") and value:
                self.anchors.add(value)

    def handle_data(self, data: str) -> None:
        self.paths += re.findall(r"\bdocs/[\w/-]+\.md\b", data)


page = cache(Page)


def dead(site: Path) -> list[str]:
    """Return a line for each target that does not exist."""
    found = []
    for path in sorted(site.rglob("*.html")):
        if path.name == "404.html":  # its links are absolute
            continue
        if path.parent.name == "reference":
            name = path.relative_to(site)
            found += [f"{name}: text {text}, no link" for text in page(path).paths]
        for target in sorted({*page(path).targets}):
            parts = urlsplit(target)
            if parts.scheme or parts.netloc:
                continue
            file = (path.parent / unquote(parts.path)).resolve() if parts.path else path.resolve()
            anchor = unquote(parts.fragment)
            if not file.is_file():
                found.append(f"{path.relative_to(site)}: no file {target}")
            elif anchor and file.suffix == ".html" and anchor not in page(file).anchors:
                found.append(f"{path.relative_to(site)}: no anchor {target}")
    return found


if __name__ == "__main__":
    lines = dead(Path(sys.argv[1]).resolve())
    print(*lines, sep="\n", end="\n" if lines else "")
    sys.exit(1 if lines else 0)
