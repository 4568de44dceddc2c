"""The command for a device, without one: its processes, and all of its lines on a stub."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from benchmarks.device import __main__ as command
from benchmarks.device.record import KEPT, Line, read, table, written

ROOT = Path(__file__).parents[2]
STUB = ROOT / "tests" / "support" / "stub_cuda"


# -- results -----------------------------------------------------------------------------------------

LINES = [
    Line("machine", "device", "an H200"),
    Line("driver", "lock", 1.2345, "ms"),
    Line("driver", "unlock beside a kernel", 301.0, "ms", False, "waited for the kernel"),
    Line("ends", "test_a", passed=True),
    Line("ends", "test_b", detail="needs two devices"),
]


def test_each_failure_is_a_line_at_the_end_of_the_table(tmp_path: Path) -> None:
    text = table(LINES).splitlines()
    assert text[-2] == "FAILED driver: unlock beside a kernel: waited for the kernel"
    assert text[-1] == "1 checks passed, 1 failed, 1 skipped"
    assert len(text) == len(LINES) + 2
    assert text[1].split() == ["driver", "lock", "1.23", "ms"]


def test_the_page_reports_the_kept_run() -> None:
    page = ROOT / "docs" / "devices.md"
    text = page.read_text()
    assert written(text, read(KEPT)) == text, "run: python -m benchmarks.device --page " + str(page)


# -- the command -------------------------------------------------------------------------------------


def started(*options: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "benchmarks.device", "--small", *options],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=1500,
    )


@pytest.mark.skipif(not hasattr(os, "killpg"), reason="there are no process groups here")
def test_a_section_that_hangs_is_ended_with_its_workers_and_keeps_its_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, worker = tmp_path / "found.jsonl", tmp_path / "worker"
    made = command.Run(tmp_path / "copy", file, time.monotonic() + 60, small=False)
    script = f"""
import multiprocessing, os, threading
from pathlib import Path
from benchmarks.device.record import Record
Record(Path({str(file)!r}), "slow")("a figure", 3.5, "ms")
if pid := os.fork():
    Path({str(worker)!r}).write_text(str(pid))
threading.Event().wait()
"""
    section = subprocess.Popen([sys.executable, "-c", script], cwd=ROOT, start_new_session=True)
    while not worker.exists() or not worker.read_text():
        assert section.poll() is None
    made.log("slow").write_text("some line\nthe last line\n")
    made.end("slow", section, time.monotonic(), 1)
    assert section.returncode == -signal.SIGKILL
    ended = psutil.STATUS_ZOMBIE  # of an init that reaps late
    with contextlib.suppress(psutil.NoSuchProcess):
        while psutil.Process(int(worker.read_text())).status() != ended:
            pass
    figure, failure = read(file)
    assert figure.shown == "3.5 ms"
    assert failure.detail == "longer than 1 s, or no time was left: the last line"
    assert failure.passed is False


def test_without_a_device_it_reports_so(tmp_path: Path) -> None:
    import torch

    if torch.accelerator.is_available():
        pytest.skip("there is a device here")
    done = started("--json", str(tmp_path / "found.jsonl"))
    assert done.returncode == 2, done.stderr
    assert "torch finds no accelerator here" in done.stdout


def on_the_stub(tmp_path: Path, *names: str, **environment: str) -> list[Line]:
    file = tmp_path / "found.jsonl"
    done = started("--json", str(file), "--only", *names, PYTHONPATH=str(STUB), **environment)
    lines = read(file)
    wrong = [line for line in lines if line.passed is False]
    assert wrong == [], done.stdout + done.stderr
    assert done.returncode == 0
    assert {line.section for line in lines} == {"machine", *names}
    return lines


@pytest.mark.full
@pytest.mark.timeout(300)
def test_figures_of_the_driver_on_a_stub(tmp_path: Path) -> None:
    lines = on_the_stub(tmp_path, "driver")
    figures = [line for line in lines if line.section == "driver" and line.passed is None]
    assert [(line.name, line.unit) for line in figures] == [("a mark", "us")]


KNOWN = (
    "test_devices.py::test_the_stream_waits_for_the_copy_and_the_host_does_not",
    "test_device_exits.py::test_an_assertion_of_a_kernel_is_raised_and_the_process_ends",
)
"""Tests that need a device which is still at work when a call returns."""


LEFT_OUT = " ".join(f"--deselect tests/accelerator/{test}" for test in KNOWN)


@pytest.mark.full
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", command.TESTS)
def test_each_test_of_a_device_is_a_line_on_a_stub(tmp_path: Path, name: str) -> None:
    lines = on_the_stub(tmp_path, name, PYTEST_ADDOPTS=LEFT_OUT)
    file = ROOT / "tests" / "accelerator" / f"test_{name}.py"
    tests = {*re.findall(r"^def (test_\w+)", file.read_text(), re.MULTILINE)}
    tests -= {test.partition("::")[2] for test in KNOWN}
    assert {line.name.partition("[")[0] for line in lines if line.section == name} == tests


@pytest.mark.full
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", ["bandwidth", "overlap"])
def test_figures_of_copies_on_a_stub(tmp_path: Path, name: str) -> None:
    lines = on_the_stub(tmp_path, name)
    assert sum(line.section == name for line in lines) >= 7
