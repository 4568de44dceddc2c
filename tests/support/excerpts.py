"""Blocks of code on pages: they run, and are parts of files."""

from __future__ import annotations

import doctest
import io
import re
import textwrap
from collections.abc import Callable
from typing import Any

BLOCK = re.compile(r"^```(python|pycon)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def run_blocks(
    text: str,
    names: dict[str, Any],
    kinds: str = "python pycon",
    between: Callable[[str], object] = str,
) -> int:
    """Run the blocks of a page in turn, with `between` behind each; return how many examples matched."""
    out, runner = io.StringIO(), doctest.DocTestRunner(verbose=False)
    for match in BLOCK.finditer(text):
        kind, block = match.groups()
        line = text.count("\n", 0, match.start()) + 1
        if kind not in kinds.split():
            continue
        if kind == "python":
            exec(compile("\n" * line + block, "the page", "exec"), names)
        else:
            example = doctest.DocTestParser().get_doctest(block, names, "the page", None, line)
            assert example.examples
            runner.run(example, out=out.write, clear_globs=False)
            names.update(example.globs)
        between(block)
    assert runner.failures == 0, out.getvalue()
    return runner.tries


def is_part(block: str, source: str) -> bool:
    """Return whether a block shows whole lines of a source, in their order.

    A line `...` stands for lines that are left out. The block may be less indented than the source,
    as a whole: a part of a function is shown so that it can be compiled.
    """
    pieces = re.split(r"^ *\.\.\.\n", block, flags=re.MULTILINE)
    for indent in range(0, 24, 4):
        at, rest = 0, f"\n{source}"
        for piece in pieces:
            found = rest.find("\n" + textwrap.indent(piece.strip("\n"), " " * indent) + "\n", at)
            if not piece.strip() or found < 0:
                break
            at = found + len(piece.strip("\n"))
        else:
            return True
    return False
