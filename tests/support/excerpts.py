"""Whether a block of code on a page is a part of a file."""

from __future__ import annotations

import re
import textwrap


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
