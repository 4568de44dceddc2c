"""The example of docs/resuming.md: a run that is killed and gone on with loses nothing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

EXAMPLE = Path(__file__).parent.parent / "examples" / "resume.py"


def test_a_killed_run_goes_on_to_the_last_bit(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore:This DataLoader will create", str(EXAMPLE)],
        capture_output=True,
        text=True,
        timeout=120,
        env={"TMPDIR": str(tmp_path), "PATH": "/usr/bin:/bin"},
    )
    assert done.returncode == 0, done.stderr
    assert "by signal 9" in done.stdout
    assert done.stdout.endswith("the same to the last bit\n")
    assert len(done.stdout.splitlines()) > 10
