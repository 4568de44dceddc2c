"""Code of pages: each block compiles as it is pasted and fits its box; the first of a page runs.

The README's blocks run in `test_docs`, those of the pages about frameworks in `tests/frameworks`, and
those of tutorials and recipes, which are parts of scripts, in `test_recipe_pages`.
"""

from __future__ import annotations

import functools
import re
import time
from pathlib import Path

import pytest

import hybridloader

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"^( *)```python\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
WIDTH = 88
"""Columns of a box of code on a desktop."""

NOT_YET = {
    "docs/cluster.md": "a Ray cluster",
    "docs/sources.md": "a bucket",
}
"""Page -> the resource that its first block needs."""

ELSEWHERE = {"docs/migrating.md", "docs/pipelines.md", "docs/quickstart.md"}
"""Pages of which another test runs every block."""

FIRST = {
    path.relative_to(ROOT).as_posix(): match[2]
    for path in sorted((ROOT / "docs").glob("*.md"))
    if (match := BLOCK.search(path.read_text()))
}


def test_the_list_names_pages() -> None:
    assert NOT_YET.keys() <= FIRST.keys()


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_every_block_of_a_page_compiles_and_fits(path: Path) -> None:
    """Fragments are not indented, and don't begin or end within a statement."""
    text = path.read_text()
    for match in BLOCK.finditer(text):
        indent, block = match[1], match[2]
        line = text.count("\n", 0, match.start()) + 2
        code = re.sub(rf"^{indent}", "", block, flags=re.MULTILINE)  # a block of a list
        compile("\n" * (line - 1) + code, path.name, "exec")
        wide = [one for one in code.splitlines() if len(one) > WIDTH]
        assert not wide, f"{path.name}:{line}"


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
@pytest.mark.parametrize("page", sorted(FIRST.keys() - NOT_YET.keys() - ELSEWHERE))
def test_the_first_block_of_a_page_runs(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "0.jpg").write_bytes(b"image")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(time, "sleep", lambda seconds: None)  # a disk that the page only plays
    # The page lets `tune` measure for its 20 seconds.
    monkeypatch.setattr(hybridloader, "tune", functools.partial(hybridloader.tune, seconds=1))
    names = {"__name__": "__main__"}
    try:
        exec(compile(FIRST[page], page, "exec"), names)
    finally:
        names.clear()  # a kept iterator keeps its workers
