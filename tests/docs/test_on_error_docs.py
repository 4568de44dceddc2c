"""The page about faults: its examples of bad samples run, with the output that it shows."""

from __future__ import annotations

import doctest
import io
import re
from pathlib import Path
from typing import Any

import pytest

import hybridloader

PAGE = Path(__file__).parents[2] / "docs" / "faults.md"
BLOCK = re.compile(r"^```(python|pycon)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
def test_every_block_about_bad_samples_runs() -> None:
    text = PAGE.read_text()
    section = text[text.index("## Bad samples") :].split("\n## ")[0]
    names: dict[str, Any] = {"__name__": "faults"}
    out = io.StringIO()
    runner = doctest.DocTestRunner(verbose=False)
    for kind, block in BLOCK.findall(section):
        if kind == "python":
            exec(compile(block, PAGE.name, "exec"), names)
            continue
        example = doctest.DocTestParser().get_doctest(block, names, PAGE.name, None, None)
        runner.run(example, out=out.write, clear_globs=False)
        names.update(example.globs)
    assert runner.failures == 0, out.getvalue()
    assert runner.tries >= 6


def test_the_table_of_errors_names_all_of_them_with_their_bases() -> None:
    text = PAGE.read_text()
    table = text[text.index("\n## Errors") :].split("\n## ")[1]
    listed: dict[str, set[str]] = {}
    for row in re.findall(r"^\| (`.*)", table, re.MULTILINE):
        names, bases = (re.findall(r"`(\w+)`", cell) for cell in row.split(" | ")[:2])
        for number, name in enumerate(names):
            listed[name] = set(bases if len(names) == 1 else bases[number : number + 1])
    for name, bases in listed.items():
        found = getattr(hybridloader.errors, name)
        assert issubclass(found, hybridloader.HybridLoaderError)
        assert bases <= {base.__name__ for base in found.__mro__}, name
    errors = {name for name, kind in vars(hybridloader.errors).items() if isinstance(kind, type)}
    assert listed.keys() == errors - {"HybridLoaderError"}
