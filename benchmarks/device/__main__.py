"""``python -m benchmarks.device``: is hybridloader right on this machine's device, and how fast?

It runs tests/accelerator and then measures, in under four minutes on one GPU with 16 cores. It needs
torch with a device, numpy, cloudpickle and pytest, no network, and no installation: a copy of the
repository is enough. Each section is a process with a time limit. Every result is a line in the file of
``--json`` before the next one is made. The exit code is 1 if a check failed, 2 if there is no device.

After a run on a device, keep its file as benchmarks/device.jsonl; ``--page docs/devices.md`` quotes it.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import machine
from benchmarks.device.record import KEPT, Record, counts, read, table, written

ROOT = Path(__file__).parents[2]
TESTS = dict.fromkeys(("devices", "ends", "device_exits", "captures"), 110.0)
"""Seconds that a file of tests/accelerator may take. These run beside each other."""

FIGURES = {"driver": 35.0, "bandwidth": 70.0, "overlap": 60.0}
"""Seconds that a function of benchmarks/device/figures.py may take. Nothing runs beside it."""

LIMIT = 235.0
"""Seconds of the whole run."""

SLOW = 10
"""Factor of all limits with ``--small``, for a simulated device on a busy machine."""


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="python -m benchmarks.device",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    names = (*TESTS, *FIGURES)
    made.add_argument("--json", type=Path, default=Path("device.jsonl"), metavar="FILE")
    made.add_argument("--only", nargs="+", default=names, choices=names, metavar="SECTION")
    made.add_argument("--small", action="store_true", help="small sizes, for a simulated device")
    made.add_argument(
        "--page", type=Path, help="write the kept run into this page, and run nothing"
    )
    made.add_argument("--section", help=argparse.SUPPRESS)
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    file = options.json.absolute()
    if options.page:
        options.page.write_text(written(options.page.read_text(), read(KEPT)))
        return 0
    if options.section:
        return section(options.section, file, small=options.small)
    file.unlink(missing_ok=True)
    Record(file, "machine")("code", machine.commit())
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="hybridloader-device-") as folder:
        run = Run(Path(folder), file, began + LIMIT * (SLOW if options.small else 1), options.small)
        run.sections({"machine": 60.0})
        if not any(line.name == "device" for line in read(file)):
            print(table(read(file)), "torch finds no accelerator here", sep="\n")
            return 2
        run.sections({name: TESTS[name] for name in TESTS if name in options.only})
        for name in FIGURES:
            if name in options.only:
                run.sections({name: FIGURES[name]})
    Record(file, "machine")("seconds of the run", round(time.monotonic() - began))
    lines = read(file)
    print(table(lines))
    return int(any(line.passed is False for line in lines))


class Run:
    """A copy of the package as it would be installed, and processes that use it.

    ``hybridloader.backends`` is in another folder of the repository, and worker processes import it too.
    """

    def __init__(self, folder: Path, file: Path, until: float, small: bool) -> None:
        self.folder, self.file, self.until, self.small = folder, file, until, small
        no_bytecode = shutil.ignore_patterns("__pycache__", "*.json")
        for name in ("hybridloader", "benchmarks", "tests"):
            shutil.copytree(ROOT / name, folder / name, ignore=no_bytecode)
        shutil.copytree(ROOT / "backends", folder / "hybridloader" / "backends", ignore=no_bytecode)
        paths = [str(folder), str(folder / "tests"), os.environ.get("PYTHONPATH", "")]
        self.env = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
            "HYBRIDLOADER_BATCHES": "100" if small else "1000",
        }

    def sections(self, limits: dict[str, float]) -> None:
        """Run sections beside each other, each until its limit at most."""
        began = time.monotonic()
        started = {name: self.start(name) for name in limits}
        for name, process in started.items():
            limit = limits[name] * (SLOW if self.small else 1)
            self.end(name, process, min(began + limit, self.until), limit)

    def start(self, name: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "benchmarks.device", "--section", name]
        command += ["--json", str(self.file), *(["--small"] if self.small else [])]
        with self.log(name).open("w") as log:
            return subprocess.Popen(
                command,
                cwd=self.folder,
                env=self.env,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def log(self, name: str) -> Path:
        return self.folder / f"{name}.log"

    def end(self, name: str, process: subprocess.Popen[bytes], until: float, limit: float) -> None:
        problem = None
        try:
            if code := process.wait(max(0.0, until - time.monotonic())):
                problem = f"exit code {code}"
        except subprocess.TimeoutExpired:
            problem = f"longer than {limit:.0f} s, or no time was left"
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # and the workers that it started
        process.wait()
        if problem is not None:
            last = self.log(name).read_text(errors="replace").strip().splitlines()[-1:]
            record = Record(self.file, name)
            record("the section", passed=False, detail=": ".join([problem, *last]))
        lines = [line for line in read(self.file) if line.section == name]
        print(f"{name}: {counts(lines)}", flush=True)


def section(name: str, file: Path, *, small: bool) -> int:
    """Run a section in this process, and return its exit code."""
    record = Record(file, name, small=small)
    if name in TESTS:
        return tests(name, record)
    figures: Any = importlib.import_module("benchmarks.device.figures")
    getattr(figures, name)(record, small=small)
    sys.stdout.flush()
    os._exit(0)  # an exit that hangs is for the tests of exits


def tests(name: str, record: Record) -> int:
    """Run a file of tests without the settings and fixtures of the others: these need more packages."""
    import pytest

    folder = ROOT / "tests" / "accelerator"
    options = ["-q", "-m", "accelerator", "-p", "no:cacheprovider", f"--confcutdir={folder}"]
    code = pytest.main([*options, f"{folder}/test_{name}.py"], plugins=[_Reports(record)])
    return 0 if code in (0, 1) else int(code)  # 1: tests failed, each of which is a line already


class _Reports:
    """Plugin of pytest that records each test when it ends."""

    def __init__(self, record: Record) -> None:
        self.record = record

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.when != "call" and report.outcome == "passed":
            return
        name = report.nodeid.partition("::")[2]
        crash = getattr(report.longrepr, "reprcrash", None)
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else ""
        detail = reason if crash is None else crash.message
        if hasattr(report, "wasxfail"):
            detail = f"may fail ({report.wasxfail}): {detail}"
        passed = {"passed": True, "failed": False, "skipped": None}[report.outcome]
        self.record(name, passed=passed, detail=detail)

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            last = str(report.longrepr).strip().splitlines()[-1]
            self.record("the tests are collected", passed=False, detail=last)


if __name__ == "__main__":
    sys.exit(main())
