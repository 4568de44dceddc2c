"""Programs that run in a Python of their own, beside the tests."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from support.platforms import PACKAGE


def python(
    *words: Any, cwd: Path | str | None = None, given: str | None = None, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run this Python with `words` and, on standard input, `given`; it finds the package."""
    return subprocess.run(
        [sys.executable, *map(str, words)],
        input=given,
        capture_output=True,
        text=True,
        timeout=150,
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": PACKAGE, **environment},
    )


def output(*words: Any, **options: Any) -> str:
    """Return what such a program prints. A warning, or anything else on standard error, fails."""
    done = python("-W", "error", *words, **options)
    assert (done.stderr, done.returncode) == ("", 0)
    return done.stdout
