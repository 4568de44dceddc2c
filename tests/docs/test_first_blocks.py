"""The first block of code of each page runs as it is pasted, without names from elsewhere.

The README's blocks run in `test_docs`, those of the pages about frameworks in `tests/frameworks`.
"""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FIRST = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)

NOT_YET = {
    "docs/cluster.md": "a Ray cluster",
    "docs/sources.md": "a bucket",
    "docs/tuning.md": "20 seconds",
}
"""Page -> the name that its first block uses and does not define, or the resource that it needs."""

BLOCKS = {
    path.relative_to(ROOT).as_posix(): match[1]
    for path in sorted((ROOT / "docs").glob("*.md"))
    if (match := FIRST.search(path.read_text()))
}


def test_the_list_names_pages() -> None:
    assert NOT_YET.keys() <= BLOCKS.keys()


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
@pytest.mark.parametrize("page", sorted(BLOCKS.keys() - NOT_YET.keys()))
def test_the_first_block_of_a_page_runs(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "0.jpg").write_bytes(b"image")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(time, "sleep", lambda seconds: None)  # a disk that the page only plays
    names = {"__name__": "__main__"}
    try:
        exec(compile(BLOCKS[page], page, "exec"), names)
    finally:
        names.clear()  # a kept iterator keeps its workers
