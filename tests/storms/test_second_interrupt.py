"""Two interrupts in a row: the second comes while the first closes the workers."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

SCRIPT = textwrap.dedent(
    """
    import sys, threading
    from hybridloader import DataLoader

    def tell(word):
        print(word, flush=True)

    batches = iter(DataLoader(range(10**6), 4, num_workers=2, backend=sys.argv[1]))
    next(batches)
    crew = batches._stage._crew
    close, wait = crew.close, crew.wait

    def closing():
        crew.close = close
        tell("closing")
        threading.Event().wait(60)  # until the second interrupt

    def waiting(timeout):
        tell("waiting")
        threading.Event().wait(60)  # until the first
        return wait(timeout)

    crew.close, crew.wait = closing, waiting
    for batch in batches:
        pass
    """
)


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="needs signals of POSIX")
@pytest.mark.full
@pytest.mark.parametrize("backend", ["fork", "threads"])
def test_a_second_interrupt_adds_no_traceback(backend: str, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    with subprocess.Popen(
        [sys.executable, str(script), backend],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        assert process.stdout is not None
        for word in ("waiting", "closing"):
            assert process.stdout.readline().strip() == word
            os.killpg(process.pid, signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == -signal.SIGINT
    assert errors.count("Traceback") == 1, errors
    assert "ignored" not in errors, errors
    assert errors.rstrip().endswith("KeyboardInterrupt")
