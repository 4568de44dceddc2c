"""Cores that a process may use, read from files that a test writes."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest

from hybridloader.observe.cores import CoreUsage, affinity, available, read

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="files of Linux")


def machine(folder: Path, cgroup: str, files: dict[str, str], stat: str = "") -> tuple[Path, Path]:
    """The folders of a machine's cgroups and of its processes."""
    cgroups, proc = folder / "cgroup", folder / "proc"
    (proc / "self").mkdir(parents=True)
    (proc / "self" / "cgroup").write_text(cgroup)
    (proc / "stat").write_text(stat)
    for name, text in files.items():
        path = cgroups / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return cgroups, proc


@pytest.mark.parametrize(
    ("cgroup", "files", "cores"),
    [
        ("0::/job/mine\n", {"job/mine/cpu.max": "50000 100000\n"}, 0.5),
        (
            "0::/job/mine\n",
            {"job/cpu.max": "25000 100000\n", "job/mine/cpu.max": "max 100000\n"},
            0.25,
        ),
        ("0::/\n", {"cpu.max": "30000 100000"}, 0.3),
        (
            "4:cpu:/job\n0::/\n",
            {"cpu/job/cpu.cfs_quota_us": "75000\n", "cpu/job/cpu.cfs_period_us": "100000\n"},
            0.75,
        ),
        (
            "4:cpu:/job\n",
            {"cpu/job/cpu.cfs_quota_us": "-1", "cpu/job/cpu.cfs_period_us": "1"},
            None,
        ),
        ("0::/job\n", {"job/cpu.max": "nonsense"}, None),
        ("", {}, None),
    ],
)
def test_a_quota_limits_the_cores(
    cgroup: str, files: dict[str, str], cores: float | None, tmp_path: Path
) -> None:
    found = available(*machine(tmp_path, cgroup, files))
    assert found == (len(affinity()) if cores is None else cores)


def test_no_files_limit_nothing(tmp_path: Path) -> None:
    assert available(tmp_path, tmp_path) == len(affinity())
    reading = read({0}, tmp_path, tmp_path)
    assert reading.busy is None
    assert reading.throttled == 0


def test_only_the_cores_of_this_process_count(tmp_path: Path) -> None:
    stat = (
        "cpu 9 9 9 9 9 9 9 9\ncpu0 100 0 50 900 7 1 2 3 0 0\ncpu1 1000 0 0 0 0 0 0 0 0 0\nintr 1\n"
    )
    files = {"job/cpu.stat": "usage_usec 5\nthrottled_usec 2500000\n"}
    cgroups, proc = machine(tmp_path, "0::/job\n", files, stat)
    reading = read({0}, cgroups, proc)
    assert reading.busy == 156 / os.sysconf("SC_CLK_TCK")
    assert reading.throttled == 2.5


def test_this_process_is_seen_to_work() -> None:
    usage = CoreUsage()
    until = time.thread_time() + 0.1
    while time.thread_time() < until:
        pass
    usage.end()
    use = usage.use()
    assert use.cores == available()
    assert use.own is not None
    assert 0 < use.own <= len(affinity()) + 0.5
    assert usage.use(10.0).own > use.own  # type: ignore[operator]
