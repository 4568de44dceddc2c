"""The page for troubleshooting: a section for each error and warning, and the messages of the code."""

from __future__ import annotations

import ast
import itertools
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.command import BAD_INPUT, main
from support.platforms import PACKAGE

from hybridloader import errors
from hybridloader.errors import HybridLoaderError

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "troubleshooting.md").read_text()
EXCEPTIONS, WARNINGS = PAGE[PAGE.index("## By exception") :].split("\n## Warnings\n")
ROWS = re.findall(r'^\| <a id="([\w-]+)"></a>`([^`]+)` \|', WARNINGS, re.MULTILINE)
MODULES = [*(ROOT / "hybridloader").rglob("*.py"), *(ROOT / "backends").rglob("*.py")]
NO_LINK = {"HybridLoaderError", "LeftOut", "NotReady"}
"""Errors that ask for no action: a base class, and two that are no failures."""

SHOWN = [
    *(
        line
        for block in re.findall(r"^```text\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
        for line in block.splitlines()
        if not re.match(r"worker  where|-{4}|\d+ +(process|thread)|See: hybridloader", line)
    ),
    *(text for _, text in ROWS),
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
    for path in MODULES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found |= pairs(node.value)
    return found


def anchors_of_errors() -> dict[str, str]:
    """Return the anchor of each error class of the package: its own, or that of its base."""
    found = {"HybridLoaderError": HybridLoaderError.anchor}
    nodes = [n for path in MODULES for n in ast.walk(ast.parse(path.read_text()))]
    kinds = [node for node in nodes if isinstance(node, ast.ClassDef)]
    while True:
        for node in kinds:
            bases = [b.id for b in node.bases if isinstance(b, ast.Name) and b.id in found]
            if bases and node.name not in found:
                lines = map(ast.unparse, node.body)
                own = [line for line in lines if line.startswith("anchor = ")]
                found[node.name] = own[0][len("anchor = '") : -1] if own else found[bases[0]]
                break
        else:
            return found


def warnings_of(path: Path) -> Iterator[str | None]:
    """Yield the anchor of each warning that a module issues; None if it names none."""
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.Call):
            continue
        function, arguments = ast.unparse(node.func), node.args
        if function.endswith("partial") and arguments:
            function, arguments = ast.unparse(arguments[0]), arguments[1:]
        if function == "warnings.warn":
            linked = arguments[0]
            arguments = linked.args if isinstance(linked, ast.Call) else []
        elif function not in ("warn", "warn_once"):
            continue
        anchor = arguments[1] if len(arguments) > 1 else None
        yield anchor.value if isinstance(anchor, ast.Constant) else None


def test_each_error_has_a_section_and_links_to_it() -> None:
    sections = set(re.findall(r"^### (\w+)$", EXCEPTIONS, re.MULTILINE))
    found = anchors_of_errors()
    assert {name for name, kind in vars(errors).items() if isinstance(kind, type)} <= {*found}
    assert {name for name, anchor in found.items() if not anchor} == NO_LINK
    assert {*found.values()} - {""} == {name.lower() for name in sections - NO_LINK}
    for name in sections - NO_LINK:
        assert found[name] == name.lower()


def test_each_warning_links_to_its_row() -> None:
    source = {path: [*warnings_of(path)] for path in MODULES if path.name != "text.py"}
    assert not [path for path, found in source.items() if None in found]
    anchors = [anchor for anchor, _ in ROWS]
    assert len({*anchors}) == len(anchors)
    assert {anchor for found in source.values() for anchor in found} == {*anchors}


def test_explain_prints_the_section_or_row_that_a_message_names(
    capsys: pytest.CaptureFixture[str],
) -> None:
    names = {*anchors_of_errors().values()} - {""}
    for name in names | {anchor for anchor, _ in ROWS}:
        assert main(["explain", name]) == 0
        assert len(capsys.readouterr().out) > 60
    assert main(["explain", "WorkerDied"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith(
        "WorkerDied\n\n```text\nDataLoader worker (pid 25666) exited unexpectedly"
    )
    assert printed.endswith("[workers that die](docs/faults.md#workers-that-die).\n")
    assert main(["explain", "no-workers"]) == 0
    assert "Cure: set `num_workers`, or leave `backend` out" in capsys.readouterr().out
    assert main(["explain", "workerdyed"]) == BAD_INPUT
    assert "did you mean 'workerdied'?" in capsys.readouterr().err


def test_a_reader_that_has_enough_ends_the_command_in_silence() -> None:
    reading, writing = os.pipe()
    os.close(reading)  # as `head` does
    with open(writing, "wb") as gone:
        command = [sys.executable, "-m", "hybridloader", "explain", "workerdied"]
        done = subprocess.run(
            command,
            stdout=gone,
            stderr=subprocess.PIPE,
            check=False,
            env={**os.environ, "PYTHONPATH": PACKAGE},
        )
    assert (done.returncode, done.stderr) == (0, b"")


@pytest.mark.parametrize("text", SHOWN)
def test_a_message_of_the_page_is_one_of_the_code(text: str, spoken: set[tuple[str, str]]) -> None:
    shown = pairs(text)
    assert shown
    assert len(shown & spoken) >= SAME * len(shown), sorted(shown - spoken)
