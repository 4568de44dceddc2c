"""The page for troubleshooting: a heading for each error, and the messages that the code has."""

from __future__ import annotations

import ast
import itertools
import re
from pathlib import Path

import pytest

from hybridloader import errors

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "troubleshooting.md").read_text()
TOLD = [
    *(
        line
        for block in re.findall(r"^```text\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
        for line in block.splitlines()
        if not re.match(r"worker  where|-{4}|\d+ +(process|thread)", line)
    ),
    *re.findall(r"^\| `([^`]{20,})` \|", PAGE[PAGE.index("## Warnings") :], re.MULTILINE),
]
"""Texts of errors and warnings that the page shows; values are those of an example."""

SAME = 0.7
"""Share of a shown text that is in the code; the rest are words of an example, such as a name."""


def pairs(text: str) -> set[tuple[str, str]]:
    """Return each two words in a row, without those of other values: quoted ones and numbers."""
    found: set[tuple[str, str]] = set()
    for piece in re.split(r"\.\.\.|(?<!\w)'[^']*'|\d+", text.lower()):
        words = re.findall(r"[a-z_/]+", piece)
        found |= set(itertools.pairwise(words))
    return found


@pytest.fixture(scope="module")
def spoken() -> set[tuple[str, str]]:
    """Return each two words in a row of the strings of the package, formatted ones without values."""
    found: set[tuple[str, str]] = set()
    for path in [*(ROOT / "hybridloader").rglob("*.py"), *(ROOT / "backends").rglob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found |= pairs(node.value)
    return found


def test_each_error_has_a_heading() -> None:
    classes = {name for name, value in vars(errors).items() if isinstance(value, type)}
    exceptions = PAGE[PAGE.index("## By exception") : PAGE.index("## Warnings")]
    assert classes == set(re.findall(r"^### (\w+)$", exceptions, re.MULTILINE))


@pytest.mark.parametrize("text", TOLD)
def test_a_message_of_the_page_is_one_of_the_code(text: str, spoken: set[tuple[str, str]]) -> None:
    shown = pairs(text)
    assert shown
    assert len(shown & spoken) >= SAME * len(shown), sorted(shown - spoken)


def test_another_message_would_be_found(spoken: set[tuple[str, str]]) -> None:
    shown = pairs(
        "worker 3 disliked its lunch, slept badly and wants a new batch every other Tuesday"
    )
    assert len(shown & spoken) < SAME / 2 * len(shown)
