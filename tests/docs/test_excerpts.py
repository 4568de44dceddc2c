"""The check that a page shows a part of a file: it refuses another line, order and indentation."""

from __future__ import annotations

import pytest
from support.excerpts import is_part

SOURCE = """\
import os


def main():
    first = 1
    second = 2
    if first:
        third = 3


if __name__ == "__main__":
    main()
"""


@pytest.mark.parametrize(
    ("block", "part"),
    [
        ("def main():\n    first = 1\n", True),
        ("import os\n...\ndef main():\n    ...\n    if first:\n        third = 3\n", True),
        ("first = 1\nsecond = 2\n", True),
        ("first = 1\nsecond = 3\n", False),
        ("second = 2\n...\nfirst = 1\n", False),
        ("first = 1\n...\nthird = 3\n", False),
        ("first =\n", False),
        ("first = 1\n...\n", False),
        ("", False),
    ],
)
def test_is_part(block: str, part: bool) -> None:
    assert is_part(block, SOURCE) is part
