"""The check of words, `.ci/words`: it finds what it is for, and the pages and docstrings pass it."""

from __future__ import annotations

import subprocess
import sys
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def words() -> ModuleType:
    spec = spec_from_loader("words", SourceFileLoader("words", str(ROOT / ".ci" / "words")))
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("A worker tells the parent.", ["tells"]),
        ("It comes behind the batch, and goes on.", ["behind, goes on"]),
        ("A wrapped\nline has a thread of\nits own.", ["of its own"]),
        ("- What it does is clear.", ["What"]),
        ("One for each | of which nobody\nknows", ["nobody"]),
        ("`tell()` and [a link](behind.md)", []),
        ("```python\ntell()  # behind\n```\n\n    behind\n", []),
        ("word " * 36 + ".", ["37 words"]),
    ],
)
def test_a_page(words: ModuleType, tmp_path: Path, text: str, found: list[str]) -> None:
    (tmp_path / "page.md").write_text(text)
    words.ROOT = tmp_path
    assert [line.split(": ")[0] for line in words.findings(tmp_path / "page.md")] == found


def test_docstrings_but_no_code(words: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "module.py").write_text(
        '"""A module that tells.\n\n    >>> tell()\n\nIt stands behind."""\n'
        'nobody = "nobody"  # nobody\n\n\ndef f() -> None:\n    """Return whoever asks."""\n'
    )
    words.ROOT = tmp_path
    found = [line.split(": ")[0] for line in words.findings(tmp_path / "module.py")]
    assert found == ["tells", "behind", "whoever"]


def test_pages_and_docstrings_pass() -> None:
    done = subprocess.run(
        [sys.executable, ROOT / ".ci" / "words"], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout + done.stderr) == (0, "")
