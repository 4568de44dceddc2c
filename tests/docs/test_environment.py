"""The page of environment variables names those that the package reads."""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "environment.md").read_text()
BY_PYTHON = {
    "tempfile.": "TMPDIR",
    "Path.home": "HOME",
    "expanduser": "HOME",
}
"""Call of the standard library -> the variable that it reads."""


def variables(section: str) -> set[str]:
    text = PAGE[PAGE.index(f"## {section}") :].partition("\n## ")[0]
    return set(re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE))


def modules() -> Iterator[tuple[Path, str]]:
    for path in [*(ROOT / "hybridloader").rglob("*.py"), *(ROOT / "backends").rglob("*.py")]:
        yield path, path.read_text()


def test_the_page_names_the_variables_that_the_package_reads() -> None:
    read: set[str] = set()
    for path, text in modules():
        if not re.search(r"\b(environb?|getenv)\b", text):
            continue
        texts = [node.value for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Constant)]
        named = {t for t in texts if isinstance(t, str) and re.fullmatch(r"[A-Z][A-Z0-9_]{2,}", t)}
        named -= {*dir(os), "JPEG", "RGB"}  # "RTLD_NOLOAD"; names of Pillow
        assert named, f"{path} reads variables; their names are not in it"
        read |= named
    assert read == variables("Variables that it reads")


def test_the_page_names_the_variables_that_python_reads_for_it() -> None:
    code = "".join(ast.unparse(ast.parse(text)) for _, text in modules())
    read = {name for call, name in BY_PYTHON.items() if call in code}
    assert read == variables("Variables that Python reads for it")
