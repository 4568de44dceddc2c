"""Examples of docs/resuming.md: a resumed run loses nothing."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.platforms import FORK, PACKAGE, REPOSITORY

from hybridloader import PipelineLoader

ROOT = REPOSITORY
EXAMPLE = ROOT / "examples" / "resume.py"


@pytest.mark.full  # most of its 9 s are imports
def test_a_killed_run_goes_on_to_the_last_bit(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore:This DataLoader will create", str(EXAMPLE)],
        capture_output=True,
        text=True,
        timeout=120,
        # With HOME, matplotlib finds the fonts that it has listed before; listing them takes seconds.
        env={
            "TMPDIR": str(tmp_path),
            "PATH": "/usr/bin:/bin",
            "PYTHONPATH": PACKAGE,
            **{name: os.environ.get(name, "/") for name in ("HOME", "SYSTEMROOT", "TEMP")},
        },
    )
    assert done.returncode == 0, done.stderr
    assert f"(exit code {-9 if FORK else 15})" in done.stdout
    assert done.stdout.endswith("the same to the last bit\n")
    assert len(done.stdout.splitlines()) > 10


@pytest.mark.classes
@pytest.mark.filterwarnings("ignore:This DataLoader will create")
def test_the_examples_of_the_page_hold() -> None:
    page = (ROOT / "docs" / "resuming.md").read_text()
    found: dict[str, Any] = {}
    for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL):
        found = {"__name__": "__page__"}
        exec(block, found)  # it asserts
        for one in found.values():  # which functions of the page, with its names, would keep
            if isinstance(one, PipelineLoader):
                one.close()
    assert found["batch"].shape == (8,)
    found["batches"].close()
