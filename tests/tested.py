"""Table of the README: on which systems the tests have run, when, and with how many failures.

The sessions of noxfile.py call ``python tests/tested.py REPORT.xml`` after pytest; another argument
names the part of the tests that was run. The counts of pytest's JUnit report replace those of the same
system in tests/tested.json, and the table is written anew. Without a report only the table is written.
The command fails if a test has failed.
"""

from __future__ import annotations

import ctypes
import json
import platform
import sys
import time
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RECORDS = ROOT / "tests" / "tested.json"
BEGIN, END = "<!-- by tests/tested.py -->\n", "<!-- end -->\n"

UNTRIED = (
    ("Linux", "3.10", "2.11.0", "CPU", "written"),
    *(
        ("Linux", "3.11", torch, "CPU", "written")
        for torch in ("2.6.0", "2.8.0", "2.10.0", "2.12.0", "2.14.1", "2.15.0")
    ),
    ("Linux", "any", "any", "GPU", "written, tested with a simulated device"),
    ("Windows", "any", "any", "any", "never run"),
    ("macOS", "any", "any", "any", "never run, simulated on Linux"),
)
"""Systems that code or a session was written for. A row goes once there is a record of its system."""


def key(record: dict[str, Any]) -> tuple[str, ...]:
    """Return the system of a record, with the minor version of Python alone."""
    python = record["python"]
    minor = ".".join(python.split(".")[:2]) + ("t" if python.endswith("t") else "")
    return record["os"], minor, record["torch"], record["device"]


def platform_name() -> str:
    """Return the name of this system, as the table has it."""
    if sys.platform == "win32":
        wine = getattr(ctypes.WinDLL("ntdll"), "wine_get_version", None)
        if wine is not None:
            wine.restype = ctypes.c_char_p
            return f"Windows 10's API, by Wine {wine().decode()}"
    return platform.system().replace("Darwin", "macOS")


def counted(report: Path, part: str) -> dict[str, Any]:
    """Return the record of a JUnit report of this system."""
    import torch

    counts = dict.fromkeys(("tests", "failures", "errors", "skipped"), 0)
    for suite in ElementTree.parse(report).iter("testsuite"):
        for name in counts:
            counts[name] += int(suite.get(name, 0))
    unlocked = not getattr(sys, "_is_gil_enabled", lambda: True)()
    return {
        "os": platform_name(),
        "python": platform.python_version() + ("t" if unlocked else ""),
        "torch": torch.__version__.split("+")[0],
        "device": "GPU" if torch.accelerator.is_available() else "CPU",
        "date": time.strftime("%Y-%m-%d"),
        "part": part,
        "passed": counts["tests"] - counts["failures"] - counts["errors"] - counts["skipped"],
        "failed": counts["failures"],
        "errors": counts["errors"],
    }


def table(records: list[dict[str, Any]]) -> str:
    """Return the table in Markdown, without marks."""
    failed = "[failed](docs/stability.md#versions)"  # causes
    rows = [f"| OS | Python | torch | device | tests | passed | {failed} | errors | date |"]
    rows.append("| --- " * 9 + "|")
    for one in sorted(records, key=lambda one: [*map(len, key(one)), *key(one)]):
        part = "all" if not one["part"] else one["part"]
        system = one["os"], one["python"], one["torch"], one["device"], part
        counts = (f"{one[name]:,}" for name in ("passed", "failed", "errors"))
        rows.append("| " + " | ".join((*system, *counts, one["date"])) + " |")
    tried = {key(one) for one in records}
    for row in UNTRIED:
        if row[:4] not in tried:
            rows.append("| " + " | ".join((*row, "", "", "", "")) + " |")
    return "\n".join(rows) + "\n"


def main(arguments: list[str]) -> None:
    records = json.loads(RECORDS.read_text())
    if arguments:
        new = counted(Path(arguments[0]), " ".join(arguments[1:]))
        records = [one for one in records if key(one) != key(new)] + [new]
        RECORDS.write_text(json.dumps(records, indent=1) + "\n", newline="\n")
    readme = ROOT / "README.md"
    before, _, rest = readme.read_text(encoding="utf-8").partition(BEGIN)
    readme.write_text(
        before + BEGIN + table(records) + END + rest.partition(END)[2], "utf-8", newline="\n"
    )
    if arguments and new["failed"] + new["errors"]:
        sys.exit(f"{new['failed']} tests failed, {new['errors']} errors")


if __name__ == "__main__":
    main(sys.argv[1:])
